"""Tickets over two groups: what can be loaded, what is kept, and what becomes of it when something goes wrong."""

import pytest

from hisparse.cache.groups import GroupKind
from hisparse.connector import GroupPages, Match, OffloadingSource, OffloadingWorkerMetadata, TierEvent, TierOutcome
from hisparse.errors import InvariantError, ProtocolError
from hisparse.offload.messages import OffloadReport, TransferKind
from hisparse.protocol import DeviceBlockId, TransferId
from tests.connector.offloading_world import BOTH, INDEXER, RESIDENT, OffloadingWorld, prompt_keys

KEYS = prompt_keys("a", 6)
NOTHING = {RESIDENT: 0, INDEXER: 0}


def match(world: OffloadingWorld, request: str = "r", have: dict[GroupKind, int] = NOTHING) -> Match:
    return world.source.match(request, KEYS, have)


def match_files(world: OffloadingWorld, request: str = "r", have: dict[GroupKind, int] = NOTHING) -> Match:
    """The answer once threads and files have answered."""
    while True:
        answer = match(world, request, have)
        if not answer.wait:
            return answer
        world.answer_files()


def evict(world: OffloadingWorld) -> None:
    """Fill the CPU tiers with something else, so that only files have what was kept."""
    world.keep(prompt_keys("z", world.num_rows * world.size))
    world.keep(prompt_keys("y", world.num_rows * world.size))


# Matching and loading.


def test_nothing_is_found_where_nothing_was_kept() -> None:
    world = OffloadingWorld()
    assert match(world) == Match(0, False)
    assert match(world, have={RESIDENT: 3, INDEXER: 2}) == Match(2, False)


def test_what_was_kept_comes_back_in_other_blocks() -> None:
    world = OffloadingWorld()
    world.keep(KEYS)
    assert match(world) == Match(6, False)
    ticket, pages = world.load("r", KEYS, NOTHING, 6) or pytest.fail("nothing was loaded")
    assert world.source.num_open == 1
    assert world.events() == ()
    world.work_all()
    assert world.events() == (TierEvent(ticket, TierOutcome.DONE, 0),)
    assert all(world.holds(part, KEYS) for part in pages)
    assert world.source.num_open == 0


def test_the_prefix_is_as_long_as_its_shortest_group() -> None:
    world = OffloadingWorld()
    world.keep(KEYS[:5], groups=(RESIDENT,))
    world.keep(KEYS[:3], groups=(INDEXER,))
    assert match(world) == Match(3, False)
    assert match(world, "s", {RESIDENT: 4, INDEXER: 0}) == Match(3, False)
    assert match(world, "t", {RESIDENT: 0, INDEXER: 6}) == Match(5, False)


def test_only_the_index_keys_that_the_host_prefix_lacks_are_loaded() -> None:
    world = OffloadingWorld()
    world.keep(KEYS)
    world.keep(KEYS, groups=(INDEXER,))
    have = {RESIDENT: 4, INDEXER: 1}
    world.managers[RESIDENT].reset()
    assert match(world, have=have) == Match(4, False)
    assert world.managers[INDEXER].num_claimed("r") == 3  # not what lies behind the host's boundary
    ticket, pages = world.load("r", KEYS, have, 4) or pytest.fail("nothing was loaded")
    assert [part.group for part in pages] == [INDEXER]
    world.send()
    assert [copies.group for copies in world.todo] == [INDEXER]
    world.work_all()
    assert world.events() == (TierEvent(ticket, TierOutcome.DONE, 0),)
    assert world.holds(pages[0], KEYS)


def test_index_keys_are_not_asked_of_files_beyond_what_rows_can_come_to() -> None:
    world = OffloadingWorld(num_rows=6, has_files=True)
    world.keep(KEYS[:2], groups=(RESIDENT,))
    world.keep(KEYS, groups=(INDEXER,))
    evict(world)
    loads = {group: world.managers[group].stats.promotions for group in BOTH}
    assert match_files(world) == Match(2, False)
    assert {group: world.managers[group].stats.promotions - loads[group] for group in BOTH} == {RESIDENT: 2, INDEXER: 2}


def test_a_group_that_is_not_kept_bounds_the_prefix_and_is_not_looked_for() -> None:
    world = OffloadingWorld(groups=(INDEXER,))
    world.keep(KEYS)
    assert world.source.groups == (INDEXER,)
    assert match(world, have={RESIDENT: 4, INDEXER: 1}) == Match(4, False)
    _, (pages,) = world.load("r", KEYS, {INDEXER: 1}, 4) or pytest.fail("nothing was loaded")
    world.work_all()
    assert world.holds(pages, KEYS)


