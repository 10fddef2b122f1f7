"""`hisparse kv` says what is stored, names every bad file, and removes nothing that is not ours."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hisparse.cli.kv import parse_age
from hisparse.cli.main import main
from hisparse.errors import InputError
from hisparse.offload.files import FileTier
from tests.offload.files.world import (
    FILE_BYTES,
    IDENTITY,
    OTHER,
    World,
    block_file,
    config,
    is_whole,
    key_of,
    namespace,
    store,
)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """Four blocks of one model and one of another."""
    for identity, numbers in ((IDENTITY, range(4)), (OTHER, range(1))):
        tier = FileTier(config(tmp_path), identity)
        assert all(store(tier, key_of(number)) for number in numbers)
        tier.close()
    return tmp_path


def flip(path: Path, at: int = 5000) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def test_ls_names_model_layout_blocks_and_bytes(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kv", "ls", str(stored)]) == 0
    title, *lines = capsys.readouterr().out.splitlines()
    assert title.split() == ["model", "revision", "layout", "blocks", "size", "last", "used", "bad"]
    assert [line.split()[:6] for line in lines] == [
        ["org/other", "main", "v1-packed-nhd", "1", "12.0", "KiB"],
        ["org/tiny", "main", "v1-packed-nhd", "4", "48.0", "KiB"],
    ]
    assert main(["kv", "ls", "--json", str(stored)]) == 0
    other, tiny = json.loads(capsys.readouterr().out)["namespaces"]
    assert (other["blocks"], tiny["blocks"], tiny["bytes"]) == (1, 4, 4 * FILE_BYTES)
    assert tiny["identity"]["num_kv_heads"] == 2


def test_stat_tells_all_of_one_namespace(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (namespace(stored) / "notes.txt").write_text("mine")
    assert main(["kv", "stat", str(namespace(stored))]) == 0
    shown = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert shown["blocks"] == "4"
    assert shown["foreign_files"] == "1"
    assert shown["family"] == "packed-nhd"
    assert shown["page_tokens"] == "16"


@pytest.mark.parametrize("at", [0, 9, 3000, 4096, FILE_BYTES - 1])
def test_verify_exits_1_and_names_the_file_after_one_byte_was_flipped(
    at: int, stored: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["kv", "verify", str(stored)]) == 0
    assert capsys.readouterr().out == "5 blocks verified, 0 bad\n"
    path = block_file(stored, key_of(2))
    flip(path, at)
    assert main(["kv", "verify", str(stored)]) == 1
    named, total = capsys.readouterr().out.splitlines()
    assert named.startswith(f"{path}: it")
    assert total == "5 blocks verified, 1 bad"
    assert path.exists()


def test_verify_speaks_json_and_moves_what_it_is_told_to(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(block_file(stored, key_of(2)))
    os.truncate(block_file(stored, key_of(3)), 100)
    assert main(["kv", "verify", "--json", "--quarantine", str(stored)]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["blocks"] == 5
    assert sorted((bad["fault"], bad["quarantined"]) for bad in said["bad"]) == [("checksum", True), ("size", True)]
    assert main(["kv", "verify", str(stored)]) == 0
    assert len(list((namespace(stored) / "quarantine").iterdir())) == 2


def test_quarantine_moves_lists_restores_and_purges(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = block_file(stored, key_of(2))
    flip(path)
    flip(block_file(stored, key_of(3)))
    assert main(["kv", "quarantine", str(stored)]) == 1
    assert "(set aside)" in capsys.readouterr().out
    assert main(["kv", "quarantine", "--list", str(stored)]) == 0
    listed = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert sorted(bad.name[:32] for bad in listed) == sorted(key_of(number).hex() for number in (2, 3))
    flip(next(bad for bad in listed if bad.name.startswith(key_of(2).hex())))
    assert main(["kv", "quarantine", "--restore", str(namespace(stored))]) == 0
    assert "1 block put back, 1 left" in capsys.readouterr().out
    assert is_whole(path, IDENTITY)
    assert main(["kv", "quarantine", "--purge", str(namespace(stored))]) == 0
    assert "1 block removed" in capsys.readouterr().out
    assert list((namespace(stored) / "quarantine").iterdir()) == []


def test_purge_says_what_it_left_and_why(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(block_file(stored, key_of(2)))
    assert main(["kv", "quarantine", str(stored)]) == 1
    folder = namespace(stored) / "quarantine"
    foreign = [folder / f"{key_of(1).hex()}.size.01234567.bad", folder / "thesis.txt"]
    for path in foreign:
        path.write_text("mine")
    capsys.readouterr()
    assert main(["kv", "quarantine", "--purge", str(namespace(stored))]) == 0
    said = capsys.readouterr().out
    assert "1 block removed" in said
    assert f"; 2 files left, which are no blocks of ours by name or by how they begin: look into {folder}" in said
    assert sorted(folder.iterdir()) == sorted(foreign)


def test_convert_says_that_there_is_nothing_to_do(
    stored: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path_factory.mktemp("converted") / "out"
    assert main(["kv", "convert", str(stored), str(out)]) == 0
    assert capsys.readouterr().out.endswith(f"nothing to do: nothing was written to {out}\n")
    out.write_text("a file")
    assert main(["kv", "convert", str(stored), str(out)]) == 2
    assert capsys.readouterr().err.startswith(f"hisparse: {out} is no directory: name one")


def test_prune_by_age_and_by_size_takes_the_oldest(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    now = time.time()
    for number, age in enumerate((100, 5000, 300, 400)):
        os.utime(block_file(stored, key_of(number)), (now - age, now - age))
    command = ["kv", "prune", str(namespace(stored))]
    assert main([*command, "--older-than", "1h", "--dry-run"]) == 0
    assert capsys.readouterr().out == "1 block would be removed, 12.0 KiB\n"
    assert block_file(stored, key_of(1)).exists()
    assert main([*command, "--older-than", "1h"]) == 0
    assert main([*command, "--max-bytes", "25KiB"]) == 0
    left = [number for number in range(4) if block_file(stored, key_of(number)).exists()]
    assert left == [0, 2]
    assert block_file(stored, key_of(0), OTHER).exists()


def test_no_command_touches_what_is_not_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world = World.make(tmp_path)
    for command in (
        ["ls"],
        ["stat"],
        ["verify", "--quarantine"],
        ["prune", "--max-bytes", "1"],
        ["quarantine", "--purge"],
    ):
        main(["kv", *command, str(tmp_path)])
        world.check()
    assert list(tmp_path.glob("v1-*/??/*.kv")) == [namespace(tmp_path) / "ab" / "thesis.kv"]
    assert sorted(path.name for path in (tmp_path / ".hisparse").iterdir()) == ["upload.tmp"]


def test_a_namespace_of_another_format_is_said_and_left_alone(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    newer = stored / namespace(stored).name.replace("v1-", "v2-")
    namespace(stored).rename(newer)
    assert main(["kv", "ls", str(stored)]) == 0
    assert "it is of format 2, and this version reads format 1" in capsys.readouterr().out
    assert main(["kv", "verify", str(stored)]) == 1
    assert f"{newer}: not verified: it is of format 2" in capsys.readouterr().out
    assert len(list(newer.rglob("*.kv"))) == 4


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["ls", "nowhere"], "nowhere: No such file or directory"),
        (["verify", "."], "holds no stored KV"),
        (["prune", "."], "needs --max-bytes or --older-than"),
        (["prune", ".", "--older-than", "soon"], "'soon' is no age"),
        (["prune", ".", "--max-bytes", "few"], "'few' is not a size"),
        (["quarantine", ".", "--list", "--purge"], "exclude one another"),
        (["stats", "."], "use one of ls, stat, verify, quarantine, prune, convert"),
        (["ls"], "Missing argument 'DIR': name a directory of the file tier"),
        (["prune", "", "--max-bytes", "1"], "'DIR': it is empty"),
        (["convert", ".", ""], "'OUT': it is empty"),
    ],
)
def test_a_mistake_gives_one_line_and_exit_code_2(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["kv", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert said in shown.err


def test_ages_are_read() -> None:
    assert [parse_age(text) for text in ("45s", "90m", "1.5h", "7d")] == [45, 5400, 5400, 604800]
    with pytest.raises(InputError, match="is no age"):
        parse_age("7")


def test_the_command_answers_without_torch(stored: Path) -> None:
    program = (
        "import sys\n"
        "from hisparse.cli.main import main\n"
        "assert main(['kv', 'verify', sys.argv[1]]) == 0\n"
        "print('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(stored)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
