"""Inputs of the quantiser tests: the golden matrix, and small random ones."""

from __future__ import annotations

from functools import cache

import torch

from exl3kit.format.decode import decode_inner
from exl3kit.format.spec import Codebook
from exl3kit.quantize import ldl
from exl3kit.quantize.regularize import Signs, regularize
from exl3kit.quantize.tensor import SIGMA_REG
from tests import golden


def weight() -> torch.Tensor:
    """The golden source matrix, fp16 (256, 384)."""
    return golden.tensors()["A.weight"]


@cache
def hessian() -> torch.Tensor:
    """Sum of the outer products of the golden calibration rows, float32 (256, 256)."""
    rows = golden.tensors()["A.calib"].double()
    return (rows.T @ rows).float()


@cache
def signs() -> Signs:
    """The signs exllamav3 drew, the same for every combination."""
    stored = golden.exl3_tensor(3, Codebook.MCG)
    return -stored.suh.float().sign(), stored.svh.float().sign()


@cache
def inner() -> torch.Tensor:
    """The golden matrix regularised with the golden signs, before the scale g."""
    return regularize(weight(), signs()).inner


@cache
def lower() -> torch.Tensor:
    """The feedback factor of the golden Hessian."""
    damped = ldl.damped(ldl.normalized(hessian()), SIGMA_REG)
    return ldl.feedback_factor(ldl.rotated(damped, signs()[0]))


def golden_inner(bits: int | float, codebook: Codebook) -> torch.Tensor:
    """What exllamav3 chose for the golden matrix, decoded in the inner basis, float64."""
    return decode_inner(golden.exl3_tensor(bits, codebook).trellis, codebook).double()


def random_case(k: int, n: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight float32 (k, n) and the Hessian (k, k) of correlated inputs."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4 * k, k, generator=generator)
    x[:, 1:] += 0.5 * x[:, :-1]
    return torch.randn(k, n, generator=generator) * 0.02, x.T @ x
