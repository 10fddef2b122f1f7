"""Many requests over one long beginning generate what stock transformers does, wherever the beginning lies."""

from collections import Counter
from dataclasses import replace

import pytest

from hisparse.config import WriteBack
from hisparse.engine import LoadedModel
from hisparse.protocol import SparseKVPageTransfer, Table
from hisparse.residency import HiSparseCoordinator, RequestPages
from tests.engine.parity import Case, Outcome, assert_parity, prompt, run

BLOCK = 16
BEGINNING = prompt(11, 28 * BLOCK + 5)
NUM_REQUESTS = 6
HOT_BLOCKS, TAIL_BLOCKS = 4, 2
BESIDE_THE_FIRST = (NUM_REQUESTS - 1) * (HOT_BLOCKS + TAIL_BLOCKS)
"""Blocks that let all requests run at once, when nothing else is on the device."""

CASE = Case(
    tuple(BEGINNING + prompt(number, 3 + 4 * number) for number in range(NUM_REQUESTS)),
    max_tokens=24,
    spare_blocks=BESIDE_THE_FIRST,
    max_running=NUM_REQUESTS,
)


@pytest.fixture
def sharers(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How many copies to the host were for how many requests."""
    counts: Counter[int] = Counter()
    sound = HiSparseCoordinator.take_transfers

    def counting(self: HiSparseCoordinator) -> tuple[SparseKVPageTransfer, ...]:
        transfers = sound(self)
        open_ones = {each.transfer.transfer_id: each for each in self._transactions.open()}
        for transfer in transfers:
            counts[len(open_ones[transfer.transfer_id].owners)] += len(transfer.copies)
        return transfers

    monkeypatch.setattr(HiSparseCoordinator, "take_transfers", counting)
    return counts


@pytest.mark.parametrize(
    ("spare_blocks", "copy_delay"),
    [
        pytest.param(BESIDE_THE_FIRST + 4, 0, id="the beginning leaves while it is shared"),
        pytest.param(BESIDE_THE_FIRST, 4, id="slab as small as lets all run at once"),
        pytest.param(1, 0, id="slab for one request at a time"),
    ],
)
def test_one_beginning_for_many_on_a_short_slab(
    tiny: LoadedModel, spare_blocks: int, copy_delay: int, sharers: Counter[int]
) -> None:
    case = replace(CASE, spare_blocks=spare_blocks, copy_delay=copy_delay)
    outcome = run(tiny, case)
    assert_parity(tiny, case, outcome)
    assert outcome.stats.spills > 0
    assert outcome.stats.rows.miss > 0
    if spare_blocks >= BESIDE_THE_FIRST:
        assert sum(count for owners, count in sharers.items() if owners > 1) > 0, "nothing left for several at once"


def test_one_beginning_for_many_with_eager_write_back(tiny: LoadedModel) -> None:
    case = replace(CASE, write_back=WriteBack.EAGER, copy_delay=2)
    assert_parity(tiny, case, run(tiny, case))


def test_control_a_sharer_that_reads_another_page_of_the_host_is_caught(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every sharer but the first is told the host block of the page before."""
    sound, num_wrong = HiSparseCoordinator._leave_device, 0

    def broken(self: HiSparseCoordinator, pages: RequestPages, page: int, is_copied: bool = False) -> None:
        nonlocal num_wrong
        sound(self, pages, page, is_copied)
        if not is_copied and page and pages.host[page - 1]:
            self._log.write(Table.HOST, pages.slot, page, (pages.host[page - 1],))
            num_wrong += 1

    monkeypatch.setattr(HiSparseCoordinator, "_leave_device", broken)
    case = replace(CASE, spare_blocks=BESIDE_THE_FIRST + 4)
    outcome = run(tiny, case)
    assert num_wrong > 0
    assert _is_caught(tiny, case, outcome)


def _is_caught(loaded: LoadedModel, case: Case, outcome: Outcome) -> bool:
    try:
        assert_parity(loaded, case, outcome)
    except AssertionError as error:
        return "other tokens" in str(error) or "differ by" in str(error)
    return False
