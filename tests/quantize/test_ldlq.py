"""Error feedback against exllamav3: with its own choices fed back, our targets are its targets."""

from __future__ import annotations

import pytest
import torch

from exl3kit.format.spec import Codebook
from exl3kit.format.tiles import to_tiles
from exl3kit.format.trellis import unpack
from exl3kit.quantize.ldlq import decode_matrix, encode_matrix, ldlq
from exl3kit.quantize.viterbi import encode
from tests import golden
from tests.quantize import cases

# exllamav3 computes targets in fp32 on a GPU; they are of size 1, so a few units of rounding.
ROUNDING = 5e-7
FLIPS = 6


def targets(bits: int | float, codebook: Codebook) -> torch.Tensor:
    """What the encoder is asked for when exllamav3's output is fed back, float64 (tiles, 256)."""
    inner = cases.inner() * golden.combination(bits, codebook)["g_scale"]
    errors = inner - cases.golden_inner(bits, codebook)
    return to_tiles(inner + cases.lower().T @ errors).reshape(-1, 256)


def is_explained_by_rounding(
    target: torch.Tensor, expected: torch.Tensor, bits: int | float, codebook: Codebook
) -> bool:
    """Does moving targets that lie on a midpoint of two fp16 values give the expected states?

    At most the six nearest to a midpoint are moved, and only if within ROUNDING of it.
    """
    nearest = target.half()
    away = torch.where(target > nearest.double(), torch.inf, -torch.inf).half()
    other = torch.nextafter(nearest, away).double()
    distance = (target - (nearest.double() + other) / 2).abs()
    movable = [i for i in distance.argsort()[:FLIPS].tolist() if distance[i] < ROUNDING]
    candidates = []
    for choice in range(1, 1 << len(movable)):
        moved = nearest.double().clone()
        for bit, index in enumerate(movable):
            if choice >> bit & 1:
                moved[index] = other[index]
        candidates.append(moved.float())
    if not candidates:
        return False
    found = encode(torch.stack(candidates), bits, codebook)
    return bool((found == expected).all(dim=1).any())


@pytest.mark.parametrize(("bits", "codebook"), golden.COMBINATIONS, ids=lambda v: str(v))
def test_golden_tiles_with_golden_feedback(bits: int | float, codebook: Codebook) -> None:
    """At least 382 of 384 tiles identical below 7 bits, 379 above; the rest is fp32 rounding."""
    inner = cases.inner() * golden.combination(bits, codebook)["g_scale"]
    stored = unpack(golden.exl3_tensor(bits, codebook).trellis)
    feedback = cases.golden_inner(bits, codebook)
    states = ldlq(inner[None], cases.lower()[None], bits, codebook, feedback[None])[0]
    differs = (states != stored).any(dim=-1).flatten()
    assert differs.sum() <= (2 if bits < 7 else 5)
    target = targets(bits, codebook)
    for tile in differs.nonzero().flatten().tolist():
        assert is_explained_by_rounding(
            target[tile], stored.reshape(-1, 256)[tile], bits, codebook
        ), f"tile {tile} differs by more than the rounding of its targets"


def test_errors_are_fed_back() -> None:
    """With feedback the proxy error falls, though the plain error rises."""
    inner, lower = cases.inner()[:, :128] * 0.95, cases.lower()
    hessian = (lower + torch.eye(256)) @ (lower + torch.eye(256)).T
    plain = decode_matrix(encode_matrix(inner, 2, "mcg"), "mcg") - inner
    fed = decode_matrix(ldlq(inner[None], lower[None], 2, "mcg")[0], "mcg") - inner

    def proxy(error: torch.Tensor) -> float:
        return float((error * (hessian @ error)).sum())

    assert proxy(fed) < 0.9 * proxy(plain)
    assert fed.square().sum() > plain.square().sum()


def test_matrices_of_a_batch_do_not_mix() -> None:
    inner = torch.stack([cases.inner()[:, :128], cases.inner()[:, 128:256]])
    lower = torch.stack([cases.lower(), torch.zeros_like(cases.lower())])
    both = ldlq(inner, lower, 2, "mcg")
    for i in range(2):
        assert torch.equal(both[i], ldlq(inner[i : i + 1], lower[i : i + 1], 2, "mcg")[0])
    assert torch.equal(both[1], encode_matrix(inner[1], 2, "mcg"))  # no factor, no feedback
