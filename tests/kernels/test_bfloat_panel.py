"""Prefill in bf16 by the library's product, against the format, float64, and the fused kernels."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from exl3kit.errors import FormatError
from exl3kit.format.decode import decode_inner
from exl3kit.format.spec import Codebook
from exl3kit.jit import cpu
from exl3kit.kernels import bfloat_panel
from exl3kit.kernels.cuda_moe import MoeWeights
from exl3kit.runtime.ops import exl3_linear, exl3_moe
from exl3kit.runtime.reference import reference_linear, reference_moe
from exl3kit.testing.compare import assert_bitwise_equal, assert_three_gates
from exl3kit.testing.generate import random_exl3
from tests.golden import COMBINATIONS
from tests.kernels.cases import (
    DTYPES,
    MIXED_RATES,
    TOKENS,
    Routing,
    linears_of,
    mixed_experts,
    random_experts,
    random_routing,
    random_rows,
    shifted,
    true_linear,
    true_sum,
)

cached_weights = cache(random_exl3)
WEIGHTS = cached_weights(256, 384, 3, "mcg")
PARTS = (WEIGHTS.trellis, WEIGHTS.suh, WEIGHTS.svh, "mcg")
# Position within 16 rows -> row, as tiles store them.
ORDER = torch.tensor([2 * (i // 4) + i % 2 + 8 * (i % 4 // 2) for i in range(16)])
E, H, S, TOP_K = 5, 256, 128, 3
EXPERTS = MoeWeights(*random_experts(E, H, S))


@pytest.fixture
def narrow_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    """256 columns at k = 256, so that the 384 of WEIGHTS are a whole panel and a part of one."""
    monkeypatch.setattr(bfloat_panel, "PANEL_BYTES", (256 * 256 * 2) // torch.get_num_threads())


@pytest.mark.parametrize(("bits", "codebook"), COMBINATIONS)
def test_panels_are_the_format_rounded(bits: int | float, codebook: Codebook, isa: int) -> None:
    weights = cached_weights(256, 384, bits, codebook)
    rows = (torch.arange(0, 256, 16).unsqueeze(1) + ORDER).flatten()
    expected = decode_inner(weights.trellis, codebook).float().bfloat16()[rows].T.contiguous()
    for first, columns in ((0, 384), (128, 128), (128, 256)):
        panel = torch.full((columns, 256), torch.nan, dtype=torch.bfloat16)
        bfloat_panel.decode(weights.trellis, codebook, first, panel, isa)
        assert_bitwise_equal(panel, expected[first : first + columns], f"columns from {first}")


@pytest.mark.parametrize(("bits", "codebook"), COMBINATIONS)
def test_every_rate_and_codebook(bits: int | float, codebook: Codebook, isa: int) -> None:
    weights = cached_weights(256, 384, bits, codebook)
    x = random_rows(33, 256)
    y = bfloat_panel.linear(x, weights.trellis, weights.suh, weights.svh, codebook, isa=isa)
    assert_three_gates(y, true_linear(x, weights), "bfloat_panel_float32")


@pytest.mark.usefixtures("narrow_panels")
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_of_tokens(dtype: str, isa: int) -> None:
    for tokens in TOKENS:
        x = random_rows(tokens, 256, DTYPES[dtype])
        y = bfloat_panel.linear(x, *PARTS, isa=isa)
        assert y.dtype == x.dtype and y.shape == (tokens, 384)
        expected = true_linear(x, WEIGHTS)
        assert_three_gates(y, expected, f"bfloat_panel_{dtype}", f"{tokens} tokens")


def test_no_farther_from_the_truth_than_a_bf16_model_by_half(isa: int) -> None:
    """One rounding more than a bf16 model's (the rotated product): 3.3e-3 to its 2.35e-3, RMS."""
    x = random_rows(145, 256, torch.bfloat16)
    truth = true_linear(x, WEIGHTS)
    dense = x @ WEIGHTS.dequantize().bfloat16()
    ours = bfloat_panel.linear(x, *PARTS, isa=isa)
    assert (ours - truth).norm() < 1.5 * (dense - truth).norm()


@pytest.mark.usefixtures("narrow_panels")
@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_is_added_before_the_rounding(dtype: str, isa: int) -> None:
    bias = random_rows(1, 384, DTYPES[dtype])[0]
    x = random_rows(33, 256)
    expected = bfloat_panel.linear(x, *PARTS, isa=isa) + bias
    assert_bitwise_equal(bfloat_panel.linear(x, *PARTS, bias, isa=isa), expected)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_poison_stays_in_its_row(poison: float, isa: int) -> None:
    x = random_rows(40, 256, torch.bfloat16)
    x[4, 77] = poison
    y = bfloat_panel.linear(x, *PARTS, isa=isa)
    expected = reference_linear(x, *PARTS, dtype=torch.float64)
    assert_three_gates(y, expected, "bfloat_panel_bfloat16")


