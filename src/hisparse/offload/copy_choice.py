"""How a GPU should copy fragments between its memory and pinned memory of the host. Decided once, from numbers alone.

Measured on an H200 behind PCIe 5 x16, whose copy engine moves 55 GB/s (`benchmarks/results/canonical_cuda.json`, and
`canonical_cuda_16k_by_engine.json` for 16 KiB by the copy engine): a batch of the copy engine is slow with fragments
below 4 KiB, and with scattered ones of 16 KiB still (33 GB/s to the device, 46 to the host); from 32 KiB on it
reaches 51 to 54. A kernel of 16 blocks moves 46 to 50 to the device and 49 to 51 to the host at every size, but takes
16 multiprocessors from the model while it runs.
"""

from enum import Enum
from math import gcd

WORD_BYTES = (16, 8, 4, 2, 1)
"""What a thread of the kernel moves at once."""

_BATCH_FROM_BYTES = {16: 32 << 10, 8: 32 << 10, 4: 8 << 10, 2: 4 << 10, 1: 2 << 10}
"""By word: the least fragment that a batch copies as fast. A warp with words of 4 bytes and less asks for a line or a
part of one at a time, so a kernel of them is slower."""

KERNEL_BLOCKS = 16
KERNEL_THREADS = 1024


class CopyMethod(Enum):
    """BATCH: one call of the driver, by the copy engines. KERNEL: loads and stores over pinned memory."""

    BATCH = "batch"
    KERNEL = "kernel"


def word_bytes(*numbers: int) -> int:
    """The widest word that divides all of addresses, strides and sizes. 0 is divided by every word."""
    common = gcd(WORD_BYTES[0], *numbers)
    return next(word for word in WORD_BYTES if common % word == 0)


def choose_method(fragment_bytes: int, alignment: int) -> CopyMethod:
    """How to copy fragments of one size whose addresses at both ends are multiples of `alignment`."""
    word = word_bytes(fragment_bytes, alignment)
    return CopyMethod.BATCH if fragment_bytes >= _BATCH_FROM_BYTES[word] else CopyMethod.KERNEL


def kernel_blocks(num_words: int) -> int:
    """Blocks of the kernel: enough to fill the link, no more than there is work for."""
    return max(1, min(KERNEL_BLOCKS, -(-num_words // KERNEL_THREADS)))
