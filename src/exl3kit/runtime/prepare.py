"""Loads the kernels that a layer can need before its first step.

A kernel is otherwise compiled and loaded at first use: seconds in the middle of serving, memory
that nobody counted, and impossible while a CUDA graph is captured. Nothing to do on a CPU, where
one library holds all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from exl3kit.format.spec import Codebook
from exl3kit.jit.launch import get_kernel
from exl3kit.runtime import cuda_paths
from exl3kit.runtime.experts import Rates, is_uniform


def prepare_linear(bits: int | float, codebook: Codebook, device: torch.device) -> None:
    """Load what `exl3_linear` launches for a matrix of that rate, whatever the tokens."""
    if device.type == "cuda":
        for spec in cuda_paths.linear_specs(int(2 * bits), codebook, device):
            get_kernel(spec, device)


def prepare_moe(rates: Sequence[Rates], codebook: Codebook, device: torch.device) -> None:
    """Load what `exl3_moe` launches for a layer's experts of those rates, whatever the tokens."""
    if device.type == "cuda":
        kinds = {int(2 * bits) for bits in rates[0]} if is_uniform(rates) else {None}
        for bits2 in kinds:
            for spec in cuda_paths.moe_specs(bits2, codebook, device):
                get_kernel(spec, device)
