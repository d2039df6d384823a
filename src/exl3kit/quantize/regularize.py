"""Make a weight matrix near Gaussian: channel scales, random signs, Hadamard on both sides.

    W = diag(su) H_k inner H_n diag(sv)

Columns are brought to equal RMS before the column transform and rows after it, so `inner` has RMS
1.2437 (the deviation of the 3inst codebook, used for every codebook) and no outliers.

In float64: it costs nothing beside the search, and the encoder's fp16 targets are then the same on
every machine but for sums that fall on a midpoint of two fp16 values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from exl3kit.checkpoint.widths import padded
from exl3kit.errors import FormatError
from exl3kit.format.hadamard import hadamard
from exl3kit.format.spec import GAUSS_SCALE

_TINY = 1e-30  # a channel with a smaller RMS counts as zero
_NUDGE = 1e-10  # exllamav3's: keeps a scale off zero

Signs = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Regularized:
    """`inner` (k, n), `su` (k,), `sv` (n,), float64; the scales are 0 on all-zero channels."""

    inner: torch.Tensor
    su: torch.Tensor
    sv: torch.Tensor


def check_weight(weight: torch.Tensor) -> None:
    """FormatError unless `weight` is a finite floating-point matrix (in, out)."""
    if weight.dim() != 2 or 0 in weight.shape or not weight.is_floating_point():
        raise FormatError(
            f"weight: expected a floating-point (in, out) matrix, got {weight.dtype} "
            f"{tuple(weight.shape)}"
        )
    is_bad = ~torch.isfinite(weight)
    if bool(is_bad.any()):
        row, column = is_bad.nonzero()[0].tolist()
        raise FormatError(
            f"weight: expected finite values, got {weight[row, column].item()} at ({row}, {column})"
        )


def pad_matrix(matrix: torch.Tensor) -> torch.Tensor:
    """(k, n) with zeros up to multiples of 128 on both sides."""
    rows, columns = matrix.shape
    return F.pad(matrix, (0, padded(columns) - columns, 0, padded(rows) - rows))


def make_signs(k: int, n: int, seed: int) -> Signs:
    """Random +-1 as float64 (k,) and (n,); the same for the same arguments."""
    generator = torch.Generator().manual_seed(seed)
    draw = [torch.randint(0, 2, (size,), generator=generator) for size in (k, n)]
    return draw[0].double() * 2 - 1, draw[1].double() * 2 - 1


def check_signs(signs: Signs, k: int, n: int) -> Signs:
    """Signs as float64 padded with +1 to the stored sizes; FormatError unless +-1 of (k,), (n,)."""
    checked = []
    for side, vector, size in (("in", signs[0], k), ("out", signs[1], n)):
        if tuple(vector.shape) not in ((size,), (padded(size),)):
            raise FormatError(
                f"signs ({side}): expected ({size},) or ({padded(size)},), "
                f"got {tuple(vector.shape)}"
            )
        if not bool((vector.abs() == 1).all()):
            raise FormatError(f"signs ({side}): expected +1 or -1 everywhere")
        checked.append(F.pad(vector.double(), (0, padded(size) - len(vector)), value=1.0))
    return checked[0], checked[1]


def _rms(matrix: torch.Tensor, dim: int) -> torch.Tensor:
    return matrix.square().mean(dim=dim).sqrt()


def regularize(weight: torch.Tensor, signs: Signs) -> Regularized:
    """Regularise (k, n) of any float dtype, sides multiples of 128, with signs of (k,) and (n,).

    On the device of `weight`, wherever the signs are.

    All-zero columns and rows get a scale of exactly 0: they decode to exact zeros.
    """
    w = weight.double()
    in_signs, out_signs = (side.to(w.device) for side in signs)
    column_rms = _rms(w, 0)
    is_zero_column = column_rms < _TINY
    mean = column_rms.mean()
    relative = column_rms / torch.where(mean > 0, mean, 1.0)
    sv = out_signs * torch.where(is_zero_column, 0.1, relative) + _NUDGE
    rotated = hadamard(w / sv, dim=1)

    row_rms = _rms(rotated, 1)
    is_zero_row = row_rms < _TINY
    magnitude = torch.where(is_zero_row, 0.1, row_rms)
    su = in_signs * magnitude / -GAUSS_SCALE + _NUDGE
    inner = hadamard(rotated / su.unsqueeze(1), dim=0)
    return Regularized(inner, su.masked_fill(is_zero_row, 0), sv.masked_fill(is_zero_column, 0))
