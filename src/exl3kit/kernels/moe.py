"""Launch of the fused routed experts on the CPU."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from exl3kit.jit.cpu import cpu_isa
from exl3kit.kernels.launch import (
    DTYPE_CODES,
    alloc_floats,
    arguments_struct,
    codebook_code,
    double_bits,
    missing_expert,
    pointer,
    require_library,
)

# Bounds the float32 intermediates of one launch. More tokens are cut into several launches, which
# cannot show in the result because rows are independent.
WORKSPACE_BYTES = 256 << 20

_POINTERS = (
    "x", "y", "topk_weights", "topk_ids", "expert_map", "matrices", "w13_trellis", "w13_suh",
    "w13_svh", "w2_trellis", "w2_suh", "w2_svh", "workspace",
)  # fmt: skip
_NUMBERS = (
    "dtype", "tokens", "top_k", "wide_ids", "map_size", "experts", "hidden", "inner", "suh_rows",
    "svh_rows", "bits2_13", "bits2_2", "codebook", "isa", "threads",
)  # fmt: skip


# Mirror of MoeArgs in kernels/cpu/exl3_cpu.h.
_MoeArgs = arguments_struct("_MoeArgs", _POINTERS, _NUMBERS)


def moe(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13_trellis: torch.Tensor,
    w13_suh: torch.Tensor,
    w13_svh: torch.Tensor,
    w2_trellis: torch.Tensor,
    w2_suh: torch.Tensor,
    w2_svh: torch.Tensor,
    codebook: str,
    expert_map: torch.Tensor | None = None,
    matrices: torch.Tensor | None = None,
    *,
    isa: int | None = None,
    threads: int | None = None,
    workspace_bytes: int = WORKSPACE_BYTES,
) -> torch.Tensor:
    """Sum over slots of topk_weight * down(silu(gate(x)) * up(x)), float32, rounded once.

    x (T, H) float32, float16 or bfloat16; topk_weights float32 (T, top_k); topk_ids int32 or int64
    w13_trellis int16 (2, E, H/16, S/16, 16 K), gate then up; w13_suh (2, V, H); w13_svh (2, E, S)
    w2_trellis int16 (E, S/16, H/16, 16 K'); w2_suh (E, S); w2_svh (V', H), all float16
    matrices int64 (3, E, 2) or None, as in `exl3_moe`
    expert_map int32 (E_global,), model id -> local id, -1 = not here; None: ids are local
    isa, threads as in kernels.linear; returns (T, H) of x's dtype, new

    Routes with weight 0, id outside the model or map entry -1 add exactly zero. Raises FormatError
    when the map names an expert that is not there. All tensors contiguous, shapes checked.
    """
    library = require_library()
    tokens, hidden = x.shape
    experts, top_k, inner = w2_suh.shape[0], topk_ids.shape[1], w2_suh.shape[1]
    threads = torch.get_num_threads() if threads is None else threads
    y = torch.empty_like(x)
    arguments = _MoeArgs(
        expert_map=pointer(expert_map),
        matrices=pointer(matrices),
        w13_trellis=pointer(w13_trellis),
        w13_suh=pointer(w13_suh),
        w13_svh=pointer(w13_svh),
        w2_trellis=pointer(w2_trellis),
        w2_suh=pointer(w2_suh),
        w2_svh=pointer(w2_svh),
        dtype=DTYPE_CODES[x.dtype],
        top_k=top_k,
        wide_ids=topk_ids.dtype == torch.int64,
        map_size=experts if expert_map is None else expert_map.shape[0],
        experts=experts,
        hidden=hidden,
        inner=inner,
        suh_rows=w13_suh.shape[1],
        svh_rows=w2_svh.shape[0],
        bits2_13=double_bits(w13_trellis),
        bits2_2=double_bits(w2_trellis),
        codebook=codebook_code(codebook),
        isa=cpu_isa() if isa is None else isa,
        threads=threads,
    )
    token_bytes = 4 * max(1, top_k) * (2 * hidden + inner)
    step = max(1, workspace_bytes // token_bytes)
    for start in range(0, tokens, step):
        part = slice(start, min(start + step, tokens))
        routed = (x[part], topk_weights[part], topk_ids[part])
        is_refused = _launch(library, arguments, *routed, y[part])
        if is_refused and expert_map is not None:
            raise missing_expert(expert_map, experts)
    return y


def _launch(
    library: ctypes.CDLL,
    arguments: Any,
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    y: torch.Tensor,
) -> bool:
    """Whether the map names an expert that is not there; then nothing is written."""
    sizes = (x.shape[0], arguments.top_k, arguments.hidden, arguments.inner, arguments.threads)
    workspace = alloc_floats(library.exl3_moe_workspace(*map(ctypes.c_int64, sizes)))
    arguments.x, arguments.y = pointer(x), pointer(y)
    arguments.topk_weights, arguments.topk_ids = pointer(topk_weights), pointer(topk_ids)
    arguments.workspace = pointer(workspace)
    arguments.tokens = x.shape[0]
    return bool(library.exl3_moe(ctypes.byref(arguments)))
