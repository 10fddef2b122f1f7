"""Options that commands share: how they are written, and as values that are not yet checked against a model."""

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from hisparse.config import KVDtype, WriteBack

BUILTIN_PREFIX = "builtin:"


def named_path(text: str) -> Path:
    """A path that was written down. Raises `BadParameter` for none, which `Path` would take for the current folder."""
    if not text:
        raise typer.BadParameter("it is empty: name a path, or . for the current folder")
    return Path(text)


class Device(Enum):
    """Where the model and its device KV live."""

    CPU = "cpu"
    CUDA = "cuda"


class HostBackingChoice(Enum):
    """Whose the host pool of several processes is."""

    SHARED = "shared"
    PRIVATE = "private"


ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A checkpoint directory, builtin:finder, builtin:tiny-v32 or builtin:tiny-glm."
    ),
]
DeviceOption = Annotated[Device, typer.Option(help="Where the model runs.")]
DtypeOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Element type of weights and KV: float32, bfloat16 or float16. [default: float32 for built-in "
        "models, bfloat16 otherwise]",
    ),
]
KVDtypeOption = Annotated[
    KVDtype,
    typer.Option(
        help="How KV rows are stored: in the dtype of the weights, or packed in 656 bytes (latents of 512 + 64)."
    ),
]
DeviceKVOption = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Device memory for resident and hot KV: a size (512KiB), a share of all KV (15%), or all. [default: "
        "25%, or more where that is too little to decode every running request at once]",
    ),
]
HostPoolOption = Annotated[str, typer.Option(metavar="SIZE", help="Usable host memory for KV.")]
HotRowsOption = Annotated[
    int | None,
    typer.Option(metavar="N", help="Device rows per request that cache host rows. [default: 2 x top-k]"),
]
StagingRowsOption = Annotated[
    int | None,
    typer.Option(metavar="N", help="Device rows through which prefill reads host pages. [default: 4 x top-k]"),
]
BlockSizeOption = Annotated[
    int | None,
    typer.Option(metavar="N", help="Tokens per page. [default: 16 for built-in models, 64 otherwise]"),
]
WriteBackOption = Annotated[
    WriteBack,
    typer.Option(help="Copy a full page to the host when its block is needed, as soon as it is full, or never."),
]
CpuTierOption = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Keep KV in this much more host memory, below the pools, for prompts that begin alike. [default: none; "
        "256MiB with --offload-dir]",
    ),
]
OffloadDirOption = Annotated[
    Path | None,
    typer.Option(
        parser=named_path,
        metavar="DIR",
        help="Keep KV in files of this directory too, for runs to come with the same model.",
    ),
]
OffloadCapacityOption = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="The most that files of the directory take together. [default: 16GiB]"),
]
TensorParallelOption = Annotated[
    int,
    typer.Option(
        min=1,
        metavar="N",
        help="Processes that compute the model together, each with a share of its heads. They share one host pool.",
    ),
]
HostBackingOption = Annotated[
    HostBackingChoice | None,
    typer.Option(
        help="Whether the processes of --tp share one host pool or have one each. [default: shared]", show_default=False
    ),
]
ChunkSizeOption = Annotated[int, typer.Option(min=1, help="Prompt tokens per step, at most.")]
TemperatureOption = Annotated[float, typer.Option(help="0 is greedy; what is not, is at least 1e-06.")]
TopPOption = Annotated[float, typer.Option(help="Sample from the likeliest tokens that reach this probability.")]
TopKOption = Annotated[int, typer.Option(help="Sample from this many likeliest tokens; 0 is all.")]
SeedOption = Annotated[int, typer.Option(help="Seed of sampling.")]
StopOption = Annotated[
    list[str] | None, typer.Option(metavar="TEXT", help="Text that ends a request; may be repeated.")
]
StopTokenOption = Annotated[
    list[int] | None, typer.Option(metavar="ID", help="Token that ends a request; may be repeated.")
]
MetricsPortOption = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=65535,
        metavar="N",
        help="Serve Prometheus metrics on this port of 127.0.0.1 while the command runs; 0 takes a free one.",
    ),
]


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
    cpu_tier: str | None = None
    offload_dir: Path | None = None
    offload_capacity: str | None = None
    num_ranks: int = 1
    host_backing: HostBackingChoice | None = None


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """What the run shows, whether it is verified, and where its metrics can be had."""

    verify: bool
    json: bool
    stream: bool
    metrics_port: int | None = None


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """One `hisparse generate` command line; `hisparse chat` makes the same of its own."""

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
        if self.device.dtype is not None:
            return self.device.dtype
        return "float32" if self.is_builtin else "bfloat16"

    @property
    def block_size(self) -> int:
        """The tiny models' top-k is half of a usual page: with pages of 64 a small budget would hold only a few."""
        if self.device.block_size is not None:
            return self.device.block_size
        return 16 if self.is_builtin else 64
