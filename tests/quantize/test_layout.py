"""Whole, cut first, cut last: names, parts and shapes agree with one another and with `slice`."""

from __future__ import annotations

import pytest
import torch

from exl3kit.errors import SliceError
from exl3kit.format.spec import Codebook
from exl3kit.format.tensors import Exl3Tensor
from exl3kit.models.base import LinearSpec, ShardKind
from exl3kit.quantize.layout import WHOLE, Layout, decode
from exl3kit.slicing.apply import cut_exl3
from tests.quantize import quick

CPU = torch.device("cpu")
UP = LinearSpec("up", 128, 512, ShardKind.COLUMN)
DOWN = LinearSpec("down", 512, 128, ShardKind.ROW)


def _weight(spec: LinearSpec) -> torch.Tensor:
    generator = torch.Generator().manual_seed(spec.in_features)
    return torch.randn(spec.in_features, spec.out_features, generator=generator)


def _quantised(spec: LinearSpec, layout: Layout) -> list[list[tuple[str, Exl3Tensor]]]:
    """The stored parts of each matrix, with their names."""
    stored = []
    pieces = layout.split(_weight(spec), None, spec.shard)
    for matrix, (weight, _) in zip(layout.matrices(spec.name), pieces, strict=True):
        ((tensor, _),) = quick.quantize_tensors([weight], [None], 2, Codebook.MCG, None, [7])
        stored.append([*zip(matrix.stored, layout.parts(tensor, spec.shard), strict=True)])
    return stored


@pytest.mark.parametrize("spec", [UP, DOWN], ids=lambda spec: spec.name)
@pytest.mark.parametrize("layout", [WHOLE, Layout(1), Layout(2), Layout(4, "cut")], ids=str)
def test_planned_entries_are_what_is_stored(spec: LinearSpec, layout: Layout) -> None:
    planned = {e.name: (e.dtype, e.shape) for e in layout.entries(spec, 2, Codebook.MCG)}
    stored = {
        f"{name}.{field}": (tensor.dtype, tuple(tensor.shape))
        for parts in _quantised(spec, layout)
        for name, part in parts
        for field, tensor in part.tensors().items()
    }
    assert stored == planned
    assert layout.stored(spec.name) == [n for parts in _quantised(spec, layout) for n, _ in parts]


@pytest.mark.parametrize("spec", [UP, DOWN], ids=lambda spec: spec.name)
def test_independent_parts_are_the_weights_channels_and_hessian_blocks(spec: LinearSpec) -> None:
    weight = _weight(spec)
    hessian = torch.randn(spec.in_features, spec.in_features)
    parts = Layout(4).split(weight, hessian, spec.shard)
    dim = 0 if spec.shard is ShardKind.ROW else 1
    assert torch.equal(torch.cat([part for part, _ in parts], dim), weight)
    for rank, (part, block) in enumerate(parts):
        assert part.is_contiguous()
        span = slice(128 * rank, 128 * rank + 128)
        expected = hessian[span, span] if spec.shard is ShardKind.ROW else hessian
        assert block is not None and torch.equal(block, expected)


@pytest.mark.parametrize("spec", [UP, DOWN], ids=lambda spec: spec.name)
def test_cut_parts_are_cuts_of_the_whole_and_decode_to_it(spec: LinearSpec) -> None:
    ((whole,),) = [[part for _, part in parts] for parts in _quantised(spec, WHOLE)]
    ((*cut,),) = [[part for _, part in parts] for parts in _quantised(spec, Layout(2, "cut"))]
    for rank, part in enumerate(cut):
        expected = cut_exl3(whole, spec.shard, range(256 * rank, 256 * rank + 256)).tensors()
        assert {k: v.tolist() for k, v in part.tensors().items()} == {
            k: v.tolist() for k, v in expected.items()
        }
    assert torch.equal(decode(cut, spec.shard, CPU), whole.dequantize())


def test_sizes_are_padded_and_biases_are_stored() -> None:
    spec = LinearSpec("head", 192, 320, ShardKind.COLUMN)
    entries = {e.name: e.shape for e in WHOLE.entries(spec, 1.5, "mul1", has_bias=True)}
    assert entries == {
        "head.trellis": (16, 24, 24),
        "head.suh": (256,),
        "head.svh": (384,),
        "head.mul1": (),
        "head.bias": (384,),
    }
    assert [e.name for e in WHOLE.entries(spec, 4, "3inst")] == [*entries][:3]


def test_a_cut_inside_a_block_is_refused() -> None:
    with pytest.raises(SliceError, match="tp values that work: 1, 2, 4"):
        Layout(3).split(_weight(UP), None, UP.shard)
