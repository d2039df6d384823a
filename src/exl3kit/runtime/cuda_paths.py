"""Which CUDA kernels serve a call, by its number of tokens: the choice inside the opaque ops.

Up to 32 tokens, and with few routes an expert more, the decode plans; beyond, the prefill plans, or
with `VLLM_EXL3_PREFILL_TRELLIS=0` the parity path, which decodes whole matrices for cuBLAS.
"""

from __future__ import annotations

import torch

from exl3kit.env import is_prefill_fused
from exl3kit.format.spec import Codebook, rates_of
from exl3kit.jit.spec import KernelSpec
from exl3kit.kernels import cuda_moe, gemm, parity, prefill_linear, prefill_moe, prefill_panel
from exl3kit.kernels.heuristics import DECODE_TOKENS, choose_core, decode_tokens, uses_panel


def linear(
    x: torch.Tensor,
    trellis: torch.Tensor,
    suh: torch.Tensor,
    svh: torch.Tensor,
    codebook: str,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """`gemm.linear` by the way that suits the rows."""
    arguments = (x, trellis, suh, svh, codebook, bias)
    if len(x) <= DECODE_TOKENS:
        return gemm.linear(*arguments)
    if uses_panel(len(x)) or not is_prefill_fused():
        return prefill_panel.linear(*arguments)
    return prefill_linear.linear(*arguments)


def moe(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    weights: cuda_moe.MoeWeights,
    codebook: str,
    expert_map: torch.Tensor | None = None,
) -> torch.Tensor:
    """`cuda_moe.moe` by the way that suits the tokens."""
    arguments = (x, topk_weights, topk_ids, weights, codebook, expert_map)
    if len(x) > DECODE_TOKENS and not is_prefill_fused():
        return parity.moe(*arguments)
    if len(x) <= decode_tokens(topk_ids.shape[1], weights.w2_suh.shape[0]):
        return cuda_moe.moe(*arguments)
    return prefill_moe.moe(*arguments)


def linear_specs(bits2: int, codebook: Codebook, device: torch.device) -> tuple[KernelSpec, ...]:
    """Every kernel that `linear` may launch for a matrix of a rate, by the number of rows."""
    return (
        *gemm.specs_of(bits2, codebook),
        *prefill_linear.SPECS,
        choose_core(device).spec(bits2, codebook),
        *prefill_panel.specs_of(bits2, codebook),
    )


def moe_specs(
    bits2: int | None, codebook: Codebook, device: torch.device
) -> tuple[KernelSpec, ...]:
    """Every kernel that `moe` may launch for matrices of a rate, or of several (None)."""
    rates = [int(2 * bits) for bits in rates_of(codebook)] if bits2 is None else [bits2]
    core = choose_core(device, bits2 is None)
    return (
        *cuda_moe.specs_of(bits2, codebook),
        *prefill_moe.SPECS,
        *(core.spec(rate, codebook) for rate in rates),
    )
