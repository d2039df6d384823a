"""The routed experts of a checkpoint, whole or cut: which tensor holds which channels.

With I the width of an expert and tp ranks, rank r owns channels r I / tp to (r + 1) I / tp of
gate's and up's outputs and of down's inputs. The trellis and the vector of that side are cut; the
other vector, of the hidden size, goes whole to every rank. A whole expert is the case tp = 1,
stored under names without a rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import torch

from exl3kit.checkpoint.header import TensorInfo
from exl3kit.checkpoint.manifest import SHARED_H, RankSlicedManifest
from exl3kit.checkpoint.names import (
    PROJECTIONS,
    TensorRule,
    check_rank_sliced_marker,
    check_rule,
    missing_text,
    shared_h_name,
    slice_rules,
)
from exl3kit.checkpoint.open import Checkpoint
from exl3kit.checkpoint.padding import check_padding
from exl3kit.checkpoint.signs import PACKED, WORD_BITS, is_packed, unpack_signs
from exl3kit.errors import CheckpointError
from exl3kit.format.spec import TILE

FIELDS = ("trellis", "suh", "svh", "mcg")


@dataclass(frozen=True)
class CutSide:
    """Along which axis of a projection's field channels lie, and how many an index stands for."""

    axis: int
    channels: int


# Fields that are not named here belong to the hidden side, or are markers: whole on every rank.
_COLUMN = {"trellis": CutSide(1, TILE), "svh": CutSide(0, 1)}
_ROW = {"trellis": CutSide(0, TILE), "suh": CutSide(0, 1)}
CUT_SIDES = {"gate_proj": _COLUMN, "up_proj": _COLUMN, "down_proj": _ROW}


@dataclass(frozen=True)
class ExpertSet:
    """The EXL3 experts of `checkpoint` as `manifest` describes them, each `width` channels wide.

    The last `padding` channels are there for the sake of a multiple of 128 only. `is_whole` is set
    for experts under names without a rank, of an ordinary or r7 checkpoint; the manifest's tp is 1.
    """

    checkpoint: Checkpoint
    manifest: RankSlicedManifest
    hidden_size: int
    width: int
    padding: int
    is_whole: bool

    @property
    def slice_width(self) -> int:
        """Channels of one rank."""
        return self.width // self.manifest.tp

    def name(self, layer: int, expert: int, proj: str, rank: int, field: str) -> str:
        """Name of the tensor that holds a field of one rank's slice: a shared one, or packed signs,
        if that is how it is stored.
        """
        prefix = f"{experts_prefix(layer)}{expert}.{proj}"
        if self.is_whole:
            return self._whole_name(prefix, field)
        ranked = f"{prefix}.rank{rank}"
        is_shared = self.manifest.rotation_layout == SHARED_H
        shared = shared_h_name(ranked, field) if is_shared else None
        return shared or f"{ranked}.{field}"

    def _whole_name(self, prefix: str, field: str) -> str:
        name = self.checkpoint.shared_name(prefix, field) or f"{prefix}.{field}"
        packed = f"{prefix}.{PACKED.get(field)}"
        return packed if self.checkpoint.has(packed) and not self.checkpoint.has(name) else name

    def info(self, layer: int, expert: int, proj: str, rank: int, field: str) -> TensorInfo:
        """Where that tensor lies; CheckpointError if it is missing."""
        return self.checkpoint.info(self.name(layer, expert, proj, rank, field))

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor of that name, packed signs as the vector they stand for."""
        tensor = self.checkpoint.tensor(name)
        return unpack_signs(tensor, name) if is_packed(name) else tensor

    def owners(self, channels: range) -> range:
        """The ranks that hold `channels`."""
        return range(channels.start // self.slice_width, -(-channels.stop // self.slice_width))

    def overlaps(self, channels: range) -> Iterator[tuple[int, range]]:
        """Each rank that holds part of `channels`, and which of its own channels they are."""
        for rank in self.owners(channels):
            first = rank * self.slice_width
            stop = min(channels.stop, first + self.slice_width)
            yield rank, range(max(channels.start, first) - first, stop - first)

    @cached_property
    def layer_names(self) -> dict[int, list[str]]:
        """The stored names below each layer's experts."""
        prefixes = {experts_prefix(layer): layer for layer in self.manifest.moe_layers}
        found: dict[int, list[str]] = {layer: [] for layer in self.manifest.moe_layers}
        for name in self.checkpoint.names():
            stem, dot, _ = name.partition(".experts.")
            if (layer := prefixes.get(stem + dot)) is not None:
                found[layer].append(name)
        return found

    def other_tensors(self) -> list[TensorInfo]:
        """Everything but these experts, in the order of the files."""
        cut = {name for names in self.layer_names.values() for name in names}
        infos = [self.checkpoint.info(name) for name in self.checkpoint.names() if name not in cut]
        return sorted(infos, key=lambda info: (info.file, info.start))

    def check(self) -> None:
        """Names, dtypes, shapes, marker values and padding of all experts.

        Reads the markers, and the vectors with padding. CheckpointError or FormatError names the
        tensor.
        """
        for layer in self.manifest.moe_layers:
            if missing := sorted(self._check_layer(layer)):
                raise CheckpointError(missing_text(f"layer {layer}", missing))
            if extra := self.strays(layer):
                raise CheckpointError(
                    f"layer {layer}: {len(extra)} tensors that no EXL3 expert has, "
                    f"first {extra[0]!r}"
                )
            if self.padding:
                self._check_padding(layer)

    def strays(self, layer: int) -> list[str]:
        """Stored names below a layer's experts that are no tensor of an EXL3 expert, sorted."""
        return sorted({*self.layer_names[layer]} - {name for name, _ in self._rules(layer)})

    def _check_padding(self, layer: int) -> None:
        last = self.manifest.tp - 1
        for expert in range(self.manifest.experts_per_layer):
            names = [self.name(layer, expert, proj, last, "svh") for proj in PROJECTIONS[:2]]
            check_padding({name: self.tensor(name) for name in names}, self.padding)

    def _check_layer(self, layer: int) -> list[str]:
        """Names of the layer that are missing; those that are there are checked."""
        missing = []
        for name, rule in self._rules(layer):
            if not self.checkpoint.has(name):
                missing.append(name)
                continue
            info = self.checkpoint.info(name)
            check_rule(name, info.dtype, info.shape, _stored_rule(name, rule))
            if name.endswith(".mcg"):
                check_rank_sliced_marker(name, self.checkpoint.tensor(name))
        return missing

    def _rules(self, layer: int) -> Iterator[tuple[str, TensorRule]]:
        """The names the layer must have, each once, and what each must be."""
        seen: set[str] = set()
        for expert in range(self.manifest.experts_per_layer):
            bits = self.manifest.bits_of(layer, expert)
            for proj in PROJECTIONS:
                rules = slice_rules(proj, bits, self.hidden_size, self.slice_width)
                for rank, (field, rule) in product(range(self.manifest.tp), rules.items()):
                    name = self.name(layer, expert, proj, rank, field)
                    if name not in seen:
                        seen.add(name)
                        yield name, rule


def experts_prefix(layer: int) -> str:
    """What the names of a layer's routed experts start with."""
    return f"model.layers.{layer}.mlp.experts."


def _stored_rule(name: str, rule: TensorRule) -> TensorRule:
    """The rule of a vector, or of the packed signs that stand for it."""
    return TensorRule(torch.int16, (rule.shape[0] // WORD_BITS,)) if is_packed(name) else rule
