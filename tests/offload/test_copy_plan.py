"""Plans write exactly their mapping's pieces, for exactly the pages that a rank must write, into memory that exists."""

import tracemalloc
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hisparse.errors import InvariantError
from hisparse.offload.copy_plan import CopyPlan, Descriptors, Direction, Placement, WriterFilter
from hisparse.offload.layout import LayerMapping, Run

MAX_OBJECT_BYTES = 2048
"""Python's own numbers and views of arrays in one call, whatever is copied. A page's addresses are none of them."""


def mapping(*runs: Run, replication: int = 1, replica: int = 0) -> LayerMapping:
    return LayerMapping(0, 1 << 20, 1 << 20, runs, replication, replica)


def strided(count: int, size: int = 64) -> LayerMapping:
    return mapping(Run(0, 32, size, count, size, 4 * size))


def bases(count: int, first: int = 1 << 40, stride: int = 1 << 24) -> np.ndarray:
    return np.arange(count, dtype=np.uint64) * np.uint64(stride) + np.uint64(first)


def described(descriptors: Descriptors, start: int, end: int) -> list[tuple[int, int, int]]:
    columns = (descriptors.sources, descriptors.destinations, descriptors.sizes)
    return list(zip(*(column[start:end].tolist() for column in columns), strict=True))


def by_hand(mapped: LayerMapping, local: np.ndarray, canonical: np.ndarray) -> set[tuple[int, int, int]]:
    return {
        (at + run.local_offset + i * run.local_stride, to + run.canonical_offset + i * run.canonical_stride, run.size)
        for at, to in zip(local.tolist(), canonical.tolist(), strict=True)
        for run in mapped.runs
        for i in range(run.count)
    }


RUNS = st.lists(
    st.builds(
        Run,
        st.integers(0, 2**34),
        st.integers(0, 2**34),
        st.integers(1, 2**33),
        st.integers(1, 20),
        st.integers(0, 2**20),
        st.integers(0, 2**20),
    ),
    min_size=1,
    max_size=4,
)


@given(RUNS, st.lists(st.tuples(st.integers(0, 2**62), st.integers(0, 2**62)), max_size=20), st.integers(0, 5))
def test_a_plan_describes_every_piece_of_every_page(runs: list[Run], pages: list[tuple[int, int]], at: int) -> None:
    mapped = mapping(*runs)
    local, canonical = (np.array([page[end] for page in pages], dtype=np.uint64) for end in (0, 1))
    for direction in Direction:
        plan = CopyPlan(mapped, direction)
        descriptors = Descriptors(at + len(pages) * plan.num_fragments + 3)
        ends = (local, canonical) if direction is Direction.STORE else (canonical, local)
        end = plan.fill(descriptors, at, *ends)
        assert end == at + len(pages) * plan.num_fragments
        got = described(descriptors, at, end)
        if direction is Direction.LOAD:
            got = [(to, source, size) for source, to, size in got]
        assert set(got) == by_hand(mapped, local, canonical)
        assert sum(size for *_, size in got) == len(pages) * plan.total_bytes
        untouched = described(descriptors, 0, at) + described(descriptors, end, descriptors.capacity)
        assert set(untouched) <= {(0, 0, 0)}


@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 512])
def test_one_page_many_pages_and_none(count: int) -> None:
    plan = CopyPlan(strided(count))
    descriptors = Descriptors(count * 40)
    for num_pages in (40, 1, 0, 7, 40):
        local, canonical = bases(num_pages), bases(num_pages, 1 << 50)
        end = plan.fill(descriptors, 0, local, canonical)
        assert end == num_pages * count
        assert set(described(descriptors, 0, end)) == by_hand(strided(count), local, canonical)


def test_sizes_are_written_again_when_another_plan_or_place_came_between() -> None:
    """A plan leaves sizes alone that it wrote in the call before, and only those."""
    few = mapping(Run(0, 0, 8, 1, 0, 0), Run(8, 100, 24, 2, 24, 50))
    many, one = strided(40, 16), mapping(Run(0, 0, 999, 1, 0, 0))
    two = mapping(Run(0, 0, 8, 1, 0, 0), Run(8, 100, 24, 1, 0, 0))
    plans = [(CopyPlan(mapped), mapped) for mapped in (few, many, one, two)]
    descriptors = Descriptors(400)
    generator = np.random.default_rng(0)
    for _ in range(300):
        plan, mapped = plans[generator.integers(4)]
        num_pages, at = int(generator.integers(0, 6)), int(generator.choice([0, 0, 1, 120]))
        local, canonical = bases(num_pages), bases(num_pages, 1 << 50)
        end = plan.fill(descriptors, at, local, canonical)
        assert set(described(descriptors, at, end)) == by_hand(mapped, local, canonical)
    with pytest.raises(ValueError, match="read-only"):
        descriptors.sizes[0] = 1


