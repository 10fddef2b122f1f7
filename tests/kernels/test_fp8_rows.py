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


def test_groups_too_small_for_a_scale_are_zeros_and_the_next_larger_are_not() -> None:
    rows = torch.full((2, 576), fp8_rows.LEAST)
    rows[0, :512] *= 0.999
    back = fp8_rows.unpack_rows(fp8_rows.pack_rows(rows))
    assert not back[0, :512].any()
    assert torch.equal(back[1, :512], rows[1, :512])


def test_halves_go_to_the_even_code() -> None:
    """With 448 in the group the scale is 1: codes of 16 to 32 are 2 apart, those of less than 2^-6 are 2^-9 apart."""
    rows = torch.zeros(1, 576)
    rows[0, :7] = torch.tensor([448.0, 17.0, 19.0, -17.0, 1.5 * 2**-9, 2.5 * 2**-9, 0.5 * 2**-9])
    back = fp8_rows.unpack_rows(fp8_rows.pack_rows(rows))
    assert back[0, :7].tolist() == [448.0, 16.0, 20.0, -16.0, 2 * 2**-9, 2 * 2**-9, 0.0]


@pytest.mark.parametrize("shape", [(2, 575), (576,)])
def test_rows_of_another_width_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="576"):
        fp8_rows.pack_rows(torch.zeros(shape))


def test_bytes_of_another_width_are_refused() -> None:
    with pytest.raises(InputError, match="656"):
        fp8_rows.unpack_rows(torch.zeros(2, 655, dtype=torch.uint8))
