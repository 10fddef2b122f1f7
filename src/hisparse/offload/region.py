"""One area of memory that the processes of a node share: rows of KV blocks, behind which a control page lies.

The file has no name while it is allocated. It gets one when it is whole, so that the other members find it, and loses
it when the last of them has mapped it. A process that is killed before or after leaves nothing; one that is killed in
between leaves a file that its members remove when they give up waiting, and that the next start sweeps if all of them
are dead. Start every generation with a name of its own (`new_region_name`); should two ever share one, neither can
remove the other's file.
"""

import logging
import os
import re
import secrets
import time
import weakref
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hisparse.errors import BackendError, InputError, InvariantError
from hisparse.offload import region_control as control
from hisparse.offload import shared_file
from hisparse.offload.region_control import ControlPage, RegionShape
from hisparse.offload.region_room import require_room, rooms
from hisparse.offload.region_sweep import PREFIX, sweep_regions
from hisparse.offload.shared_file import SHARED_MEMORY

logger = logging.getLogger(__name__)

ATTACH_SECONDS = 120.0
"""What members wait for each other at most, by default."""

_POLL_SECONDS = 0.005
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


@dataclass(frozen=True, slots=True)
class Membership:
    """Who a process is among those that share a region.

    `member` of `num_members`; one of them creates the region, the others attach. `digest`: at most 32 bytes that all
    of them must agree on, such as that of their layout. `timeout_s`: what they wait for each other.
    """

    member: int = 0
    num_members: int = 1
    digest: bytes = b""
    timeout_s: float = ATTACH_SECONDS

    def __post_init__(self) -> None:
        if not 0 <= self.member < self.num_members:
            raise InputError(f"member {self.member} is not one of {self.num_members}")


def new_region_name(label: str) -> str:
    """A name that no other start has, to hand to all members. `label`: what the name begins with."""
    return _checked(f"{label}.{secrets.token_hex(8)}")


class SharedRegion:
    """`num_blocks` rows of `row_bytes`, the same memory in every member. Made by `create` or `attach`.

    Rows are written by whoever the caller lets write them: there is no lock of rows here.
    """

    def __init__(self, fd: int, shape: RegionShape, path: Path, membership: Membership) -> None:
        """Map `fd`, which the region owns from now on. For `create` and `attach`."""
        self._fd: int | None = fd
        self._shape = shape
        self._path = path
        self._membership = membership
        self._mapping = shared_file.map_shared(fd, shape.file_bytes)
        bytes_ = np.frombuffer(self._mapping, dtype=np.uint8)
        self._rows: np.ndarray | None = bytes_[: shape.data_bytes].reshape(shape.num_blocks, shape.row_bytes)
        self._control: ControlPage | None = ControlPage(bytes_[shape.data_bytes :], shape)
        # What a member that has joined owes the others, however it ends; None before.
        self._at_exit: weakref.finalize[..., SharedRegion] | None = None

    @classmethod
    def create(
        cls,
        name: str,
        num_blocks: int,
        row_bytes: int,
        membership: Membership | None = None,
        directory: Path = SHARED_MEMORY,
    ) -> "SharedRegion":
        """Allocate a region, all pages of it, and let the other members find it. Sweeps what dead processes left.

        Raises `CapacityError` when the file system, the machine or the cgroup has no room for it, before anything is
        allocated, `InputError` for a bad size or a name that is taken, and `BackendError` without shared memory.
        """
        membership = membership or Membership()
        shape = RegionShape(num_blocks, row_bytes, membership.num_members, membership.digest)
        path = directory / f"{PREFIX}{_checked(name)}"
        sweep_regions(directory)  # first: what it removes makes room
        require_room(shape, rooms(directory))
        fd = shared_file.open_unnamed(directory)
        region = None
        try:
            if not control.lock_shared(fd):
                raise InvariantError("a file without a name is locked")
            shared_file.set_size(fd, shape.file_bytes)
            region = cls(fd, shape, path, membership)
            shared_file.prefault(fd, region.address, shape.file_bytes)
            region._page.write(shape)
            region._say_mapped()
            if shape.num_members > 1:
                shared_file.give_name(fd, path)
        except BaseException:
            _discard(region, fd)
            raise
        return region

    @classmethod
    def attach(cls, name: str, membership: Membership | None = None, directory: Path = SHARED_MEMORY) -> "SharedRegion":
        """Wait for a region to appear and map it. The last member to do so removes its name.

        Raises `InputError` when the file is no region, is for other members, or this member has it already, and
        `BackendError` when none appears in time or another member gave up.
        """
        membership = membership or Membership()
        path = directory / f"{PREFIX}{_checked(name)}"
        fd = _await_file(path, membership.timeout_s)
        region = None
        try:
            shape = _checked_shape(fd, path, membership)
            region = cls(fd, shape, path, membership)
            region._join()
            shared_file.prefault(fd, region.address, shape.file_bytes)
        except BaseException:
            _discard(region, fd)
            raise
        return region

    @property
    def num_blocks(self) -> int:
        """Rows of the region."""
        return self._shape.num_blocks

    @property
    def row_bytes(self) -> int:
        """From one row to the next: a multiple of 4096."""
        return self._shape.row_bytes

    @property
    def path(self) -> Path:
        """The name by which members find the region. Gone once all of them have."""
        return self._path

    @property
    def rows(self) -> np.ndarray:
        """uint8 `[num_blocks, row_bytes]`, zero at first. Raises `InvariantError` after `close`."""
        if self._rows is None:
            raise InvariantError("a shared region was used after it was closed")
        return self._rows

    @property
    def address(self) -> int:
        """Where this process sees row 0. Members see the region at different addresses."""
        return int(self.rows.ctypes.data)

    def row(self, block: int) -> np.ndarray:
        """One row: uint8 `[row_bytes]`, no copy. Raises `InputError` for a block that is not there."""
        if not 0 <= block < self.num_blocks:
            raise InputError(f"block {block} is not one of the {self.num_blocks} of the shared region")
        row: np.ndarray = self.rows[block]
        return row

    def is_shared_by_all(self) -> bool:
        """Whether every member has mapped the region; then no name leads to it any more."""
        return not self._page.missing

    def wait_for_members(self) -> None:
        """Return once every member has mapped the region.

        Raises `BackendError`, which names them, when some have not in time or one gave up. Close the region then.
        """
        deadline = time.monotonic() + self._membership.timeout_s
        while missing := self._page.missing:
            late = time.monotonic() > deadline
            if late or self._page.is_abandoned:
                reason = f"in {self._membership.timeout_s:g} s" if late else "before another member gave up"
                raise BackendError(f"members {_listed(missing)} did not map the shared region {self._path} {reason}")
            time.sleep(_POLL_SECONDS)

    def close(self) -> tuple[str, ...]:
        """Give the region up. Returns a line for each thing that could not be done; idempotent.

        Before all members have mapped the region this ends it for everyone. Views that are still in use stay valid,
        and keep the memory; unpin it first (`PinnedRegion`).
        """
        if self._fd is None:
            return ()
        fd, self._fd = self._fd, None
        problems: tuple[str, ...] = ()
        if self._at_exit is not None:
            self._at_exit.detach()
            problems = _give_up(fd, self._shape, self._path, self._page)
        self._rows = self._control = None
        try:
            self._mapping.close()
        except BufferError:
            problems += (f"{self._shape.file_bytes} bytes of {self._path} stay mapped: views of its rows are in use",)
        os.close(fd)
        for problem in problems:
            logger.warning("shared region: %s", problem)
        return problems

    def _join(self) -> None:
        """Say that this member has the region mapped; remove the name if it is the last."""
        member, fd = self._membership.member, self._descriptor
        with control.locked(fd, self._shape):
            if self._page.is_abandoned:
                raise BackendError(f"the shared region {self._path} was given up by another member")
            if self._page.has_mapped(member):
                raise InputError(f"member {member} of the shared region {self._path} is there already")
            if self._page.missing == (member,):
                # First, so that a death between the two lines leaves no file that nobody would remove.
                control.remove_name(fd, self._path)
            self._say_mapped()

    def _say_mapped(self) -> None:
        self._page.set_mapped(self._membership.member)
        self._at_exit = weakref.finalize(
            self, _finish, self._descriptor, self._shape, self._path, self._page, os.getpid()
        )

    @property
    def _page(self) -> ControlPage:
        if self._control is None:
            raise InvariantError("a shared region was used after it was closed")
        return self._control

    @property
    def _descriptor(self) -> int:
        if self._fd is None:
            raise InvariantError("a shared region was used after it was closed")
        return self._fd


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise InputError(f"{name!r} cannot name a region: letters, digits, '.', '_' and '-', at most 200")
    return name


