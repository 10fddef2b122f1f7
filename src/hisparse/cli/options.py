"""The options of `hisparse generate` as values, as they were written: not yet checked against a model."""

from dataclasses import dataclass
from pathlib import Path

from hisparse.config import KVDtype, WriteBack

BUILTIN_PREFIX = "builtin:"


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How every request chooses its tokens and when it stops."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool


@dataclass(frozen=True, slots=True)
class DeviceOptions:
    """Where the model runs and how much memory its KV gets. None stands for a default that depends on the model."""

    device: str
    dtype: str | None
    kv_dtype: KVDtype
    device_kv: str | None
    host_pool: str
    hot_rows: int | None
    staging_rows: int | None
    block_size: int | None
    write_back: WriteBack
    max_running: int
    chunk_tokens: int


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """What the run shows, and whether it is verified."""

    verify: bool
    json: bool
    stream: bool


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """One `hisparse generate` command line."""

    model: str
    prompts: tuple[str, ...]
    prompt_files: tuple[Path, ...]
    prompt_ids: tuple[str, ...]
    sampling: SamplingOptions
    device: DeviceOptions
    output: OutputOptions

    @property
    def is_builtin(self) -> bool:
        """Whether the model is one that ships with the library."""
        return self.model.startswith(BUILTIN_PREFIX)

    @property
    def dtype(self) -> str:
        """Tiny models are for comparing bits; real checkpoints are published in bfloat16."""
        return self.device.dtype or ("float32" if self.is_builtin else "bfloat16")

    @property
    def block_size(self) -> int:
        """The tiny models' top-k is half of a usual page: with pages of 64 a small budget would hold only a few."""
        return self.device.block_size or (16 if self.is_builtin else 64)
