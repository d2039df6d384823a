"""Which bits every matrix of a job gets: the one object that allocation, recipe and job share."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from exl3kit.checkpoint.manifest import MAX_BITS, MIN_BITS
from exl3kit.checkpoint.open import RANK_SLICED
from exl3kit.errors import FormatError, UnsupportedError
from exl3kit.format.spec import check_bits
from exl3kit.models.base import LinearSpec, ModelMap, ShardKind

Bits = int | float  # a rate: whole, or with mul1 a half
HEAD = "lm_head"
# Linears that stay as they are: the router decides on small differences of its scores; engines hold
# eh_proj and the indexer as plain linears and absorb kv_b_proj into the attention as a dense one.
_KEPT = re.compile(r".*\.(mlp\.gate|kv_b_proj|eh_proj|indexer\.\w+)")


@dataclass(frozen=True)
class BitPlan:
    """`experts[layer][e]` is the K of routed expert e, gate, up and down alike.

    `modules[name]` is that of another linear that becomes EXL3, named as in `ModelMap.linears`, or
    of `lm_head`. What is named in neither is copied as it is.
    """

    experts: Mapping[int, tuple[Bits, ...]]
    modules: Mapping[str, Bits] = field(default_factory=dict)

    def check(self, model: ModelMap, dialect: str, codebook: str) -> None:
        """Raise unless a file of `dialect` ("rank-sliced" or "ordinary") can hold this plan.

        FormatError: a rate the format or the dialect lacks (experts of rank-sliced files have 2 to
        6 whole bits), a layer without routed experts or with another number of them, an unknown
        module. UnsupportedError: a module that has to stay unquantised.
        """
        for layer, rates in self.experts.items():
            _check_layer(model, layer, rates)
            for expert, bits in enumerate(rates):
                where = f"model.layers.{layer}.mlp.experts.{expert}"
                _check_rate(where, bits, codebook, is_slice=dialect == RANK_SLICED)
        if self.modules:
            known = dense_linears(model)
            for name, bits in self.modules.items():
                _check_module(name, known)
                _check_rate(name, bits, codebook)

    def average_bits(self, model: ModelMap) -> float:
        """Mean bits over all weights that become EXL3, each weight counted once; 0 for none."""
        one_expert = 3 * model.hidden_size * model.moe_intermediate_size
        weights = one_expert * sum(map(len, self.experts.values()))
        spent = one_expert * sum(map(sum, self.experts.values()))
        known = dense_linears(model) if self.modules else {}
        for name, bits in self.modules.items():
            size = known[name].in_features * known[name].out_features
            weights, spent = weights + size, spent + size * bits
        return spent / weights if weights else 0.0

    def expert_bits(self) -> float:
        """Mean bits of the routed experts, which all have one size; 0 for none."""
        rates = [bits for layer in self.experts.values() for bits in layer]
        return sum(rates) / len(rates) if rates else 0.0


def uniform(
    model: ModelMap,
    layers: Iterable[int],
    bits: Bits,
    modules: Mapping[str, Bits] | None = None,
) -> BitPlan:
    """The same `bits` for every routed expert of `layers`."""
    return BitPlan(dict.fromkeys(layers, (bits,) * model.num_experts), dict(modules or {}))


def dense_linears(model: ModelMap) -> dict[str, LinearSpec]:
    """Every linear that is no routed expert, by name, `lm_head` last."""
    found = {spec.name: spec for layer in model.layers for spec in model.linears(layer)}
    head = LinearSpec(HEAD, model.hidden_size, model.vocab_size, ShardKind.COLUMN)
    return {**found, HEAD: head}


def is_kept(name: str) -> bool:
    """True for a linear that stays unquantised in every EXL3 file: router, eh_proj and the like."""
    return _KEPT.fullmatch(name) is not None


def _check_layer(model: ModelMap, layer: int, rates: tuple[Bits, ...]) -> None:
    if layer not in model.moe_layers:
        raise FormatError(
            f"bit plan: layer {layer}: expected a layer with routed experts, one of "
            f"{list(model.moe_layers)}"
        )
    if len(rates) != model.num_experts:
        raise FormatError(
            f"bit plan: layer {layer}: expected the bits of {model.num_experts} experts, "
            f"got {len(rates)}"
        )


def _check_rate(where: str, bits: Bits, codebook: str, is_slice: bool = False) -> None:
    """FormatError unless the format has the rate, and a rank slice may have it."""
    if is_slice and (type(bits) is not int or not MIN_BITS <= bits <= MAX_BITS):
        raise FormatError(
            f"{where}: bits: expected a whole number from {MIN_BITS} to {MAX_BITS} for a "
            f"rank-sliced expert, got {bits!r}"
        )
    try:
        check_bits(bits, codebook)
    except FormatError as error:
        raise FormatError(f"{where}: {error}") from None


def _check_module(name: str, known: Mapping[str, LinearSpec]) -> None:
    if name not in known:
        raise FormatError(
            f"bit plan: module {name!r}: expected a linear of the model, as {next(iter(known))!r}"
        )
    if is_kept(name):
        raise UnsupportedError(f"{name}: has to stay unquantised; leave it out of the plan")
