"""What a slice job writes: each output tensor as bytes of stored ones, decided before any is read.

Every conversion is one rule. Output rank r owns a range of channels; the source ranks that hold
them give their parts of it, joined in order: one part of one rank when a whole expert or a slice is
cut finer, several ranks' wholes when slices are merged. The hidden-side vectors of all ranks that
feed one output rank become one vector, so they must be the same bytes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Literal

import torch

from exl3kit._version import __version__
from exl3kit.checkpoint.header import TensorInfo
from exl3kit.checkpoint.jsonfile import is_int
from exl3kit.checkpoint.keys import MAX_COUNT, show
from exl3kit.checkpoint.manifest import PER_EXPERT, SHARED_H, RankSlicedManifest
from exl3kit.checkpoint.names import HIDDEN_FIELDS, PROJECTIONS, RANK_SUFFIX, slice_rules
from exl3kit.checkpoint.open import Checkpoint
from exl3kit.checkpoint.pieces import PlannedTensor, copy_of, joined, unpacked
from exl3kit.checkpoint.signs import WORD_BITS, is_packed
from exl3kit.checkpoint.widths import check_cut, stored_cut
from exl3kit.errors import SliceError
from exl3kit.models.registry import model_map
from exl3kit.slicing.axes import rank_range
from exl3kit.slicing.experts import CUT_SIDES, FIELDS, ExpertSet
from exl3kit.slicing.whole import expert_set

SHIM = "modelopt"
LAYOUTS = {"per_expert": PER_EXPERT, "shared_h": SHARED_H}


@dataclass(frozen=True)
class SliceOptions:
    """Ranks to cut for; the layout of the hidden-side vectors, None for the source's own.

    `shim` writes quant_method `modelopt`, for tools that do not know EXL3.
    """

    tp: int
    layout: Literal["per_expert", "shared_h"] | None = None
    shim: Literal["modelopt"] | None = None


@dataclass(frozen=True)
class SlicePlan:
    """A job that passed `plan_slice`: the source's experts, and the same experts as written."""

    options: SliceOptions
    source: ExpertSet
    target: ExpertSet

    @property
    def manifest(self) -> RankSlicedManifest:
        """The output's `hybrid_tr3_tail`."""
        return self.target.manifest

    @cached_property
    def copied(self) -> list[TensorInfo]:
        """Everything but the cut experts, in the order of the source's files."""
        return self.source.other_tensors()

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors of the output; by rates, since there may be a million tensors."""
        manifest, width = self.manifest, self.source.width // self.manifest.tp
        is_shared = manifest.rotation_layout == SHARED_H

        def of_expert(bits: int) -> int:
            rules = [
                rule
                for proj in PROJECTIONS
                for field, rule in slice_rules(proj, bits, self.source.hidden_size, width).items()
                if not (is_shared and field == HIDDEN_FIELDS[proj])
            ]
            return sum(rule.dtype.itemsize * math.prod(rule.shape) for rule in rules)

        rates = Counter(bits for layer in manifest.layer_bits.values() for bits in layer)
        of_layer = 2 * len(HIDDEN_FIELDS) * self.source.hidden_size if is_shared else 0
        experts = sum(count * of_expert(bits) for bits, count in rates.items())
        layers = len(manifest.moe_layers) * of_layer
        return sum(info.nbytes for info in self.copied) + manifest.tp * (experts + layers)

    def tensors(self) -> Iterator[PlannedTensor]:
        """Every tensor of the output: the copied ones, then the experts layer by layer."""
        yield from (copy_of(info, info.name) for info in self.copied)
        for layer in self.manifest.moe_layers:
            written: set[str] = set()
            for expert in range(self.manifest.experts_per_layer):
                for proj in PROJECTIONS:
                    for rank in range(self.manifest.tp):
                        for field in FIELDS:
                            name = self.target.name(layer, expert, proj, rank, field)
                            if name not in written:
                                written.add(name)
                                yield self._tensor(name, layer, expert, proj, rank, field)

    def _tensor(
        self, name: str, layer: int, expert: int, proj: str, rank: int, field: str
    ) -> PlannedTensor:
        channels = rank_range("moe_intermediate_size", self.source.width, self.manifest.tp, rank)
        side = CUT_SIDES[proj].get(field)
        if side is None:
            owner = self.source.owners(channels).start
            info = self.source.info(layer, expert, proj, owner, field)
            if is_packed(info.name):
                return unpacked(name, [(info, 0, info.shape[0] * WORD_BITS)])
            return copy_of(info, name)
        cuts = [
            (
                self.source.info(layer, expert, proj, owner, field),
                part.start // side.channels,
                part.stop // side.channels,
            )
            for owner, part in self.source.overlaps(channels)
        ]
        return unpacked(name, cuts) if is_packed(cuts[0][0].name) else joined(name, side.axis, cuts)


def plan_slice(checkpoint: Checkpoint, options: SliceOptions) -> SlicePlan:
    """Check the source and the options; reads markers, and hidden-side vectors that must agree.

    SliceError: a source that is not EXL3 or whose experts the format cannot take, a tp that 128
    does not allow, nothing to change, vectors that differ. CheckpointError: missing or wrong
    tensors. UnsupportedError: an unknown architecture or dialect.
    """
    _check_options(options)
    model = model_map(checkpoint.config)
    if model.num_experts:
        check_cut("hidden_size", model.hidden_size, 1)
        stored_cut("moe_intermediate_size", model.moe_intermediate_size, options.tp)
    source = expert_set(checkpoint, model)
    target = replace(source, manifest=_target_manifest(source, options), is_whole=False)
    if not source.is_whole and _shape(target.manifest) == _shape(source.manifest):
        raise SliceError(
            f"{checkpoint.path}: already cut for tp {options.tp} in layout "
            f"{target.manifest.rotation_layout}; nothing to do"
        )
    source.check()
    _check_hidden_vectors(source, target.manifest)
    return SlicePlan(options, source, target)


def _check_options(options: SliceOptions) -> None:
    """The values that config.json will carry; the types are not checked for a caller in Python."""
    if not is_int(options.tp) or not 1 <= options.tp <= MAX_COUNT:
        raise SliceError(f"tp: expected an integer 1..{MAX_COUNT}, got {show(options.tp)}")
    for key, value, allowed in (
        ("layout", options.layout, (None, *LAYOUTS)),
        ("shim", options.shim, (None, SHIM)),
    ):
        if value not in allowed:
            listed = ", ".join(map(repr, allowed))
            raise SliceError(f"{key}: expected one of {listed}, got {show(value)}")


def _shape(manifest: RankSlicedManifest) -> tuple[int, str]:
    """What a slice job can change."""
    return manifest.tp, manifest.rotation_layout


def _target_manifest(source: ExpertSet, options: SliceOptions) -> RankSlicedManifest:
    manifest = source.manifest
    layout = LAYOUTS[options.layout] if options.layout else manifest.rotation_layout
    # to_config writes the multiplier itself; without it here, slicing twice equals slicing once
    extra = {key: value for key, value in manifest.extra.items() if key != "mcg_multiplier"}
    if source.is_whole:
        extra = {"producer": "exl3kit", "producer_version": __version__, "source_format": "EXL3"}
    return replace(manifest, tp=options.tp, rotation_layout=layout, extra=extra)


def _check_hidden_vectors(source: ExpertSet, target: RankSlicedManifest) -> None:
    """Vectors that become one must be the same bytes; reads only those that must agree."""
    shares = target.rotation_layout == SHARED_H and source.manifest.rotation_layout != SHARED_H
    for layer in target.moe_layers:
        for proj, field in HIDDEN_FIELDS.items():
            groups: dict[tuple[str, ...], None] = {}  # in order, each once
            for rank in range(target.tp):
                owners = source.owners(rank_range("width", source.width, target.tp, rank))
                names = [
                    tuple(source.name(layer, expert, proj, owner, field) for owner in owners)
                    for expert in range(target.experts_per_layer)
                ]
                groups |= dict.fromkeys([tuple(chain(*names))] if shares else names)
            for group in groups:
                _check_equal(source, group, target, shares)


def _check_equal(
    source: ExpertSet, names: tuple[str, ...], target: RankSlicedManifest, shares: bool
) -> None:
    first, *others = dict.fromkeys(names)
    if not others:
        return
    expected = source.checkpoint.tensor(first).view(torch.int16)
    for name in others:
        if torch.equal(source.checkpoint.tensor(name).view(torch.int16), expected):
            continue
        if shares and _linear(name) != _linear(first):
            raise SliceError(
                f"tensor {name!r} differs from {first!r}: layout shared_h needs hidden-side "
                "vectors that are the same for all experts of a layer; use layout per_expert"
            )
        raise SliceError(
            f"tensor {name!r} differs from {first!r}: slices that were quantised one by one cannot "
            f"be joined. Serve the checkpoint as it is: with --tensor-parallel-size "
            f"{', '.join(map(str, source.manifest.runs_at))} a rank takes one or several slices of "
            f"each expert (expansion). Or quantise the model again with --tp {target.tp}"
        )


def _linear(name: str) -> str:
    """The linear whose tensor, or whose slice's tensor, `name` is."""
    return RANK_SUFFIX.sub("", name.rpartition(".")[0])
