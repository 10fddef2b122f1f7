"""The engine generates what stock transformers does, however small the device; and the check sees what is wrong."""

import functools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparse.config import WriteBack
from hisparse.engine import LoadedModel, load_model
from hisparse.geometry import NULL_BLOCK
from hisparse.kernels.contract import Selection
from hisparse.worker import CpuStream
from hisparse.worker.runtime import LeaderRuntime
from hisparse.worker.views import BlockCopies
from tests.engine.blas import rows_are_independent
from tests.engine.parity import HOT_ROWS, TOPK, Case, Outcome, assert_parity, prompt, run

load = functools.cache(load_model)

BLOCK = 16
EDGES = [
    *(TOPK + off for off in (-1, 0, 1)),
    *(HOT_ROWS + off for off in (-1, 0, 1)),
    *(15 * BLOCK + off for off in (-1, 0, 1)),
]
"""Prompt lengths one short of, at and one past the selection, the hot lease, and the end of a page."""


def test_prompts_at_every_edge_share_an_engine_that_is_as_small_as_can_be(tiny: LoadedModel) -> None:
    case = Case(tuple(prompt(length, length) for length in EDGES), max_tokens=5)
    outcome = run(tiny, case)
    assert_parity(tiny, case, outcome)
    assert outcome.stats.spills > 0


@pytest.mark.parametrize("length", [BLOCK * 12 - 3, BLOCK * 12 - 2, HOT_ROWS - 3])
def test_decoding_crosses_the_end_of_a_page_and_of_the_hot_lease(tiny: LoadedModel, length: int) -> None:
    case = Case((prompt(length, length), prompt(length + 1, 180)), max_tokens=20)
    outcome = run(tiny, case)
    assert_parity(tiny, case, outcome)
    assert outcome.stats.rows.miss > 0


