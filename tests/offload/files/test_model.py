"""Random lives of a directory against a dictionary of what may be there."""

import os
import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hisparse.offload.files import FileTier
from tests.offload.files.world import FILE_BYTES, IDENTITY, block_file, config, is_whole, key_of, loads, store

NUMBERS = st.integers(0, 11)
BLOCKS = 8


class DirectoryMachine(RuleBasedStateMachine):
    """Two tiers on one directory store, load, damage, delete, restart; a hit is always right, a good block a hit."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="hisparse-test-"))
        self.tiers = [self.open(), self.open()]
        self.damaged: set[int] = set()

    def open(self) -> FileTier:
        return FileTier(config(self.root, blocks=BLOCKS), IDENTITY, touch_after_ns=0)

    def teardown(self) -> None:
        for tier in self.tiers:
            tier.close()
        shutil.rmtree(self.root)

    @rule(which=st.integers(0, 1), number=NUMBERS)
    def store(self, which: int, number: int) -> None:
        is_there = block_file(self.root, key_of(number)).exists()
        if store(self.tiers[which], key_of(number)):
            # Damage that the first bytes do not show survives a store that finds the block there; other damage is set
            # aside, and the block is written anew.
            path = block_file(self.root, key_of(number))
            assert path.exists()
            if not is_there or is_whole(path, IDENTITY):
                self.damaged.discard(number)

    @rule(which=st.integers(0, 1), number=NUMBERS)
    def load(self, which: int, number: int) -> None:
        path = block_file(self.root, key_of(number))
        is_good = path.exists() and number not in self.damaged
        assert loads(self.tiers[which], key_of(number)) is is_good
        if not is_good:
            assert not self.tiers[which].lookup(key_of(number))
            self.damaged.discard(number)

    @rule(number=NUMBERS, at=st.integers(0, FILE_BYTES - 1), bit=st.integers(0, 7))
    def flip(self, number: int, at: int, bit: int) -> None:
        path = block_file(self.root, key_of(number))
        if path.exists() and number not in self.damaged:
            with path.open("r+b", buffering=0) as file:
                byte = os.pread(file.fileno(), 1, at)[0]
                os.pwrite(file.fileno(), bytes([byte ^ 1 << bit]), at)
            self.damaged.add(number)

    @rule(number=NUMBERS)
    def delete(self, number: int) -> None:
        block_file(self.root, key_of(number)).unlink(missing_ok=True)
        self.damaged.discard(number)

    @rule(which=st.integers(0, 1))
    def restart(self, which: int) -> None:
        assert self.tiers[which].close()
        self.tiers[which] = self.open()

    @invariant()
    def every_block_with_a_name_is_whole_or_was_damaged(self) -> None:
        for number in range(12):
            path = block_file(self.root, key_of(number))
            if path.exists():
                assert is_whole(path, IDENTITY) is (number not in self.damaged)
            else:
                self.damaged.discard(number)


TestDirectoryMachine = DirectoryMachine.TestCase
TestDirectoryMachine.settings = settings(max_examples=25, stateful_step_count=25)
