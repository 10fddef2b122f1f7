"""Rows, pages and blocks as bytes and offsets. No other module does this arithmetic.

A *block* holds `block_size` rows of every layer of its group, layer after layer, so that one block is one
contiguous range and every layer's view of the allocation starts at an offset of its own:

    block b │ layer 0: row 0 … row bs-1 │ layer 1: row 0 … row bs-1 │ … │ padding up to block_stride │

Row stride and row bytes differ only where alignment pays: rows in host memory start on 128-byte lines, because a
gather over PCIe fetches whole lines (benchmarks/README.md says where its rate is measured).
"""

from dataclasses import dataclass

from hisparse.errors import InputError, InvariantError

NULL_BLOCK = 0
"""Block 0 of every pool. It is never data: a table entry of 0 means "not here"."""

HOST_LINE_BYTES = 128
"""The unit in which a GPU reads host memory."""

ROW_ALIGNMENT = 16
"""Rows are copied as 16-byte words."""

MAX_ROW_BYTES = 4096


def ceil_div(numerator: int, denominator: int) -> int:
    """The least integer at or above `numerator / denominator`, for non-negative numerator."""
    return -(-numerator // denominator)


def align_up(value: int, alignment: int) -> int:
    """The least multiple of `alignment` at or above `value`."""
    return ceil_div(value, alignment) * alignment


@dataclass(frozen=True, slots=True)
class RowFormat:
    """How one token's KV of one layer is stored.

    `name` is the element type ("float32", "bfloat16", "float16") or a packed format ("fp8_ds_mla").
    `row_bytes` counts the payload of a row; a store may space rows wider apart.
    """

    name: str
    row_bytes: int

    def __post_init__(self) -> None:
        if self.row_bytes <= 0 or self.row_bytes % ROW_ALIGNMENT or self.row_bytes > MAX_ROW_BYTES:
            raise InputError(
                f"a {self.name} row of {self.row_bytes} bytes is not supported: "
                f"rows are a multiple of {ROW_ALIGNMENT} bytes, up to {MAX_ROW_BYTES}"
            )


ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def latent_row(dtype: str, kv_lora_rank: int, rope_dim: int) -> RowFormat:
    """The row of an MLA latent cache: `kv_lora_rank` latent elements, then `rope_dim` rotated key elements.

    `fp8_ds_mla` packs 512 latents as fp8 with one fp32 scale per 128, then 64 bf16 rope elements: 656 bytes (the
    row that FlashMLA's sparse kernels read).

    Raises `InputError` for an unknown dtype or a geometry that the packed format does not have.
    """
    if dtype == "fp8_ds_mla":
        if (kv_lora_rank, rope_dim) != (512, 64):
            raise InputError(f"fp8_ds_mla rows are 512+64 wide; this model's are {kv_lora_rank}+{rope_dim}")
        return RowFormat(dtype, 512 + 4 * 4 + 2 * 64)
    if dtype not in ELEMENT_BYTES:
        raise InputError(f"unknown KV dtype {dtype!r}: use one of {', '.join([*ELEMENT_BYTES, 'fp8_ds_mla'])}")
    return RowFormat(dtype, ELEMENT_BYTES[dtype] * (kv_lora_rank + rope_dim))


@dataclass(frozen=True, slots=True)
class PagedLayout:
    """Where the rows of one layer lie in an allocation of `num_blocks` blocks. All sizes in bytes.

    Row `r` of block `b` starts at `offset + b*block_stride + r*row_stride`. A *physical row* is the number
    `b*block_size + r`; it is the same for all layers of a group, and 0 … `block_size`-1 lie in the null block.
    """

    offset: int
    block_stride: int
    row_stride: int
    row_bytes: int
    block_size: int
    num_blocks: int

    def __post_init__(self) -> None:
        if self.row_bytes > self.row_stride:
            raise InvariantError(f"rows of {self.row_bytes} bytes overlap at a stride of {self.row_stride}")
        if self.offset + self.block_size * self.row_stride > self.block_stride:
            raise InvariantError(
                f"a layer at offset {self.offset} with {self.block_size} rows of {self.row_stride} bytes "
                f"leaves its block of {self.block_stride} bytes"
            )

    @property
    def num_rows(self) -> int:
        """Physical rows, those of the null block included."""
        return self.num_blocks * self.block_size

    @property
    def end_bytes(self) -> int:
        """One past the last byte that a row of this layer can occupy."""
        last = (self.num_blocks - 1) * self.block_stride + (self.block_size - 1) * self.row_stride
        return self.offset + last + self.row_bytes

    def row_offset(self, physical_row: int) -> int:
        """The byte at which a physical row starts."""
        block, row = divmod(physical_row, self.block_size)
        return self.offset + block * self.block_stride + row * self.row_stride


@dataclass(frozen=True, slots=True)
class BlockGeometry:
    """The shape of one block of a group of layers. All sizes in bytes.

    `payload_bytes` is what a block holds; `block_stride` is what it occupies, alignment included.
    """

    num_layers: int
    block_size: int
    row_bytes: int
    row_stride: int

    def __post_init__(self) -> None:
        if self.num_layers <= 0 or self.block_size <= 0:
            raise InputError(f"a block of {self.num_layers} layers of {self.block_size} rows holds nothing")
        if self.row_bytes > self.row_stride or self.row_stride % ROW_ALIGNMENT:
            raise InvariantError(f"row stride {self.row_stride} does not fit rows of {self.row_bytes} bytes")

    @property
    def page_bytes(self) -> int:
        """Payload of one layer's page."""
        return self.block_size * self.row_bytes

    @property
    def payload_bytes(self) -> int:
        """What a block holds: the pages of all layers, without padding."""
        return self.num_layers * self.page_bytes

    @property
    def layer_stride(self) -> int:
        """From one layer's page of a block to the next layer's."""
        return self.block_size * self.row_stride

    @property
    def block_stride(self) -> int:
        """From one block to the next: what a block occupies."""
        return self.num_layers * self.layer_stride

    def layer(self, layer: int, num_blocks: int) -> PagedLayout:
        """One layer's view of an allocation of `num_blocks` blocks."""
        if not 0 <= layer < self.num_layers:
            raise InvariantError(f"layer {layer} is not one of {self.num_layers}")
        return PagedLayout(
            offset=layer * self.layer_stride,
            block_stride=self.block_stride,
            row_stride=self.row_stride,
            row_bytes=self.row_bytes,
            block_size=self.block_size,
            num_blocks=num_blocks,
        )

    def blocks_in(self, num_bytes: int) -> int:
        """How many whole blocks a budget holds, counted in payload."""
        return num_bytes // self.payload_bytes

    def pages(self, num_tokens: int) -> int:
        """How many pages hold `num_tokens` tokens, the last one perhaps in part."""
        return ceil_div(num_tokens, self.block_size)


def device_blocks(row: RowFormat, num_layers: int, block_size: int) -> BlockGeometry:
    """Blocks of the slab: rows packed, as attention kernels read them."""
    return BlockGeometry(num_layers, block_size, row.row_bytes, row.row_bytes)


def host_blocks(row: RowFormat, num_layers: int, block_size: int) -> BlockGeometry:
    """Blocks of the host pool: every row starts on a line of its own."""
    return BlockGeometry(num_layers, block_size, row.row_bytes, align_up(row.row_bytes, HOST_LINE_BYTES))
