"""What the CUDA kernels do beyond the shipped contract: graphs, no waits, served sizes against the reference."""

from dataclasses import dataclass, replace

import pytest
import torch

from hisparse.errors import InputError
from hisparse.geometry import PagedLayout
from hisparse.kernels.contract import EMPTY, BlockTables, HotState, MissPlan, ResolverCounters, Selection
from hisparse.kernels.cuda import ops
from hisparse.kernels.cuda.resolver import CudaResolver
from hisparse.kernels.reference import ReferenceResolver
from hisparse.testing.resolver_cases import Case, CaseShape, LayerRows
from hisparse.testing.resolver_checker import check_resolve
from hisparse.testing.resolver_contract import on_host
from tests.gpu.marks import NEEDS_GPU
from tests.gpu.waiting import nothing_waits

pytestmark = NEEDS_GPU

BLOCK = 64
MAX_SERVED_ROWS = 256


@pytest.fixture
def resolver() -> CudaResolver:
    return CudaResolver()


@dataclass
class Served:
    """A cache of served size. Row r of the host pool holds r in its first 8 bytes, so copies are told apart."""

    tables: BlockTables
    state: HotState
    source: LayerRows
    destination: LayerRows
    plan: MissPlan
    counters: ResolverCounters

    @classmethod
    def build(cls, slots: int, tokens: int, hot_rows: int, resident_pages: int = 0) -> "Served":
        pages, hot_blocks, row_bytes, stride = -(-tokens // BLOCK), -(-hot_rows // BLOCK), 656, 768
        num_host, num_slab = 1 + slots * pages, 1 + slots * (hot_blocks + resident_pages)
        host = torch.zeros(num_host * BLOCK * stride, dtype=torch.uint8, pin_memory=True)
        host.view(torch.int64).view(-1, stride // 8)[:, 0] = torch.arange(num_host * BLOCK)
        slab = torch.zeros(num_slab * BLOCK * row_bytes, dtype=torch.uint8, device="cuda")
        ids = torch.randperm(num_slab - 1, dtype=torch.int32) + 1
        resident = torch.zeros(slots, pages, dtype=torch.int32)
        resident[:, :resident_pages] = ids[slots * hot_blocks :].view(slots, -1)
        host_ids = (torch.randperm(num_host - 1, dtype=torch.int32) + 1).view(slots, pages)
        return cls(
            BlockTables(resident.cuda(), host_ids.cuda(), ids[: slots * hot_blocks].view(slots, -1).cuda()),
            HotState.allocate(slots, hot_rows, tokens, "cuda"),
            LayerRows(host, PagedLayout(0, BLOCK * stride, stride, row_bytes, BLOCK, num_host)),
            LayerRows(slab, PagedLayout(0, BLOCK * row_bytes, row_bytes, row_bytes, BLOCK, num_slab)),
            MissPlan.allocate(MAX_SERVED_ROWS, hot_rows, "cuda"),
            ResolverCounters.allocate("cuda"),
        )

    def resolve(self, resolver: CudaResolver | ReferenceResolver, selection: Selection) -> torch.Tensor:
        return resolver.resolve(
            selection, self.tables, self.state, self.source, self.destination, self.plan, self.counters
        )

    def twin(self) -> "Served":
        """The same tables and host pool; state, slab, plan and counters of its own."""
        state = HotState(*(getattr(self.state, name).clone() for name in HotState.__slots__))
        slab = LayerRows(self.destination.storage.clone(), self.destination.layout)
        plan = MissPlan.allocate(*self.plan.host_row.shape, "cuda")
        return replace(self, state=state, destination=slab, plan=plan, counters=ResolverCounters.allocate("cuda"))

    def marks(self, rows: torch.Tensor) -> torch.Tensor:
        """The first 8 bytes of slab rows; -1 for row -1."""
        words = self.destination.storage.view(torch.int64).view(-1, 656 // 8)[:, 0]
        return torch.where(rows >= 0, words[rows.long().clamp(min=0)], -1)

    def host_rows(self, selection: Selection) -> torch.Tensor:
        """The host row of every selected position."""
        slot, position = selection.row_slot.long().clamp(min=0)[:, None], selection.positions.long().clamp(min=0)
        return self.tables.host[slot, position // BLOCK].long() * BLOCK + position % BLOCK


def drifting(row_slot: torch.Tensor, tokens: int, topk: int, step: int) -> Selection:
    """Positions that mostly stay from step to step: the highest scores of a slowly changing noise."""
    generator = torch.Generator(device="cuda").manual_seed(7)
    base = torch.randn(row_slot.numel(), tokens, generator=generator, device="cuda")
    change = torch.randn(row_slot.numel(), tokens, generator=generator.manual_seed(100 + step), device="cuda")
    positions = (base + 0.3 * change).topk(topk).indices.int().sort(1).values
    return Selection(positions, row_slot)


@pytest.mark.parametrize(
    ("slots", "rows", "tokens", "topk", "hot_rows", "resident_pages"),
    [
        (1, 1, 32768, 2048, 4096, 0),
        (3, 1, 32768, 2048, 4096, 200),
        (2, 4, 16384, 2048, 10240, 0),
        (1, 8, 40000, 4096, 32768, 0),
        (130, 1, 2100, 130, 262, 8),
        (5, 2, 163840, 2047, 4095, 0),
    ],
)
def test_served_sizes_agree_with_the_reference_in_every_step(
    resolver: CudaResolver, slots: int, rows: int, tokens: int, topk: int, hot_rows: int, resident_pages: int
) -> None:
    served = Served.build(slots, tokens, hot_rows, resident_pages)
    row_slot = torch.arange(slots, dtype=torch.int32).repeat(rows)[torch.randperm(slots * rows)]
    row_slot[row_slot == 2] = EMPTY
    for step in range(6):
        selection = drifting(row_slot.cuda(), tokens, topk, step)
        twin, before, totals = served.twin(), served.state.position_of.clone(), served.counters.totals.clone()
        stamps = served.state.stamp.clone()
        expected = twin.resolve(ReferenceResolver(), selection)
        got = served.resolve(resolver, selection)
        assert torch.equal(served.counters.totals - totals, twin.counters.totals)
        assert torch.equal(got < 0, expected < 0)
        resident = served.tables.resident[
            selection.row_slot.long().clamp(min=0)[:, None], selection.positions.long() // BLOCK
        ]
        from_host = (got >= 0) & (resident == 0)
        assert torch.equal(got[~from_host], expected[~from_host])
        assert torch.equal(served.marks(got)[from_host], served.host_rows(selection)[from_host])
        assert torch.equal(served.state.position_of.sort(1).values, twin.state.position_of.sort(1).values) or _same_age(
            stamps, before, served, twin
        )
        assert torch.equal(served.state.stamp.sort(1).values, twin.state.stamp.sort(1).values)
        assert torch.equal(served.plan.count, twin.plan.count)
        assert torch.equal(served.plan.copies()[0].sort().values, twin.plan.copies()[0].sort().values)


@pytest.mark.parametrize(("requests", "rows", "missed"), [(32, 4, 600), (64, 1, 900), (3, 8, 1500)])
def test_no_two_misses_share_a_victim_when_many_blocks_run(
    resolver: CudaResolver, requests: int, rows: int, missed: int
) -> None:
    """Victims of a step spread over more of the queue than a block looks at together, and blocks differ in pace."""
    tokens, union, topk = 16384, 4096 if rows > 1 else 2048, 2048
    served = Served.build(requests, tokens, 10240 if rows > 1 else 4096)
    row_slot = torch.arange(requests, dtype=torch.int32).repeat_interleave(rows).cuda()
    order = torch.stack([torch.randperm(tokens, device="cuda") for _ in range(requests)]).int()
    fixed, walked = order[:, : union - missed], order[:, union - missed :]
    starts = torch.linspace(0, union - topk, rows).long().tolist()
    for step in range(24):
        new = walked[:, (torch.arange(missed, device="cuda") + step * missed) % walked.shape[1]]
        chosen = torch.cat([fixed, new], 1)[:, torch.randperm(union, device="cuda")]
        positions = torch.stack([chosen[:, start : start + topk] for start in starts], 1).flatten(0, 1).contiguous()
        selection = Selection(positions, row_slot)
        rows_found = served.resolve(resolver, selection)
        assert torch.equal(served.marks(rows_found), served.host_rows(selection)), f"step {step}"
        held = served.state.position_of.sort(1).values
        assert not ((held[:, 1:] == held[:, :-1]) & (held[:, 1:] >= 0)).any(), f"step {step}"
    assert served.counters.read()["unreachable"] == 0


def _same_age(stamps: torch.Tensor, before: torch.Tensor, served: Served, twin: Served) -> bool:
    """Whether the rows that either evicted had the same ages, slot by slot: ties may go either way."""
    ages = [
        torch.where(other.state.position_of != before, torch.where(before < 0, 0, stamps), -1).sort(1).values
        for other in (served, twin)
    ]
    return torch.equal(*ages)


def test_rows_last_read_thousands_of_steps_ago_are_told_apart(resolver: CudaResolver) -> None:
    for seed in range(20):
        case = on_host(Case(CaseShape(num_slots=2, max_tokens=200, hot_rows=64, topk=16), seed, "cuda"))
        for first in range(0, 64, 16):
            check_resolve(resolver, case, case.select([(slot, range(first, first + 16)) for slot in range(2)]))
        case.state.step.fill_(3_000_000)
        case.state.queue_state.zero_()  # notes about other stamps
        spread = 10 ** (seed % 6 + 1)
        case.state.stamp.copy_(torch.randint(3_000_000 - spread, 3_000_001, case.state.stamp.shape))
        for first in (100, 116, 20):
            check_resolve(resolver, case, case.select([(slot, range(first, first + 16)) for slot in range(2)]))


def test_a_partly_leased_request_uses_the_blocks_that_it_has(resolver: CudaResolver) -> None:
    case = on_host(Case(CaseShape(max_tokens=64, hot_rows=24), 3, "cuda"))
    case.tables.hot[1, 1] = 0
    for first in (0, 8, 16, 3):
        check_resolve(resolver, case, case.select([(1, range(first, first + 8)), (1, range(first + 4, first + 12))]))


def test_a_graph_replays_on_inputs_that_changed(resolver: CudaResolver) -> None:
    served = Served.build(4, 4096, 512)
    row_slot = torch.arange(4, dtype=torch.int32, device="cuda")
    positions = drifting(row_slot, 4096, 256, 0).positions.clone()
    selection = Selection(positions, row_slot)
    served.resolve(resolver, selection)
    resolver.replay_plan(served.plan, [served.source], [served.destination], served.counters)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows = served.resolve(resolver, selection)
        resolver.replay_plan(served.plan, [served.source], [served.destination], served.counters)
    for step in range(1, 20):
        positions.copy_(drifting(row_slot, 4096, 256, step).positions)
        twin, totals = served.twin(), served.counters.totals.clone()
        graph.replay()
        twin.resolve(ReferenceResolver(), selection)
        assert torch.equal(served.marks(rows), served.host_rows(selection))
        twin.counters.totals[3] *= 2
        assert torch.equal(served.counters.totals - totals, twin.counters.totals)
        assert served.state.step.tolist() == [step + 1] * 4


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_the_operators_compile_into_one_graph(resolver: CudaResolver, backend: str) -> None:
    served = Served.build(4, 4096, 512)
    row_slot = torch.arange(4, dtype=torch.int32, device="cuda")
    layouts = ops.layout_numbers(served.source.layout) + ops.layout_numbers(served.destination.layout)
    host, scratch = served.source.storage, torch.zeros(8192, dtype=torch.int32, device="cuda")

    def step(
        positions: torch.Tensor,
        tables: list[torch.Tensor],
        state: list[torch.Tensor],
        slab: torch.Tensor,
        plan: list[torch.Tensor],
        counters: list[torch.Tensor],
    ) -> torch.Tensor:
        out = torch.empty_like(positions)
        ops.resolve(out, [positions, row_slot], tables, state, host, slab, plan, counters, scratch, layouts, True)
        ops.move_rows(plan[1], plan[2], plan[0], host, slab, layouts, counters[0])
        return out + 1

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    for index in range(4):
        selection, twin = drifting(row_slot, 4096, 256, index), served.twin()
        totals = served.counters.totals.clone()
        rows = compiled(
            selection.positions,
            [served.tables.resident, served.tables.host, served.tables.hot],
            [getattr(served.state, name) for name in HotState.__slots__],
            served.destination.storage,
            [served.plan.count, served.plan.host_row, served.plan.slab_row],
            [served.counters.totals, served.counters.status],
        )
        twin.resolve(ReferenceResolver(), selection)
        assert torch.equal(served.marks(rows - 1), served.host_rows(selection))
        twin.counters.totals[3] *= 2
        assert torch.equal(served.counters.totals - totals, twin.counters.totals)
    assert served.state.step.tolist() == [4] * 4


def test_no_call_waits_for_the_device(resolver: CudaResolver) -> None:
    served = Served.build(4, 4096, 512)
    selection = drifting(torch.arange(4, dtype=torch.int32, device="cuda"), 4096, 256, 0)
    slots = torch.tensor([1], device="cuda")

    def step() -> None:
        served.resolve(resolver, selection)
        resolver.replay_plan(served.plan, [served.source], [served.destination], served.counters)
        resolver.gather_rows(served.plan.host_row[0], served.plan.slab_row[0], served.source, served.destination)
        resolver.reset_slots(served.state, slots)

    step()
    with nothing_waits():
        step()
        with pytest.raises(RuntimeError, match="synchroniz"):
            served.plan.count[0].item()


@pytest.mark.parametrize("num_layers", [1, 3, 20])
def test_one_replay_serves_all_followers(resolver: CudaResolver, num_layers: int) -> None:
    case = on_host(Case(CaseShape(max_tokens=64, hot_rows=24, num_layers=num_layers, leader=0), 5, "cuda"))
    outcome = check_resolve(resolver, case, case.select([(slot, range(8)) for slot in range(4)]))
    followers = range(1, num_layers)
    totals = case.counters.totals.clone()
    resolver.replay_plan(
        case.plan,
        [case.source(layer) for layer in followers],
        [case.destination(layer) for layer in followers],
        case.counters,
    )
    assert int((case.counters.totals - totals)[3]) == 32 * 64 * len(followers)
    for layer in range(num_layers):
        view = case.destination(layer)
        for (slot, position), _ in outcome.loads.items():
            start = view.layout.row_offset(int(outcome.rows[slot, position]))
            assert view.storage[start : start + 64].cpu().tolist() == case.truth([slot], [position], layer)[0].tolist()


def test_mirrored_rows_reach_the_host_and_nothing_else_does(resolver: CudaResolver) -> None:
    case = Case(CaseShape(num_layers=3), 9, "cuda")
    case.place_all(range(4), resident=True)
    before = case.host.clone()
    slab = torch.tensor([int(case.tables.resident[0, page]) * 8 + page for page in range(6)] + [-1, 9], device="cuda")
    host = torch.tensor([16, 33, 9, -1, 50, 70, 20, -1], device="cuda")
    resolver.mirror_rows(slab, host, case.destination(2), case.source(2))
    torch.cuda.synchronize()
    layout = case.source(2).layout
    for page, row in enumerate([16, 33, 9, -1, 50, 70]):
        if row >= 0:
            start = layout.row_offset(row)
            before[start : start + 64] = torch.from_numpy(case.truth([0], [page * 8 + page], 2)[0])
    assert torch.equal(before, case.host)


def test_rows_past_four_gib_are_found(resolver: CudaResolver) -> None:
    shape = CaseShape(max_tokens=128, block_size=64, row_bytes=4096, num_layers=1, leader=0, unused_blocks=17000)
    case = on_host(Case(shape, 2, "cuda", lambda size: torch.empty(size, dtype=torch.uint8, pin_memory=True)))
    assert min(case.slab.numel(), case.host.numel()) > 1 << 32
    check_resolve(resolver, case, case.select([(slot, range(60, 68)) for slot in range(4)]))


def test_what_the_kernels_cannot_take_is_refused(resolver: CudaResolver) -> None:
    case = Case(CaseShape(), 1, "cuda", lambda size: torch.empty(size, dtype=torch.uint8))
    with pytest.raises(InputError, match="pinned host memory"):
        check_resolve(resolver, case, case.select([(0, [1])]))
    with pytest.raises(InputError, match="positions is on cpu; this resolver serves cuda:0"):
        check_resolve(
            resolver, case, Selection(torch.zeros(1, 8, dtype=torch.int32), torch.zeros(1, dtype=torch.int32))
        )