def test_pages_from_files_are_counted_and_those_from_memory_are_not() -> None:
    world = OffloadingWorld(num_rows=6, has_files=True)
    world.keep(KEYS)
    evict(world)
    world.keep(KEYS[:1])
    assert match(world) == Match(1, True)
    assert match_files(world) == Match(6, False)
    ticket, pages = world.load("r", KEYS, NOTHING, 5) or pytest.fail("nothing was loaded")
    world.work_all()
    assert world.events() == (TierEvent(ticket, TierOutcome.DONE, 4),)
    assert all(world.holds(part, KEYS) for part in pages)
    # The next request finds them in memory.
    assert match(world, "s") == Match(6, False)
    ticket, _ = world.load("s", KEYS, NOTHING, 5) or pytest.fail("nothing was loaded")
    world.work_all()
    assert world.events() == (TierEvent(ticket, TierOutcome.DONE, 0),)


def test_a_page_counts_as_from_files_when_one_of_its_groups_is() -> None:
    world = OffloadingWorld(num_rows=6, has_files=True)
    world.keep(KEYS)
    evict(world)
    world.keep(KEYS, groups=(RESIDENT,))
    assert match_files(world) == Match(6, False)
    ticket, _ = world.load("r", KEYS, NOTHING, 6) or pytest.fail("nothing was loaded")
    world.work_all()
    assert world.events() == (TierEvent(ticket, TierOutcome.DONE, 6),)


def test_a_prefix_larger_than_the_cpu_tier_flows_through_it() -> None:
    world = OffloadingWorld(num_rows=2, has_files=True)
    for start in range(0, 6, 2):
        world.offer("keeper", KEYS, start, start + 2)
        world.settle()
    world.source.forget("keeper")
    evict(world)
    have, num_loads = 0, 0
    while have < 6:
        answer = match_files(world, have={RESIDENT: have, INDEXER: have})
        assert answer.num_pages > have, f"stuck after {have} pages"
        ticket, pages = world.load("r", KEYS, {RESIDENT: have, INDEXER: have}, answer.num_pages) or pytest.fail("no")
        world.work_all()
        assert world.events() == (TierEvent(ticket, TierOutcome.DONE, answer.num_pages - have),)
        assert all(world.holds(part, KEYS) for part in pages)
        have, num_loads = answer.num_pages, num_loads + 1
    assert num_loads == 3


def test_the_patience_for_files_is_bounded_and_begins_anew_with_a_load() -> None:
    world = OffloadingWorld(num_rows=2, has_files=True, lookup_deadline_s=1.0)
    for start in range(0, 6, 2):
        world.offer("keeper", KEYS, start, start + 2)
        world.settle()
    evict(world)
    assert match_files(world) == Match(2, False)
    world.now_s = 0.9
    world.load("r", KEYS, NOTHING, 2)
    world.work_all()
    world.events()
    assert match(world, have={RESIDENT: 2, INDEXER: 2}).wait
    world.now_s = 1.8
    assert match(world, have={RESIDENT: 2, INDEXER: 2}).wait
    world.now_s = 1.9  # nothing has come up: the request computes
    assert match(world, have={RESIDENT: 2, INDEXER: 2}) == Match(2, False)


# Chunks of several pages.


def test_only_whole_chunks_are_kept() -> None:
    world = OffloadingWorld(pages_per_chunk=2)
    keys = prompt_keys("a", 7)
    stored = world.offer("r", keys, 1, 7) or pytest.fail("nothing was stored")
    assert [(part.group, part.first_page, len(part.blocks)) for part in stored.pages] == [
        (RESIDENT, 2, 4),
        (INDEXER, 2, 4),
    ]
    assert world.offer("r", keys, 0, 1) is None
    world.settle()
    assert world.source.match("s", keys, NOTHING) == Match(0, False)
    assert world.source.match("t", keys, {RESIDENT: 2, INDEXER: 3}) == Match(6, False)


def test_of_a_chunk_only_the_pages_that_are_wanted_are_written() -> None:
    world = OffloadingWorld(pages_per_chunk=4)
    keys = prompt_keys("a", 8)
    world.keep(keys)
    have = {RESIDENT: 2, INDEXER: 5}
    assert world.source.match("r", keys, have) == Match(8, False)
    before = dict(world.device)
    ticket, pages = world.load("r", keys, have, 7) or pytest.fail("nothing was loaded")
    world.work_all()
    assert world.events() == (TierEvent(ticket, TierOutcome.DONE, 0),)
    assert all(world.holds(part, keys) for part in pages)
    assert len(world.device) - len(before) == 5 + 2
    assert {key: world.device[key] for key in before} == before


def test_a_load_may_begin_behind_what_was_matched_and_not_before_it() -> None:
    world = OffloadingWorld()
    world.keep(KEYS)
    match(world, have={RESIDENT: 1, INDEXER: 1})
    with pytest.raises(InvariantError, match="page 0, which no match looked for"):
        world.load("r", KEYS, NOTHING, 3)
    ticket, pages = world.load("r", KEYS, {RESIDENT: 2, INDEXER: 1}, 4) or pytest.fail("nothing was loaded")
    world.work_all()
    assert world.events() == (TierEvent(ticket, TierOutcome.DONE, 0),)
    assert all(world.holds(part, KEYS) for part in pages)


