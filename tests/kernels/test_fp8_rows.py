"""Packed rows hold what was put in, as well as eight bits can."""

import pytest
import torch

from hisparse.errors import InputError
from hisparse.geometry import latent_row
from hisparse.kernels import fp8_rows


def test_a_packed_row_is_as_long_as_its_format_says() -> None:
    packed = fp8_rows.pack_rows(torch.randn(3, 576))
    assert packed.shape == (3, latent_row("fp8_ds_mla", 512, 64).row_bytes)


def test_rows_come_back_within_a_sixteenth_and_rope_within_bf16() -> None:
    rows = torch.randn(50, 576) * torch.logspace(-3, 3, 50).unsqueeze(1)
    back = fp8_rows.unpack_rows(fp8_rows.pack_rows(rows))
    largest = rows[:, :512].unflatten(1, (4, 128)).abs().amax(2).repeat_interleave(128, 1)
    # Three mantissa bits, and below the normal numbers steps of 2^-9 of a range that ends at 448.
    assert ((back - rows)[:, :512].abs() <= rows[:, :512].abs() / 16 + largest / 448 * 2**-10).all()
    assert torch.equal(back[:, 512:], rows[:, 512:].bfloat16().float())


def test_each_group_has_a_scale_of_its_own() -> None:
    rows = torch.ones(1, 576)
    rows[0, :128] = 1e6
    assert fp8_rows.unpack_rows(fp8_rows.pack_rows(rows))[0, 128:].tolist() == [1.0] * 448


def test_zeros_stay_zeros() -> None:
    assert not fp8_rows.unpack_rows(fp8_rows.pack_rows(torch.zeros(2, 576))).any()


@pytest.mark.parametrize("shape", [(2, 575), (576,)])
def test_rows_of_another_width_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="576"):
        fp8_rows.pack_rows(torch.zeros(shape))


def test_bytes_of_another_width_are_refused() -> None:
    with pytest.raises(InputError, match="656"):
        fp8_rows.unpack_rows(torch.zeros(2, 655, dtype=torch.uint8))
