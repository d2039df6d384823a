"""Rules, groups and a mean to a plan."""

from __future__ import annotations

import pytest

from exl3kit.errors import FormatError
from exl3kit.models.registry import model_map
from exl3kit.quantize.bit_plan import BitPlan, uniform
from exl3kit.quantize.budget import is_budget, plan_bits
from exl3kit.quantize.recipe import Recipe, RecipeError, Rule
from exl3kit.testing.tiny_configs import tiny_config_of

MODEL = model_map(tiny_config_of("glm4_moe", num_layers=3, num_experts=4, mtp_layers=1))
LAYERS = (1, 2, 3)
WEIGHTS = {(layer, expert): 10.0 * layer + expert for layer in (1, 2) for expert in range(4)}


def test_a_rate_is_uniform() -> None:
    plan = plan_bits(Recipe(dense={"head": 6}), MODEL, LAYERS, 3, "mcg")
    assert plan == uniform(MODEL, LAYERS, 3, {"lm_head": 6})
    assert not is_budget(3, "mcg") and not is_budget(2.5, "mul1") and not is_budget(plan, "mcg")
    assert is_budget(2.5, "mcg") and is_budget(2.75, "mul1")


def test_a_mean_is_shared_out_by_weight_and_next_token_layers_stay_below() -> None:
    plan = plan_bits(Recipe(), MODEL, LAYERS, 3.25, "mcg", WEIGHTS)
    assert plan.experts == {1: (3, 3, 3, 3), 2: (3, 3, 4, 4), 3: (3, 3, 3, 3)}
    target = BitPlan({layer: plan.experts[layer] for layer in (1, 2)})
    assert target.expert_bits() == 3.25


def test_whole_layers_get_the_bits_where_they_must_be_alike() -> None:
    plan = plan_bits(Recipe(), MODEL, (1, 2), 2.5, "mcg", WEIGHTS, by_layer=True)
    assert plan.experts == {1: (2, 2, 2, 2), 2: (3, 3, 3, 3)}
    below = plan_bits(Recipe(), MODEL, (1, 2), 3.25, "mcg", WEIGHTS, by_layer=True)
    assert below == uniform(MODEL, (1, 2), 3)


def test_experts_that_a_rule_names_are_outside_the_mean() -> None:
    recipe = Recipe(rules=(Rule("*.2.mlp.experts.[23]", 6),))
    plan = plan_bits(recipe, MODEL, (1, 2), 2.5, "mcg", WEIGHTS)
    assert plan.experts == {1: (2, 2, 2, 3), 2: (3, 3, 6, 6)}


def test_without_weights_both_rates_are_there_to_be_checked() -> None:
    plan = plan_bits(Recipe(), MODEL, LAYERS, 3.25, "mcg")
    assert plan.experts == {1: (4, 3, 3, 3), 2: (3, 3, 3, 3), 3: (3, 3, 3, 3)}


def test_a_layer_is_kept_whole_or_not_at_all() -> None:
    whole = Recipe(rules=(Rule("model.layers.3.mlp.experts.*", None),))
    assert set(plan_bits(whole, MODEL, LAYERS, 3, "mcg").experts) == {1, 2}
    part = Recipe(rules=(Rule("*.experts.0", None),))
    with pytest.raises(RecipeError, match=r"layers\.1\.mlp\.experts: rules keep 1 of 4"):
        plan_bits(part, MODEL, LAYERS, 3, "mcg")


def test_a_mean_beyond_the_rates() -> None:
    with pytest.raises(FormatError, match="bits: expected 1 to 8, got 9"):
        plan_bits(Recipe(), MODEL, LAYERS, 9, "mcg")
