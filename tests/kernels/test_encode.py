"""The compiled trellis encoder: exllamav3's states on every tier, and what holds for any input."""

from __future__ import annotations

import pytest
import torch

from exl3kit.errors import CompileError, FormatError
from exl3kit.format.codebook import codebook_values
from exl3kit.format.spec import GAUSS_SCALE, Codebook, words_per_tile
from exl3kit.format.trellis import chains, unpack
from exl3kit.jit.cpu import cpu_isa
from exl3kit.kernels.encode import encode_tiles
from tests import golden

# One integer rate below and above the lane count of each tier, both kinds of half-rate step.
RATES = ((1, Codebook.MCG), (3, Codebook.THREE_INST), (2.5, Codebook.MUL1), (8, Codebook.MUL1))

# d * d below 2^-25 rounds to 0 in fp16: the largest difference that costs nothing.
FREE_DIFFERENCE = 2.0**-12.5


def tiles_of(codebook: Codebook) -> torch.Tensor:
    """The golden encoder inputs, stretched to the codebook's deviation as the generator did."""
    scale = 1.0 if codebook is Codebook.MUL1 else GAUSS_SCALE
    return golden.tensors()["enc.tiles"] * torch.tensor(scale, dtype=torch.float32)


def awkward_tiles() -> torch.Tensor:
    """Targets at which fp16 arithmetic is hard: zeros, subnormals, outliers, sums that overflow."""
    normal = torch.randn(1, 256, generator=torch.Generator().manual_seed(3))
    outlier = normal.clone()
    outlier[0, 17], outlier[0, 200] = 90.0, -250.0
    halves = normal.half().float()
    return torch.cat(
        [normal * scale for scale in (0, 1e-6, 1e-3, 0.1, 1, 4, 60, 3000)]
        + [outlier, halves, halves.sign() * 65504]
    )


def random_path(bits: int | float, codebook: Codebook, count: int) -> torch.Tensor:
    """States of random rings: every one is a valid path."""
    generator = torch.Generator().manual_seed(int(10 * bits))
    shape = (count, words_per_tile(bits))
    words = torch.randint(-32768, 32768, shape, generator=generator).to(torch.int16)
    return unpack(words)


@pytest.mark.parametrize(("bits", "codebook"), golden.COMBINATIONS, ids=lambda v: str(v))
def test_golden_states(isa: int, bits: int | float, codebook: Codebook) -> None:
    stored = golden.tensors()[f"enc.{golden.tag(bits, codebook)}.states"].int() & 0xFFFF
    assert torch.equal(encode_tiles(tiles_of(codebook), bits, codebook, isa=isa), stored)


@pytest.mark.parametrize(("bits", "codebook"), RATES)
def test_tiers_agree_where_rounding_is_hard(isa: int, bits: float, codebook: Codebook) -> None:
    best = encode_tiles(awkward_tiles(), bits, codebook)
    assert torch.equal(encode_tiles(awkward_tiles(), bits, codebook, isa=isa), best)
    assert chains(best, bits).all()


@pytest.mark.parametrize(("bits", "codebook"), golden.COMBINATIONS, ids=lambda v: str(v))
def test_decoded_values_are_found_again(bits: int | float, codebook: Codebook) -> None:
    """Values on a path cost nothing, so the path found costs nothing; it is nearly always the same.

    Not always: different states share a value, and differences below 2^-12.5 cost 0 in fp16.
    """
    states = random_path(bits, codebook, 16)
    values = codebook_values(codebook)
    found = encode_tiles(values[states].float(), bits, codebook)
    assert chains(found, bits).all()
    difference = (values[found].float() - values[states].float()).abs().max()
    assert difference <= FREE_DIFFERENCE
    assert (found == states).all(dim=1).sum() >= 14


def test_result_does_not_depend_on_threads_or_company() -> None:
    tiles = torch.randn(7, 256, generator=torch.Generator().manual_seed(5))
    alone = torch.cat([encode_tiles(tile[None], 3, "mcg", threads=1) for tile in tiles])
    for threads in (1, 2, 5):
        assert torch.equal(encode_tiles(tiles, 3, "mcg", threads=threads), alone)


def test_error_on_gaussian_tiles() -> None:
    """At fixed input scale, so at 8 bits twice the error that the best scale would give."""
    tiles = torch.randn(4, 256, generator=torch.Generator().manual_seed(6)) * 0.9
    values = codebook_values(Codebook.MUL1)
    error = [
        (values[encode_tiles(tiles, bits, "mul1")].float() - tiles).square().mean().item()
        for bits in (1, 2, 3, 4, 8)
    ]
    # At least 8 % above what 20 tiles at their best scale gave: .2708 .0683 .01721 .00435 1.9e-5
    for reached, bound in zip(error, (0.33, 0.077, 0.0187, 0.0048, 4e-5), strict=True):
        assert reached < bound


def test_no_tiles() -> None:
    assert encode_tiles(torch.empty(0, 256), 3, "mcg").shape == (0, 256)


@pytest.mark.parametrize(
    ("tiles", "message"),
    [
        (torch.zeros(2, 255), r"tiles: expected torch.float32 \(n, 256\).*\(2, 255\)"),
        (torch.zeros(256), "tiles: expected"),
        (torch.zeros(1, 256, dtype=torch.float64), "float64"),
        (torch.full((1, 256), float("nan")), "finite"),
        (torch.full((1, 256), float("-inf")), "finite"),
        (torch.full((1, 256), 65536.0), "65504"),
    ],
)
def test_refused_tiles(tiles: torch.Tensor, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        encode_tiles(tiles, 3, "mcg")


def test_refused_rates() -> None:
    for bits, codebook in ((2.5, "mcg"), (9, "mul1"), (0, "mcg"), (3, "2mad")):
        with pytest.raises(FormatError):
            encode_tiles(torch.zeros(1, 256), bits, codebook)


def test_a_tier_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cpu_isa() < 9
    monkeypatch.setattr("exl3kit.kernels.encode.ISA_NAMES", [f"tier{i}" for i in range(10)])
    with pytest.raises(CompileError, match="tier9"):
        encode_tiles(torch.zeros(1, 256), 3, "mcg", isa=9)
