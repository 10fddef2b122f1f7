"""File systems that do not answer: nothing wrong is read, and an engine and its process end all the same."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from hisparse.engine import Engine, EngineConfig, LoadedModel, SamplingParams, load_model
from hisparse.engine import offload as engine_offload
from hisparse.engine.stock import stock_generate
from hisparse.errors import BackendError, InvariantError
from hisparse.offload.config import FileOptions, OffloadConfig
from hisparse.offload.files.filesystem import LocalFileSystem
from tests.engine.parity import GREEDY, prompt

ROOT = Path(__file__).resolve().parents[2]
NUM_TOKENS = 6
FIRST, SECOND = prompt(1, 300), prompt(2, 300)


class Reads:
    """Hangs in reads of blocks from when it is told to until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hangs, self.let_go = threading.Event(), threading.Event()
        self.are_hanging = False
        plain = LocalFileSystem.read

        def read(filesystem: LocalFileSystem, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
            if self.are_hanging and len(buffers) == 2:  # a header and a payload
                self.hangs.set()
                self.let_go.wait(60)
            return plain(filesystem, descriptor, buffers, offset)

        monkeypatch.setattr(LocalFileSystem, "read", read)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reads]:
    reads = Reads(monkeypatch)
    yield reads
    reads.let_go.set()


@pytest.fixture
def loaded() -> LoadedModel:
    """A model whose weights a test may change."""
    return load_model("builtin:tiny-v32")


def config(folder: Path) -> EngineConfig:
    files = FileOptions((folder,), 1 << 30, threads=16)
    return EngineConfig(max_tokens=400, block_size=16, offload=OffloadConfig(16 << 20, files=files))


def run(engine: Engine, tokens: tuple[int, ...]) -> tuple[int, ...]:
    request = engine.add_request(tokens, SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True))
    for _ in engine.run():
        pass
    return engine.take_result(request).output_ids


def other_weights(loaded: LoadedModel) -> dict[str, torch.Tensor]:
    weights = {name: tensor.clone() for name, tensor in loaded.model.state_dict().items()}
    weights["model.layers.1.self_attn.q_a_proj.weight"] *= 2
    return weights


def step_until_files_are_read(engine: Engine, reads: Reads) -> None:
    """Rows of the region are being filled, and whoever asked for that is gone."""
    reads.are_hanging = True
    request = engine.add_request(FIRST, SamplingParams(max_tokens=NUM_TOKENS))
    until = time.monotonic() + 30
    while not reads.hangs.is_set():
        assert time.monotonic() < until
        engine.step()
    engine.abort(request)


def test_weights_are_not_swapped_while_a_read_hangs_that_fills_rows_of_the_former_ones(
    loaded: LoadedModel, tmp_path: Path, reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes would come into rows that other KV has by then."""
    monkeypatch.setattr(engine_offload, "CLOSE_SECONDS", 0.3)
    weights = other_weights(loaded)
    with Engine(loaded, config(tmp_path)) as engine:
        run(engine, FIRST)
    engine = Engine(loaded, config(tmp_path))
    step_until_files_are_read(engine, reads)
    with pytest.raises(BackendError, match="reads or writes of files with KV do not end"):
        engine.swap_weights(weights)
    with pytest.raises(InvariantError, match="a step of this engine failed"):
        engine.step()
    # Closing is bounded: it does not wait for what was waited for before, nor for the connector's own time.
    closing = threading.Thread(target=engine.close, daemon=True)
    closing.start()
    closing.join(25)
    assert not closing.is_alive()
    reads.let_go.set()
    # The model is without hooks and has the new weights, so another engine goes on with them.
    with Engine(loaded, config(tmp_path)) as engine:
        found = run(engine, FIRST)
    assert found == stock_generate(loaded.model, FIRST, GREEDY, NUM_TOKENS).tokens


def test_a_read_that_ends_in_time_holds_no_swap_up_and_nothing_is_read_of_it(
    loaded: LoadedModel, tmp_path: Path, reads: Reads
) -> None:
    weights = other_weights(loaded)
    with Engine(loaded, config(tmp_path)) as engine:
        run(engine, FIRST)
    with Engine(loaded, config(tmp_path)) as engine:
        step_until_files_are_read(engine, reads)
        threading.Timer(0.3, reads.let_go.set).start()
        engine.swap_weights(weights)
        found = [run(engine, tokens) for tokens in (SECOND, FIRST)]
        engine.reset_prefix_cache()
        found += [run(engine, tokens) for tokens in (SECOND, FIRST)]
    other = load_model(loaded.name)
    other.model.load_state_dict(weights)
    expected = [stock_generate(other.model, tokens, GREEDY, NUM_TOKENS).tokens for tokens in (SECOND, FIRST)]
    assert found == expected * 2


PROGRAM = """
import sys, threading
from pathlib import Path
from hisparse.engine import Engine, EngineConfig, SamplingParams, load_model
from hisparse.offload.config import FileOptions, OffloadConfig
from hisparse.offload.files import FileTier

def hang(tier, key):
    asked.set()
    threading.Event().wait()

asked, FileTier.lookup = threading.Event(), hang
files = FileOptions((Path(sys.argv[1]),), 1 << 30)
offload = OffloadConfig(16 << 20, files=files, lookup_deadline_s=0.2)
config = EngineConfig(max_tokens=200, block_size=16, offload=offload)
with Engine(load_model("builtin:tiny-v32"), config) as engine:
    request = engine.add_request(list(range(1, 100)), SamplingParams(max_tokens=2, ignore_eos=True))
    for _ in engine.run():
        pass
    assert asked.is_set()
    print(len(engine.take_result(request).output_ids), flush=True)
"""


def test_a_process_whose_look_up_hangs_for_good_answers_and_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, check=False)
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr
