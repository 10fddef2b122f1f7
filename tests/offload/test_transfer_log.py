"""Reports of several workers become one fact, and a report that cannot be true is refused with its transfer's id."""

import pytest

from hisparse.errors import ProtocolError
from hisparse.offload.messages import OffloadReport, TransferKind, TransferOutcome
from hisparse.offload.transfer_log import OpenTransfer, TransferLog
from hisparse.protocol import TransferId


def begun(num_workers: int = 2) -> tuple[TransferLog, OpenTransfer, tuple[TransferId, ...]]:
    log = TransferLog(num_workers)
    transfer = log.begin(TransferKind.STORE, "request", ())
    return log, transfer, (transfer.transfer_id,)


def test_reports_of_different_steps_add_up_in_any_order_of_workers() -> None:
    log, transfer, ids = begun()
    assert log.acknowledge(OffloadReport(1, enqueued=ids)) == []
    assert log.acknowledge(OffloadReport(1, completed=ids)) == []
    assert log.acknowledge(OffloadReport(0, enqueued=ids)) == [(transfer, TransferOutcome.ENQUEUED)]
    assert log.acknowledge(OffloadReport(0)) == []
    assert log.acknowledge(OffloadReport(0, completed=ids)) == [(transfer, TransferOutcome.DONE)]
    assert len(log) == 0


def test_a_transfer_is_over_when_every_worker_has_said_its_last_word() -> None:
    log, transfer, ids = begun(3)
    assert log.acknowledge(OffloadReport(1, failed=ids)) == []
    assert log.acknowledge(OffloadReport(0, enqueued=ids, completed=ids)) == []
    assert log.acknowledge(OffloadReport(2, enqueued=ids, failed=ids)) == [(transfer, TransferOutcome.FAILED)]


@pytest.mark.parametrize(
    ("before", "report", "message"),
    [
        (None, OffloadReport(0, enqueued=(TransferId(7),)), "transfer 7 enqueued, which was never begun"),
        (None, OffloadReport(0, failed=(TransferId(0),)), "transfer 0 failed, which was never begun"),
        (None, OffloadReport(2, enqueued=(TransferId(1),)), "worker 2; there are 2"),
        (None, OffloadReport(-1, enqueued=(TransferId(1),)), "worker -1; there are 2"),
        (None, OffloadReport(0, completed=(TransferId(1),)), "transfer 1 completed before enqueued"),
        (None, OffloadReport(0, enqueued=(TransferId(1), TransferId(1))), "transfer 1 enqueued twice"),
        (
            OffloadReport(0, enqueued=(TransferId(1),)),
            OffloadReport(0, enqueued=(TransferId(1),)),
            "transfer 1 enqueued twice",
        ),
        (
            OffloadReport(0, enqueued=(TransferId(1),), completed=(TransferId(1),)),
            OffloadReport(0, completed=(TransferId(1),)),
            "transfer 1 completed after it had reported the end",
        ),
        (
            OffloadReport(0, failed=(TransferId(1),)),
            OffloadReport(0, enqueued=(TransferId(1),)),
            "transfer 1 enqueued after it had reported the end",
        ),
        (
            None,
            OffloadReport(0, enqueued=(TransferId(1),), completed=(TransferId(1),), failed=(TransferId(1),)),
            "transfer 1 failed and completed at once",
        ),
    ],
)
def test_a_report_that_cannot_be_true_is_refused_whole(
    before: OffloadReport | None, report: OffloadReport, message: str
) -> None:
    log, transfer, _ = begun()
    if before is not None:
        log.acknowledge(before)
    seen = (set(transfer.enqueued_by), set(transfer.over_for), set(transfer.failed_by))
    with pytest.raises(ProtocolError, match=message):
        log.acknowledge(report)
    assert (transfer.enqueued_by, transfer.over_for, transfer.failed_by) == seen


def test_a_report_after_the_end_names_its_transfer() -> None:
    log, _, ids = begun(1)
    log.acknowledge(OffloadReport(0, enqueued=ids, completed=ids))
    with pytest.raises(ProtocolError, match="transfer 1 completed, which is over already"):
        log.acknowledge(OffloadReport(0, completed=ids))


def test_a_transfer_is_overdue_once_and_may_still_end() -> None:
    log, transfer, ids = begun(1)
    assert log.overdue() == []
    for now_s, overdue in ((5.0, []), (14.9, []), (15.0, [transfer]), (16.0, [])):
        log.hand_out(now_s, now_s + 10.0)
        assert log.overdue() == overdue
    assert log.acknowledge(OffloadReport(0, enqueued=ids, completed=ids))[-1] == (transfer, TransferOutcome.DONE)


def test_a_transfer_that_nobody_was_given_is_not_overdue() -> None:
    log, _, _ = begun(1)
    log.hand_out(5.0, 15.0)
    late = log.begin(TransferKind.LOAD, "request", ())
    assert late not in log.overdue()
    log.hand_out(20.0, 30.0)
    assert late not in log.overdue()
