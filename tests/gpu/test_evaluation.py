"""`hisparse eval` on a GPU: right answers from the host, and wrong ones from a broken host."""

import json
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs triton")

from hisparse.cli.main import main
from hisparse.worker.cuda import CudaBackend
from tests.evaluation.misplaced import SHAPES, assert_misplaced
from tests.evaluation.wired import write_checkpoint
from tests.gpu.marks import NEEDS_GPU

pytestmark = NEEDS_GPU


@pytest.mark.parametrize("row_bytes", [64, 128])
@pytest.mark.parametrize(("num_layers", "block_size"), SHAPES)
def test_a_broken_host_gets_every_row_in_the_wrong_place(num_layers: int, block_size: int, row_bytes: int) -> None:
    assert_misplaced(CudaBackend(), num_layers, block_size, row_bytes)


def test_answers_from_the_host_are_those_from_the_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path)
    options = ["--context", "2048", "--keys", "4", "--prompts", "4", "--device-kv", "10%", "--block-size", "16"]
    assert main(["eval", str(tmp_path), "--device", "cuda", "--dtype", "float32", "--json", *options]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["identical"] is True
    assert said["accuracy"]["resident"] == said["accuracy"]["hisparse"] == 1.0
    assert said["accuracy"]["broken"] < 0.3
    assert said["needle_rows"]["share_from_host"] > 0.7
