"""What the tests on a GPU share."""

from collections.abc import Iterator

import pytest
import torch

from tests.gpu.waiting import nothing_waits


@pytest.fixture
def on_cuda() -> Iterator[torch.device]:
    """Tensors that a test makes without saying where lie on the GPU."""
    torch.set_default_device("cuda")
    yield torch.device("cuda", torch.cuda.current_device())
    torch.set_default_device(None)


@pytest.fixture
def no_synchronisation() -> Iterator[None]:
    """Whatever makes the host wait for the GPU raises."""
    with nothing_waits():
        yield
