"""Are the names, dtypes and shapes of a checkpoint those its manifest and its model call for?

Works on headers only. A module may be dense (`.weight`) or EXL3 (`.trellis` and its companions) in
every dialect: what is there decides, and either form must be complete.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Protocol

import torch

from exl3kit.checkpoint.manifest import RankSlicedManifest
from exl3kit.checkpoint.names import TensorRule, check_rule, expert_rules, missing_text
from exl3kit.checkpoint.open import Checkpoint
from exl3kit.checkpoint.widths import check_cut
from exl3kit.errors import CheckpointError, FormatError, SliceError
from exl3kit.format.spec import HADAMARD_BLOCK, TILE, bits_from_words

EXL3_FIELDS = ("trellis", "suh", "svh", "su", "sv", "mcg", "mul1")
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
    def moe_layers(self) -> range: ...
    def tensors(self) -> Iterable[ExpectedTensor]: ...


def structure_faults(checkpoint: Checkpoint, model: ExpectedModel) -> list[str]:
    """One line for each wrong tensor, each layer with missing ones, and all unexpected ones."""
    manifest = checkpoint.manifest
    if too_many := _too_many(checkpoint, model):
        return [too_many]
    if manifest is not None and (faults := _contradictions(manifest, model)):
        return faults
    faults = []
    known: set[str] = set()
    missing: dict[str, list[str]] = defaultdict(list)
    for name, rule in _sliced_rules(manifest, model):
        known.add(name)
        if not checkpoint.has(name):
            missing[_group(name)].append(name)
        else:
            faults += _rule_fault(checkpoint, name, rule)
    for spec in model.tensors():
        if _is_sliced(spec.name, manifest):
            continue
        module = spec.name.removesuffix(".weight")
        is_exl3 = len(spec.shape) == 2 and checkpoint.has(f"{module}.trellis")
        if is_exl3 and not checkpoint.has(spec.name):
            known.update(f"{module}.{field}" for field in EXL3_FIELDS)
            faults += _linear_faults(checkpoint, module, spec.shape)
        elif checkpoint.has(spec.name):
            known.add(spec.name)
            faults += _plain_fault(checkpoint, spec)
        elif not spec.is_optional:
            missing[_group(spec.name)].append(spec.name)
    faults += [missing_text(group, names) for group, names in missing.items()]
    return faults + _unexpected(checkpoint, known)


def _contradictions(manifest: RankSlicedManifest, model: ExpectedModel) -> list[str]:
    """Where manifest and model disagree, so that no expert tensor can be judged."""
    faults: list[str] = []
    if manifest.experts_per_layer != model.num_experts:
        faults.append(
            f"experts: the manifest has {manifest.experts_per_layer} a layer, "
            f"the model has {model.num_experts}"
        )
    if outside := [layer for layer in manifest.moe_layers if layer not in model.moe_layers]:
        faults.append(f"moe_layers: layers {outside[:8]} have no routed experts in the model")
    for name, width, tp in (
        ("hidden_size", model.hidden_size, 1),
        ("moe_intermediate_size", model.moe_intermediate_size, manifest.tp),
    ):
        try:
            check_cut(name, width, tp)
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


def _rule_fault(checkpoint: Checkpoint, name: str, rule: TensorRule) -> list[str]:
    info = checkpoint.info(name)
    try:
        check_rule(name, info.dtype, info.shape, rule)
    except CheckpointError as err:
        return [str(err)]
    return []


def _plain_fault(checkpoint: Checkpoint, spec: ExpectedTensor) -> list[str]:
    """A bias beside a trellis has the padded length; all other shapes are exact."""
    info = checkpoint.info(spec.name)
    module = spec.name.rpartition(".")[0]
    is_padded = spec.name.endswith(".bias") and checkpoint.has(f"{module}.trellis")
    shape = tuple(map(_padded, spec.shape)) if is_padded else spec.shape
    rule = TensorRule(info.dtype, shape)
    faults = _rule_fault(checkpoint, spec.name, rule)
    if not (info.dtype.is_floating_point or faults):
        faults.append(f"tensor {spec.name!r}: expected a floating-point dtype, got {info.dtype}")
    return faults


def _linear_faults(checkpoint: Checkpoint, module: str, shape: tuple[int, ...]) -> list[str]:
    """Dtypes and shapes of a whole EXL3 linear whose dense weight would be (out, in) = `shape`."""
    trellis = checkpoint.info(f"{module}.trellis")
    ins, outs = _padded(shape[1]), _padded(shape[0])
    words = trellis.shape[-1] if trellis.shape else 0
    rules = {
        "trellis": TensorRule(torch.int16, (ins // TILE, outs // TILE, words)),
        "suh": TensorRule(torch.float16, (ins,)),
        "svh": TensorRule(torch.float16, (outs,)),
        "su": TensorRule(torch.int16, (ins // TILE,)),
        "sv": TensorRule(torch.int16, (outs // TILE,)),
        "mcg": TensorRule(torch.int32, ()),
        "mul1": TensorRule(torch.int32, ()),
    }
    faults: list[str] = []
    try:
        bits_from_words(words)
    except FormatError as err:
        faults.append(f"tensor '{module}.trellis': {err}")
    for field, rule in rules.items():
        if checkpoint.has(f"{module}.{field}"):
            faults += _rule_fault(checkpoint, f"{module}.{field}", rule)
    for side in ("su", "sv"):
        if not checkpoint.has(f"{module}.{side}h") and not checkpoint.has(f"{module}.{side}"):
            faults.append(f"tensor '{module}.{side}h' is missing")
    if checkpoint.has(f"{module}.mcg") and checkpoint.has(f"{module}.mul1"):
        faults.append(f"tensors '{module}.mcg' and '{module}.mul1': expected at most one marker")
    return faults


def _padded(size: int) -> int:
    return -(-size // HADAMARD_BLOCK) * HADAMARD_BLOCK


def _unexpected(checkpoint: Checkpoint, known: set[str]) -> list[str]:
    extra = sorted(set(checkpoint.infos) - known)
    if not extra:
        return []
    more = "" if len(extra) <= _SHOWN else ", ..."
    return [f"{len(extra)} tensors that the model does not have: {', '.join(extra[:_SHOWN])}{more}"]
