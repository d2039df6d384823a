"""The torch ops: registration, fakes, torch.compile, refusals, and the path without a compiler."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from exl3kit.errors import FormatError
from exl3kit.runtime import cpu_paths, ops
from exl3kit.runtime.experts import matrix_table
from exl3kit.runtime.ops import exl3_linear, exl3_moe
from exl3kit.runtime.reference import reference_linear, reference_moe
from exl3kit.testing.compare import assert_bitwise_equal, assert_three_gates
from exl3kit.testing.generate import random_exl3
from tests.kernels.cases import random_experts, random_routing, random_rows, true_linear

E, H, S = 4, 128, 256
WEIGHTS = random_exl3(256, 384, 3)
EXPERTS = random_experts(E, H, S)
MAP = torch.tensor([3, -1, 0, 1, 2, -1])
TABLE = matrix_table([(3, 3, 4)] * E, H, S)


def linear_arguments(tokens: int = 3, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Keyword arguments of a valid call."""
    return {
        "x": random_rows(tokens, 256, dtype),
        "trellis": WEIGHTS.trellis,
        "suh": WEIGHTS.suh,
        "svh": WEIGHTS.svh,
        "codebook": "mcg",
        "bias": None,
    }


def moe_arguments(tokens: int = 3, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Keyword arguments of a valid call."""
    weights, ids = random_routing(tokens, 2, len(MAP))
    routed = {"x": random_rows(tokens, H, dtype), "topk_weights": weights, "topk_ids": ids}
    options = {"codebook": "mcg", "expert_map": MAP, "matrices": None}
    return {**routed, **EXPERTS._asdict(), **options}


def test_opcheck() -> None:
    """Schema, fake against real, no aliasing, tracing with dynamic shapes; any dtype would do."""
    linear = linear_arguments(5, torch.bfloat16)
    linear["bias"] = random_rows(1, 384)[0]
    torch.library.opcheck(torch.ops.exl3.linear.default, tuple(linear.values()))
    moe = moe_arguments(5, torch.bfloat16)
    torch.library.opcheck(torch.ops.exl3.moe.default, tuple(moe.values()))


def test_registering_twice_is_harmless() -> None:
    before = exl3_linear(**linear_arguments())
    again = importlib.reload(ops)
    assert_bitwise_equal(again.exl3_linear(**linear_arguments()), before)
    torch.library.opcheck(torch.ops.exl3.linear.default, tuple(linear_arguments().values()))


@pytest.mark.parametrize("leading", [(), (0,), (4,), (2, 3)])
def test_leading_dimensions(leading: tuple[int, ...]) -> None:
    arguments = linear_arguments()
    arguments["x"] = random_rows(6, 256)[: torch.Size(leading).numel()].reshape(*leading, 256)
    y = exl3_linear(**arguments)
    assert y.shape == (*leading, 384)
    assert_three_gates(y, true_linear(arguments["x"], WEIGHTS), "float32")


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_equals_eager_for_every_batch(backend: str) -> None:
    """One graph: the first dimension is dynamic, and rows do not depend on it."""
    parts = (WEIGHTS.trellis, WEIGHTS.suh, WEIGHTS.svh, "mcg")

    def step(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        wide = exl3_moe(x, weights, ids, *EXPERTS, "mcg", MAP).repeat(1, 2)
        return exl3_linear(wide, *parts)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=backend)
    for tokens in (5, 2, 17, 1):
        routing = random_routing(tokens, 2, len(MAP))
        x = random_rows(tokens, H)
        assert_bitwise_equal(compiled(x, *routing), step(x, *routing), f"{tokens} tokens")


def test_no_tokens() -> None:
    y = exl3_moe(**moe_arguments(0, torch.bfloat16))
    assert y.shape == (0, H) and y.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_without_a_compiler_the_reference_runs(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_paths, "cpu_library", lambda: None)
    linear, moe = linear_arguments(3, dtype), moe_arguments(3, dtype)
    assert_bitwise_equal(ops.exl3_linear(**linear), reference_linear(**linear).to(dtype))
    assert_bitwise_equal(ops.exl3_moe(**moe), reference_moe(**moe).to(dtype))


Change = Callable[[torch.Tensor], Any]
LINEAR_REFUSALS: list[tuple[str, Change, str]] = [
    ("x", lambda x: x[:, :128].contiguous(), r"x has shape \(3, 128\), expected \(3, 256\)"),
    ("x", lambda x: x.t().contiguous().t(), "x has strides .*contiguous"),
    ("x", lambda x: x.double(), "x has dtype torch.float64, expected torch.float32 or"),
    ("x", lambda x: torch.tensor(1.0), r"x has shape \(\), expected \(…, 256\)"),
    ("suh", lambda x: x[:-1], r"suh has shape \(255,\), expected \(256,\)"),
    ("svh", lambda x: x.float(), "svh has dtype torch.float32, expected torch.float16"),
    ("svh", lambda x: x.repeat_interleave(2)[::2], "svh has strides"),
    ("bias", lambda _: torch.zeros(383), r"bias has shape \(383,\)"),
    ("trellis", lambda x: x.int(), "trellis has dtype torch.int32"),
    ("trellis", lambda x: x[..., :47], "trellis: .*expected one of .*got 47"),
    ("trellis", lambda x: x[..., :24], "trellis: bits: 1.5 exists with codebook mul1 only"),
    ("trellis", lambda x: x[:, :12], r"trellis holds a \(256, 192\) matrix, expected multiples"),
    ("trellis", lambda x: x[0], "expected torch.int16 with 3 dimensions"),
    ("codebook", lambda _: "mgc", "codebook: expected one of 3inst, mcg, mul1, got 'mgc'"),
]
MOE_REFUSALS: list[tuple[str, Change, str]] = [
    ("x", lambda x: x[:2], r"x has shape \(2, 128\), expected \(3, 128\)"),
    ("topk_weights", lambda x: x.half(), "topk_weights has dtype torch.float16"),
    ("topk_weights", lambda x: x[:, :1], r"topk_weights has shape \(3, 1\), expected \(3, 2\)"),
    ("topk_ids", lambda x: x.short(), "topk_ids has dtype torch.int16, expected torch.int32 or"),
    ("topk_ids", lambda x: x[0], r"topk_ids has shape \(2,\), expected \(T, top_k\)"),
    ("w13_trellis", lambda x: x[:, :3], r"w13_trellis has shape \(2, 3, .*expected \(2, 4"),
    ("w13_suh", lambda x: x[0], r"w13_suh has shape \(4, 128\), expected \(2, 4, 128\)"),
    ("w13_svh", lambda x: x.transpose(0, 1), "w13_svh has shape"),
    ("w2_trellis", lambda x: x[:, :8], r"w2_trellis has shape .*expected \(4, 16, 8, 64\)"),
    ("w2_trellis", lambda x: x.repeat_interleave(2, 3)[..., ::2], "w2_trellis has strides"),
    ("w2_suh", lambda x: x.float(), "w2_suh has dtype"),
    ("w2_svh", lambda x: x[:, :64], r"w2_svh has shape \(4, 64\), expected \(4, 128\)"),
    ("w13_suh", lambda x: x[:, :3], r"w13_suh has shape \(2, 3, 128\), expected \(2, 4, 128\)"),
    ("w2_svh", lambda x: x[:3], r"w2_svh has shape \(3, 128\), expected \(4, 128\)"),
    (
        "matrices",
        lambda _: TABLE,
        r"w13_trellis has shape \(2, 4, 8, 16, 48\), expected \(49152,\)",
    ),
    ("expert_map", lambda x: x.float(), "expert_map has dtype torch.float32"),
    ("expert_map", lambda x: x.view(2, 3), r"expert_map has shape \(2, 3\), expected \(6,\)"),
    ("expert_map", lambda x: x + 1, "expert_map: expected local ids below 4"),
]


@pytest.mark.parametrize(("name", "change", "message"), LINEAR_REFUSALS)
def test_linear_refuses(name: str, change: Change, message: str) -> None:
    arguments = linear_arguments()
    arguments[name] = change(arguments[name])
    with pytest.raises(FormatError, match=message):
        exl3_linear(**arguments)


@pytest.mark.parametrize(("name", "change", "message"), MOE_REFUSALS)
def test_moe_refuses(name: str, change: Change, message: str) -> None:
    arguments = moe_arguments()
    arguments[name] = change(arguments[name])
    with pytest.raises(FormatError, match=message):
        exl3_moe(**arguments)
