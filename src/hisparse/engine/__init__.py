"""The embedded engine: continuous batching over a stock transformers model whose KV is HiSparse's."""

from hisparse.engine.config import EngineConfig
from hisparse.engine.engine import Engine
from hisparse.engine.meter import EngineMeter
from hisparse.engine.models import LoadedModel, describe_model, load_model
from hisparse.engine.output import StepOutput, TokenOutput
from hisparse.engine.parallel import HostBacking, TensorParallel
from hisparse.engine.request import FinishReason
from hisparse.engine.result import RequestResult
from hisparse.engine.sampler import SamplingParams
from hisparse.engine.stats import EngineStats

__all__ = [
    "Engine",
    "EngineConfig",
    "EngineMeter",
    "EngineStats",
    "FinishReason",
    "HostBacking",
    "LoadedModel",
    "RequestResult",
    "SamplingParams",
    "StepOutput",
    "TensorParallel",
    "TokenOutput",
    "describe_model",
    "load_model",
]
