"""Checks at the edge of the ops, whose kernels read raw pointers, and of the device they run on.

Shapes and dtypes are also checked while tracing; contiguity and device only when an op really runs.
"""

from __future__ import annotations

import torch

from exl3kit.errors import FormatError, UnsupportedError
from exl3kit.format.spec import (
    HADAMARD_BLOCK,
    TILE,
    bits_from_words,
    check_bits,
    check_codebook,
)

ACTIVATION_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ID_DTYPES = (torch.int32, torch.int64)


def check_device(name: str) -> None:
    """UnsupportedError unless there is a device of that name to compute on."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"device: expected cpu, cuda or cuda:N, got {name!r}")
    found = torch.cuda.device_count() if device.type == "cuda" else 1
    if (device.index or 0) >= found:
        raise UnsupportedError(
            f"device: expected one of {found} CUDA devices, got {name!r}; use cpu"
        )


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
) -> None:
    """FormatError unless `tensor` has the shape and one of the dtypes."""
    if tensor.dtype not in dtypes:
        allowed = " or ".join(str(dtype) for dtype in dtypes)
        raise FormatError(f"{name} has dtype {tensor.dtype}, expected {allowed}")
    if tuple(tensor.shape) != shape:
        raise FormatError(f"{name} has shape {tuple(tensor.shape)}, expected {shape}")


def check_readable(
    tensors: dict[str, torch.Tensor | None], device: torch.device, read_bytes: int = 16
) -> None:
    """FormatError unless every tensor is contiguous and on `device`: no copy is made in silence.

    On a GPU the address must be a multiple of `read_bytes` too, what kernels read at a time at
    most: 16 of activations and weights; of what they read by elements, 1.
    """
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.device != device:
            raise FormatError(f"{name} is on device {tensor.device}, expected {device}")
        if not tensor.is_contiguous():
            raise FormatError(
                f"{name} has strides {tensor.stride()}, expected a contiguous tensor; "
                "call .contiguous() where it is made"
            )
        if device.type == "cuda" and tensor.data_ptr() % read_bytes:
            raise FormatError(
                f"{name} starts at address {tensor.data_ptr():#x}, expected a multiple of "
                f"{read_bytes}; call .clone() where the view is made"
            )


def check_trellis(name: str, trellis: torch.Tensor, dims: int, codebook: str) -> tuple[int, int]:
    """(k, n) of int16 (…, k/16, n/16, 16 K) with `dims` dimensions; FormatError otherwise."""
    if trellis.dtype != torch.int16 or trellis.dim() != dims:
        raise FormatError(
            f"{name} has dtype {trellis.dtype} and shape {tuple(trellis.shape)}, "
            f"expected torch.int16 with {dims} dimensions"
        )
    try:
        check_bits(bits_from_words(trellis.shape[-1]), codebook)
    except FormatError as error:
        raise FormatError(f"{name}: {error}") from None
    k, n = (TILE * size for size in trellis.shape[-3:-1])
    if k == 0 or n == 0 or k % HADAMARD_BLOCK or n % HADAMARD_BLOCK:
        raise FormatError(
            f"{name} holds a ({k}, {n}) matrix, expected multiples of {HADAMARD_BLOCK}"
        )
    return k, n


def check_linear(
    x: torch.Tensor,
    trellis: torch.Tensor,
    suh: torch.Tensor,
    svh: torch.Tensor,
    codebook: str,
    bias: torch.Tensor | None,
) -> None:
    """Shapes and dtypes of `exl3::linear`; FormatError names the argument."""
    k, n = check_trellis("trellis", trellis, 3, codebook)
    if x.dim() == 0:
        raise FormatError(f"x has shape (), expected (…, {k})")
    check_tensor("x", x, (*x.shape[:-1], k), ACTIVATION_DTYPES)
    check_tensor("suh", suh, (k,), (torch.float16,))
    check_tensor("svh", svh, (n,), (torch.float16,))
    if bias is not None:
        check_tensor("bias", bias, (n,), ACTIVATION_DTYPES)


def _check_uniform(w13_trellis: torch.Tensor, w2_trellis: torch.Tensor, codebook: str) -> int:
    """Number of experts; FormatError unless the two stacks agree about it and about sizes."""
    check_trellis("w2_trellis", w2_trellis, 4, codebook)
    experts = w2_trellis.shape[0]
    h_tiles, s_tiles, words = w13_trellis.shape[2:]
    packed = (torch.int16,)
    check_tensor("w13_trellis", w13_trellis, (2, experts, h_tiles, s_tiles, words), packed)
    shape = experts, s_tiles, h_tiles, w2_trellis.shape[-1]
    check_tensor("w2_trellis", w2_trellis, shape, packed)
    return experts


def _check_vector(name: str, vectors: torch.Tensor, dims: int) -> int:
    """Length of the last of `dims` dimensions; FormatError unless it is whole Hadamard blocks."""
    shape = tuple(vectors.shape)
    if len(shape) != dims or shape[-1] == 0 or shape[-1] % HADAMARD_BLOCK:
        raise FormatError(
            f"{name} has shape {shape}, expected {dims} dimensions, the last a multiple of "
            f"{HADAMARD_BLOCK}"
        )
    return shape[-1]


def _sharing(vectors: torch.Tensor, dim: int, experts: int) -> int:
    """How many vectors serve the experts in turn: a divisor of their number, else all of it."""
    rows = vectors.shape[dim] if vectors.dim() == dim + 2 else 0
    return rows if rows and experts % rows == 0 else experts


def check_moe(
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
    expert_map: torch.Tensor | None,
    matrices: torch.Tensor | None,
) -> None:
    """Shapes and dtypes of `exl3::moe`; FormatError names the argument."""
    half = (torch.float16,)
    if matrices is None:
        hidden, inner = check_trellis("w13_trellis", w13_trellis, 5, codebook)
        experts = _check_uniform(w13_trellis, w2_trellis, codebook)
    else:
        hidden, inner = _check_vector("w13_suh", w13_suh, 3), _check_vector("w2_suh", w2_suh, 2)
        experts = w2_suh.shape[0]
        check_codebook(codebook)
        for name, trellis in {"w13_trellis": w13_trellis, "w2_trellis": w2_trellis}.items():
            check_tensor(name, trellis, (trellis.numel(),), (torch.int16,))
        check_tensor("matrices", matrices, (3, experts, 2), (torch.int64,))
    check_tensor("w13_suh", w13_suh, (2, _sharing(w13_suh, 1, experts), hidden), half)
    check_tensor("w13_svh", w13_svh, (2, experts, inner), half)
    check_tensor("w2_suh", w2_suh, (experts, inner), half)
    check_tensor("w2_svh", w2_svh, (_sharing(w2_svh, 0, experts), hidden), half)
    if topk_ids.dim() != 2:
        raise FormatError(f"topk_ids has shape {tuple(topk_ids.shape)}, expected (T, top_k)")
    tokens, top_k = topk_ids.shape
    check_tensor("topk_ids", topk_ids, (tokens, top_k), ID_DTYPES)
    check_tensor("topk_weights", topk_weights, (tokens, top_k), (torch.float32,))
    check_tensor("x", x, (tokens, hidden), ACTIVATION_DTYPES)
    if expert_map is not None:
        check_tensor("expert_map", expert_map, (expert_map.numel(),), ID_DTYPES)
