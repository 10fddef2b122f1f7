"""Tensor parallelism on one node: ranks in processes of their own, which share one host pool.

`sharded_model` gives a rank its part of a model; `rank_spec` and `messages` are what crosses the line between the
scheduler's process and a rank's; `rank_process` is the rank; `host_group` is how ranks that share a GPU sum and gather;
`processes` starts, watches and ends the ranks; `process_executor` drives them as an engine's executor.
"""

from hisparse.engine.parallel import HostBacking, TensorParallel
from hisparse.engine.tp.process_executor import ProcessExecutor

__all__ = ["HostBacking", "ProcessExecutor", "TensorParallel"]
