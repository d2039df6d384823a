"""The EXL3 experts of any checkpoint; whole ones are described as a rank-sliced file of tp 1.

What the rank-sliced format cannot say is refused here: a codebook other than mcg, a bias, bits
that differ within an expert, MoE layers with gaps between them.
"""

from __future__ import annotations

from exl3kit.checkpoint.manifest import (
    MAX_BITS,
    MIN_BITS,
    PER_EXPERT,
    SHARED_H,
    RankSlicedManifest,
    make_manifest,
)
from exl3kit.checkpoint.names import PROJECTIONS
from exl3kit.checkpoint.open import PLAIN, Checkpoint
from exl3kit.checkpoint.structure import contradictions
from exl3kit.checkpoint.widths import padded
from exl3kit.errors import SliceError
from exl3kit.format.spec import TILE, Codebook
from exl3kit.models.base import ModelMap
from exl3kit.slicing.experts import ExpertSet, experts_prefix


def expert_set(checkpoint: Checkpoint, model: ModelMap) -> ExpertSet:
    """The experts of an EXL3 checkpoint of any dialect; only names and shapes are looked at.

    SliceError if there are none, or if they are not the model's or not what a rank can have.
    """
    if not model.num_experts:
        raise SliceError(
            f"{checkpoint.path}: the model has no routed experts, so there is nothing to cut; "
            "engines cut its linears while they load them"
        )
    if checkpoint.dialect == PLAIN:
        raise SliceError(
            f"{checkpoint.path}: expected an EXL3 checkpoint, got a plain one; `exl3kit quantize "
            "SRC OUT --tp N` makes one that is cut already"
        )
    manifest = checkpoint.manifest or whole_manifest(checkpoint, model)
    if faults := contradictions(manifest, model):
        raise SliceError(faults[0])
    width = padded(model.moe_intermediate_size)
    padding = width - model.moe_intermediate_size
    is_whole = checkpoint.manifest is None
    return ExpertSet(checkpoint, manifest, model.hidden_size, width, padding, is_whole)


def whole_manifest(checkpoint: Checkpoint, model: ModelMap) -> RankSlicedManifest:
    """A manifest with tp 1 of the layers whose routed experts are EXL3.

    Vectors that a layer of the r7 dialect shares stay shared. SliceError names the tensor or the
    layers that a rank-sliced checkpoint cannot have.
    """
    layers = [layer for layer in model.moe_layers if _is_exl3(checkpoint, model, layer)]
    if not layers:
        raise SliceError(
            f"{checkpoint.path}: none of its routed experts is EXL3, so there is nothing to cut; "
            "quantise the model with `exl3kit quantize`"
        )
    if gaps := sorted({*range(layers[0], layers[-1] + 1)} - {*layers}):
        raise SliceError(
            f"{checkpoint.path}: layers with EXL3 experts must be contiguous, got {layers[0]} to "
            f"{layers[-1]} without {', '.join(map(str, gaps[:8]))}; serve the file as it is, "
            "engines cut whole experts while they load them"
        )
    experts = range(model.num_experts)
    return make_manifest(
        1,
        {layer: tuple(_bits(checkpoint, layer, e) for e in experts) for layer in layers},
        rotation_layout=SHARED_H if checkpoint.r7 else PER_EXPERT,
    )


def _is_exl3(checkpoint: Checkpoint, model: ModelMap, layer: int) -> bool:
    """True if all experts of the layer are EXL3, False if none is."""
    linears = [
        f"{experts_prefix(layer)}{expert}.{proj}"
        for expert in range(model.num_experts)
        for proj in PROJECTIONS
    ]
    lacking = [name for name in linears if not checkpoint.has(f"{name}.trellis")]
    for name in lacking:
        if checkpoint.has(f"{name}.slice.0.trellis"):
            raise SliceError(
                f"tensor '{name}.slice.0.trellis': an expert in slices with a rotation each cannot "
                "be cut again; quantise the model again"
            )
    if lacking and len(lacking) < len(linears):
        raise SliceError(
            f"layer {layer}: {len(lacking)} of {len(linears)} expert linears are not EXL3, first "
            f"{lacking[0]!r}; a rank-sliced layer has all of them"
        )
    return not lacking


def _bits(checkpoint: Checkpoint, layer: int, expert: int) -> int:
    """Bits of an expert, the same in its three projections."""
    found = {}
    for proj in PROJECTIONS:
        name = f"{experts_prefix(layer)}{expert}.{proj}"
        _check_codebook(checkpoint, name)
        if checkpoint.has(f"{name}.bias"):
            raise SliceError(f"tensor '{name}.bias': a rank-sliced expert has no bias")
        shape = checkpoint.info(f"{name}.trellis").shape
        bits = shape[-1] / TILE if len(shape) == 3 else 0
        if bits not in range(MIN_BITS, MAX_BITS + 1):
            raise SliceError(
                f"tensor '{name}.trellis': a rank-sliced expert has {MIN_BITS} to {MAX_BITS} bits, "
                f"got {bits:g} from shape {list(shape)}; quantise the model again"
            )
        found[proj] = int(bits)
    if len(set(found.values())) > 1:
        raise SliceError(
            f"{experts_prefix(layer)}{expert}: a rank-sliced expert has one bitrate, got "
            + ", ".join(f"{proj} {bits}" for proj, bits in found.items())
            + "; quantise the model again"
        )
    return found[PROJECTIONS[0]]


def _check_codebook(checkpoint: Checkpoint, name: str) -> None:
    if checkpoint.has(f"{name}.{Codebook.MCG}") and not checkpoint.has(f"{name}.{Codebook.MUL1}"):
        return
    is_mul1 = checkpoint.has(f"{name}.{Codebook.MUL1}")
    found = f"mul1 (tensor '{name}.mul1')" if is_mul1 else f"3inst (no '{name}.mcg')"
    raise SliceError(
        f"{name}: rank-sliced checkpoints have codebook mcg only, got {found}; exllamav3 >= 1.0 "
        "writes mul1 by default: convert again with its --codebook mcg, or quantise the original "
        "with `exl3kit quantize`"
    )
