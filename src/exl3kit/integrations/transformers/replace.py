"""Which modules of a model the checkpoint stores as EXL3, and their replacement."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

import torch

from exl3kit.checkpoint.fp8 import FP8_DTYPES
from exl3kit.checkpoint.header import TensorInfo
from exl3kit.checkpoint.modules import exl3_parts
from exl3kit.checkpoint.names import RANK_SUFFIX
from exl3kit.checkpoint.open import PLAIN, Checkpoint
from exl3kit.checkpoint.structure import structure_faults
from exl3kit.errors import CheckpointError, UnsupportedError
from exl3kit.format.spec import TILE
from exl3kit.integrations.transformers.experts import Exl3Experts
from exl3kit.integrations.transformers.linear import FIELDS, Exl3Linear, Exl3SlicedLinear
from exl3kit.models.decoder import DecoderMap

_SHOWN = 8


def without_mtp(checkpoint: Checkpoint, model: DecoderMap) -> tuple[Checkpoint, DecoderMap]:
    """Both without the next-token layers, which transformers has no classes for."""
    drafts = tuple(f"model.layers.{layer}." for layer in model.mtp_layers)
    infos = {n: info for n, info in checkpoint.infos.items() if not n.startswith(drafts)}
    manifest = checkpoint.manifest
    if manifest is not None:
        last = min(manifest.last_layer, model.num_hidden_layers - 1)
        bits = {layer: b for layer, b in manifest.layer_bits.items() if layer <= last}
        manifest = replace(manifest, last_layer=last, layer_bits=bits)
    r7 = checkpoint.r7
    if r7 is not None:
        r7 = replace(r7, last_layer=min(r7.last_layer, model.num_hidden_layers - 1))
    target = replace(
        model,
        num_mtp_layers=0,
        moe_layers=tuple(n for n in model.moe_layers if n < model.num_hidden_layers),
    )
    return replace(checkpoint, infos=infos, manifest=manifest, r7=r7), target


def check_checkpoint(checkpoint: Checkpoint, model: DecoderMap) -> None:
    """Everything that can be known from metadata and headers, before a weight is read.

    CheckpointError lists missing, unexpected and wrong tensors, UnsupportedError names a form of
    storage that transformers' modules cannot hold.
    """
    if checkpoint.dialect == PLAIN or not checkpoint.exl3_prefixes():
        raise UnsupportedError(
            f"{checkpoint.path}: its quant_method is one of exl3kit's, but it holds no EXL3 tensors"
        )
    if faults := structure_faults(checkpoint, model):
        raise CheckpointError(f"{checkpoint.path}: " + "; ".join(faults[:_SHOWN]))
    if tables := checkpoint.row_tables():
        raise UnsupportedError(f"{', '.join(tables)}: expected a .weight, got a row table")
    if fp8 := [name for name, info in checkpoint.infos.items() if info.dtype in FP8_DTYPES]:
        raise UnsupportedError(f"tensor {fp8[0]!r}: expected BF16, FP16 or FP32, got FP8")


def replace_modules(root: torch.nn.Module, prefix: str, checkpoint: Checkpoint) -> None:
    """Replace the linears and experts of `root` that are EXL3 in the checkpoint.

    `prefix` comes before the names of `root` in the checkpoint: `model.` for a model without head.
    UnsupportedError for EXL3 weights of a module that is neither a linear nor routed experts.
    """
    for name, module in list(root.named_modules()):
        is_linear = isinstance(module, torch.nn.Linear)
        if is_linear and (found := _linear(module, f"{prefix}{name}", checkpoint)):
            root.set_submodule(name, found)
    experts = _expert_tensors(checkpoint)
    for stem, infos in experts.items():
        name = stem.removeprefix(prefix)
        if _has_module(root, name):
            root.set_submodule(name, _experts(stem, infos, checkpoint))
    _check_replaced(root, prefix, checkpoint)


def _linear(
    module: torch.nn.Linear, stored: str, checkpoint: Checkpoint
) -> Exl3Linear | Exl3SlicedLinear | None:
    parts = exl3_parts(checkpoint, stored)
    if not parts:
        return None
    if parts == [stored]:
        return Exl3Linear(module.in_features, module.out_features, _fields(checkpoint, stored))
    if module.bias is not None:
        raise UnsupportedError(f"module {stored!r}: a linear in slices with a bias")
    is_input = stored.endswith("down_proj")
    left = module.in_features if is_input else module.out_features
    linears = []
    for part in parts:
        rows, columns = checkpoint.info(f"{part}.trellis").shape[:2]
        size = min(left, TILE * (rows if is_input else columns))
        sizes = (size, module.out_features) if is_input else (module.in_features, size)
        linears.append(Exl3Linear(*sizes, _fields(checkpoint, part)))
        left -= size
    return Exl3SlicedLinear(linears, is_input)


def _fields(checkpoint: Checkpoint, module: str) -> dict[str, TensorInfo]:
    names = {field: f"{module}.{field}" for field in FIELDS}
    return {field: checkpoint.info(n) for field, n in names.items() if checkpoint.has(n)}


def _expert_tensors(checkpoint: Checkpoint) -> dict[str, dict[str, TensorInfo]]:
    """Tensors of EXL3 experts: module name of the layer's experts -> name below it -> tensor."""
    found: dict[str, dict[str, TensorInfo]] = defaultdict(dict)
    for name, info in checkpoint.infos.items():
        stem, dot, path = name.partition(".mlp.experts.")
        if dot:
            found[f"{stem}.mlp.experts"][path] = info
    return {stem: infos for stem, infos in found.items() if any("trellis" in n for n in infos)}


def _experts(stem: str, infos: Mapping[str, TensorInfo], checkpoint: Checkpoint) -> Exl3Experts:
    if plain := [path for path in infos if path.endswith(".weight")]:
        raise UnsupportedError(
            f"{stem}: expected all experts EXL3 or none, got also a dense '{stem}.{plain[0]}'"
        )
    numbers = {path.partition(".")[0] for path in infos} - {"shared_h", "r7_shared"}
    is_sliced = any(".rank" in path for path in infos)
    return Exl3Experts(stem, len(numbers), checkpoint.tp if is_sliced else None, infos)


def _has_module(root: torch.nn.Module, name: str) -> bool:
    try:
        root.get_submodule(name)
    except AttributeError:
        return False
    return True


def _check_replaced(root: torch.nn.Module, prefix: str, checkpoint: Checkpoint) -> None:
    """No parameter may be left dense whose weight the checkpoint stores as EXL3."""
    wanted = {f"{prefix}{name}" for name, _ in root.named_parameters()}
    prefixes = (RANK_SUFFIX.sub("", name) for name in checkpoint.exl3_prefixes())
    if left := [name for name in prefixes if f"{name}.weight" in wanted]:
        raise UnsupportedError(
            f"module {left[0]!r}: EXL3 is supported for linears and routed experts; store "
            f"'{left[0]}.weight' in BF16"
        )