# Storing.


def test_what_is_kept_already_is_not_copied_again() -> None:
    world = OffloadingWorld()
    world.keep(KEYS[2:4])
    stored = world.offer("r", KEYS) or pytest.fail("nothing was stored")
    assert [(part.group, part.first_page, len(part.blocks)) for part in stored.pages] == [
        (group, first, 2) for group in BOTH for first in (0, 4)
    ]
    world.settle()
    assert world.events() == (TierEvent(stored.ticket, TierOutcome.DONE),)
    assert world.offer("r", KEYS) is None


def test_pages_that_find_no_room_are_not_in_the_ticket() -> None:
    world = OffloadingWorld(num_rows=4)
    stored = world.offer("r", KEYS) or pytest.fail("nothing was stored")
    assert [(part.group, part.first_page, len(part.blocks)) for part in stored.pages] == [
        (RESIDENT, 0, 4),
        (INDEXER, 0, 4),
    ]
    assert world.offer("r", KEYS, 4, 6) is None
    world.settle()
    assert match(world, "s") == Match(4, False)


def test_a_page_that_is_not_on_the_device_is_not_stored() -> None:
    world = OffloadingWorld()
    with pytest.raises(InvariantError, match="not on the device"):
        world.source.offer("r", KEYS, [GroupPages(RESIDENT, 0, (DeviceBlockId(3), DeviceBlockId(0)))])


# Whatever goes wrong is a miss.


@pytest.mark.parametrize("failing", BOTH)
def test_a_load_that_fails_in_one_group_fails_once_both_are_over_and_the_request_computes(failing: GroupKind) -> None:
    world = OffloadingWorld()
    world.keep(KEYS)
    match(world)
    ticket, _ = world.load("r", KEYS, NOTHING, 6) or pytest.fail("nothing was loaded")
    world.send()
    (broken,) = [copies for copies in world.todo if copies.group is failing]
    world.work(broken, fails=True)
    assert world.events() == ()
    assert world.source.num_open == 1
    world.work_all()
    assert world.source.num_open == 1
    assert world.events() == (TierEvent(ticket, TierOutcome.FAILED),)
    assert world.source.num_open == 0
    assert match(world, have={RESIDENT: 2, INDEXER: 1}) == Match(1, False)
    # What failed is not trusted for others either.
    assert match(world, "s") == Match(0, False)


def test_a_load_that_is_overdue_says_so_once_and_its_end_later() -> None:
    world = OffloadingWorld(transfer_deadline_s=1.0)
    world.keep(KEYS)
    match(world)
    ticket, _ = world.load("r", KEYS, NOTHING, 6) or pytest.fail("nothing was loaded")
    world.send()
    first, second = world.todo
    world.now_s = 1.0
    assert world.events() == (), "nobody was asked since"
    world.send()
    assert world.events() == (TierEvent(ticket, TierOutcome.OVERDUE),)
    assert not TierEvent(ticket, TierOutcome.OVERDUE).is_last
    assert world.source.num_open == 1
    assert match(world) == Match(0, False)
    world.work(first)
    assert world.events() == ()
    world.work(second)
    assert world.events() == (TierEvent(ticket, TierOutcome.DONE, 0),)
    assert world.source.num_open == 0


def test_a_store_that_is_overdue_has_failed_and_what_comes_of_it_later_is_not_kept() -> None:
    world = OffloadingWorld(transfer_deadline_s=1.0)
    stored = world.offer("r", KEYS) or pytest.fail("nothing was stored")
    world.send()
    world.now_s = 1.0
    world.send()
    assert world.events() == (TierEvent(stored.ticket, TierOutcome.FAILED),)
    assert world.source.num_open == 0
    assert world.source.num_under_way == 2
    world.work_all()
    assert world.events() == ()
    assert world.source.num_under_way == 0
    assert match(world, "s") == Match(0, False)


def test_a_store_that_fails_is_not_kept() -> None:
    world = OffloadingWorld()
    stored = world.offer("r", KEYS) or pytest.fail("nothing was stored")
    world.send()
    world.work(world.todo[0], fails=True)
    world.work_all()
    assert world.events() == (TierEvent(stored.ticket, TierOutcome.FAILED),)
    assert match(world, "s") == Match(0, False)


def test_what_was_withdrawn_between_match_and_load_is_not_loaded() -> None:
    world = OffloadingWorld()
    world.keep(KEYS)
    assert match(world) == Match(6, False)
    world.source.reset()
    assert world.load("r", KEYS, NOTHING, 6) is None
    assert world.source.num_open == 0
    assert match(world) == Match(0, False)