def test_a_plan_of_layers_is_their_plans_together() -> None:
    mappings = [strided(3), strided(5, 8), strided(1, 700)]
    placements = [Placement(1000 * layer, 70_000 * layer) for layer in range(3)]
    local, canonical = bases(4), bases(4, 1 << 50)
    plan = CopyPlan.of_layers(mappings, placements, Direction.STORE)
    descriptors = Descriptors(36)
    assert (plan.num_fragments, plan.total_bytes) == (9, 3 * 64 + 5 * 8 + 700)
    assert plan.fill(descriptors, 0, local, canonical) == 36
    expected = set()
    for mapped, at in zip(mappings, placements, strict=True):
        expected |= by_hand(mapped, local + np.uint64(at.local_offset), canonical + np.uint64(at.canonical_offset))
    assert set(described(descriptors, 0, 36)) == expected


def test_a_plan_knows_what_chooses_a_copy_method() -> None:
    plan = CopyPlan(mapping(Run(0, 512, 256, 4, 256, 1024), Run(1024, 96, 32, 1, 0, 0)))
    assert (plan.min_fragment_bytes, plan.max_fragment_bytes, plan.alignment) == (32, 256, 32)
    assert CopyPlan(mapping(Run(0, 0, 6, 1, 0, 0))).alignment == 2
    assert CopyPlan(mapping(Run(0, 0, 1 << 20, 1, 0, 0))).alignment == 4096


@pytest.mark.parametrize(
    ("at", "num_sources", "num_destinations"), [(0, 5, 5), (3, 4, 4), (-1, 1, 1), (13, 0, 0), (0, 3, 2), (0, 1, 3)]
)
def test_what_does_not_fit_is_refused_and_nothing_is_written(at: int, num_sources: int, num_destinations: int) -> None:
    plan, descriptors = CopyPlan(strided(3)), Descriptors(12)
    with pytest.raises(InvariantError, match="do not fit"):
        plan.fill(descriptors, at, bases(num_sources), bases(num_destinations))
    assert set(described(descriptors, 0, 12)) == {(0, 0, 0)}
    assert plan.fill(descriptors, 0, bases(4), bases(4)) == 12


def test_addresses_of_another_type_are_refused_rather_than_converted() -> None:
    plan, descriptors = CopyPlan(strided(3)), Descriptors(12)
    signed = bases(4).astype(np.int64)
    for ends in ((signed, bases(4)), (bases(4), signed)):
        with pytest.raises(InvariantError, match="addresses are uint64"):
            plan.fill(descriptors, 0, *ends)
    assert set(described(descriptors, 0, 12)) == {(0, 0, 0)}


def test_plans_and_descriptors_of_nothing_are_refused() -> None:
    with pytest.raises(InvariantError, match="at least one byte"):
        CopyPlan(mapping())
    with pytest.raises(InvariantError, match="at least one byte"):
        CopyPlan(mapping(Run(0, -1, 8, 1, 0, 0)))
    with pytest.raises(InvariantError, match="hold nothing"):
        Descriptors(0)
    with pytest.raises(InvariantError, match="do not go with"):
        CopyPlan.of_layers([strided(1)], [], Direction.LOAD)
    others = [strided(1), replace(strided(1), replication=2)]
    with pytest.raises(InvariantError, match="replicated differently"):
        CopyPlan.of_layers(others, [Placement(0, 0)] * 2, Direction.LOAD)


