"""Names and shapes of a rank-sliced checkpoint's expert tensors.

With H hidden size, S = I / tp the slice width and K the expert's bits, all of one rank:

    gate_proj, up_proj   H -> S   trellis (H/16, S/16, 16 K)   suh (H,)   svh (S,)
    down_proj            S -> H   trellis (S/16, H/16, 16 K)   suh (S,)   svh (H,)

each under `model.layers.{L}.mlp.experts.{E}.{proj}.rank{r}.`, with an `mcg` marker. In the layout
`shared_h_v1` the three vectors of length H are stored once a layer, under `experts.shared_h.`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from exl3kit.checkpoint.manifest import SHARED_H, RankSlicedManifest
from exl3kit.checkpoint.widths import padded
from exl3kit.errors import CheckpointError
from exl3kit.format.spec import TILE, Codebook, words_per_tile
from exl3kit.format.tensors import check_marker

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
# The vector of length H of each projection: whole on every rank, one a layer in shared_h_v1.
HIDDEN_FIELDS = {"gate_proj": "suh", "up_proj": "suh", "down_proj": "svh"}
RANK_SUFFIX = re.compile(r"\.rank[0-9]+$")  # of the name of one slice, a linear by itself
_RANKED = re.compile(
    r"(?P<prefix>.+)\.rank(?P<rank>[0-9]+)\.(?P<field>trellis|suh|svh|mcg|mul1)", re.DOTALL
)
_EXPERT = re.compile(r"(?P<stem>.+\.experts)\.(?P<expert>[^.]+)\.(?P<proj>[^.]+)", re.DOTALL)
_LAYER = re.compile(r"(?:^|\.)layers\.([0-9]{1,6})(?:\.|$)")
_MISSING_SHOWN = 32


@dataclass(frozen=True, slots=True)
class TensorRule:
    """Dtype and shape a tensor must have."""

    dtype: torch.dtype
    shape: tuple[int, ...]


def normalise_name(name: str, manifest: RankSlicedManifest) -> tuple[str, int | None]:
    """`name` without `.rank{r}`, and r: the rank of the file that owns the slice.

    Names without a rank are returned as they are, with None. A shared vector becomes the vector of
    expert 0, which the loader broadcasts. CheckpointError names the tensor: a rank that is not
    below tp or has leading zeros, a layer or expert the manifest does not declare, a shared name or
    H-side vector that the rotation layout does not allow.
    """
    match = _RANKED.fullmatch(name)
    if match is None:
        if ".experts.shared_h." in name:
            raise CheckpointError(f"tensor {name!r}: a shared_h name must carry .rank<r>.")
        return name, None
    owner = _parse_rank(match["rank"], name, manifest.tp)
    prefix = _checked_prefix(match["prefix"], match["field"], name, manifest)
    return f"{prefix}.{match['field']}", owner


def layer_index(name: str) -> int:
    """The number after `layers.` in a module or tensor name; CheckpointError if there is none."""
    match = _LAYER.search(name)
    if match is None:
        raise CheckpointError(
            f"module {name!r}: expected a layer index as in 'model.layers.3', found none"
        )
    return int(match[1])


def expert_rules(
    manifest: RankSlicedManifest, layer: int, hidden_size: int, intermediate_size: int
) -> Iterator[tuple[str, TensorRule]]:
    """Name and rule of every expert tensor of `layer`, all experts and ranks, in file order.

    `intermediate_size` is that of the whole expert, before the cut and without padding.
    """
    width = padded(intermediate_size) // manifest.tp
    is_shared = manifest.rotation_layout == SHARED_H
    stem = f"model.layers.{layer}.mlp.experts"
    for rank in range(manifest.tp) if is_shared else ():
        for proj, field in HIDDEN_FIELDS.items():
            rule = TensorRule(torch.float16, (hidden_size,))
            yield f"{stem}.shared_h.{proj}.rank{rank}.{field}", rule
    for expert in range(manifest.experts_per_layer):
        bits = manifest.bits_of(layer, expert)
        for proj in PROJECTIONS:
            rules = slice_rules(proj, bits, hidden_size, width)
            if is_shared:
                del rules[HIDDEN_FIELDS[proj]]
            for rank in range(manifest.tp):
                for field, rule in rules.items():
                    yield f"{stem}.{expert}.{proj}.rank{rank}.{field}", rule


def slice_rules(proj: str, bits: int, hidden_size: int, width: int) -> dict[str, TensorRule]:
    """Field -> rule of one rank's slice of one projection; `width` is I / tp."""
    ins, outs = (width, hidden_size) if proj == "down_proj" else (hidden_size, width)
    return {
        "trellis": TensorRule(torch.int16, (ins // TILE, outs // TILE, words_per_tile(bits))),
        "suh": TensorRule(torch.float16, (ins,)),
        "svh": TensorRule(torch.float16, (outs,)),
        "mcg": TensorRule(torch.int32, ()),
    }


def shared_h_name(prefix: str, field: str) -> str | None:
    """The shared tensor that stands for `field` of a rank-sliced linear, None if it has its own.

    `prefix` as in `model.layers.1.mlp.experts.3.gate_proj.rank0`.
    """
    stem, _, rank = prefix.rpartition(".")
    match = _EXPERT.fullmatch(stem)
    if match is None or HIDDEN_FIELDS.get(match["proj"]) != field:
        return None
    return f"{match['stem']}.shared_h.{match['proj']}.{rank}.{field}"


def check_rule(name: str, dtype: torch.dtype, shape: tuple[int, ...], rule: TensorRule) -> None:
    """CheckpointError unless dtype and shape are the rule's; a marker may be any one element."""
    is_one = rule.shape == () and all(size == 1 for size in shape)
    if dtype != rule.dtype or (shape != rule.shape and not is_one):
        raise CheckpointError(
            f"tensor {name!r}: expected {rule.dtype} {list(rule.shape)}, got {dtype} {list(shape)}"
        )


def check_rank_sliced_marker(name: str, marker: torch.Tensor) -> None:
    """A rank-sliced expert's marker must be `mcg`, one int32 of its exact value, never `mul1`."""
    if name.rpartition(".")[2] == Codebook.MUL1:
        value = int(marker.reshape(-1)[0]) & 0xFFFFFFFF if marker.numel() else 0
        raise CheckpointError(
            f"tensor {name!r}: expected an mcg marker, rank-sliced experts have no other codebook; "
            f"got mul1 0x{value:08X}"
        )
    check_marker(marker, Codebook.MCG, name)


def check_complete(layer: int, missing: Iterable[str]) -> None:
    """CheckpointError if any tensor of `layer` is missing: the first 32 names and the total."""
    names = sorted(missing)
    if names:
        raise CheckpointError(missing_text(f"layer {layer}", names))


def missing_text(group: str, names: Sequence[str]) -> str:
    """The error line for the missing tensors of `group`: how many, and the first 32."""
    more = "" if len(names) <= _MISSING_SHOWN else ", ..."
    shown = ", ".join(names[:_MISSING_SHOWN])
    return f"{group}: {len(names)} tensors are missing: {shown}{more}"


def _parse_rank(digits: str, name: str, tp: int) -> int:
    if len(digits) > 1 and digits[0] == "0":
        raise CheckpointError(f"tensor {name!r}: rank must have no leading zeros, got {digits!r}")
    if len(digits) > 6 or int(digits) >= tp:
        raise CheckpointError(
            f"tensor {name!r}: rank must be below the checkpoint's tp = {tp}, got {digits[:12]}; "
            "the tensor belongs to a file made for more ranks"
        )
    return int(digits)


def _checked_prefix(prefix: str, field: str, name: str, manifest: RankSlicedManifest) -> str:
    """The prefix without rank, a shared one as expert 0's; refuses what is not declared."""
    layer = layer_index(name)
    if layer not in manifest.moe_layers:
        raise CheckpointError(
            f"tensor {name!r}: layer {layer} is outside moe_layers "
            f"[{manifest.first_layer}, {manifest.last_layer}]"
        )
    match = _EXPERT.fullmatch(prefix)
    if match is None or match["proj"] not in PROJECTIONS:
        raise CheckpointError(
            f"tensor {name!r}: expected '...experts.<expert>.<proj>.rank<r>' "
            f"with proj one of {', '.join(PROJECTIONS)}"
        )
    is_shared_layout = manifest.rotation_layout == SHARED_H
    is_shared_field = HIDDEN_FIELDS[match["proj"]] == field
    if match["expert"] == "shared_h":
        if not (is_shared_layout and is_shared_field):
            raise CheckpointError(
                f"tensor {name!r}: not allowed with rotation_layout {manifest.rotation_layout!r}; "
                f"shared_h_v1 shares {HIDDEN_FIELDS[match['proj']]} of {match['proj']} only"
            )
        return f"{match['stem']}.0.{match['proj']}"
    if is_shared_layout and is_shared_field:
        raise CheckpointError(
            f"tensor {name!r}: rotation_layout 'shared_h_v1' stores it once, under shared_h"
        )
    _check_expert(match["expert"], name, manifest.experts_per_layer)
    return prefix


def _check_expert(expert: str, name: str, experts: int) -> None:
    if not re.fullmatch("0|[1-9][0-9]{0,5}", expert) or int(expert) >= experts:
        raise CheckpointError(
            f"tensor {name!r}: expert must be 0..{experts - 1}, got {expert[:40]!r}"
        )
