"""Calls that hang hold up neither their caller nor the end of the process."""

import subprocess
import sys
import threading
from concurrent.futures import Future

import pytest

from hisparse.offload.daemon_executor import DaemonExecutor

HANGS = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
from hisparse.offload.daemon_executor import DaemonExecutor
hangs = threading.Event()
executor = {executor}
executor.submit(lambda: (hangs.set(), threading.Event().wait()))
executor.submit(print, "never said")
assert hangs.wait(30)
executor.shutdown(wait=False, cancel_futures=True)
print("the end", flush=True)
"""


def ends(executor: str, timeout_s: float) -> bool:
    """Whether a process ends whose only thread of an executor hangs for good."""
    command = [sys.executable, "-c", HANGS.format(executor=executor)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "the end\n"
        try:
            return process.wait(timeout_s) == 0
        except subprocess.TimeoutExpired:
            process.kill()
            return False


def test_a_process_ends_while_a_call_hangs() -> None:
    assert ends("DaemonExecutor(1, 'hangs')", 60)


def test_control_one_with_threads_of_the_standard_library_does_not() -> None:
    assert not ends("ThreadPoolExecutor(1)", 1)


def test_calls_begin_in_order_and_give_what_they_return_or_raise() -> None:
    executor, begun = DaemonExecutor(1, "test"), list[int]()

    def work(number: int, *, factor: int) -> int:
        begun.append(number)
        if number == 2:
            raise ZeroDivisionError("two")
        return number * factor

    futures = [executor.submit(work, number, factor=3) for number in range(5)]
    assert [futures[number].result(10) for number in (0, 1, 3, 4)] == [0, 3, 9, 12]
    with pytest.raises(ZeroDivisionError, match="two"):
        futures[2].result(10)
    assert begun == [0, 1, 2, 3, 4]
    assert executor.close(10)


def test_as_many_calls_as_there_are_threads_go_on_at_once_and_threads_end_with_it() -> None:
    before = threading.active_count()
    executor = DaemonExecutor(3, "test")
    meeting = threading.Barrier(3)
    assert sorted(future.result(10) for future in [executor.submit(meeting.wait, 10) for _ in range(3)]) == [0, 1, 2]
    assert [executor.submit(int, "7").result(10) for _ in range(10)] == [7] * 10
    assert threading.active_count() == before + 3
    executor.shutdown()
    assert threading.active_count() == before


def hang(executor: DaemonExecutor) -> tuple[threading.Event, "Future[bool]"]:
    begun, let_go = threading.Event(), threading.Event()

    def call() -> bool:
        begun.set()
        return let_go.wait(30)

    future = executor.submit(call)
    assert begun.wait(10)
    return let_go, future


def test_closing_finishes_what_is_queued_and_takes_no_more() -> None:
    executor = DaemonExecutor(1, "test")
    let_go, first = hang(executor)
    queued = executor.submit(int, "7")
    threading.Timer(0.05, let_go.set).start()
    assert executor.close(20)
    assert first.result(0)
    assert queued.result(0) == 7
    with pytest.raises(RuntimeError, match="test takes no more calls"):
        executor.submit(int, "8")


def test_closing_waits_for_no_call_that_hangs_and_cancels_those_behind_it() -> None:
    executor = DaemonExecutor(1, "test")
    let_go, first = hang(executor)
    queued, given_up = executor.submit(int, "7"), executor.submit(int, "8")
    assert given_up.cancel()
    assert not executor.close(0.05)
    assert queued.cancelled()
    assert not first.done()
    let_go.set()
    assert first.result(10)
