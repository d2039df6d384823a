"""EXL3 linears in vLLM: a fused layer keeps one EXL3 matrix per source and calls each by itself.

Sources of a fused layer (q, k, v or gate, up) have their own sizes and may have their own bits, so
their fields lie behind one another in flat parameters:

    trellis int16 (sum of words,)     suh fp16 (sum of in_features,)
    mcg or mul1 int32 (sources,)      svh fp16 (sum of out_features,)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from exl3kit.checkpoint.names import check_rule, missing_text
from exl3kit.errors import CheckpointError
from exl3kit.format.spec import Codebook
from exl3kit.format.tensors import check_marker
from exl3kit.integrations.vllm.compat import LinearMethodBase
from exl3kit.integrations.vllm.params import (
    Cut,
    MatrixSpec,
    make_parameter,
    rank_start,
)
from exl3kit.runtime.ops import exl3_linear

_QKV = {"q": 0, "k": 1, "v": 2}


@dataclass(frozen=True)
class LinearPart:
    """One source matrix as the checkpoint stores it: module name and sizes before any cut."""

    name: str
    spec: MatrixSpec


@dataclass
class LinearField:
    """One field of all sources of a layer, behind one another in a flat parameter."""

    name: str
    parts: Sequence[LinearPart]
    cuts: Sequence[Cut]
    shapes: Sequence[tuple[int, ...]]
    received: set[int] = field(default_factory=set)

    @property
    def numel(self) -> int:
        """Elements of all sources together."""
        return sum(prod(shape) for shape in self.shapes)

    def view(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        """Source `index` of the flat tensor in its own shape, without a copy."""
        start = sum(prod(shape) for shape in self.shapes[:index])
        return flat.narrow(0, start, prod(self.shapes[index])).view(self.shapes[index])

    def load(
        self,
        param: torch.nn.Parameter,
        loaded_weight: torch.Tensor,
        shard_id: str | int | None = None,
    ) -> None:
        """vLLM's linear loader: cut one stored tensor to this rank, check it, copy it."""
        index = _QKV[shard_id] if isinstance(shard_id, str) else shard_id or 0
        part, shape = self.parts[index], self.shapes[index]
        label = f"{part.name}.{self.name}"
        check_rule(
            label, loaded_weight.dtype, tuple(loaded_weight.shape), part.spec.rules()[self.name]
        )
        if self.name == part.spec.codebook:
            check_marker(loaded_weight, part.spec.codebook, label)
        weight = self.cuts[index].apply(self.name, loaded_weight)
        self.view(param.data, index).copy_(weight.reshape(shape))
        self.received.add(index)


class Exl3LinearMethod(LinearMethodBase):
    """vLLM quant method of one linear layer, fused or not."""

    def __init__(self, parts: Sequence[LinearPart]) -> None:
        self.parts = parts
        self.fields: dict[str, LinearField] = {}
        codebooks = {part.spec.codebook for part in parts}
        if len(codebooks) > 1:
            names = ", ".join(f"{part.name} {part.spec.codebook}" for part in parts)
            raise CheckpointError(f"parts of one fused layer must share a codebook, got {names}")
        self.codebook: Codebook = codebooks.pop()

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Allocate the fields of this rank; SliceError where a cut is not on 128 features."""
        cuts = self._cuts(layer, input_size_per_partition, output_partition_sizes)
        local = [
            MatrixSpec(cut.in_size, cut.out_size, part.spec.bits, self.codebook).rules()
            for part, cut in zip(self.parts, cuts, strict=True)
        ]
        for name, rule in local[0].items():
            shapes = [rules[name].shape for rules in local]
            loader = self.fields[name] = LinearField(name, self.parts, cuts, shapes)
            parameter = make_parameter((loader.numel,), rule.dtype, loader.load)
            layer.register_parameter(name, parameter)

    def _cuts(self, layer: Any, in_size: int, out_sizes: list[int]) -> list[Cut]:
        """The part of each source that this rank holds."""
        tp = (layer.tp_size, layer.tp_rank)
        return [
            Cut(
                rank_start(f"{part.name} input", part.spec.in_features, in_size, *tp),
                in_size,
                rank_start(f"{part.name} output", part.spec.out_features, out_size, *tp),
                out_size,
            )
            for part, out_size in zip(self.parts, out_sizes, strict=True)
        ]

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check that every tensor of every source came; no repacking takes place."""
        missing = [
            f"{part.name}.{name}"
            for name, loader in self.fields.items()
            for index, part in enumerate(self.parts)
            if index not in loader.received
        ]
        if missing:
            raise CheckpointError(missing_text(self.parts[0].name.rpartition(".")[0], missing))
        for loader in self.fields.values():
            loader.received.clear()

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """(…, in) -> (…, sum of out) in the dtype of x; `bias` is vLLM's own, (sum of out,)."""
        x = x.contiguous()
        outputs = [
            exl3_linear(
                x,
                self.fields["trellis"].view(layer.trellis, index),
                self.fields["suh"].view(layer.suh, index),
                self.fields["svh"].view(layer.svh, index),
                str(self.codebook),
            )
            for index in range(len(self.parts))
        ]
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
        return output if bias is None else output + bias
