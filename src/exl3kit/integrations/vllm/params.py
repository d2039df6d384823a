"""EXL3 fields as vLLM parameters: shapes, checks, and the cut of one tensor-parallel rank.

Parameters are allocated at full size under the checkpoint's own leaf names, and each carries a
`weight_loader` that writes only through `param.data.copy_`: vLLM's reload counts the copied
elements of a layer to learn when it is complete, so every element is copied exactly once.
Loaders hold no reference to their layer, which reload keeps in a weak dictionary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from exl3kit.checkpoint.names import TensorRule
from exl3kit.checkpoint.widths import valid_tp
from exl3kit.errors import CheckpointError, SliceError
from exl3kit.format.spec import HADAMARD_BLOCK, TILE, Codebook, marker_value, words_per_tile


@dataclass(frozen=True)
class MatrixSpec:
    """Stored sizes of one EXL3 matrix: (in_features, out_features), K bits, one codebook."""

    in_features: int
    out_features: int
    bits: int | float
    codebook: Codebook

    def rules(self) -> dict[str, TensorRule]:
        """What each tensor must be, by leaf name; a marker only where the codebook has one."""
        tiles = (self.in_features // TILE, self.out_features // TILE)
        rules = {
            "trellis": TensorRule(torch.int16, (*tiles, words_per_tile(self.bits))),
            "suh": TensorRule(torch.float16, (self.in_features,)),
            "svh": TensorRule(torch.float16, (self.out_features,)),
        }
        if marker_value(self.codebook) is not None:
            rules[str(self.codebook)] = TensorRule(torch.int32, ())
        return rules


@dataclass(frozen=True)
class Cut:
    """The part of a stored matrix that one rank holds: ranges over in- and out-features."""

    in_start: int
    in_size: int
    out_start: int
    out_size: int

    def apply(self, field: str, tensor: torch.Tensor) -> torch.Tensor:
        """The rank's view of a whole stored field; markers are returned as they are."""
        if field == "trellis":
            rows = tensor.narrow(0, self.in_start // TILE, self.in_size // TILE)
            return rows.narrow(1, self.out_start // TILE, self.out_size // TILE)
        if field == "suh":
            return tensor.narrow(0, self.in_start, self.in_size)
        if field == "svh":
            return tensor.narrow(0, self.out_start, self.out_size)
        return tensor


def rank_start(name: str, size: int, local_size: int, tp_size: int, tp_rank: int) -> int:
    """Start of a rank's `local_size` features out of `size`, both whole 128 blocks.

    Where fewer distinct parts than ranks exist (replicated key/value heads) neighbours share one.
    CheckpointError when the sizes do not belong together, SliceError with the tensor-parallel
    sizes that work when the cut is not on 128 features.
    """
    parts = size // local_size if local_size else 0
    if parts == 0 or parts * local_size != size or tp_size % parts:
        raise CheckpointError(
            f"{name}: stored size is {size}, but the model expects {local_size} on each of "
            f"{tp_size} ranks"
        )
    if local_size % HADAMARD_BLOCK:
        raise SliceError(
            f"{name}: {size} features cut over {parts} ranks are {local_size} on each, expected a "
            f"multiple of {HADAMARD_BLOCK}; tensor-parallel sizes that work: "
            f"{', '.join(map(str, valid_tp(size)))}"
        )
    return tp_rank // (tp_size // parts) * local_size


def make_parameter(
    shape: tuple[int, ...], dtype: torch.dtype, weight_loader: Callable[..., object]
) -> torch.nn.Parameter:
    """An uninitialised parameter on the current default device that loads itself.

    CheckpointError on the meta device, where nothing could be loaded into it.
    """
    data = torch.empty(shape, dtype=dtype)
    if data.is_meta:
        raise CheckpointError("EXL3 weights cannot be created on the meta device")
    parameter = torch.nn.Parameter(data, requires_grad=False)
    parameter.weight_loader = weight_loader  # type: ignore[attr-defined]
    return parameter
