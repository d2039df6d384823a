"""Are the names, dtypes and shapes of a checkpoint those its manifest and its model call for?

Works on headers only. A module may be stored in any of the forms that `forms` knows, in every
dialect: what is there decides, and it must be complete.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Protocol

from exl3kit.checkpoint.forms import rule_fault, stored_form
from exl3kit.checkpoint.manifest import RankSlicedManifest
from exl3kit.checkpoint.names import TensorRule, expert_rules, missing_text, normalise_name
from exl3kit.checkpoint.open import Checkpoint
from exl3kit.checkpoint.r7 import check_r7
from exl3kit.checkpoint.widths import check_cut, stored_cut
from exl3kit.errors import CheckpointError, SliceError

_SHOWN = 32
_MAX_CLAIM = 1000  # tensors for each one found; beyond that no list of names would help


class ExpectedTensor(Protocol):
    """A tensor of the unquantised model."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def is_optional(self) -> bool: ...


class ExpectedModel(Protocol):
    """What a model's own map must tell; `exl3kit.models.base.ModelMap` does."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def moe_intermediate_size(self) -> int: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def moe_layers(self) -> tuple[int, ...]: ...
    def tensors(self) -> Iterable[ExpectedTensor]: ...


def structure_faults(checkpoint: Checkpoint, model: ExpectedModel) -> list[str]:
    """One line for each wrong tensor, each layer with missing ones, and all unexpected ones."""
    manifest = checkpoint.manifest
    if too_many := _too_many(checkpoint, model):
        return [too_many]
    if manifest is not None and (faults := contradictions(manifest, model)):
        return faults
    faults = []
    known: set[str] = set()
    missing: dict[str, list[str]] = defaultdict(list)
    for name, rule in _sliced_rules(manifest, model):
        known.add(name)
        if not checkpoint.has(name):
            missing[_group(name)].append(name)
        else:
            faults += rule_fault(checkpoint, name, rule)
    faults += _r7_faults(checkpoint)
    for spec in model.tensors():
        if _is_sliced(spec.name, manifest):
            continue
        form = stored_form(checkpoint, spec.name, spec.shape)
        if form is not None:
            known |= form.names
            faults += form.faults
        elif not spec.is_optional:
            missing[_group(spec.name)].append(spec.name)
    faults += [missing_text(group, names) for group, names in missing.items()]
    return faults + _unexpected(sorted(set(checkpoint.infos) - known), manifest)


def contradictions(manifest: RankSlicedManifest, model: ExpectedModel) -> list[str]:
    """Where manifest and model disagree, so that no expert tensor can be judged."""
    faults: list[str] = []
    if manifest.experts_per_layer != model.num_experts:
        faults.append(
            f"experts: the manifest has {manifest.experts_per_layer} a layer, "
            f"the model has {model.num_experts}"
        )
    if outside := sorted({*manifest.moe_layers} - {*model.moe_layers}):
        faults.append(f"moe_layers: layers {outside[:8]} have no routed experts in the model")
    for check, name, width, tp in (
        (check_cut, "hidden_size", model.hidden_size, 1),
        (stored_cut, "moe_intermediate_size", model.moe_intermediate_size, manifest.tp),
    ):
        try:
            check(name, width, tp)
        except SliceError as err:
            faults.append(str(err))
    return faults


def _too_many(checkpoint: Checkpoint, model: ExpectedModel) -> str | None:
    """A config may claim 4096 layers of 4096 experts: do not list 50 million missing names."""
    claimed = 3 * len(model.moe_layers) * model.num_experts
    if claimed <= _MAX_CLAIM * len(checkpoint.infos):
        return None
    return (
        f"config.json describes at least {claimed} tensors, "
        f"the files hold {len(checkpoint.infos)}: they are not of this model, or most are missing"
    )


def _sliced_rules(
    manifest: RankSlicedManifest | None, model: ExpectedModel
) -> Iterator[tuple[str, TensorRule]]:
    if manifest is None:
        return
    for layer in manifest.moe_layers:
        yield from expert_rules(manifest, layer, model.hidden_size, model.moe_intermediate_size)


def _is_sliced(name: str, manifest: RankSlicedManifest | None) -> bool:
    if manifest is None or ".mlp.experts." not in name:
        return False
    return int(name.split(".")[2]) in manifest.moe_layers


def _group(name: str) -> str:
    """`layer 3` for the names of a decoder layer, `model` for the rest."""
    parts = name.split(".")
    return f"layer {parts[2]}" if name.startswith("model.layers.") else "model"


def _r7_faults(checkpoint: Checkpoint) -> list[str]:
    """What the block of the r7 dialect says and the experts' names and widths do not bear out."""
    try:
        if checkpoint.r7 is not None:
            check_r7(checkpoint.r7, checkpoint.infos)
    except CheckpointError as err:
        return [str(err)]
    return []


def _unexpected(names: list[str], manifest: RankSlicedManifest | None) -> list[str]:
    """Tensors the model does not have: one line for each rank's, whose names tell why, and one."""
    reasons, others = [], []
    for name in names:
        try:
            if manifest is not None and len(reasons) < _SHOWN:
                normalise_name(name, manifest)
            others.append(name)
        except CheckpointError as err:
            reasons.append(str(err))
    if not others:
        return reasons
    more = "" if len(others) <= _SHOWN else ", ..."
    claim = f"{len(others)} tensors that the model does not have"
    return [*reasons, f"{claim}: {', '.join(others[:_SHOWN])}{more}"]
