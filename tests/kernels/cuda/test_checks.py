"""What a kernel cannot take is refused in one line, before a kernel sees it."""

from dataclasses import replace

import pytest
import torch

from hisparse.errors import BackendError, InputError
from hisparse.kernels.contract import MissPlan, Selection
from hisparse.kernels.cuda import driver
from hisparse.kernels.cuda.checks import check_resolve, check_rows
from hisparse.kernels.cuda.resolver import CudaResolver
from hisparse.testing.resolver_cases import Case, CaseShape, LayerRows

CPU = torch.device("cpu")


@pytest.fixture
def case() -> Case:
    return Case(CaseShape(), seed=1)


def check(case: Case, selection: Selection) -> None:
    check_resolve(selection, case.tables, case.state, case.plan, case.counters)


def test_tensors_of_the_contract_are_accepted(case: Case) -> None:
    check(case, case.select([(0, [1, 2])]))
    check_rows(case.source(1), case.destination(1), CPU)


def test_a_wrong_dtype_is_named(case: Case) -> None:
    good = case.select([(0, [1])])
    with pytest.raises(InputError, match=r"row_slot is torch\.int64, not torch\.int32"):
        check(case, replace(good, row_slot=good.row_slot.long()))


def test_a_wrong_device_is_named(case: Case) -> None:
    good = case.select([(0, [1])])
    with pytest.raises(InputError, match=r"row_slot is on meta, not on cpu"):
        check(case, replace(good, row_slot=good.row_slot.to("meta")))


def test_a_wrong_shape_is_named(case: Case) -> None:
    good = case.select([(0, [1]), (1, [2])])
    with pytest.raises(InputError, match=r"row_slot has shape \[1\], not \[2\]"):
        check(case, replace(good, row_slot=good.row_slot[:1]))


def test_a_tensor_with_gaps_is_named(case: Case) -> None:
    good = case.select([(0, [1]), (1, [2])])
    with pytest.raises(InputError, match=r"positions is not contiguous: pass positions\.contiguous"):
        check(case, replace(good, positions=good.positions.t().contiguous().t()))


def test_a_plan_that_may_be_too_short_is_refused(case: Case) -> None:
    case.plan = MissPlan.allocate(1, 3, "cpu")
    with pytest.raises(InputError, match="a plan for 1 rows of 3 copies is too small: this call can need 1 of 8"):
        check(case, case.select([(0, [1])]))
    case.plan = MissPlan.allocate(1, 20, "cpu")
    with pytest.raises(InputError, match="1 rows of 20 copies is too small: this call can need 2 of 16"):
        check(case, case.select([(0, [1]), (1, [1])]))


def test_rows_that_are_not_aligned_are_refused(case: Case) -> None:
    rows = case.destination(0)
    shifted = LayerRows(torch.empty(rows.storage.numel() + 16, dtype=torch.uint8)[8:-8], rows.layout)
    with pytest.raises(InputError, match=r"address .* is not a multiple of 16 bytes"):
        check_rows(case.source(0), shifted, CPU)


def test_a_layout_past_its_storage_is_refused(case: Case) -> None:
    rows = case.destination(2)
    with pytest.raises(InputError, match="the destination layout ends at byte"):
        check_rows(case.source(2), LayerRows(rows.storage[: rows.layout.end_bytes - 16], rows.layout), CPU)


def test_memory_that_the_device_cannot_read_is_refused(case: Case) -> None:
    with pytest.raises(InputError, match="pinned host memory"):
        check_rows(case.source(0), case.destination(0), torch.device("meta"))


def test_layouts_that_disagree_are_refused(case: Case) -> None:
    rows = case.destination(0)
    narrow = LayerRows(rows.storage, replace(rows.layout, row_bytes=rows.layout.row_bytes - 16))
    with pytest.raises(InputError, match="differ in row_bytes: 64 and 48"):
        check_rows(case.source(0), narrow, CPU)


def test_pages_that_are_no_power_of_two_are_refused() -> None:
    case = Case(CaseShape(block_size=6), seed=1)
    with pytest.raises(InputError, match="block size 6 must be a power of two"):
        check_rows(case.source(0), case.destination(0), CPU)


def test_without_a_device_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    driver.device_limits.cache_clear()
    with pytest.raises(BackendError, match=r"no CUDA device is available: .* or use device cpu"):
        CudaResolver()


def test_without_a_driver_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(driver.ctypes, "CDLL", missing)
    driver._library.cache_clear()
    with pytest.raises(BackendError, match="the NVIDIA driver was not found"):
        driver._library()
