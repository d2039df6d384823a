"""A recipe: which bits each part of a model gets, and what it is calibrated on.

`recipe_file` reads one from TOML:

    experts = 3.25                      # mean bits of the routed experts
    mtp = "bf16"                        # experts of next-token layers: "bf16" or "trellis"
    seed = 0

    [dense]                             # what else becomes EXL3, by group; the rest is copied
    attention = 5
    shared_experts = 6
    head = 6

    [calibration]
    files = ["prose.txt", "chat.jsonl"]
    rows = 256

    [[rules]]                           # exceptions; where several match, the last one holds
    modules = "model.layers.[12].mlp.experts.*"
    bits = 4

    [[rules]]
    modules = "*.o_proj"
    bits = "keep"

A pattern is a shell glob over the names of the model's linears, a routed expert being one module
(`model.layers.3.mlp.experts.7`). As in exllamav3's recipes the last match holds, so exceptions
follow what they are exceptions to. Linears that every EXL3 file keeps dense (router, kv_b_proj,
eh_proj, indexer) are no modules here. `experts` is the mean over the experts that no rule names.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from exl3kit.errors import Exl3Error
from exl3kit.log import get_logger
from exl3kit.models.base import ModelMap
from exl3kit.quantize.bit_plan import HEAD, Bits, dense_linears, is_kept
from exl3kit.quantize.calibration import DEFAULT_COLS, DEFAULT_ROWS

_log = get_logger(__name__)

MtpMode = Literal["bf16", "trellis"]

# The linears of each group of `[dense]`, without those that are always kept.
GROUPS = {
    "attention": re.compile(r"model\.layers\.\d+\.self_attn\..*"),
    "mlp": re.compile(r"model\.layers\.\d+\.mlp\.(gate|up|down)_proj"),
    "shared_experts": re.compile(r"model\.layers\.\d+\.mlp\.shared_experts\..*"),
    "head": re.compile(HEAD),
}


class RecipeError(Exl3Error, ValueError):
    """A recipe that cannot be followed; the message names the file and the key."""


@dataclass(frozen=True)
class Rule:
    """`bits` for all modules that match the glob `modules`; None keeps them as they are."""

    modules: str
    bits: Bits | None


@dataclass(frozen=True)
class CalibrationRecipe:
    """Texts (none: the bundled one), rows and columns; see `calibration.calibration_rows`.

    `route_all` makes every expert's Hessian of all tokens, whatever the router says.
    """

    files: tuple[Path, ...] = ()
    text_field: str | None = None
    rows: int = DEFAULT_ROWS
    cols: int = DEFAULT_COLS
    route_all: bool = False


@dataclass(frozen=True)
class Recipe:
    """What a recipe file says. `experts` is None where it leaves the bits to the command line."""

    experts: Bits | None = None
    mtp: MtpMode = "bf16"
    seed: int = 0
    dense: Mapping[str, Bits] = field(default_factory=dict)
    calibration: CalibrationRecipe = CalibrationRecipe()
    rules: tuple[Rule, ...] = ()

    def overridden(
        self,
        experts: Bits | None = None,
        mtp: MtpMode | None = None,
        seed: int | None = None,
        dense: Mapping[str, Bits] | None = None,
        files: tuple[Path, ...] | None = None,
        text_field: str | None = None,
        rows: int | None = None,
        cols: int | None = None,
        route_all: bool | None = None,
    ) -> Recipe:
        """This recipe with what the command line says instead; None leaves the recipe's value.

        Groups of `dense` replace one by one.
        """
        top = _given(experts=experts, mtp=mtp, seed=seed)
        texts = _given(
            files=files, text_field=text_field, rows=rows, cols=cols, route_all=route_all
        )
        calibration = replace(self.calibration, **texts)
        return replace(self, **top, dense={**self.dense, **(dense or {})}, calibration=calibration)

    def module_bits(self, model: ModelMap) -> dict[str, Bits]:
        """Bits of every linear other than routed experts that becomes EXL3, by name.

        RecipeError for a rule that matches no module of the model at all.
        """
        names = [name for name in dense_linears(model) if not is_kept(name)]
        chosen = {name: bits for name in names if (bits := self._group_bits(name)) is not None}
        for rule in self.rules:
            matched = [name for name in names if fnmatchcase(name, rule.modules)]
            if not matched and not _experts_of(rule, model):
                raise RecipeError(
                    f"rule {rule.modules!r}: expected a pattern of linears of the model, as "
                    f"{names[0]!r}; nothing has such a name"
                )
            for name in matched:
                chosen.pop(name, None)
                if rule.bits is not None:
                    chosen[name] = rule.bits
        return chosen

    def expert_bits(self, model: ModelMap) -> dict[tuple[int, int], Bits | None]:
        """(layer, expert) -> bits of the routed experts that a rule names; None keeps them."""
        fixed: dict[tuple[int, int], Bits | None] = {}
        for rule in self.rules:
            fixed.update(dict.fromkeys(_experts_of(rule, model), rule.bits))
        return fixed

    def check_used(self, model: ModelMap, copied: Collection[int]) -> None:
        """RecipeError for a rule with bits for next-token layers alone, those of `copied`, which
        stay as they are; a warning for a group of linears that the model does not have."""
        names = [name for name in dense_linears(model) if not is_kept(name)]
        for group in self.dense:
            if not any(map(GROUPS[group].fullmatch, names)):
                _log.warning("dense %s: the model has no such linears", group)
        inside = tuple(f"model.layers.{layer}." for layer in copied)
        for rule in self.rules:
            matched = [name for name in names if fnmatchcase(name, rule.modules)]
            matched += [f"model.layers.{x}.mlp.experts.{e}" for x, e in _experts_of(rule, model)]
            if rule.bits is not None and all(name.startswith(inside) for name in matched):
                raise RecipeError(
                    f"rule {rule.modules!r}: matches next-token layers only, which are copied; "
                    "give mtp 'trellis' to quantise them"
                )

    def _group_bits(self, name: str) -> Bits | None:
        groups = (group for group in self.dense if GROUPS[group].fullmatch(name))
        return next((self.dense[group] for group in groups), None)


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _experts_of(rule: Rule, model: ModelMap) -> list[tuple[int, int]]:
    """(layer, expert) of the routed experts whose name the rule's pattern matches."""
    return [
        (layer, expert)
        for layer in model.moe_layers
        for expert in range(model.num_experts)
        if fnmatchcase(f"model.layers.{layer}.mlp.experts.{expert}", rule.modules)
    ]