@st.composite
def cases(draw: st.DrawFn) -> Case:
    block_size = draw(st.sampled_from([8, 16, 32]))
    pages = st.integers(1, 400 // block_size)
    lengths = st.tuples(pages, st.sampled_from([0, 1, block_size - 1])).map(lambda p: p[0] * block_size + p[1])
    several = st.lists(lengths, min_size=1, max_size=4)
    return Case(
        prompts=tuple(prompt(draw(st.integers(0, 2)), length) for length in draw(several)),
        max_tokens=draw(st.sampled_from([1, 6, 12])),
        spare_blocks=draw(st.sampled_from([0, 1, 9, 40, None])),
        block_size=block_size,
        chunk=draw(st.sampled_from([7, 50, 128, 1000])),
        max_running=draw(st.sampled_from([1, 2, 4])),
        write_back=draw(st.sampled_from([WriteBack.PRESSURE, WriteBack.EAGER])),
        copy_delay=draw(st.sampled_from([0, 1, 5])),
    )


@pytest.mark.parametrize("name", ["builtin:tiny-v32", "builtin:tiny-glm"])
@settings(max_examples=14)
@given(case=cases())
def test_no_shape_of_a_run_changes_what_is_generated(name: str, case: Case) -> None:
    loaded = load(name)
    assert_parity(loaded, case, run(loaded, case))


@pytest.mark.parametrize("name", ["builtin:tiny-v32", "builtin:tiny-glm"])
def test_in_bfloat16_the_tokens_are_those_of_the_run_with_everything_resident(name: str) -> None:
    loaded = load(name, "bfloat16")
    prompts = (prompt(1, 260), prompt(2, 97), prompt(3, 161))
    small = run(loaded, Case(prompts, max_tokens=24, copy_delay=2))
    resident = run(loaded, Case(prompts, max_tokens=24, spare_blocks=None))
    assert small.stats.spills > 0 == resident.stats.spills
    assert small.stats.rows.miss > 0 == resident.stats.rows.miss
    assert small.tokens == resident.tokens
    for ours, theirs in zip(small.results, resident.results, strict=True):
        mine, other = torch.stack(ours.logits), torch.stack(theirs.logits)
        assert torch.equal(mine, other) or not rows_are_independent()
        # Where they are not, a sum in float32 now and then rounds to the next bfloat16.
        assert (mine - other).pow(2).mean().sqrt() < 2**-7 * other.pow(2).mean().sqrt()


# Controls: the same check, with one thing broken of what moved through the host.

CONTROL = Case((prompt(5, 230), prompt(6, 200)), max_tokens=10, max_running=1)


class FirstMisses:
    """Stands in for `LeaderRuntime.resolve`: before the first call of a layer that reads from the host, hands one
    position that it will load to `damage`."""

    def __init__(
        self, patch: pytest.MonkeyPatch, damage: Callable[[LeaderRuntime, int, int], None], layer: int
    ) -> None:
        self.num_damaged = 0
        sound = LeaderRuntime.resolve

        def resolve(runtime: LeaderRuntime, selection: Selection) -> torch.Tensor:
            if not self.num_damaged and runtime.layer == layer:
                where = _on_host(runtime, selection)
                if where is not None:
                    damage(runtime, *where)
                    self.num_damaged += 1
            return sound(runtime, selection)

        patch.setattr(LeaderRuntime, "resolve", resolve)


def _on_host(runtime: LeaderRuntime, selection: Selection) -> tuple[int, int] | None:
    """The first selected (slot, position) that a first `resolve` finds on the host only."""
    tables = runtime.context.tables
    for slot, positions in zip(selection.row_slot.tolist(), selection.positions.tolist(), strict=True):
        for position in positions:
            page = position // BLOCK
            if position >= 0 and tables.resident[slot, page] == NULL_BLOCK != tables.host[slot, page]:
                return slot, position
    return None


def _flip_one_bit(runtime: LeaderRuntime, slot: int, position: int) -> None:
    """The sign of one element of one host row."""
    block = int(runtime.context.tables.host[slot, position // BLOCK])
    start = runtime.views.host.layout.row_offset(block * BLOCK + position % BLOCK)
    runtime.views.host.storage[start + 3] ^= 0x80


def _swap_two_host_blocks(runtime: LeaderRuntime, slot: int, position: int) -> None:
    """The page of the position and another one of the slot."""
    host = runtime.context.tables.host[slot]
    page = position // BLOCK
    other = next(at for at in host.nonzero().flatten().tolist() if at != page)
    host[[page, other]] = host[[other, page]]


def _is_caught(loaded: LoadedModel, outcome: Outcome) -> bool:
    try:
        assert_parity(loaded, CONTROL, outcome)
    except AssertionError as error:
        return "other tokens" in str(error) or "differ by" in str(error)
    return False


@pytest.mark.parametrize("damage", [_flip_one_bit, _swap_two_host_blocks])
def test_control_wrong_bytes_in_one_place_of_the_host_are_caught(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch, damage: Callable[[LeaderRuntime, int, int], None]
) -> None:
    first_misses = FirstMisses(monkeypatch, damage, layer=0)
    outcome = run(tiny, CONTROL)
    assert first_misses.num_damaged == 1
    assert _is_caught(tiny, outcome)


def test_control_one_skipped_page_copy_is_caught(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def note(runtime: LeaderRuntime, slot: int, position: int) -> None:
        read.append(int(runtime.context.tables.host[slot, position // BLOCK]))

    with monkeypatch.context() as patch:
        FirstMisses(patch, note, layer=0)
        assert not _is_caught(tiny, run(tiny, CONTROL))
    skipped = 0
    sound = CpuStream.submit

    def submit(stream: CpuStream, copies: BlockCopies) -> object:
        nonlocal skipped
        kept = copies.destination_blocks != read[0]
        if not skipped and not kept.all():
            skipped += 1
            sources, destinations = copies.source_blocks[kept], copies.destination_blocks[kept]
            copies = BlockCopies(copies.source, copies.destination, sources, destinations)
        return sound(stream, copies)

    monkeypatch.setattr(CpuStream, "submit", submit)
    outcome = run(tiny, CONTROL)
    assert skipped == 1
    assert _is_caught(tiny, outcome)


def test_control_a_stale_hot_row_is_caught(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both requests run in the one slot there is; the second is served what the first left in the hot rows."""
    forgotten = 0

    def forget(runtime: LeaderRuntime, slots: torch.Tensor) -> None:
        nonlocal forgotten
        forgotten += 1

    monkeypatch.setattr(LeaderRuntime, "forget", forget)
    outcome = run(tiny, CONTROL)
    assert forgotten > 0
    assert _is_caught(tiny, outcome)


def test_control_one_stale_hot_row_is_enough(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """One hot row says that it holds a position which is still on the host; what it holds is another one's bytes."""

    def claim(runtime: LeaderRuntime, slot: int, position: int) -> None:
        runtime.state.position_of[slot, 5] = position
        runtime.state.hot_row_of[slot, position] = 5

    first_misses = FirstMisses(monkeypatch, claim, layer=0)
    outcome = run(tiny, CONTROL)
    assert first_misses.num_damaged == 1
    assert _is_caught(tiny, outcome)