def test_descriptors_over_signed_arrays_share_their_memory() -> None:
    """Kernels and torch have no unsigned addresses; the bits are the same."""
    arrays = [np.zeros(6, dtype=np.int64) for _ in range(3)]
    descriptors = Descriptors.over(*arrays)
    assert CopyPlan(strided(3)).fill(descriptors, 0, bases(2, 2**63 + 5), bases(2)) == 6
    assert [int(x) for x in arrays[0].view(np.uint64)] == descriptors.sources.tolist()
    assert arrays[0].min() < 0 < arrays[2].min()
    for wrong in (np.zeros(5, dtype=np.int64), np.zeros(6, dtype=np.int32), np.zeros((6, 1), dtype=np.int64)):
        with pytest.raises(InvariantError, match="64-bit"):
            Descriptors.over(arrays[0], arrays[1], wrong)


@given(st.integers(1, 8), st.lists(st.integers(0, 2**63), max_size=40), st.data())
def test_each_page_is_written_by_its_elected_replica_alone(
    replication: int, page_ids: list[int], data: st.DataObject
) -> None:
    ids = np.array(page_ids, dtype=np.uint64)
    local, canonical = bases(len(ids)), bases(len(ids), 1 << 50)
    written = []
    for replica in range(replication):
        mapped = replace(strided(1), replication=replication, replica=replica)
        chosen = WriterFilter(mapped, len(ids) + data.draw(st.integers(0, 3)))
        kept = [index for index, page in enumerate(page_ids) if mapped.writes(page)]
        for _ in range(2):  # what the last call left behind does not matter
            sources, destinations = chosen.select(ids, local, canonical)
            assert sources.tolist() == local[kept].tolist()
            assert destinations.tolist() == canonical[kept].tolist()
        written += sources.tolist()
    assert sorted(written) == local.tolist()


def test_a_filter_refuses_more_pages_than_it_has_room_for() -> None:
    chosen = WriterFilter(replace(strided(1), replication=2), 3)
    with pytest.raises(InvariantError, match="3 pages fit"):
        chosen.select(bases(4), bases(4), bases(4))
    with pytest.raises(InvariantError, match="2 destinations"):
        chosen.select(bases(3), bases(3), bases(2))


def peak_bytes(call: Callable[[], object]) -> int:
    """The most that a call has allocated at one time. Counts what numpy allocates, buffers of its loops included."""
    call()
    tracemalloc.start()
    try:
        call()
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        call()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("num_fragments", [1, 2, 16, 31, 32, 512])
@pytest.mark.parametrize("direction", list(Direction))
def test_a_transfer_allocates_no_buffer(num_fragments: int, direction: Direction) -> None:
    """However many pages: 1 and 2048 take the same few views of arrays."""
    plan = CopyPlan(strided(num_fragments), direction)
    descriptors = Descriptors(2048 * num_fragments)
    peaks = []
    for num_pages in (1, 2048):
        local, canonical = bases(num_pages), bases(num_pages, 1 << 50)

        def fill(local: np.ndarray = local, canonical: np.ndarray = canonical) -> None:
            descriptors._sized_by = None  # so that sizes are written too
            plan.fill(descriptors, 0, local, canonical)

        peaks.append(peak_bytes(fill))
    assert max(peaks) <= MAX_OBJECT_BYTES
    assert peaks[1] - peaks[0] <= 256  # larger numbers, a view more


@pytest.mark.parametrize("replication", [1, 2, 8])
def test_filtering_allocates_no_buffer(replication: int) -> None:
    chosen = WriterFilter(replace(strided(1), replication=replication), 2048)
    peaks = []
    for count in (1, 2048):
        ids, local, canonical = np.arange(count, dtype=np.uint64), bases(count), bases(count, 1 << 50)
        peaks.append(peak_bytes(lambda i=ids, a=local, b=canonical: chosen.select(i, a, b)))  # type: ignore[misc]
    assert max(peaks) <= MAX_OBJECT_BYTES
    assert peaks[1] - peaks[0] <= 256


def test_a_buffer_would_be_seen() -> None:
    """Control: the same sums through a temporary array, and a boolean index."""
    count, out = 2048, np.zeros(2048 * 4, dtype=np.uint64)
    offsets, pages = np.arange(4, dtype=np.uint64), bases(count)

    def with_temporary() -> None:
        out[:] = (pages[:, None] + offsets).ravel()

    def by_broadcasting() -> None:
        np.add(pages[:, None], offsets, out.reshape(count, 4))

    assert peak_bytes(with_temporary) >= out.nbytes
    assert peak_bytes(by_broadcasting) >= 8 * np.getbufsize() // 2
    assert peak_bytes(lambda: pages[pages % np.uint64(2) == 0]) >= pages.nbytes