def test_a_bad_file_is_a_miss_from_its_page_on() -> None:
    world = OffloadingWorld(num_rows=6, has_files=True)
    world.keep(KEYS)
    evict(world)
    assert match(world).wait
    world.executor.run_all()
    assert match(world).wait
    world.files[RESIDENT].end(3, well=False)
    assert match_files(world) == Match(3, False)
    ticket, pages = world.load("r", KEYS, NOTHING, 3) or pytest.fail("nothing was loaded")
    world.work_all()
    assert world.events() == (TierEvent(ticket, TierOutcome.DONE, 3),)
    assert all(world.holds(part, KEYS) for part in pages)
    assert match_files(world, have={RESIDENT: 3, INDEXER: 3}) == Match(3, False)


def test_a_forgotten_request_leaves_its_ticket_to_its_end_and_may_come_again() -> None:
    world = OffloadingWorld()
    world.keep(KEYS)
    match(world)
    ticket, pages = world.load("r", KEYS, NOTHING, 3) or pytest.fail("nothing was loaded")
    world.source.forget("r")
    assert world.source.num_open == 1
    assert match(world) == Match(6, False)
    again, more = world.load("r", KEYS, NOTHING, 6) or pytest.fail("nothing was loaded")
    world.work_all()
    assert {event.ticket for event in world.events()} == {ticket, again}
    assert all(world.holds(part, KEYS) for part in (*pages, *more))


def test_after_a_reset_neither_memory_nor_files_give_what_was_stored_before() -> None:
    world = OffloadingWorld(has_files=True)
    world.keep(KEYS)
    world.source.reset()
    assert match_files(world) == Match(0, False)
    world.source.forget("r")
    world.keep(KEYS)
    assert match_files(world, "s") == Match(6, False)


def test_other_managers_take_over_once_nothing_is_under_way() -> None:
    world = OffloadingWorld()
    world.offer("r", KEYS)
    world.send()
    others = {group: world.make_manager(group) for group in BOTH}
    with pytest.raises(InvariantError, match="1 tickets"):
        world.source.rebind(others)
    world.work_all()
    world.source.rebind(others)
    assert [event.outcome for event in world.source.take_events()] == [TierOutcome.DONE]
    assert match(world, "s") == Match(0, False)


# Contradictions.


def test_a_request_that_loads_neither_matches_nor_loads() -> None:
    world = OffloadingWorld()
    world.keep(KEYS)
    match(world)
    world.load("r", KEYS, NOTHING, 3)
    with pytest.raises(InvariantError, match="request r matches while ticket 2 loads for it"):
        match(world)
    with pytest.raises(InvariantError, match="request r loads, but no match of it promised anything"):
        world.load("r", KEYS, NOTHING, 3)


def test_a_load_without_a_match_or_of_nothing_is_refused() -> None:
    world = OffloadingWorld()
    with pytest.raises(InvariantError, match="no match of it promised anything"):
        world.load("r", KEYS, NOTHING, 3)
    match(world)
    with pytest.raises(InvariantError, match="loads 0 ranges"):
        world.source.begin_load("r", KEYS, [GroupPages(RESIDENT, 0, ())])


def test_reports_of_unknown_groups_and_transfers_are_refused() -> None:
    world = OffloadingWorld(groups=(INDEXER,))
    for group, said in ((RESIDENT, "resident group, which is not offloaded"), (INDEXER, "transfer 9 .* never begun")):
        report = OffloadReport(0, enqueued=(TransferId(9),))
        with pytest.raises(ProtocolError, match=said):
            world.connector.update_connector_output(OffloadingWorkerMetadata(((group, report),)))


def test_a_source_of_no_group_is_refused() -> None:
    with pytest.raises(InvariantError, match="0 groups"):
        OffloadingSource({})


def test_copies_are_handed_out_once_and_name_rows_of_their_own_group() -> None:
    world = OffloadingWorld()
    world.offer("r", KEYS[:2])
    meta = world.connector.build_connector_meta(4)
    assert meta.step == 4
    assert [(copies.group, copies.kind, len(copies.rows)) for copies in meta.copies] == [
        (RESIDENT, TransferKind.STORE, 2),
        (INDEXER, TransferKind.STORE, 2),
    ]
    assert world.connector.build_connector_meta(5).copies == ()


def test_shutting_down_writes_to_files_what_their_limits_kept_from_them() -> None:
    world = OffloadingWorld(has_files=True, max_tier_writes=1)
    world.offer("r", KEYS)
    world.work_all()
    for tier in world.files.values():
        assert len(tier.work) == 1
        tier.end_all()
        tier.is_prompt = True
    world.executor.is_prompt = True
    world.connector.shutdown()
    assert all(len(tier.kept) == 6 for tier in world.files.values())
