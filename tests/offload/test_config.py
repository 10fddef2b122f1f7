"""Options are parsed once: what is wrong is told in one line that names the option, before anything is made."""

import dataclasses
from pathlib import Path

import pytest

from hisparse.errors import InputError
from hisparse.offload.config import FileOptions, OffloadConfig

LEAST: dict[str, object] = {"cpu_bytes": "1GiB"}
FILES: dict[str, object] = {"directories": ["/a", "/b"], "capacity_bytes": "10GiB"}


def test_what_is_not_said_has_a_default() -> None:
    config = OffloadConfig.parse(LEAST)
    assert config == OffloadConfig(cpu_bytes=1 << 30)
    assert config.canonical_layout
    assert config.files is None


def test_every_option_can_be_said() -> None:
    said: dict[str, object] = {
        "cpu_bytes": 123456,
        "canonical_layout": False,
        "blocks_per_chunk": 4,
        "policy": "lru",
        "max_stores": 1,
        "max_tier_writes": 2,
        "max_tier_loads": 3,
        "lookup_deadline_s": 1,
        "lookup_limit_s": 20,
        "transfer_deadline_s": 2.5,
        "files": FILES | {"threads": 8, "deadline_s": 3, "fsync": True, "direct_io": False},
    }
    config = OffloadConfig.parse(said)
    assert set(said) == {field.name for field in dataclasses.fields(config)}
    assert config.files == FileOptions((Path("/a"), Path("/b")), 10 << 30, 8, 3.0, True, False)
    assert all(getattr(config, name) == value for name, value in said.items() if name != "files")
    assert OffloadConfig.parse(LEAST | {"files": FILES | {"directories": "/a"}}).files == FileOptions(
        (Path("/a"),), 10 << 30
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"canonical_layuot": True}, "no option 'canonical_layuot': the nearest is 'canonical_layout'"),
        ({"cpu_byte": 1}, "no option 'cpu_byte': the nearest is 'cpu_bytes'"),
        ({"zzz": 1}, "no option 'zzz': the nearest is '"),
        ({"files": FILES | {"dir": "/a"}}, "offload.files has no option 'dir': the nearest is 'direct_io'|directories"),
        ({"canonical_layout": "false"}, "offload.canonical_layout must be true or false, not 'false'"),
        ({"canonical_layout": 1}, "must be true or false, not 1"),
        ({"cpu_bytes": True}, "must be a size"),
        ({"cpu_bytes": 0}, "must be a size"),
        ({"cpu_bytes": 1.5}, "must be a size"),
        ({"cpu_bytes": "much"}, "offload.cpu_bytes 'much' is not a size"),
        ({"blocks_per_chunk": 0}, "whole number of at least 1, not 0"),
        ({"blocks_per_chunk": True}, "whole number of at least 1, not True"),
        ({"max_stores": 2.0}, "whole number"),
        ({"policy": "mru"}, "offload.policy must be one of arc, lru, not 'mru'"),
        ({"policy": ["lru"]}, "must be one of"),
        ({"lookup_deadline_s": 0}, "number of seconds above 0"),
        ({"lookup_deadline_s": float("nan")}, "number of seconds above 0"),
        ({"lookup_deadline_s": float("inf")}, "number of seconds above 0"),
        ({"lookup_deadline_s": "2"}, "number of seconds above 0"),
        ({"files": "/a"}, "offload.files must be a mapping"),
        ({"files": {"directories": ["/a"]}}, "offload.files needs the option 'capacity_bytes'"),
        ({"files": FILES | {"directories": []}}, "must be a path or a list of paths"),
        ({"files": FILES | {"directories": [""]}}, "must be a path or a list of paths"),
        ({"files": FILES | {"directories": ["/a", "/a"]}}, "names a directory twice: /a, /a"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        OffloadConfig.parse(LEAST | options)
    assert "\n" not in str(caught.value)


def test_a_missing_option_is_named() -> None:
    with pytest.raises(InputError, match="offload needs the option 'cpu_bytes'"):
        OffloadConfig.parse({})


def test_options_do_not_change_afterwards() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        OffloadConfig.parse(LEAST).cpu_bytes = 1  # type: ignore[misc]
