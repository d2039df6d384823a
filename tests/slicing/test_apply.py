"""A cut EXL3 linear decodes to exactly the cut of the decoded linear."""

from __future__ import annotations

import pytest
import torch

from exl3kit.errors import SliceError
from exl3kit.format.spec import SUPPORTED_BITS
from exl3kit.format.tensors import Exl3Tensor
from exl3kit.models.base import ShardKind
from exl3kit.slicing.apply import cut_dense, cut_exl3
from exl3kit.testing.generate import random_exl3


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
@pytest.mark.parametrize("kind", [ShardKind.COLUMN, ShardKind.ROW])
def test_decode_of_the_cut_is_the_cut_of_the_decode(bits: float, kind: ShardKind) -> None:
    whole = random_exl3(256, 256, bits, "mul1", seed=int(2 * bits))
    dense = whole.dequantize(torch.float64)
    for channels in (range(0, 128), range(128, 256)):
        part = cut_exl3(whole, kind, channels)
        assert (part.bits, part.codebook) == (whole.bits, whole.codebook)
        assert torch.equal(part.dequantize(torch.float64), cut_dense(dense, kind, channels))


def test_row_slices_add_up_to_the_whole_product() -> None:
    whole = random_exl3(512, 256, 3)
    x = torch.randn(5, 512, dtype=torch.float64)
    parts = [range(0, 128), range(128, 512)]
    partial = [
        x[:, list(channels)] @ cut_exl3(whole, ShardKind.ROW, channels).dequantize(torch.float64)
        for channels in parts
    ]
    torch.testing.assert_close(sum(partial), x @ whole.dequantize(torch.float64))


def test_codebooks_and_names_are_kept() -> None:
    for codebook in ("3inst", "mcg", "mul1"):
        whole = random_exl3(256, 128, 4, codebook, name="a.b")
        part = cut_exl3(whole, ShardKind.ROW, range(0, 128))
        assert (part.codebook, part.name) == (codebook, "a.b")


def test_bias_follows_the_output_side_only() -> None:
    made = random_exl3(128, 256, 2)
    bias = torch.arange(256).half()
    whole = Exl3Tensor(**made.tensors() | {"bias": bias}, name="q_proj")
    part = cut_exl3(whole, ShardKind.COLUMN, range(128, 256))
    assert part.bias is not None and torch.equal(part.bias, bias[128:])
    with pytest.raises(SliceError, match=r"q_proj: row cut: a bias"):
        cut_exl3(whole, ShardKind.ROW, range(0, 128))


def test_replicated_is_unchanged_and_illegal_cuts_name_the_tensor() -> None:
    whole = random_exl3(256, 256, 2, name="up_proj")
    assert cut_exl3(whole, ShardKind.REPLICATED, range(0, 1)) is whole
    with pytest.raises(SliceError, match=r"up_proj: column cut.*64 to 192"):
        cut_exl3(whole, ShardKind.COLUMN, range(64, 192))
    with pytest.raises(SliceError, match="row cut"):
        cut_dense(torch.ones(256, 256), ShardKind.ROW, range(0, 64))
