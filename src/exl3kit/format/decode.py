"""Reference decode: packed tiles -> dense matrix.

    W = diag(suh) H_k What H_n diag(svh)          y = x W

What, the matrix in the rotated ("inner") basis, is exact in fp16. The transforms are done in the
dtype asked for; float64 is the ground truth of all kernel tests.
"""

from __future__ import annotations

import torch

from exl3kit.format.codebook import codebook_values
from exl3kit.format.hadamard import hadamard
from exl3kit.format.tiles import from_tiles
from exl3kit.format.trellis import unpack


def decode_inner(trellis: torch.Tensor, codebook: str) -> torch.Tensor:
    """int16 (k/16, n/16, 16 K) -> What, float16 (k, n), exact, on the same device."""
    states = unpack(trellis)
    return from_tiles(codebook_values(codebook, trellis.device)[states])


def rotate_back(
    inner: torch.Tensor, suh: torch.Tensor, svh: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """What (k, n) -> W (k, n) in `dtype` (float32 or float64): both transforms and both scales."""
    rows = hadamard(inner.to(dtype), dim=0) * suh.to(dtype).unsqueeze(1)
    return hadamard(rows, dim=1) * svh.to(dtype)


def decode_dense(
    trellis: torch.Tensor,
    suh: torch.Tensor,
    svh: torch.Tensor,
    codebook: str,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The dense matrix W of one linear, (k, n) in `dtype`.

    Half types are computed in float32 and rounded once at the end.
    """
    working = torch.float64 if dtype == torch.float64 else torch.float32
    return rotate_back(decode_inner(trellis, codebook), suh, svh, working).to(dtype)
