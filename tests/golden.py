"""The vectors made by exllamav3 itself (tests/data/golden), read once for every test."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from exl3kit.format.spec import HALF_BITS, INTEGER_BITS, Codebook
from exl3kit.format.tensors import Exl3Tensor

FOLDER = Path(__file__).parent / "data" / "golden"

COMBINATIONS: list[tuple[int | float, Codebook]] = [
    *((bits, codebook) for bits in INTEGER_BITS for codebook in Codebook),
    *((bits, Codebook.MUL1) for bits in HALF_BITS),
]


@cache
def tensors() -> dict[str, torch.Tensor]:
    """Every stored tensor by name."""
    return load_file(FOLDER / "exl3_golden.safetensors")


@cache
def manifest() -> dict[str, Any]:
    """The generator's manifest: digests, proxy errors, scales."""
    return json.loads((FOLDER / "manifest.json").read_text())


def tag(bits: int | float, codebook: Codebook) -> str:
    """Name of a combination in the files: k3.mcg, k1p5.mul1."""
    return f"k{str(bits).replace('.', 'p')}.{codebook}"


def combination(bits: int | float, codebook: Codebook) -> dict[str, Any]:
    """The manifest's row of a combination."""
    wanted = f"A.{tag(bits, codebook)}"
    return next(row for row in manifest()["combos"] if row["tag"] == wanted)


def exl3_tensor(bits: int | float, codebook: Codebook) -> Exl3Tensor:
    """The stored linear of a combination."""
    prefix = f"A.{tag(bits, codebook)}."
    stored = {name.removeprefix(prefix): tensor for name, tensor in tensors().items()}
    return Exl3Tensor(
        stored["trellis"], stored["suh"], stored["svh"], stored.get("mcg"), stored.get("mul1")
    )
