"""The worker on NVIDIA GPUs: pinned host memory, page copies on a stream of their own, and what the machine offers.

`driver` is the part of the CUDA driver that torch does not offer; `numa` places memory; `host_memory` maps, fills and
registers the host pool; `teardown` gives it back when the process is told to end; `stream` copies pages; `side`
runs launches beside the forward pass; `backend` puts them together; `machine` looks at a machine and measures its link.
"""

from hisparse.worker.cuda.backend import CudaBackend

__all__ = ["CudaBackend"]
