"""The Hessian's part: damping, rotation, and its unit block-lower-triangular factor.

    H = L D L', L with identity 16 x 16 diagonal blocks: what `ldlq` feeds errors back through.

float64 throughout: the factor of a 256 x 256 matrix takes a millisecond, and in float32 the
Cholesky of calibration Hessians (condition 1e6 and more after damping) already loses digits.
"""

from __future__ import annotations

import torch

from exl3kit.errors import FormatError
from exl3kit.format.hadamard import hadamard
from exl3kit.format.spec import TILE

_DEAD = 1e-20  # mean diagonal below which a Hessian says nothing (exllamav3's bound)
_ASYMMETRY = 1e-3  # of the largest entry; fp32 or bf16 accumulation stays far below
_RETRIES = 10


def check_hessian(hessian: torch.Tensor, k: int) -> None:
    """FormatError unless `hessian` is (k, k), finite and symmetric with no negative diagonal."""
    if tuple(hessian.shape) != (k, k):
        raise FormatError(f"hessian: expected shape ({k}, {k}), got {tuple(hessian.shape)}")
    if not bool(torch.isfinite(hessian).all()):
        row, column = (~torch.isfinite(hessian)).nonzero()[0].tolist()
        raise FormatError(
            f"hessian: expected finite values, got {hessian[row, column].item()} "
            f"at ({row}, {column})"
        )
    if bool((hessian.diagonal() < 0).any()):
        raise FormatError("hessian: expected a sum of outer products, got a negative diagonal")
    if bool((hessian - hessian.T).abs().max() > _ASYMMETRY * hessian.abs().max()):
        raise FormatError("hessian: expected a symmetric matrix (sum of outer products)")


def is_dead(hessian: torch.Tensor) -> bool:
    """Does the Hessian carry nothing? Mean diagonal below 1e-20, as for an input never active."""
    return float(hessian.diagonal().double().mean()) < _DEAD


def normalized(hessian: torch.Tensor) -> torch.Tensor:
    """float64, symmetric, mean diagonal 1: sums and means of outer products become the same."""
    h = hessian.double()
    return (h + h.T) / (2 * h.diagonal().mean())


def damped(hessian: torch.Tensor, sigma: float) -> torch.Tensor:
    """hessian + sigma * mean diagonal * identity."""
    out = hessian.clone()
    out.diagonal().add_(sigma * hessian.diagonal().mean())
    return out


def rotated(hessian: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """H_k diag(scales) hessian diag(scales) H_k: the Hessian of errors in the inner basis."""
    s = scales.to(hessian.dtype)
    return hadamard(hadamard(hessian * s * s.unsqueeze(1), dim=0), dim=1)


def feedback_factor(hessian: torch.Tensor) -> torch.Tensor:
    """float64 (k, k), k a multiple of 16 -> L minus its identity diagonal blocks.

    A Hessian that is not positive definite is damped by 0.05 of its mean diagonal at a time, up to
    ten times; then it is a FormatError.
    """
    for _ in range(_RETRIES + 1):
        lower, info = torch.linalg.cholesky_ex(hessian)
        if int(info) == 0 and bool(torch.isfinite(lower).all()):
            return _without_diagonal_blocks(lower)
        hessian = damped(hessian, 0.05)
    raise FormatError(
        f"hessian: expected positive semi-definite, still not after {_RETRIES} times damping; "
        "was it summed from finite activations?"
    )


def _without_diagonal_blocks(lower: torch.Tensor) -> torch.Tensor:
    """L * blockdiag(L_ii)^-1 with the (identity) diagonal blocks cleared."""
    size = len(lower)
    blocks = lower.view(size // TILE, TILE, size // TILE, TILE).diagonal(dim1=0, dim2=2)
    blocks = blocks.permute(2, 0, 1)
    columns = lower.view(size, size // TILE, TILE).transpose(0, 1)  # (block, row, column in block)
    # columns @ block^-1, as the solution of X block = columns.
    unit = torch.linalg.solve_triangular(blocks, columns, upper=False, left=False)
    each = torch.arange(size // TILE, device=lower.device)
    unit.view(size // TILE, size // TILE, TILE, TILE)[each, each] = 0
    return unit.transpose(0, 1).reshape(size, size)