def _checked_shape(fd: int, path: Path, membership: Membership) -> RegionShape:
    shape = control.read_shape(fd)
    if shape is None:
        raise InputError(f"{path} is not a shared region of version {control.VERSION}: it is left alone")
    if shape.num_members != membership.num_members:
        raise InputError(f"{path} is for {shape.num_members} members; this process expects {membership.num_members}")
    if shape.digest != membership.digest.ljust(control.DIGEST_BYTES, b"\0"):
        raise InputError(f"{path} has another layout than member {membership.member}: all must be started alike")
    return shape


def _await_file(path: Path, timeout_s: float) -> int:
    """The file, locked as in use, once it is there."""
    deadline = time.monotonic() + timeout_s
    while True:
        fd = shared_file.open_named(path)
        if fd is not None:
            # Between the two calls a sweep may have found the file unused, and removed it.
            if control.lock_shared(fd) and os.fstat(fd).st_nlink:
                return fd
            os.close(fd)
        if time.monotonic() > deadline:
            raise BackendError(f"no shared region appeared as {path} in {timeout_s:g} s: did its creator start?")
        time.sleep(_POLL_SECONDS)


def _give_up(fd: int, shape: RegionShape, path: Path, page: ControlPage) -> tuple[str, ...]:
    """End what others still wait for, if they do. Returns what could not be done."""
    try:
        with control.locked(fd, shape):
            if page.missing:
                page.abandon()
                control.remove_name(fd, path)
    except OSError as error:
        return (f"{path} could not be removed ({error.strerror}); the next start sweeps it",)
    return ()


def _finish(fd: int, shape: RegionShape, path: Path, page: ControlPage, pid: int) -> None:
    """What `close` does, for a region that nobody closed. A child that was forked from a member is none."""
    if os.getpid() == pid:
        for problem in _give_up(fd, shape, path, page):
            logger.warning("shared region: %s", problem)
        os.close(fd)


def _discard(region: SharedRegion | None, fd: int) -> None:
    """After a failure: nothing stays behind."""
    if region is None:
        os.close(fd)
    else:
        region.close()


def _listed(members: tuple[int, ...]) -> str:
    return ", ".join(map(str, members))
