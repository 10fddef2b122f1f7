"""Random cases for a resolver: sizes that sit next to bounds, and a scheduler that does anything that is legal."""

import random
from collections.abc import Iterator

from hisparse.kernels.contract import Selection
from hisparse.testing.resolver_cases import Case, CaseShape


def random_shape(seed: int) -> CaseShape:
    """Small sizes, with hot rows that may be fewer than a step selects and a last page that may be cut."""
    rng = random.Random(seed)
    block_size = rng.choice([1, 2, 4, 8, 16])
    topk = rng.choice([1, 3, 8, 13, 32])
    num_layers = rng.randint(1, 4)
    return CaseShape(
        num_slots=rng.randint(1, 6),
        max_tokens=rng.randint(topk, topk + 4 * block_size + 20),
        block_size=block_size,
        topk=topk,
        hot_rows=max(1, topk * rng.randint(1, 3) + rng.choice([-1, 0, 0, 1, block_size])),
        row_bytes=rng.choice([16, 64, 656, 1152]),
        num_layers=num_layers,
        leader=rng.randrange(num_layers),
        unused_blocks=rng.choice([0, 3]),
    )


def random_steps(case: Case, num_steps: int) -> Iterator[tuple[Selection, list[int]]]:
    """Step by step: the selection to resolve, and the slots to reset before. The tables change in between."""
    for slot in range(case.shape.num_slots):
        start_request(case, slot)
    for _ in range(num_steps):
        ended = [slot for slot in range(case.shape.num_slots) if case.rng.random() < 0.1]
        for slot in ended:
            case.forget(slot)
            if case.rng.random() < 0.9:
                start_request(case, slot)
        for slot in range(case.shape.num_slots):
            move_page(case, slot)
        yield random_selection(case), ended


def start_request(case: Case, slot: int) -> None:
    """Give an empty slot some pages, each on the device, on host, on both or missing, and mostly a hot lease."""
    for page in range(case.rng.randint(0, case.shape.max_pages)):
        resident, host = case.rng.choice([(True, False), (False, True), (False, True), (True, True), (False, False)])
        if resident or host:
            case.place(slot, page, resident=resident, host=host)
    if case.rng.random() < 0.85:
        case.lease(slot)


def move_page(case: Case, slot: int) -> None:
    """Spill or restore one page that holds something, at random."""
    pages = [page for page in range(case.shape.max_pages) if case.content[slot, page]]
    if not pages or case.rng.random() < 0.5:
        return
    page = case.rng.choice(pages)
    if int(case.tables.resident[slot, page]) == 0:
        case.restore(slot, page)
    else:
        case.spill(slot, page)


def random_selection(case: Case) -> Selection:
    """Up to 8 rows in any order, some of padding, with duplicates, empty elements and positions out of range."""
    rng, shape = case.rng, case.shape
    favourites = [rng.randrange(shape.max_tokens) for _ in range(shape.topk)]
    rows = []
    for _ in range(rng.randint(1, 8)):
        positions = [_random_position(case, favourites) for _ in range(shape.topk)]
        rows.append((rng.choice([-1, *range(shape.num_slots)]), positions))
    return case.select(rows)


def _random_position(case: Case, favourites: list[int]) -> int:
    kind = case.rng.random()
    if kind < 0.05:
        return -1
    if kind < 0.08:
        return case.shape.max_tokens + case.rng.randrange(2 * case.shape.block_size)
    if kind < 0.5:
        return case.rng.choice(favourites)
    return case.rng.randrange(case.shape.max_tokens)
