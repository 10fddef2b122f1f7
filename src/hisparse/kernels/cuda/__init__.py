"""The resolver on NVIDIA GPUs: CUDA C++ in `source/`, compiled at run time, behind the same contract as the reference.

`compiler` turns sources into machine code and caches it; `parameters` decides, from shapes alone, how a kernel is
specialised and launched; `arguments` mirrors the structs of `source/layout.cuh`; `driver` launches; `ops` registers
the torch operators; `resolver` is what callers use.
"""
