"""Kernels: sources that know no framework (cpu/, cuda/) and the Python that launches them.

`linear` and `moe` multiply by packed EXL3 weights on a CPU, `gemm` and `cuda_moe` on a GPU;
`encode` and `encode_cuda` search the trellis. The CPU ones launch the tier that `exl3kit.jit.cpu`
chose, the CUDA ones kernels that are compiled at first use. All pass raw pointers; shapes and
dtypes were checked by their caller. Every kernel is tested against `exl3kit.format`.
"""

from __future__ import annotations
