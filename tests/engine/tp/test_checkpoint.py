"""Of a checkpoint each rank reads its own part, and together the parts are the whole."""

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hisparse.engine import LoadedModel, load_model
from hisparse.engine.builtin import builtin_config
from hisparse.engine.models import describe_model
from hisparse.engine.revision import NUM_PIECES, PIECE_BYTES, weights_revision
from hisparse.engine.tp import ProcessExecutor, TensorParallel, sharded_model
from hisparse.offload.config import OffloadConfig
from tests.engine.parity import Case, assert_parity, prompt, run
from tests.engine.test_models import save_tokenizer

CASE = Case((prompt(5, 230), prompt(6, 200)), max_tokens=6, max_running=2, copy_delay=2)
WITH_TIER = replace(CASE, offload=OffloadConfig(cpu_bytes=4 << 20))
"""Whose ranks say which weights they have."""


def ranks(num_ranks: int) -> TensorParallel:
    return TensorParallel(num_ranks, "cpu", start_s=60, step_s=60, close_s=10)


def save(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def test_ranks_that_read_parts_of_a_checkpoint_generate_what_stock_generates(tiny: LoadedModel, tmp_path: Path) -> None:
    path = save(tiny.model, tmp_path)
    assert_parity(tiny, CASE, run(describe_model(str(path)), replace(CASE, parallel=ranks(2))))


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of which nearly all is split over ranks, with an odd number of rows that are in no rank's half."""
    config = builtin_config("builtin:tiny-v32")
    config.vocab_size, config.hidden_size, config.moe_intermediate_size = 40_001, 512, 256
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return save(model, tmp_path_factory.mktemp("large"))


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_the_revision_of_parts_is_that_of_the_whole(large: Path, num_ranks: int) -> None:
    loaded = load_model(str(large), "bfloat16")
    split = {name: weight.nbytes for name, weight in loaded.model.state_dict().items() if weight.ndim == 3}
    assert all(num_bytes > NUM_PIECES * PIECE_BYTES for num_bytes in split.values()), "experts are looked at whole"
    described = describe_model(str(large), "bfloat16")
    with closing(ProcessExecutor(described, WITH_TIER.config(loaded), ranks(num_ranks))) as executor:
        assert executor.revision() == weights_revision(loaded.model)


@dataclass(frozen=True)
class Peaks:
    """Each rank writes what loading took at most: bytes of memory, files that it has mapped included."""

    folder: Path
    load: Callable[[str, str, str, int], LoadedModel] = sharded_model.load_part

    def __call__(self, rank: int) -> None:
        from hisparse.engine.tp import rank_process

        def load_and_tell(*arguments: Any) -> LoadedModel:
            before = memory("VmRSS")
            loaded = self.load(*arguments)
            (self.folder / f"{rank}.json").write_text(json.dumps(memory("VmHWM") - before))
            return loaded

        rank_process.load_part = load_and_tell

    def read(self) -> list[int]:
        return [json.loads(file.read_text()) for file in sorted(self.folder.iterdir())]


def memory(what: str) -> int:
    """Bytes of this process, by the system's name for them."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
    return int(line.split()[1]) << 10


def whole(name: str, dtype: str, device: str, num_ranks: int) -> LoadedModel:
    return load_model(name, dtype, device)


@pytest.mark.parametrize(("load", "is_less"), [(sharded_model.load_part, True), (whole, False)])
def test_no_rank_has_room_for_the_whole_checkpoint(
    large: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, load: Any, is_less: bool
) -> None:
    """The second case is the control: ranks that load the whole are seen to. What is converted is not just mapped."""
    peaks = Peaks(tmp_path, load)
    monkeypatch.setattr(ProcessExecutor, "prepare", peaks)
    described = describe_model(str(large), "bfloat16")
    ProcessExecutor(described, CASE.config(described), ranks(4)).close()
    num_bytes = sum(file.stat().st_size for file in large.glob("*.safetensors"))
    found = peaks.read()
    assert [peak < num_bytes for peak in found] == [is_less] * 4, f"{found} of {num_bytes} bytes"
