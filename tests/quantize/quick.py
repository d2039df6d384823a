"""A stand-in for the trellis search, for tests of what surrounds it: valid EXL3 in microseconds.

Its trellises are random words drawn from the bytes of everything it is given, Hessian included, so
two runs that differ in any bit of any input write different files.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from exl3kit.checkpoint.widths import padded
from exl3kit.format.spec import TILE, Codebook, words_per_tile
from exl3kit.format.tensors import Exl3Tensor, make_marker
from exl3kit.quantize.stats import TensorStats
from exl3kit.testing.tiny_model import TinyGlm4Moe

SPEC = TinyGlm4Moe(
    hidden_size=128,
    intermediate_size=256,
    moe_intermediate_size=256,
    num_experts=2,
    num_layers=3,
    mtp_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=64,
)


def install(patch: pytest.MonkeyPatch) -> None:
    """Let the job use it instead of the encoder."""
    patch.setattr("exl3kit.quantize.linears.quantize_tensors", quantize_tensors)
    patch.setattr("exl3kit.quantize.experts.search_scale", search_scale)


def quantize_tensors(
    weights: Sequence[Tensor],
    hessians: Sequence[Tensor | None],
    bits: int | float,
    codebook: str,
    scales: Sequence[float] | None,
    seeds: Sequence[int],
) -> list[tuple[Exl3Tensor, TensorStats]]:
    """The job's call of the real one."""
    assert len({weight.shape for weight in weights}) == 1
    given = [None] * len(weights) if scales is None else scales
    rows = zip(weights, hessians, given, seeds, strict=True)
    return [_one(weight, h, bits, codebook, scale, seed) for weight, h, scale, seed in rows]


def search_scale(weights: Sequence[Tensor], bits: int | float, codebook: str, seed: int) -> float:
    """A number that depends on all it is given."""
    return 0.5 + _digest(*weights, bits, codebook, seed) / 2**33


def _one(
    weight: Tensor,
    hessian: Tensor | None,
    bits: int | float,
    codebook: str,
    scale: float | None,
    seed: int,
) -> tuple[Exl3Tensor, TensorStats]:
    assert torch.isfinite(weight).all()
    drawn = _digest(weight, hessian, bits, codebook, scale, seed)
    generator = torch.Generator().manual_seed(drawn)
    ins, outs = (padded(size) for size in weight.shape)
    shape = (ins // TILE, outs // TILE, words_per_tile(bits))
    trellis = torch.randint(-(2**15), 2**15, shape, generator=generator, dtype=torch.int16)
    rms = float(weight.square().mean().sqrt())
    marker = make_marker(Codebook(codebook))
    tensor = Exl3Tensor(
        trellis,
        torch.full((ins,), rms).half(),
        torch.ones(outs).half(),
        mcg=marker if codebook == Codebook.MCG else None,
        mul1=marker if codebook == Codebook.MUL1 else None,
    )
    is_dead = hessian is None or not hessian.any()
    return tensor, TensorStats(drawn / 2**32, scale or 1.0, fallback=is_dead)


def _digest(*values: object) -> int:
    crc = 0
    for value in values:
        data = value.contiguous().numpy().tobytes() if isinstance(value, Tensor) else repr(value)
        crc = zlib.crc32(data if isinstance(data, bytes) else data.encode(), crc)
    return crc
