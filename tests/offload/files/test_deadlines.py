"""A call that hangs holds up nothing but its own buffer."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hisparse.offload.files import FileTier, Transfer
from tests.offload.files.driven import DrivenFileSystem
from tests.offload.files.world import IDENTITY, aligned, block_file, config, key_of, loads, row_of, store

DEADLINE_S = 0.2


class Hanging(DrivenFileSystem):
    """Hangs in one kind of call on blocks, once it is told to, until it is let go."""

    def __init__(self) -> None:
        super().__init__(self._hang)
        self.at = ""
        self.let_go = threading.Event()
        self.hangs = threading.Event()

    def _hang(self, number: int, name: str, arguments: tuple[Any, ...]) -> None:
        if name == self.at:
            self.at = ""
            self.hangs.set()
            self.let_go.wait(20)


@pytest.fixture
def hanging() -> Iterator[Hanging]:
    filesystem = Hanging()
    yield filesystem
    filesystem.let_go.set()


def begin(filesystem: Hanging, at: str, transfer: Any) -> Transfer:
    filesystem.at = at
    started: Transfer = transfer()
    assert filesystem.hangs.wait(10)
    return started


@pytest.mark.parametrize("at", ["open", "status_of", "read", "close"])
def test_a_load_that_hangs_is_a_miss_by_the_deadline_and_keeps_its_buffer(
    at: str, hanging: Hanging, tmp_path: Path
) -> None:
    tier = FileTier(config(tmp_path, deadline_s=DEADLINE_S), IDENTITY, hanging)
    assert store(tier, key_of(1))
    began = time.monotonic()
    load = begin(hanging, at, lambda: tier.load(key_of(1), aligned()))
    assert load.verdict.result(10) is False
    assert time.monotonic() - began >= DEADLINE_S
    assert not load.done()
    hanging.let_go.set()
    assert load.result(10) is False
    assert loads(tier, key_of(1))
    tier.close()


@pytest.mark.parametrize("at", ["open", "write", "close"])
def test_a_store_that_hangs_never_gets_its_name(at: str, hanging: Hanging, tmp_path: Path) -> None:
    """Its buffer may have changed by the time that the call comes back."""
    tier = FileTier(config(tmp_path, deadline_s=DEADLINE_S), IDENTITY, hanging)
    transfer = begin(hanging, at, lambda: tier.store(key_of(1), aligned(row_of(key_of(1)))))
    assert transfer.verdict.result(10) is False
    hanging.let_go.set()
    assert transfer.result(10) is False
    assert not block_file(tmp_path, key_of(1)).exists()
    assert list((tmp_path / ".hisparse").glob("*.tmp")) == []
    assert store(tier, key_of(1))
    tier.close()


def test_what_waits_behind_a_hanging_call_fails_in_time_and_is_over_with_that(hanging: Hanging, tmp_path: Path) -> None:
    tier = FileTier(config(tmp_path, deadline_s=DEADLINE_S), IDENTITY, hanging)
    assert store(tier, key_of(1))
    begin(hanging, "read", lambda: tier.load(key_of(1), aligned()))
    waiting = [tier.load(key_of(1), aligned()), tier.store(key_of(2), aligned())]
    assert [transfer.result(10) for transfer in waiting] == [False, False]
    hanging.let_go.set()
    tier.close()


def test_other_threads_go_on_beside_a_hanging_call(hanging: Hanging, tmp_path: Path) -> None:
    tier = FileTier(config(tmp_path, threads=2, deadline_s=5), IDENTITY, hanging)
    assert store(tier, key_of(1))
    load = begin(hanging, "read", lambda: tier.load(key_of(1), aligned()))
    assert all(store(tier, key_of(number)) for number in range(2, 6))
    assert loads(tier, key_of(2))
    assert not load.done()
    hanging.let_go.set()
    assert load.result(10)
    tier.close()


def test_closing_does_not_wait_for_a_hanging_call_and_leaves_its_lock(hanging: Hanging, tmp_path: Path) -> None:
    """Another tier that starts meanwhile must not sweep what is still being written."""
    tier = FileTier(config(tmp_path, deadline_s=30), IDENTITY, hanging)
    transfer = begin(hanging, "write", lambda: tier.store(key_of(1), aligned()))
    began = time.monotonic()
    assert not tier.close(0.1)
    assert time.monotonic() - began < 5
    assert transfer.verdict.result(0) is False
    FileTier(config(tmp_path), IDENTITY).close()
    assert sorted(path.suffix for path in (tmp_path / ".hisparse").iterdir()) == [".lock", ".tmp"]
    hanging.let_go.set()
    assert transfer.result(10) is False
    assert not block_file(tmp_path, key_of(1)).exists()


def test_closing_finishes_what_was_begun(tmp_path: Path) -> None:
    tier = FileTier(config(tmp_path), IDENTITY)
    transfers = [tier.store(key_of(number), aligned(row_of(key_of(number)))) for number in range(20)]
    assert tier.close(30)
    assert all(transfer.result(0) for transfer in transfers)


def test_loads_go_before_stores(hanging: Hanging, tmp_path: Path) -> None:
    tier = FileTier(config(tmp_path), IDENTITY, hanging)
    assert store(tier, key_of(1))
    begin(hanging, "read", lambda: tier.load(key_of(1), aligned()))
    ended: list[str] = []
    stores = [tier.store(key_of(number), aligned()) for number in (2, 3)]
    for transfer in stores:
        transfer.add_done_callback(lambda _: ended.append("store"))
    load = tier.load(key_of(1), aligned())
    load.add_done_callback(lambda _: ended.append("load"))
    hanging.let_go.set()
    tier.close()
    assert ended == ["load", "store", "store"]


def test_the_same_key_twice_at_once_is_one_store(hanging: Hanging, tmp_path: Path) -> None:
    tier = FileTier(config(tmp_path), IDENTITY, hanging)
    first = begin(hanging, "write", lambda: tier.store(key_of(1), aligned(row_of(key_of(1)))))
    assert tier.store(key_of(1), aligned(row_of(key_of(1)))) is first
    hanging.let_go.set()
    assert first.result(10)
    assert tier.stats().stores == 1
    tier.close()


def test_a_full_queue_refuses_at_once(hanging: Hanging, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hisparse.offload.files.tier.MAX_QUEUED", 2)
    tier = FileTier(config(tmp_path), IDENTITY, hanging)
    assert store(tier, key_of(9))
    begin(hanging, "read", lambda: tier.load(key_of(9), aligned()))
    stores = [tier.store(key_of(number), aligned()) for number in range(3)]
    assert [transfer.done() for transfer in stores] == [False, False, True]
    assert stores[2].result(0) is False
    hanging.let_go.set()
    tier.close()
    assert [transfer.result(0) for transfer in stores] == [True, True, False]
