"""Kernels: sources that know no framework (cpu/) and the Python that launches them.

`linear` and `moe` multiply by packed EXL3 weights, `encode` searches the trellis. Each launches the
tier that `exl3kit.jit.cpu` chose and passes raw pointers; shapes and dtypes were checked by its
caller. Every kernel is tested against `exl3kit.format`.
"""

from __future__ import annotations
