"""The slow path in plain torch: the oracle of the ops, and what runs where no compiler is found.

Built on exl3kit.format alone. Nothing is rounded below `dtype`: float64 is the ground truth of the
kernel tests, float32 is what the ops fall back to. Costs a full decode of every matrix a call.
"""

from __future__ import annotations

import torch
from torch.nn.functional import silu

from exl3kit.errors import FormatError
from exl3kit.format.decode import decode_inner
from exl3kit.format.hadamard import hadamard
from exl3kit.format.spec import TILE, check_codebook


def reference_linear(
    x: torch.Tensor,
    trellis: torch.Tensor,
    suh: torch.Tensor,
    svh: torch.Tensor,
    codebook: str,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """y = H(H(x * suh) What) * svh (+ bias) in `dtype` (float32 or float64).

    x (…, k); trellis int16 (k/16, n/16, 16 K); suh (k,); svh, bias (n,); returns (…, n) of `dtype`.
    """
    inner = decode_inner(trellis, check_codebook(codebook)).to(dtype)
    y = hadamard(hadamard(x.to(dtype) * suh.to(dtype)) @ inner) * svh.to(dtype)
    return y if bias is None else y + bias.to(dtype)


def reference_moe(
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
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Un-reduced routed sum of `kernels.moe.moe` (same arguments) in `dtype`, (T, H) of `dtype`.

    Expert by expert; routes with weight 0, id outside the model or map entry -1 add exactly zero.
    """
    y = torch.zeros(x.shape, dtype=dtype)
    local = local_expert_ids(topk_weights, topk_ids, w2_suh.shape[0], expert_map)

    def matrix(number: int, expert: int) -> torch.Tensor:
        if matrices is None:
            return w2_trellis[expert] if number == 2 else w13_trellis[number, expert]
        parts = (w2_trellis, w2_suh, w2_svh) if number == 2 else (w13_trellis, w13_suh, w13_svh)
        k, n = (vectors.shape[-1] // TILE for vectors in parts[1:])
        start, bits2 = matrices[number, expert].tolist()
        return parts[0][start : start + 8 * bits2 * k * n].view(k, n, 8 * bits2)

    for expert in local.unique().tolist():
        if expert < 0:
            continue
        tokens, slots = (local == expert).nonzero(as_tuple=True)
        gate, up = (
            reference_linear(
                x[tokens],
                matrix(side, expert),
                w13_suh[side, expert % w13_suh.shape[1]],
                w13_svh[side, expert],
                codebook,
                dtype=dtype,
            )
            for side in (0, 1)
        )
        down = reference_linear(
            silu(gate) * up,
            matrix(2, expert),
            w2_suh[expert],
            w2_svh[expert % w2_svh.shape[0]],
            codebook,
            dtype=dtype,
        )
        weights = topk_weights[tokens, slots].to(dtype).unsqueeze(1)
        y.index_add_(0, tokens, weights * down)
    return y


def local_expert_ids(
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    num_experts: int,
    expert_map: torch.Tensor | None,
) -> torch.Tensor:
    """int64 (T, top_k): the local expert of every route, -1 where the route contributes nothing.

    Raises FormatError when the map names an expert that is not there.
    """
    map_size = num_experts if expert_map is None else expert_map.shape[0]
    ids = topk_ids.long()
    absent = (ids < 0) | (ids >= map_size) | (topk_weights == 0)
    ids = ids.masked_fill(absent, 0)
    local = ids if expert_map is None else expert_map.long()[ids]
    local = local.masked_fill(absent | (local < 0), -1)
    if (local >= num_experts).any():
        raise FormatError(
            f"expert_map: expected local ids below {num_experts} or -1, got {int(local.max())}"
        )
    return local
