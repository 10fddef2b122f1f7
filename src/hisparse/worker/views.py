"""Bound views of one layer's rows in a paged allocation, and the one way in which pages are copied between two."""

from dataclasses import dataclass

import torch

from hisparse.errors import InvariantError
from hisparse.geometry import NULL_BLOCK, BlockGeometry, PagedLayout, RowFormat

ELEMENT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""The torch dtype of every row format that is a plain array of elements."""

INT32_END = 1 << 31
"""One past the last number that an int32 holds."""


def row_dtype(row: RowFormat) -> torch.dtype:
    """The dtype in which a row is an array of elements; uint8 for packed formats such as `fp8_ds_mla`."""
    return ELEMENT_DTYPES.get(row.name, torch.uint8)


class Allocation:
    """Memory with an end: its owner closes it, and every view of it then raises. Views hold no memory themselves."""

    __slots__ = ("_name", "_storage")

    def __init__(self, name: str, storage: torch.Tensor) -> None:
        """`storage`: uint8 `[num_bytes]`, contiguous. Raises `InvariantError` for anything else."""
        if storage.dtype != torch.uint8 or storage.dim() != 1 or not storage.is_contiguous():
            raise InvariantError(f"the {name} is contiguous bytes, not {storage.dtype} {tuple(storage.shape)}")
        if not storage.is_meta and storage.data_ptr() == 0:
            raise InvariantError(f"the {name} is a null pointer")
        self._name = name
        self._storage: torch.Tensor | None = storage

    @property
    def storage(self) -> torch.Tensor:
        """uint8 `[num_bytes]`. Raises `InvariantError` after `close`."""
        if self._storage is None:
            raise InvariantError(f"the {self._name} was closed and used afterwards")
        return self._storage

    def close(self) -> None:
        """Let go of the memory. Idempotent."""
        self._storage = None


@dataclass(frozen=True, slots=True, eq=False)
class PagedCacheView:
    """The immutable binding of one layer's rows into an allocation. Row numbers are physical rows, int32 or int64.

    Raises `InvariantError` when the allocation does not hold the layout, or has more rows than an int32 row number
    (what a resolver gives out) can name.
    """

    allocation: Allocation
    layout: PagedLayout

    def __post_init__(self) -> None:
        num_bytes, layout = self.storage.numel(), self.layout
        if layout.num_blocks <= NULL_BLOCK + 1:
            raise InvariantError(f"an allocation of {layout.num_blocks} blocks has none beside the null block")
        if layout.end_bytes > num_bytes:
            raise InvariantError(f"rows reach byte {layout.end_bytes} of an allocation of {num_bytes} bytes")
        if layout.num_rows > INT32_END:
            raise InvariantError(f"{layout.num_rows} rows cannot be numbered in 32 bits")

    @classmethod
    def over(cls, storage: torch.Tensor, layout: PagedLayout) -> "PagedCacheView":
        """A view of memory that nobody closes. `storage`: uint8 `[num_bytes]`, contiguous."""
        return cls(Allocation("storage", storage), layout)

    @property
    def storage(self) -> torch.Tensor:
        """uint8 `[num_bytes]`: the whole allocation. Raises `InvariantError` after its owner closed it."""
        return self.allocation.storage

    @property
    def index_dtype(self) -> torch.dtype:
        """The least integer type that holds every byte offset of this view: int32 below 2^31 bytes, else int64."""
        return torch.int32 if self.layout.end_bytes <= INT32_END else torch.int64

    def rows(self, dtype: torch.dtype) -> torch.Tensor:
        """All rows, `[num_blocks, block_size, row_bytes // itemsize]`, sharing memory with the allocation.

        Raises `InvariantError` when rows do not start and end on multiples of the element size.
        """
        storage, layout = self.storage, self.layout
        size = dtype.itemsize
        strides = (layout.block_stride, layout.row_stride)
        address = 0 if storage.is_meta else storage.data_ptr()
        if any(value % size for value in (address, layout.offset, layout.row_bytes, *strides)):
            raise InvariantError(f"rows at {layout} are not aligned for elements of {size} bytes")
        words = storage[: storage.numel() // size * size].view(dtype)
        shape = (layout.num_blocks, layout.block_size, layout.row_bytes // size)
        return words.as_strided(shape, (strides[0] // size, strides[1] // size, 1), layout.offset // size)

    def read(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Copies of `rows` (any shape `[...]`), as `[..., row_bytes // itemsize]`. Negative rows give zeros.

        Raises `IndexError` for a row beyond the allocation.
        """
        # Row 0 stands in for negative rows: it is memory of ours, and what was read there is overwritten.
        wanted = rows.to(torch.int64).clamp(min=0)
        size = self.layout.block_size
        values = self.rows(dtype)[wanted // size, wanted % size]
        return values.masked_fill_((rows < 0).unsqueeze(-1), 0)

    def write(self, rows: torch.Tensor, values: torch.Tensor) -> None:
        """Store `values`, `[n, row_bytes // itemsize]` of any dtype of that width, into `rows`, `[n]`.

        Raises `InvariantError` for a row of the null block or below (padding has nothing to write), for values of
        another width, and when the numbers of rows differ. On a GPU, where looking would stop the stream, padding
        writes to the null block, which nobody reads.
        """
        target = self.rows(values.dtype)
        if values.shape != (*rows.shape, target.shape[2]) or rows.dim() != 1:
            raise InvariantError(
                f"values {tuple(values.shape)} do not fit {tuple(rows.shape)} rows of {target.shape[2]}"
            )
        size = self.layout.block_size
        if rows.device.type != "cuda" and rows.numel() and int(rows.min()) < (NULL_BLOCK + 1) * size:
            raise InvariantError(f"row {int(rows.min())} is no place to write: data starts at row {size}")
        where = rows.to(torch.int64)
        target[where // size, where % size] = values


def all_layers(geometry: BlockGeometry, num_blocks: int) -> PagedLayout:
    """Blocks as pages of all layers' rows at once, so that whole blocks are copied as one layer's are."""
    return PagedLayout(
        offset=0,
        block_stride=geometry.block_stride,
        row_stride=geometry.row_stride,
        row_bytes=geometry.row_bytes,
        block_size=geometry.num_layers * geometry.block_size,
        num_blocks=num_blocks,
    )


@dataclass(frozen=True, slots=True)
class BlockCopies:
    """Whole blocks to copy: `source_blocks[i]` of `source` to `destination_blocks[i]` of `destination`.

    Both ends hold rows of the same size and number per block, perhaps at other strides. The ids are int64 `[n]` on
    the CPU; no block is a destination twice.
    """

    source: PagedCacheView
    destination: PagedCacheView
    source_blocks: torch.Tensor
    destination_blocks: torch.Tensor

    def __post_init__(self) -> None:
        source, destination = self.source.layout, self.destination.layout
        if (source.row_bytes, source.block_size) != (destination.row_bytes, destination.block_size):
            raise InvariantError(f"blocks of {source} and of {destination} do not hold the same rows")
        if self.source_blocks.shape != self.destination_blocks.shape:
            raise InvariantError(f"{len(self.source_blocks)} blocks do not copy to {len(self.destination_blocks)}")

    def run(self) -> None:
        """Move the bytes, in one strided copy. Both ends are memory of the CPU."""
        if self.source_blocks.numel():
            # Words, because rows are a multiple of 16 bytes: an eighth of the elements that bytes would be.
            source, destination = self.source.rows(torch.int64), self.destination.rows(torch.int64)
            destination[self.destination_blocks] = source[self.source_blocks]
