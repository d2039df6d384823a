"""What the output holds: which shard has which tensors, all known before the first is quantised.

One shard is a decoder layer, and one has what lies outside the layers. A linear of the bit plan is
stored as EXL3; everything else is copied with its bytes, but for FP8 matrices, which become BF16:
readers of EXL3 files know no second quantisation.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from exl3kit.checkpoint.fp8 import FP8_DTYPES, SCALE_FIELD
from exl3kit.checkpoint.open import Checkpoint
from exl3kit.checkpoint.shard import Entry
from exl3kit.format.spec import Codebook
from exl3kit.models.base import LinearSpec, ModelMap
from exl3kit.quantize.bit_plan import HEAD, BitPlan, dense_linears
from exl3kit.quantize.layout import WHOLE, Layout, Matrix

_LAYER = re.compile(r"model\.layers\.(\d+)\..*", re.DOTALL)


@dataclass(frozen=True)
class PlannedLinear:
    """A linear that becomes EXL3 at `bits`, stored as `layout` says."""

    spec: LinearSpec
    bits: int | float
    layout: Layout

    @property
    def matrices(self) -> list[Matrix]:
        """What the quantiser is given for it."""
        return self.layout.matrices(self.spec.name)


@dataclass(frozen=True)
class Contents:
    """The tensors of the output made from `checkpoint` by `bits`; `experts` is their layout.

    Everything is by layer, None standing for what lies outside the layers.
    """

    checkpoint: Checkpoint
    model: ModelMap
    bits: BitPlan
    experts: Layout
    codebook: Codebook

    @property
    def layers(self) -> list[int | None]:
        """The parts of the output, each one shard, in the order of their shards."""
        return [None, *sorted(layer for layer in self._names if layer is not None)]

    def shard_number(self, layer: int | None) -> int:
        """The shard of a layer, from 1 on."""
        return self.layers.index(layer) + 1

    def linears(self, layer: int | None) -> list[PlannedLinear]:
        """Linears that become EXL3: dense ones by name, then experts, each gate, up, down."""
        found = [
            PlannedLinear(spec, self.bits.modules[spec.name], WHOLE)
            for spec in self._dense.get(layer, ())
            if spec.name in self.bits.modules
        ]
        if layer is not None:
            for expert, rate in enumerate(self.bits.experts.get(layer, ())):
                specs = self.model.expert_linears(layer, expert)
                found += [PlannedLinear(spec, rate, self.experts) for spec in specs]
        return found

    def matrices(self, layer: int | None) -> list[Matrix]:
        """The matrices of all these linears."""
        return [matrix for linear in self.linears(layer) for matrix in linear.matrices]

    def copied(self, layer: int | None) -> list[str]:
        """Tensors of the source that the output has in dense form."""
        replaced = {linear.spec.name for linear in self.linears(layer)}
        return [
            name
            for name in self._names.get(layer, ())
            if name.rpartition(".")[0] not in replaced and not self._is_scale(name)
        ]

    def biases(self, layer: int | None) -> list[LinearSpec]:
        """The EXL3 linears with a bias, which is stored beside the trellis."""
        return [p.spec for p in self.linears(layer) if self.checkpoint.has(f"{p.spec.name}.bias")]

    def entries(self, layer: int | None) -> list[Entry]:
        """Name, dtype and shape of every tensor of the layer's shard."""
        found = []
        for name in self.copied(layer):
            info = self.checkpoint.info(name)
            dtype = torch.bfloat16 if info.dtype in FP8_DTYPES else info.dtype
            found.append(Entry(name, dtype, info.shape))
        biased = {spec.name for spec in self.biases(layer)}
        for linear in self.linears(layer):
            has_bias = linear.spec.name in biased
            found += linear.layout.entries(linear.spec, linear.bits, self.codebook, has_bias)
        return found

    def _is_scale(self, name: str) -> bool:
        """A block scale of an FP8 matrix: it goes into the BF16 weight."""
        return name.endswith(f".{SCALE_FIELD}")

    @cached_property
    def _names(self) -> dict[int | None, list[str]]:
        groups: dict[int | None, list[str]] = {None: []}
        for name in self.checkpoint.names():
            groups.setdefault(layer_of(name), []).append(name)
        return groups

    @cached_property
    def _dense(self) -> Mapping[int | None, list[LinearSpec]]:
        groups: dict[int | None, list[LinearSpec]] = {}
        for name, spec in dense_linears(self.model).items():
            groups.setdefault(None if name == HEAD else layer_of(name), []).append(spec)
        return groups


def layer_of(name: str) -> int | None:
    """The decoder layer a tensor or module belongs to, None if it is outside the layers."""
    match = _LAYER.fullmatch(name)
    return int(match[1]) if match else None


def total_bytes(contents: Contents) -> int:
    """Tensor bytes of the whole output."""
    return sum(entry.nbytes for entry in _all_entries(contents, contents.layers))


def _all_entries(contents: Contents, layers: Iterable[int | None]) -> Iterator[Entry]:
    for layer in layers:
        yield from contents.entries(layer)
