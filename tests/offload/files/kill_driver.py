"""Kill a process at every call of a tier's life. Run as a program: `kill_driver.py FOLDER after|torn`.

Each life is a forked process that sends itself SIGKILL at one call: after it, or before it and, where it
is a write, in its middle.
Prints the calls at which a process was killed, in order.
"""

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

from tests.offload.files.driven import DrivenFileSystem, nothing
from tests.offload.files.world import World

MOST_CALLS = 2000
RESTARTS = 5
SKIPPED = 3


def killing(number: int, mode: str) -> DrivenFileSystem:
    """A file system that ends the process at call `number`, after writing the call's name."""

    def act(at: int, name: str, arguments: tuple[Any, ...]) -> None:
        if at != number:
            return
        if mode == "torn" and name == "write":
            # Half of the bytes, in whole pages where the whole had them: direct I/O takes no others.
            whole = arguments[1]
            os.pwritev(arguments[0], whole[:1] if len(whole) > 1 else [whole[0][: whole[0].nbytes // 2]], arguments[2])
        os.write(1, f"{name}\n".encode())
        os.kill(os.getpid(), signal.SIGKILL)

    return DrivenFileSystem(nothing, act) if mode == "after" else DrivenFileSystem(act)


def main(folder: Path, mode: str) -> None:
    """Kill, check, start again; until a life ends by itself."""
    first = World.make(folder / "first")
    for number in range(MOST_CALLS):
        world = first.copy(folder / str(number))
        child = os.fork()
        if child == 0:
            filesystem = killing(number, mode)
            world.run(filesystem)
            # A call that fails by itself has no "after": its number ends no life, and the next one is tried.
            os._exit(SKIPPED if number < len(filesystem.calls) else 0)
        _, status = os.waitpid(child, 0)
        world.check()
        world.check_restart(RESTARTS if number % RESTARTS == 0 else 1)
        shutil.rmtree(world.root)
        match os.waitstatus_to_exitcode(status):
            case 0:
                return
            case code if code not in (-signal.SIGKILL, SKIPPED):
                raise SystemExit(f"call {number}: ended with {code} instead of a kill")
    raise SystemExit("a life of so many calls was not expected")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
