"""Tensor parallelism on one node: ranks in processes of their own, which share one host pool.

The rank's side: `rank_process` is its life; `sharded_model` gives it its part of a model; `host_group` is how ranks
that share a GPU sum and gather; `exchange` hands on rank 0's events; `parent_watch` and `parent_channel` are how it has
a parent. The line between the two: `rank_spec`, `messages`, `meeting`. The scheduler's side: `processes` starts,
watches and ends ranks, with `sending`, `failures` and `driver_files`; `process_executor` drives them as an engine's
executor.
"""

from hisparse.engine.parallel import HostBacking, TensorParallel
from hisparse.engine.tp.process_executor import ProcessExecutor

__all__ = ["HostBacking", "ProcessExecutor", "TensorParallel"]
