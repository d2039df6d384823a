"""torch custom ops over the CPU and CUDA kernels, with fakes, and the functions that users call.

`exl3::linear` and `exl3::moe` change no argument, return new tensors and keep the first dimension
dynamic, so torch.compile sees one opaque node each. The device of the tensors chooses the kernels.
On a CPU without a compiler the reference runs in float32 (exl3kit.jit.cpu warns once).
"""

from __future__ import annotations

import torch

from exl3kit.kernels.cuda_moe import MoeWeights
from exl3kit.runtime import cpu_paths, cuda_paths
from exl3kit.runtime.checks import check_linear, check_moe, check_readable


@torch.library.custom_op("exl3::linear", mutates_args=(), device_types=("cpu", "cuda"))
def _linear(
    x: torch.Tensor,
    trellis: torch.Tensor,
    suh: torch.Tensor,
    svh: torch.Tensor,
    codebook: str,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    check_linear(x, trellis, suh, svh, codebook, bias)
    tensors = {"x": x, "trellis": trellis, "suh": suh, "svh": svh, "bias": bias}
    check_readable(tensors, x.device)
    rows = x.view(-1, x.shape[-1])
    paths = cuda_paths if x.is_cuda else cpu_paths
    y = paths.linear(rows, trellis, suh, svh, codebook, bias)
    return y.view(*x.shape[:-1], svh.shape[0])


@_linear.register_fake
def _(
    x: torch.Tensor,
    trellis: torch.Tensor,
    suh: torch.Tensor,
    svh: torch.Tensor,
    codebook: str,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    check_linear(x, trellis, suh, svh, codebook, bias)
    return x.new_empty((*x.shape[:-1], svh.shape[0]))


@torch.library.custom_op("exl3::moe", mutates_args=(), device_types=("cpu", "cuda"))
def _moe(
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
) -> torch.Tensor:
    check_moe(
        x, topk_weights, topk_ids, w13_trellis, w13_suh, w13_svh, w2_trellis, w2_suh, w2_svh,
        codebook, expert_map, matrices,
    )  # fmt: skip
    check_readable(
        {
            "x": x,
            "w13_trellis": w13_trellis,
            "w13_suh": w13_suh,
            "w13_svh": w13_svh,
            "w2_trellis": w2_trellis,
            "w2_suh": w2_suh,
            "w2_svh": w2_svh,
            "matrices": matrices,
        },
        x.device,
    )
    routing = {"topk_weights": topk_weights, "topk_ids": topk_ids, "expert_map": expert_map}
    check_readable(routing, x.device, read_bytes=1)
    paths = cuda_paths if x.is_cuda else cpu_paths
    weights = MoeWeights(w13_trellis, w13_suh, w13_svh, w2_trellis, w2_suh, w2_svh, matrices)
    return paths.moe(x, topk_weights, topk_ids, weights, codebook, expert_map)


@_moe.register_fake
def _(
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
) -> torch.Tensor:
    check_moe(
        x, topk_weights, topk_ids, w13_trellis, w13_suh, w13_svh, w2_trellis, w2_suh, w2_svh,
        codebook, expert_map, matrices,
    )  # fmt: skip
    return torch.empty_like(x)


def exl3_linear(
    x: torch.Tensor,
    trellis: torch.Tensor,
    suh: torch.Tensor,
    svh: torch.Tensor,
    codebook: str,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """y = x W + bias with W packed: y = H128(H128(x * suh) What) * svh + bias.

    x         (…, in_features) float32, float16 or bfloat16
    trellis   int16 (in/16, out/16, 16 K), read as it is in the file, never copied or decoded whole
    suh, svh  float16 (in,), (out,)
    codebook  "3inst", "mcg" or "mul1"
    bias      (out,) float32, float16 or bfloat16, or None
    returns   (…, out_features) of x's dtype, rounded once at the end

    float32 throughout on a CPU, but for 32 bfloat16 rows and more on one that multiplies bf16; on a
    GPU the rotated input is fp16, sums are float32 and beyond 32 rows leave the product as fp16. A
    row's result does not depend on the rows beside it nor on the number of threads; it can depend
    on how many they are on a GPU and with those bfloat16 rows (docs/numerics.md). FormatError for a
    wrong shape, dtype or device, or a tensor that is not contiguous.
    """
    return _linear(x, trellis, suh, svh, codebook, bias)


def exl3_moe(
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
) -> torch.Tensor:
    """Routed experts: sum over slots j of topk_weights[:, j] * down(silu(gate(x)) * up(x)).

    x             (T, H) float32, float16 or bfloat16; T may be 0
    topk_weights  float32 (T, top_k); 0 skips the expert
    topk_ids      int32 or int64 (T, top_k); the same id twice in a token counts twice
    w13_trellis   int16 (2, E, H/16, S/16, 16 K), gate then up; w13_suh float16 (2, V, H);
                  w13_svh float16 (2, E, S)
    w2_trellis    int16 (E, S/16, H/16, 16 K'); w2_suh float16 (E, S); w2_svh float16 (V', H)
    codebook      "3inst", "mcg" or "mul1", of all three
    expert_map    int32 or int64 (E_global,): id -> local expert, -1 = not here; None: ids are local
    matrices      None, or, where experts differ in rate or gate from up, int64 (3, E, 2): for gate,
                  up and down of every expert the element of w13_trellis or w2_trellis, which are
                  then flat, at which it starts, and twice the bits (runtime.experts.matrix_table);
                  what it says is not checked against the sizes of the two
    returns       (T, H) of x's dtype, the sum over this rank's experts and slice, not reduced over
                  ranks; rounded once at the end

    Vectors of the hidden side may serve several experts: V and V' divide E, expert e has row e % V.

    Precision and errors are those of `exl3_linear`; on a GPU the input of down is rounded to fp16
    too. Ids outside the model contribute nothing. A row's result depends neither on the rows beside
    it nor on the number of threads, within a plan (docs/numerics.md). A map that names an expert
    which is not there is a FormatError on a CPU; on a GPU, where that would take a synchronisation,
    such a route adds nothing.
    """
    return _moe(
        x, topk_weights, topk_ids, w13_trellis, w13_suh, w13_svh, w2_trellis, w2_suh, w2_svh,
        codebook, expert_map, matrices,
    )  # fmt: skip
