"""Stored blocks change their family or lose their topology, byte for byte as an independent formula says."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hisparse.cli.main import main
from hisparse.errors import InputError
from hisparse.offload.files import DirectTopology, FileTier, FileTierConfig, Identity
from hisparse.offload.files.conversion import plan_jobs, run_job
from hisparse.offload.files.survey import find
from tests.offload.files.world import IDENTITY, key_of

HEADS, TOKENS, BYTES, LAYERS, CHUNK = 4, 8, 32, 2, 2
PAGE = 2 * TOKENS * HEADS * BYTES
FAMILIES = ("packed-nhd", "packed-hnd", "split-nhd", "split-hnd")
ROOM = 1 << 24


def identity(family: str, topology: DirectTopology | None = None, page_bytes: int = PAGE, slots: int = 1) -> Identity:
    used = LAYERS * CHUNK * page_bytes * slots
    return replace(
        IDENTITY,
        family=family,
        num_kv_heads=HEADS,
        head_bytes=BYTES,
        page_tokens=TOKENS,
        page_bytes=(page_bytes,) * LAYERS,
        row_bytes=-(-used // 4096) * 4096,
        blocks_per_chunk=CHUNK,
        topology=topology,
    )


def page(family: str, seed: int, layer: int, block: int, heads: range) -> np.ndarray:
    """One page by the formula: every (kv, token, head) has bytes of its own."""
    out = np.empty(2 * TOKENS * len(heads) * BYTES, np.uint8)
    for kind, token, (local, head) in itertools.product(range(2), range(TOKENS), enumerate(heads)):
        rng = np.random.default_rng((seed, layer, block, kind, token, head))
        count = len(heads)
        at = {
            "packed-nhd": ((token * count + local) * 2 + kind) * BYTES,
            "packed-hnd": ((local * TOKENS + token) * 2 + kind) * BYTES,
            "split-nhd": ((kind * TOKENS + token) * count + local) * BYTES,
            "split-hnd": ((kind * count + local) * TOKENS + token) * BYTES,
        }[family]
        out[at : at + BYTES] = rng.integers(0, 256, BYTES, np.uint8)
    return out


def row(of: Identity, family: str, seed: int, slots: list[range]) -> np.ndarray:
    """A row of the file: slots of ranks, layers, blocks."""
    out = np.zeros(of.row_bytes, np.uint8)
    pages = [
        page(family, seed, layer, block, heads) for heads in slots for layer in range(LAYERS) for block in range(CHUNK)
    ]
    joined = np.concatenate(pages)
    out[: len(joined)] = joined
    return out


def write(root: Path, of: Identity, slots: list[range], seeds: range = range(3)) -> None:
    tier = FileTier(FileTierConfig((root,), ROOM), of)
    for seed in seeds:
        assert tier.store(key_of(seed), row(of, of.family, seed, slots)).result(30)
    tier.close()


def check(root: Path, of: Identity, seeds: range = range(3)) -> None:
    tier = FileTier(FileTierConfig((root,), ROOM), of)
    for seed in seeds:
        out = np.empty(of.row_bytes, np.uint8)
        assert tier.load(key_of(seed), out).result(30)
        assert np.array_equal(out, row(of, of.family, seed, [range(HEADS)]))
    tier.close()


@pytest.mark.parametrize(("before", "after"), [*itertools.permutations(FAMILIES, 2)])
def test_every_family_becomes_every_other(before: str, after: str, tmp_path: Path) -> None:
    write(tmp_path / "in", identity(before), [range(HEADS)])
    assert main(["kv", "convert", str(tmp_path / "in"), str(tmp_path / "out"), "--family", after]) == 0
    check(tmp_path / "out", identity(after))
    check(tmp_path / "in", identity(before))


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("per_rank", [False, True])
def test_what_ranks_stored_as_they_had_it_becomes_canonical(tp: int, per_rank: bool, tmp_path: Path) -> None:
    """At tp 8 every head is there twice."""
    count = max(1, HEADS // tp)
    first = [rank * HEADS // tp // count * count for rank in range(tp)]
    slots = [range(start, start + count) for start in first]
    page_bytes = PAGE * count // HEADS
    if per_rank:
        for rank, heads in enumerate(slots):
            write(tmp_path, identity("packed-nhd", DirectTopology(tp, rank=rank), page_bytes), [heads])
    else:
        write(tmp_path, identity("packed-nhd", DirectTopology(tp), page_bytes, tp), slots)
    for family in ("packed-nhd", "split-hnd"):
        out = tmp_path / family
        assert main(["kv", "convert", str(tmp_path), str(out), "--family", family]) == 0
        check(out, identity(family))


def test_a_chunk_that_one_rank_lacks_is_left_out_and_a_rank_that_lacks_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, seeds in enumerate((range(3), range(1, 3))):
        direct = identity("split-nhd", DirectTopology(2, rank=rank), PAGE // 2)
        write(tmp_path / "both", direct, [range(2 * rank, 2 * rank + 2)], seeds)
    (job,) = plan_jobs(find(tmp_path / "both"), None)
    assert [done.problem for done in run_job(job, tmp_path / "out")] == [None, None]
    check(tmp_path / "out", identity("split-nhd"), range(1, 3))
    write(tmp_path / "one", identity("split-nhd", DirectTopology(2, rank=1), PAGE // 2), [range(2, 4)])
    assert main(["kv", "convert", str(tmp_path / "one"), str(tmp_path / "out")]) == 1
    assert "it takes the namespaces of all 2 ranks, and there are: 1" in capsys.readouterr().out


def test_a_bad_block_is_named_and_the_others_are_converted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "in", identity("packed-nhd"), [range(HEADS)])
    bad = next((tmp_path / "in").rglob(f"{key_of(1).hex()}.kv"))
    raw = bytearray(bad.read_bytes())
    raw[-1] ^= 1
    bad.write_bytes(raw)
    assert main(["kv", "convert", str(tmp_path / "in"), str(tmp_path / "out"), "--family", "split-nhd"]) == 1
    said = capsys.readouterr().out
    assert f"{key_of(1).hex()}: not converted: {bad}: its payload fails its checksum" in said
    assert "2 blocks converted" in said
    check(tmp_path / "out", identity("split-nhd"), range(1))
    check(tmp_path / "out", identity("split-nhd"), range(2, 3))
    assert bad.read_bytes() == raw


def test_converting_again_writes_nothing_again(tmp_path: Path) -> None:
    write(tmp_path, identity("packed-nhd"), [range(HEADS)])
    command = ["kv", "convert", str(tmp_path), str(tmp_path), "--family", "packed-hnd"]
    assert main(command) == 0
    times = {path: path.stat().st_ino for path in tmp_path.rglob("*.kv")}
    assert len(times) == 6
    assert main(command) == 0
    assert {path: path.stat().st_ino for path in tmp_path.rglob("*.kv")} == times


@pytest.mark.parametrize(
    ("family", "code", "said"),
    [
        ("packed", 2, "'packed' is no family: packed-nhd"),
        ("latent", 1, "a latent has no heads"),
        ("packed-nhd", 0, "it is canonical and packed-nhd already"),
    ],
)
def test_what_cannot_be_converted_is_said(
    family: str, code: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, identity("packed-nhd"), [range(HEADS)])
    assert main(["kv", "convert", str(tmp_path), str(tmp_path / "out"), "--family", family]) == code
    shown = capsys.readouterr()
    assert said in shown.out + shown.err
    assert not (tmp_path / "out").exists()


def test_a_job_with_a_problem_does_not_run(tmp_path: Path) -> None:
    write(tmp_path, identity("packed-nhd"), [range(HEADS)])
    (job,) = plan_jobs(find(tmp_path), None)
    with pytest.raises(InputError, match="already"):
        next(run_job(job, tmp_path))
