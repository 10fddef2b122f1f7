"""A file system whose every call a test can watch, fail, stall or die at."""

from collections.abc import Callable, Sequence
from typing import Any

from hisparse.offload.files import LocalFileSystem

CALLS = (
    *("open", "close", "read", "write", "sync", "status_of", "status", "touch", "rename", "unlink"),
    *("make_directory", "list_directory", "lock"),
)
Act = Callable[[int, str, tuple[Any, ...]], None]


def nothing(number: int, name: str, arguments: tuple[Any, ...]) -> None:
    """What happens at most calls."""


class DrivenFileSystem(LocalFileSystem):
    """The machine's file system with something done `before` or `after` each call, numbered from 0.

    What they raise, the caller gets. A descriptor is closed by a failing close, as the kernel does it, and not left
    open by a failing open.
    """

    def __init__(self, before: Act = nothing, after: Act = nothing) -> None:
        self.before, self.after = before, after
        self.calls: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        plain = super().__getattribute__(name)
        if name not in CALLS:
            return plain

        def call(*arguments: Any) -> Any:
            number = len(self.calls)
            self.calls.append(name)
            try:
                self.before(number, name, arguments)
            except OSError:
                if name == "close":
                    plain(*arguments)
                raise
            result = plain(*arguments)
            try:
                self.after(number, name, arguments)
            except OSError:
                if name == "open":
                    super(DrivenFileSystem, self).close(result)
                raise
            return result

        return call


class ShortFileSystem(LocalFileSystem):
    """Reads and writes at most `most` bytes a call."""

    def __init__(self, most: int) -> None:
        self.most = most

    def read(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        return super().read(descriptor, self._cut(buffers), offset)

    def write(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        return super().write(descriptor, self._cut(buffers), offset)

    def _cut(self, buffers: Sequence[memoryview]) -> Sequence[memoryview]:
        cut, left = [], self.most
        for buffer in buffers:
            cut.append(buffer[:left])
            left -= cut[-1].nbytes
        return cut