def test_unaligned(isa: int) -> None:
    x = random_rows(40, 256, torch.bfloat16)
    parts = (shifted(WEIGHTS.trellis), shifted(WEIGHTS.suh), shifted(WEIGHTS.svh), "mcg")
    y = bfloat_panel.linear(shifted(x), *parts, isa=isa)
    assert_bitwise_equal(y, bfloat_panel.linear(x, *PARTS, isa=isa))


@pytest.mark.usefixtures("narrow_panels")
def test_threads_do_not_show(isa: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of decoding and both rotations; the product, whose threads are the library's, is float64."""
    monkeypatch.setattr(torch, "mm", lambda a, b: (a.double() @ b.double()).bfloat16())
    x, before = random_rows(145, 256, torch.bfloat16), torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(bfloat_panel.linear(x, *PARTS, isa=isa))
    finally:
        torch.set_num_threads(before)
    for y in results[1:]:
        assert_bitwise_equal(y, results[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_experts(dtype: str, isa: int) -> None:
    x, routing = random_rows(145, H, DTYPES[dtype]), random_routing(145, TOP_K, E)
    y = bfloat_panel.moe(x, *routing, EXPERTS, "mcg", isa=isa)
    expected = reference_moe(x, *routing, *EXPERTS[:6], "mcg", dtype=torch.float64)
    assert y.dtype == x.dtype
    assert_three_gates(y, expected, f"bfloat_panel_moe_{dtype}")


def test_experts_of_several_rates(isa: int) -> None:
    stacked, matrices = mixed_experts(MIXED_RATES, H, S)
    x, routing = random_rows(60, H), random_routing(60, TOP_K, E)
    y = bfloat_panel.moe(x, *routing, MoeWeights(*stacked, matrices), "mcg", isa=isa)
    expected = true_sum(x, routing, linears_of(MIXED_RATES, H, S, "mcg"))
    assert_three_gates(y, expected, "bfloat_panel_moe_float32")


def test_routes_that_add_nothing(isa: int) -> None:
    """Elsewhere by the map, outside the model, weight zero: also beside a row of NaN."""
    here = torch.tensor([-1, 4, 0, -1, 2, 1, -1, 3], dtype=torch.int32)
    x, routing = random_rows(40, H), random_routing(40, TOP_K, 8)
    routing.weights[7], routing.ids[8], x[9] = 0.0, -1, torch.nan
    routing.ids[9] = 0
    y = bfloat_panel.moe(x, *routing, EXPERTS, "mcg", here, isa=isa)
    expected = reference_moe(x, *routing, *EXPERTS[:6], "mcg", expert_map=here, dtype=torch.float64)
    assert_three_gates(y, expected, "bfloat_panel_moe_float32")
    assert_bitwise_equal(y[7:10], torch.zeros(3, H))


def test_a_map_to_an_expert_that_is_not_there() -> None:
    here = torch.tensor([0, 1, 2, 3, E], dtype=torch.int32)
    x, routing = random_rows(40, H), Routing(torch.ones(40, 1), torch.full((40, 1), 4))
    with pytest.raises(FormatError, match=f"expert_map: expected local ids below {E}"):
        bfloat_panel.moe(x, *routing, EXPERTS, "mcg", here)


@pytest.mark.parametrize("has_units", [True, False])
def test_only_many_rows_of_bf16_on_a_machine_that_multiplies_them(
    has_units: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything else has the bits of the fused kernels, whose rows do not see their batch."""
    if cpu.cpu_library() is None:
        pytest.skip("no C++ compiler: the reference runs")
    monkeypatch.setattr(bfloat_panel, "has_bfloat_units", lambda: has_units)
    for dtype in DTYPES.values():
        x = random_rows(64, 256, dtype)
        alone = torch.cat([exl3_linear(row, *PARTS) for row in x.split(31)])
        assert torch.equal(exl3_linear(x, *PARTS), alone) != (has_units and dtype == torch.bfloat16)
        # 53 tokens with 3 slots are 31.8 rows for each of the 5 experts.
        routing = random_routing(54, TOP_K, E)
        first = Routing(routing.weights[:53], routing.ids[:53])
        few = exl3_moe(x[:53], *first, *EXPERTS[:6], "mcg")
        many = exl3_moe(x[:54], *routing, *EXPERTS[:6], "mcg")
        assert torch.equal(few, many[:53]) != (has_units and dtype == torch.bfloat16)


def test_a_low_tier_keeps_to_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """EXL3KIT_CPU_ISA below avx512 turns the path off, also where the machine has the units."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    for tier in cpu.ISA_NAMES:
        bfloat_panel.has_bfloat_units.cache_clear()
        monkeypatch.setattr(bfloat_panel, "cpu_isa", lambda tier=tier: cpu.ISA_NAMES.index(tier))
        assert bfloat_panel.has_bfloat_units() == tier.startswith("avx512")
    bfloat_panel.has_bfloat_units.cache_clear()
