"""The contract of `kernels.contract.Resolver` as tests. Needs pytest.

An engine runs them on its own back end:

    class TestMyResolver(ResolverContract):
        device = "cuda"
        num_random_cases = 2000

        @pytest.fixture
        def resolver(self) -> Resolver:
            return MyResolver()

Inputs are built on `device`. Host memory is pinned when that is a CUDA device; `allocate_host` replaces it.
"""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from hisparse.kernels.contract import EMPTY, STATUS_OK, STATUS_UNION_OVERFLOW, Resolver, Selection
from hisparse.testing.resolver_cases import Allocate, Case, CaseShape
from hisparse.testing.resolver_checker import check_gather, check_replay, check_resolve
from hisparse.testing.resolver_random import random_shape, random_steps

MakeCase = Callable[..., Case]

ROOMY = CaseShape(max_tokens=64, hot_rows=24)


class ResolverContract:
    """Subclass it under a name that pytest collects, and provide the fixture `resolver`.

    `device` is where tables, state and slab are built; `num_random_cases` how many random sequences of steps run.
    """

    device = "cpu"
    num_random_cases = 40

    @pytest.fixture
    def resolver(self) -> Resolver:
        """The resolver under test."""
        raise NotImplementedError("provide the fixture `resolver` in the subclass")

    @pytest.fixture
    def allocate_host(self) -> Allocate | None:
        """Makes host memory that the resolver can read; None for the default."""
        return None

    @pytest.fixture
    def make_case(self, allocate_host: Allocate | None) -> MakeCase:
        """Builds a case from a shape and a seed."""

        def make(shape: CaseShape = ROOMY, seed: int = 1) -> Case:
            return Case(shape, seed, self.device, allocate_host)

        return make

    @pytest.fixture
    def hosted(self, make_case: MakeCase) -> Case:
        """A case in which every page is on host only and every slot has its hot lease."""
        return on_host(make_case())

    # Where a position is served from

    def test_resident_positions_give_their_rows_and_move_nothing(self, resolver: Resolver, make_case: MakeCase) -> None:
        case = make_case()
        case.place_all(range(4), resident=True, host=True)
        outcome = check_resolve(resolver, case, case.select([(slot, range(slot, slot + 8)) for slot in range(4)]))
        assert outcome.counted == {"resident": 32, "hot": 0, "miss": 0, "bytes": 0, "unreachable": 0}

    def test_what_only_the_host_has_is_loaded_once_and_is_hot_from_then_on(
        self, resolver: Resolver, hosted: Case
    ) -> None:
        selection = hosted.select([(slot, range(9 * slot, 9 * slot + 8)) for slot in range(4)])
        first = check_resolve(resolver, hosted, selection)
        second = check_resolve(resolver, hosted, selection)
        assert (first.counted["miss"], first.counted["hot"]) == (32, 0)
        assert (second.counted["miss"], second.counted["hot"]) == (0, 32)
        assert (first.rows == second.rows).all()

    def test_half_resident_rows_mix_both_places(self, resolver: Resolver, make_case: MakeCase) -> None:
        case = make_case()
        for slot in range(4):
            for page in range(case.shape.max_pages):
                case.place(slot, page, resident=page % 2 == 0, host=page % 2 == 1)
            case.lease(slot)
        outcome = check_resolve(resolver, case, case.select([(slot, range(4, 12)) for slot in range(4)]))
        assert (outcome.counted["resident"], outcome.counted["miss"]) == (16, 16)

    def test_a_resident_page_goes_before_a_hot_row(self, resolver: Resolver, hosted: Case) -> None:
        selection = hosted.select([(0, range(8))])
        check_resolve(resolver, hosted, selection)
        hosted.restore(0, 0)
        assert check_resolve(resolver, hosted, selection).counted["resident"] == 8
        hosted.spill(0, 0)
        assert check_resolve(resolver, hosted, selection).counted["hot"] == 8

    def test_a_hot_row_serves_even_when_its_host_page_is_gone(self, resolver: Resolver, hosted: Case) -> None:
        selection = hosted.select([(0, range(8))])
        check_resolve(resolver, hosted, selection)
        hosted.tables.host[0, 0] = 0
        assert check_resolve(resolver, hosted, selection).counted["hot"] == 8

    def test_what_is_neither_resident_nor_on_host_is_unreachable(self, resolver: Resolver, make_case: MakeCase) -> None:
        case = make_case()
        case.place(0, 0, host=True)
        case.lease(0)
        outcome = check_resolve(resolver, case, case.select([(0, [6, 7, 8, 8, 63])]))
        assert outcome.counted == {"resident": 0, "hot": 0, "miss": 2, "bytes": 128, "unreachable": 3}
        assert int(case.counters.status.item()) == STATUS_OK

    def test_positions_past_the_tables_are_unreachable(self, resolver: Resolver, make_case: MakeCase) -> None:
        case = on_host(make_case(CaseShape(max_tokens=61)))
        outcome = check_resolve(resolver, case, case.select([(3, [60, 61, 63, 64, 1 << 20, (1 << 31) - 1])]))
        assert outcome.counted["unreachable"] == 5
        assert outcome.rows[0, 0] != EMPTY

    def test_without_a_hot_lease_what_only_the_host_has_is_unreachable(
        self, resolver: Resolver, make_case: MakeCase
    ) -> None:
        case = make_case()
        case.place_all(range(4), host=True)
        case.restore(1, 0)
        outcome = check_resolve(resolver, case, case.select([(1, [0, 1, 20, 21])]))
        assert (outcome.counted["resident"], outcome.counted["unreachable"]) == (2, 2)
        assert int(case.counters.status.item()) == STATUS_OK

    def test_a_promise_that_there_is_no_lease_changes_nothing(self, resolver: Resolver, make_case: MakeCase) -> None:
        case = make_case(CaseShape(max_tokens=62, topk=40))
        case.place_all(range(4), host=True)
        for slot, page in ((0, 0), (0, 7), (2, 3), (3, 7)):
            case.restore(slot, page)
        rows = [(0, range(40)), (-1, range(8)), (3, [61, 60, -1, 62, 5000, 61]), (2, range(20, 40)), (0, range(22, 62))]
        outcomes = []
        for leased in (True, False, True):
            outcomes.append(check_resolve(resolver, case, replace(case.select(rows), leased=leased)))
        assert outcomes[0].counted == outcomes[1].counted == outcomes[2].counted
        assert outcomes[0].counted["resident"] > 0
        assert outcomes[0].counted["unreachable"] > 0

    # Rows of a step

    def test_padding_gives_nothing_even_where_it_names_what_slot_0_has(self, resolver: Resolver, hosted: Case) -> None:
        hosted.restore(0, 0)
        outcome = check_resolve(resolver, hosted, hosted.select([(-1, range(8)), (2, [3]), (-1, range(30, 38))]))
        assert outcome.counted == {"resident": 0, "hot": 0, "miss": 1, "bytes": 64, "unreachable": 0}

    def test_a_step_of_padding_alone_writes_every_element(self, resolver: Resolver, hosted: Case) -> None:
        outcome = check_resolve(resolver, hosted, hosted.select([(-1, range(8))] * 3))
        assert (outcome.rows == EMPTY).all()

    def test_a_position_twice_in_a_row_is_one_miss_and_one_row(self, resolver: Resolver, hosted: Case) -> None:
        outcome = check_resolve(resolver, hosted, hosted.select([(1, [5, 9, 5, 5, 9])]))
        assert (outcome.counted["miss"], outcome.counted["hot"]) == (2, 3)

    @pytest.mark.parametrize("num_rows", range(2, 9))
    def test_rows_of_one_slot_are_resolved_as_one_union(
        self, resolver: Resolver, make_case: MakeCase, num_rows: int
    ) -> None:
        case = on_host(make_case(CaseShape(max_tokens=64, hot_rows=8 + num_rows - 1)))
        rows = [(slot, range(row, row + 8)) for row in range(num_rows) for slot in (2, 0)]
        case.rng.shuffle(rows)
        outcome = check_resolve(resolver, case, case.select(rows))
        assert outcome.counted["miss"] == 2 * (8 + num_rows - 1)
        assert int(case.counters.status.item()) == STATUS_OK

    def test_slots_do_not_share_hot_rows_even_when_they_share_a_page(self, resolver: Resolver, hosted: Case) -> None:
        hosted.share(0, 2, 3)
        outcome = check_resolve(resolver, hosted, hosted.select([(0, [16, 17]), (3, [16, 17])]))
        assert outcome.counted["miss"] == 4

    def test_every_priority_gives_exact_lru(self, resolver: Resolver, hosted: Case) -> None:
        chosen = hosted.select([(0, range(8)), (1, range(8))])
        priority = torch.rand(4, hosted.shape.max_tokens, device=hosted.device)
        check_resolve(resolver, hosted, Selection(chosen.positions, chosen.row_slot, priority))

    # Which rows are evicted

    def test_one_position_more_than_the_hot_size_evicts_the_oldest_row_alone(
        self, resolver: Resolver, hosted: Case
    ) -> None:
        for first in (0, 8, 16):
            check_resolve(resolver, hosted, hosted.select([(0, range(first, first + 8))]))
        oldest = ints_of(hosted, 0, range(8))
        outcome = check_resolve(resolver, hosted, hosted.select([(0, [24])]))
        assert outcome.loads[0, 24] in oldest
        assert check_resolve(resolver, hosted, hosted.select([(0, range(8, 16))])).counted["miss"] == 0

    def test_a_row_that_was_read_again_outlives_one_that_was_not(self, resolver: Resolver, hosted: Case) -> None:
        for first in (0, 8, 16, 0):
            check_resolve(resolver, hosted, hosted.select([(0, range(first, first + 8))]))
        check_resolve(resolver, hosted, hosted.select([(0, range(24, 32))]))
        assert check_resolve(resolver, hosted, hosted.select([(0, range(8))])).counted["miss"] == 0
        assert check_resolve(resolver, hosted, hosted.select([(0, range(8, 16))])).counted["miss"] == 8

    def test_no_row_evicts_what_another_row_of_the_step_reads(self, resolver: Resolver, hosted: Case) -> None:
        for first in (0, 8, 16):
            check_resolve(resolver, hosted, hosted.select([(0, range(first, first + 8))]))
        rows = [(0, range(32, 40)), (0, range(8)), (0, range(40, 48))]
        outcome = check_resolve(resolver, hosted, hosted.select(rows))
        assert (outcome.counted["hot"], outcome.counted["miss"]) == (8, 16)

    def test_a_union_of_exactly_the_hot_size_fits_and_one_more_does_not(self, resolver: Resolver, hosted: Case) -> None:
        rows = [(1, range(first, first + 8)) for first in (0, 8, 16)]
        assert check_resolve(resolver, hosted, hosted.select(rows)).counted["miss"] == 24
        assert int(hosted.counters.status.item()) == STATUS_OK
        outcome = check_resolve(resolver, hosted, hosted.select([*rows, (1, [40, 40]), (2, range(8))]))
        assert outcome.counted == {"resident": 0, "hot": 24, "miss": 8, "bytes": 512, "unreachable": 2}
        assert int(hosted.counters.status.item()) == STATUS_UNION_OVERFLOW

    def test_the_status_stays_after_an_overflow(self, resolver: Resolver, hosted: Case) -> None:
        check_resolve(resolver, hosted, hosted.select([(0, range(8 * row, 8 * row + 8)) for row in range(4)]))
        check_resolve(resolver, hosted, hosted.select([(0, [1])]))
        assert int(hosted.counters.status.item()) == STATUS_UNION_OVERFLOW

    # Slots that are lent again

    def test_a_recycled_slot_forgets_its_hot_rows(self, resolver: Resolver, hosted: Case) -> None:
        selection = hosted.select([(0, range(8)), (1, range(8))])
        check_resolve(resolver, hosted, selection)
        hosted.forget(0)
        resolver.reset_slots(hosted.state, torch.tensor([0], device=hosted.device))
        hosted.place_all([0], host=True)
        hosted.lease(0)
        outcome = check_resolve(resolver, hosted, selection)
        assert (outcome.counted["miss"], outcome.counted["hot"]) == (8, 8)

    def test_a_recycled_host_block_is_not_served_from_an_old_hot_row(self, resolver: Resolver, hosted: Case) -> None:
        check_resolve(resolver, hosted, hosted.select([(0, range(8))]))
        block = int(hosted.tables.host[0, 0])
        hosted.forget(0)
        resolver.reset_slots(hosted.state, torch.tensor([0], device=hosted.device))
        for page in range(7, -1, -1):
            hosted.place(0, page, host=True)
        hosted.lease(0)
        assert block in hosted.tables.host[0].tolist()
        assert check_resolve(resolver, hosted, hosted.select([(0, range(64 - 8, 64))])).counted["miss"] == 8
        assert check_resolve(resolver, hosted, hosted.select([(0, range(8))])).counted["miss"] == 8

    def test_a_reset_of_no_slot_changes_nothing(self, resolver: Resolver, hosted: Case) -> None:
        selection = hosted.select([(3, range(8))])
        check_resolve(resolver, hosted, selection)
        resolver.reset_slots(hosted.state, torch.zeros(0, dtype=torch.int64, device=hosted.device))
        assert check_resolve(resolver, hosted, selection).counted["hot"] == 8

    # Bytes

    @pytest.mark.parametrize("row_bytes", [16, 48, 576, 656, 1152, 2304, 4096])
    def test_rows_of_every_size_keep_their_bytes_in_leader_and_followers(
        self, resolver: Resolver, make_case: MakeCase, row_bytes: int
    ) -> None:
        case = on_host(make_case(CaseShape(max_tokens=64, row_bytes=row_bytes, num_layers=4)))
        for first in (0, 6, 30):
            rows = [(slot, range(first + slot, first + slot + 8)) for slot in range(4)]
            outcome = check_resolve(resolver, case, case.select(rows))
            for layer in (0, 2, 3):
                check_replay(resolver, case, outcome, layer)

    def test_followers_are_served_together_in_any_order_and_number(
        self, resolver: Resolver, make_case: MakeCase
    ) -> None:
        case = on_host(make_case(CaseShape(max_tokens=64, hot_rows=24, num_layers=20)))
        followers = [layer for layer in range(20) if layer != case.shape.leader]
        for first, served in ((0, followers), (6, followers[::-1]), (30, followers[2:5]), (40, [])):
            outcome = check_resolve(resolver, case, case.select([(slot, range(first, first + 8)) for slot in range(4)]))
            check_replay(resolver, case, outcome, *served)

    @pytest.mark.parametrize("block_size", [1, 2, 16, 64])
    def test_pages_of_every_size_are_crossed(self, resolver: Resolver, make_case: MakeCase, block_size: int) -> None:
        case = on_host(make_case(CaseShape(max_tokens=2 * block_size + 9, block_size=block_size, hot_rows=9)))
        for first in (0, block_size - 1, block_size, 2 * block_size + 1):
            check_resolve(resolver, case, case.select([(slot, range(first, first + 8)) for slot in range(4)]))

    def test_a_plan_without_misses_replays_nothing(self, resolver: Resolver, hosted: Case) -> None:
        selection = hosted.select([(0, range(8))])
        first = check_resolve(resolver, hosted, selection)
        check_replay(resolver, hosted, first, 2)
        second = check_resolve(resolver, hosted, selection)
        check_replay(resolver, hosted, second, 2)
        assert not hosted.plan.count.any()

    def test_gather_rows_skips_pairs_with_an_empty_end(self, resolver: Resolver, hosted: Case) -> None:
        host = [int(hosted.tables.host[1, page]) * 8 + page for page in range(4)]
        slab = [int(hosted.tables.hot[1, index]) * 8 + index for index in range(3)]
        copies = [(host[0], slab[2]), (-1, -1), (host[3], slab[0]), (-1, slab[1]), (host[1], -1)]
        for layer in range(3):
            check_gather(resolver, hosted, copies, layer)
        check_gather(resolver, hosted, [(-1, -1)], 0)

    def test_rows_past_two_gib_are_found(self, resolver: Resolver, make_case: MakeCase) -> None:
        shape = CaseShape(max_tokens=128, block_size=64, row_bytes=4096, num_layers=2, unused_blocks=4200)
        case = on_host(make_case(shape))
        assert min(case.slab.numel(), case.host.numel()) > 1 << 31
        outcome = check_resolve(resolver, case, case.select([(slot, range(60, 68)) for slot in range(4)]))
        check_replay(resolver, case, outcome, 0)

    # Sequences

    def test_the_sizes_of_a_served_model(self, resolver: Resolver, make_case: MakeCase) -> None:
        shape = CaseShape(
            num_slots=2, max_tokens=8192, block_size=64, topk=2048, hot_rows=4096, row_bytes=656, num_layers=2
        )
        case = on_host(make_case(shape))
        draw = random.Random(0)
        for _ in range(3):
            rows = [(slot, draw.sample(range(8192), 2048)) for slot in (1, 0, 1)]
            outcome = check_resolve(resolver, case, case.select(rows))
            check_replay(resolver, case, outcome, 0)

    def test_random_sequences_of_steps(self, resolver: Resolver, make_case: MakeCase) -> None:
        for seed in range(self.num_random_cases):
            case = make_case(random_shape(seed), seed)
            for selection, ended in random_steps(case, num_steps=12):
                resolver.reset_slots(case.state, torch.tensor(ended, dtype=torch.int64, device=case.device))
                outcome = check_resolve(resolver, case, selection)
                check_replay(resolver, case, outcome, (case.shape.leader + 1) % case.shape.num_layers)


def on_host(case: Case) -> Case:
    """Put every page of every slot on host alone and lease every slot its hot rows."""
    case.place_all(range(case.shape.num_slots), host=True)
    for slot in range(case.shape.num_slots):
        case.lease(slot)
    return case


def ints_of(case: Case, slot: int, positions: range) -> set[int]:
    """The hot rows that hold `positions` of a slot now."""
    held = case.state.position_of[slot].tolist()
    return {hot_row for hot_row, position in enumerate(held) if position in positions}
