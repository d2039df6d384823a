"""The numpy encoder against exllamav3 and the compiled one, and its use without a compiler."""

from __future__ import annotations

import pytest
import torch

from exl3kit.format.codebook import codebook_values
from exl3kit.format.spec import GAUSS_SCALE, Codebook
from exl3kit.quantize import viterbi
from tests import golden


@pytest.mark.parametrize(
    ("bits", "codebook"),
    [(1, Codebook.MCG), (1.5, Codebook.MUL1), (3, Codebook.THREE_INST), (8, Codebook.MUL1)],
)
def test_golden_states(bits: int | float, codebook: Codebook) -> None:
    scale = 1.0 if codebook is Codebook.MUL1 else GAUSS_SCALE
    tiles = golden.tensors()["enc.tiles"][:2] * torch.tensor(scale, dtype=torch.float32)
    stored = golden.tensors()[f"enc.{golden.tag(bits, codebook)}.states"].int() & 0xFFFF
    assert torch.equal(viterbi.reference_encode(tiles, bits, codebook), stored[:2])


def test_ties_and_overflow_as_the_kernel_has_them() -> None:
    """Equal costs everywhere: all targets on one value, all targets out of range."""
    value = codebook_values(Codebook.MUL1)[4711].float()
    tiles = torch.stack([value.expand(256), torch.full((256,), 60000.0)])
    kernel = viterbi.encode(tiles, 4, "mul1")
    assert torch.equal(viterbi.reference_encode(tiles, 4, "mul1"), kernel)


def test_reference_is_used_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the kernel was called")

    monkeypatch.setattr(viterbi, "cpu_library", lambda: None)
    monkeypatch.setattr(viterbi, "encode_tiles", refuse)
    stored = golden.tensors()["enc.k8.mul1.states"].int() & 0xFFFF
    assert torch.equal(viterbi.encode(golden.tensors()["enc.tiles"][:1], 8, "mul1"), stored[:1])


def test_no_tiles() -> None:
    assert viterbi.reference_encode(torch.empty(0, 256), 3, "mcg").shape == (0, 256)
