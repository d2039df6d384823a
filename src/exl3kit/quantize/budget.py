"""A recipe's rules, groups and mean bits, made into the bits of every matrix."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from exl3kit.models.base import ModelMap
from exl3kit.quantize.allocate import Expert, adjacent_rates, allocate
from exl3kit.quantize.bit_plan import BitPlan, Bits
from exl3kit.quantize.recipe import Recipe, RecipeError


def is_budget(bits: Bits | BitPlan, codebook: str) -> bool:
    """True for a mean that no single rate of the codebook gives, so that experts differ."""
    return not isinstance(bits, BitPlan) and len(adjacent_rates(bits, codebook)) > 1


def plan_bits(
    recipe: Recipe,
    model: ModelMap,
    layers: Collection[int],
    bits: Bits,
    codebook: str,
    weights: Mapping[Expert, float] | None = None,
    by_layer: bool = False,
) -> BitPlan:
    """The plan for the routed experts of `layers`, at `bits` in the mean, and the recipe's modules.

    Experts that a rule names have the rule's bits and are outside the mean; so are those of
    next-token layers, which have the rate below it. `weights` are the other experts' (see
    `sensitivity`); without them the first has the rate above and the others that below: a plan to
    check a job by. With `by_layer` the experts of a layer get the same bits, for readers that
    want it so, and each layer counts once. FormatError for `bits` beyond the codebook's rates,
    RecipeError for a rule that keeps some experts of a layer.
    """
    rates = adjacent_rates(bits, codebook)
    fixed = recipe.expert_bits(model)
    free = [(x, e) for x in layers for e in range(model.num_experts) if (x, e) not in fixed]
    counted = [expert for expert in free if expert[0] not in model.mtp_layers]
    chosen: dict[Expert, Bits | None] = {**fixed, **dict.fromkeys(free, rates[0])}
    if weights is not None:
        own = {expert: weights[expert] for expert in counted}
        chosen |= _whole_layers(own, bits, codebook) if by_layer else allocate(own, bits, codebook)
    else:
        chosen |= dict.fromkeys(counted[:1], rates[-1])
    experts = {}
    for layer in layers:
        known = [k for e in range(model.num_experts) if (k := chosen[layer, e]) is not None]
        if known and len(known) < model.num_experts:
            raise RecipeError(
                f"model.layers.{layer}.mlp.experts: rules keep {model.num_experts - len(known)} of "
                f"{model.num_experts} experts; a layer's are kept or quantised together"
            )
        if known:
            experts[layer] = tuple(known)
    return BitPlan(experts, recipe.module_bits(model))


def _whole_layers(weights: Mapping[Expert, float], bits: Bits, codebook: str) -> dict[Expert, Bits]:
    """Bits of each expert, shared out over layers by the sum of their experts' weights."""
    layers: dict[Expert, float] = {}
    for (layer, _), weight in weights.items():
        layers[layer, 0] = layers.get((layer, 0), 0.0) + weight
    chosen = allocate(layers, bits, codebook)
    return {(layer, expert): chosen[layer, 0] for layer, expert in weights}
