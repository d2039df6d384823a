"""What a bit plan averages to, and every plan that no file could hold is refused by name."""

from __future__ import annotations

import pytest

from exl3kit.checkpoint.open import ORDINARY, RANK_SLICED
from exl3kit.errors import FormatError, UnsupportedError
from exl3kit.models.registry import model_map
from exl3kit.quantize.bit_plan import BitPlan, dense_linears, is_kept, uniform
from exl3kit.testing.tiny_configs import tiny_config_of

MODEL = model_map(tiny_config_of("glm4_moe", num_layers=3, num_experts=4, mtp_layers=1))
EXPERT = 3 * 256 * 256


def test_uniform_gives_every_expert_of_the_layers_the_same_bits() -> None:
    plan = uniform(MODEL, range(1, 3), 3)
    assert plan.experts == {1: (3, 3, 3, 3), 2: (3, 3, 3, 3)}
    assert plan.modules == {}
    plan.check(MODEL, RANK_SLICED, "mcg")
    assert plan.average_bits(MODEL) == plan.expert_bits() == 3


def test_average_counts_weights_not_matrices() -> None:
    modules = {"model.layers.0.mlp.down_proj": 6, "lm_head": 4}
    plan = BitPlan({1: (2, 3, 3, 4), 2: (2, 2, 2, 2)}, modules)
    sizes = {"model.layers.0.mlp.down_proj": 512 * 256, "lm_head": 256 * 320}
    spent = EXPERT * (12 + 8) + sum(sizes[n] * modules[n] for n in modules)
    weights = EXPERT * 8 + sum(sizes.values())
    assert plan.average_bits(MODEL) == pytest.approx(spent / weights)
    assert plan.expert_bits() == 2.5


def test_an_empty_plan_averages_to_nothing() -> None:
    assert BitPlan({}).average_bits(MODEL) == BitPlan({}).expert_bits() == 0


@pytest.mark.parametrize("bits", [1, 7, 2.5, 3.0, True])
def test_rates_a_rank_slice_cannot_have(bits: float) -> None:
    plan = uniform(MODEL, [1], bits)
    with pytest.raises(FormatError, match=r"layers\.1\.mlp\.experts\.0: bits: expected a whole"):
        plan.check(MODEL, RANK_SLICED, "mcg")


def test_ordinary_files_have_one_to_eight_bits_and_with_mul1_halves() -> None:
    for bits in (1, 7, 8):
        uniform(MODEL, [1], bits).check(MODEL, ORDINARY, "mcg")
    uniform(MODEL, [1], 2.5, {"lm_head": 3.5}).check(MODEL, ORDINARY, "mul1")
    with pytest.raises(FormatError, match=r"experts\.0: bits: 2\.5 exists with codebook mul1 only"):
        uniform(MODEL, [1], 2.5).check(MODEL, ORDINARY, "mcg")
    with pytest.raises(FormatError, match=r"lm_head: bits: expected one of .* got 9"):
        uniform(MODEL, [1], 3, {"lm_head": 9}).check(MODEL, ORDINARY, "mcg")


def test_layers_and_experts_must_be_the_models() -> None:
    with pytest.raises(FormatError, match=r"layer 0: expected .* one of \[1, 2, 3\]"):
        uniform(MODEL, [0], 3).check(MODEL, RANK_SLICED, "mcg")
    with pytest.raises(FormatError, match="layer 2: expected the bits of 4 experts, got 3"):
        BitPlan({2: (3, 3, 3)}).check(MODEL, RANK_SLICED, "mcg")


def test_modules_must_be_the_models_and_quantisable() -> None:
    with pytest.raises(FormatError, match=r"'model\.layers\.0\.mlp\.dwon_proj': expected a linear"):
        BitPlan({}, {"model.layers.0.mlp.dwon_proj": 4}).check(MODEL, RANK_SLICED, "mcg")
    with pytest.raises(UnsupportedError, match=r"layers\.3\.eh_proj: has to stay unquantised"):
        BitPlan({}, {"model.layers.3.eh_proj": 4}).check(MODEL, ORDINARY, "mcg")


def test_what_stays_unquantised_everywhere() -> None:
    sparse = model_map(tiny_config_of("deepseek_v32", mtp_layers=1))
    kept = {name.partition("layers.")[2] for name in dense_linears(sparse) if is_kept(name)}
    attention = ("kv_b_proj", "indexer.wq_b", "indexer.wk", "indexer.weights_proj")
    expected = {f"{layer}.self_attn.{name}" for layer in range(3) for name in attention}
    assert kept == expected | {"1.mlp.gate", "2.mlp.gate", "2.eh_proj"}
