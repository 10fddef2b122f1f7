"""HiSparse: sparse-attention decoding with most of the KV cache in host memory.

The names below are the library's front door; everything else is imported from its own module. They are loaded when
they are first used, so that `import hisparse` costs nothing and the scheduler's side stays free of torch.
"""

from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hisparse.cache import KVCacheManager, TableLog
    from hisparse.config import CacheConfig, CachePlan, ModelGeometry, WriteBack, plan_cache
    from hisparse.connector import HiSparseConnector
    from hisparse.engine import Engine, EngineConfig, LoadedModel, SamplingParams, load_model
    from hisparse.errors import BackendError, CapacityError, HiSparseError, InputError, InvariantError, ProtocolError
    from hisparse.geometry import RowFormat, latent_row
    from hisparse.kernels.contract import Selection
    from hisparse.residency import HiSparseCoordinator
    from hisparse.worker import HiSparseCacheHandle, HiSparseWorker

    __version__: str

_HOMES = {
    "hisparse.cache": ("KVCacheManager", "TableLog"),
    "hisparse.config": ("CacheConfig", "CachePlan", "ModelGeometry", "WriteBack", "plan_cache"),
    "hisparse.connector": ("HiSparseConnector",),
    "hisparse.engine": ("Engine", "EngineConfig", "LoadedModel", "SamplingParams", "load_model"),
    "hisparse.errors": (
        "BackendError",
        "CapacityError",
        "HiSparseError",
        "InputError",
        "InvariantError",
        "ProtocolError",
    ),
    "hisparse.geometry": ("RowFormat", "latent_row"),
    "hisparse.kernels.contract": ("Selection",),
    "hisparse.residency": ("HiSparseCoordinator",),
    "hisparse.worker": ("HiSparseCacheHandle", "HiSparseWorker"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "BackendError",
    "CacheConfig",
    "CachePlan",
    "CapacityError",
    "Engine",
    "EngineConfig",
    "HiSparseCacheHandle",
    "HiSparseConnector",
    "HiSparseCoordinator",
    "HiSparseError",
    "HiSparseWorker",
    "InputError",
    "InvariantError",
    "KVCacheManager",
    "LoadedModel",
    "ModelGeometry",
    "ProtocolError",
    "RowFormat",
    "SamplingParams",
    "Selection",
    "TableLog",
    "WriteBack",
    "__version__",
    "latent_row",
    "load_model",
    "plan_cache",
]


def __getattr__(name: str) -> Any:
    """Load a public name from the module that defines it."""
    if name == "__version__":
        value: Any = metadata.version("hisparse")
    elif name in _HOME_OF:
        value = getattr(import_module(_HOME_OF[name]), name)
    else:
        raise AttributeError(f"module 'hisparse' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, loaded or not."""
    return __all__
