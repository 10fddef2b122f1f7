"""Whatever changes the meaning of the bytes changes the name under which they are kept; nothing else does."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from hisparse.errors import InputError
from hisparse.offload.files import DirectTopology, FileTier, Identity, attention_config_digest
from hisparse.offload.files.namespace import NAMESPACE_NAME
from tests.offload.files.world import IDENTITY, ROW_BYTES, config, key_of, loads, namespace, store

CHANGES: dict[str, Any] = {
    "model": "org/larger",
    "revision": "v2",
    "config_digest": "11" * 16,
    "hash_seed": "1",
    "family": "packed-hnd",
    "dtype": "float16",
    "num_kv_heads": 4,
    "head_bytes": 32,
    "page_tokens": 32,
    "page_bytes": (8192,),
    "row_bytes": 2 * ROW_BYTES,
    "blocks_per_chunk": 1,
    "first_layer": 2,
    "topology": DirectTopology(tp=1),
}


def test_every_field_is_part_of_the_name() -> None:
    names = {IDENTITY.name}
    for field, value in CHANGES.items():
        names.add(dataclasses.replace(IDENTITY, **{field: value}).name)
    names.add(dataclasses.replace(IDENTITY, page_bytes=(2048, 2048), blocks_per_chunk=2).name)
    # blocks_per_chunk of 1 is what it was: the control that equal identities share a name.
    assert len(names) == len(CHANGES) + 1
    assert {field.name for field in dataclasses.fields(Identity)} == {*CHANGES, "format"}


@pytest.mark.parametrize("change", ["tp", "pp", "dcp", "pcp", "interleave", "rank"])
def test_every_field_of_a_direct_topology_is_part_of_the_name(change: str) -> None:
    one = DirectTopology(1)
    two = dataclasses.replace(one, **{change: 2})
    names = {dataclasses.replace(IDENTITY, topology=topology).name for topology in (None, one, two)}
    assert len(names) == 3


@pytest.mark.parametrize(
    "change",
    [
        {"family": "packed-hnd"},
        {"family": "split-nhd"},
        {"config_digest": attention_config_digest({"rope_theta": 5e5})},
        {"dtype": "float16"},
        {"revision": "v2"},
        {"topology": DirectTopology(tp=1)},
    ],
    ids=str,
)
def test_what_another_configuration_stored_is_a_miss(change: dict[str, Any], tmp_path: Path) -> None:
    mine = FileTier(config(tmp_path), IDENTITY)
    assert store(mine, key_of(1))
    other = FileTier(config(tmp_path), dataclasses.replace(IDENTITY, **change))
    assert not other.lookup(key_of(1))
    assert not loads(other, key_of(1))
    same = FileTier(config(tmp_path), dataclasses.replace(IDENTITY))
    assert same.lookup(key_of(1))
    assert loads(same, key_of(1))
    for tier in (mine, other, same):
        tier.close()


def test_direct_bytes_of_one_topology_miss_under_another(tmp_path: Path) -> None:
    tiers = [
        FileTier(config(tmp_path), dataclasses.replace(IDENTITY, topology=DirectTopology(tp=tp))) for tp in (1, 2, 1)
    ]
    assert store(tiers[0], key_of(1))
    assert [tier.lookup(key_of(1)) for tier in tiers] == [True, False, True]
    for tier in tiers:
        tier.close()


def test_a_file_in_the_wrong_namespace_is_caught_by_its_header(tmp_path: Path) -> None:
    other = dataclasses.replace(IDENTITY, revision="v2")
    with_block = FileTier(config(tmp_path), IDENTITY)
    assert store(with_block, key_of(1))
    with_block.close()
    FileTier(config(tmp_path), other).close()
    shard = key_of(1).hex()[:2]
    (namespace(tmp_path) / shard).rename(namespace(tmp_path, other) / shard)
    tier = FileTier(config(tmp_path), other)
    assert not tier.lookup(key_of(1))
    (bad,) = (namespace(tmp_path, other) / "quarantine").iterdir()
    assert bad.name.startswith(f"{key_of(1).hex()}.identity.")
    tier.close()


def test_rope_and_unknown_entries_count_and_names_do_not() -> None:
    base = {"rope_theta": 1e4, "rope_scaling": {"factor": 2.0}, "num_key_value_heads": 8, "_name_or_path": "a"}
    digest = attention_config_digest(base)
    assert digest == attention_config_digest(dict(reversed(base.items())) | {"transformers_version": "5"})
    for change in ({"rope_theta": 5e5}, {"rope_scaling": {"factor": 4.0}}, {"something_new": 1}):
        assert attention_config_digest(base | change) != digest
    with pytest.raises(InputError, match="no canonical form"):
        attention_config_digest({"rope_theta": object()})


def test_an_identity_is_read_back() -> None:
    for identity in (IDENTITY, dataclasses.replace(IDENTITY, topology=DirectTopology(4, rank=3))):
        assert Identity.from_json(identity.to_json()) == identity
        assert NAMESPACE_NAME.fullmatch(identity.name)


@pytest.mark.parametrize("model", ["", "/models/x/", "../../etc", "Ünï cødé", "a" * 300, "-", "x/..."])
def test_any_model_name_gives_a_directory_name(model: str) -> None:
    name = dataclasses.replace(IDENTITY, model=model).name
    assert NAMESPACE_NAME.fullmatch(name)
    assert len(name) < 120


def changed(**fields: Any) -> str:
    return json.dumps(json.loads(IDENTITY.to_json()) | fields, indent=2, sort_keys=True) + "\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no JSON object"),
        ("[]", "no JSON object"),
        ("{}", "of format None"),
        (changed(format=2), "of format 2, and this version reads format 1"),
        (changed(colour="red"), "not those of a namespace"),
        (changed(topology={"tp": 1, "ep": 1}), "not those of a namespace"),
        (changed(row_bytes="many"), "not those of a namespace"),
        (changed(row_bytes=1), "cannot hold"),
        (IDENTITY.to_json() + "\n", "changed by something else"),
    ],
)
def test_what_is_no_identity_is_refused(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        Identity.from_json(text)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_kv_heads": 0}, "num_kv_heads is 0"),
        ({"family": "Packed NHD"}, "no name of a layout family"),
        ({"page_bytes": ()}, "at least one layer"),
        ({"page_bytes": (0,)}, "at least one layer"),
        ({"blocks_per_chunk": 2}, "cannot hold 2 x 8192 bytes"),
    ],
)
def test_numbers_that_do_not_belong_together_are_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        dataclasses.replace(IDENTITY, **change)
