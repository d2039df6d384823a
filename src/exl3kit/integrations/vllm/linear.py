"""EXL3 linears in vLLM: a fused layer keeps one EXL3 matrix per source and calls each by itself.

Sources of a fused layer (q, k, v or gate, up) have their own sizes and may have their own bits, so
their fields lie behind one another in flat parameters:

    trellis int16 (sum of words,)     suh fp16 (sum of in_features,)
    mcg or mul1 int32 (sources,)      svh fp16 (sum of out_features,)

A file fills sizes up to 128, as the 576 outputs of latent attention's `kv_a_proj_with_mqa`: the
input is filled up with zeros and the outputs are cut off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch.nn.functional import linear, pad

from exl3kit.checkpoint.names import check_rule, missing_text
from exl3kit.checkpoint.widths import padded
from exl3kit.errors import CheckpointError
from exl3kit.format.decode import decode_dense
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
from exl3kit.runtime.prepare import prepare_linear

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
        self.kept: list[slice] = []  # columns of each source's output that are the layer's
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
        self.kept = self._kept(layer, output_partition_sizes)
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

        def span(name: str, stored: int, size: int) -> tuple[int, int]:
            if layer.tp_size == 1 and stored == padded(size):
                return 0, stored
            return rank_start(name, stored, size, *tp), size

        return [
            Cut(
                *span(f"{part.name} input", part.spec.in_features, in_size),
                *span(f"{part.name} output", part.spec.out_features, out_size),
            )
            for part, out_size in zip(self.parts, out_sizes, strict=True)
        ]

    def _kept(self, layer: Any, out_sizes: list[int]) -> list[slice]:
        """Which columns of each source's output the layer gives."""
        return [slice(size) for size in out_sizes]

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check that every tensor of every source came; no repacking takes place.

        Kernels are loaded now, before vLLM measures the memory that is left, and not in a step.
        """
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
        for part in self.parts:
            prepare_linear(part.spec.bits, self.codebook, layer.suh.device)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """(…, in) -> (…, sum of out) in the dtype of x; `bias` is vLLM's own, (sum of out,)."""
        fill = self.fields["suh"].shapes[0][0] - x.shape[-1]
        x = pad(x, (0, fill)) if fill else x.contiguous()
        outputs = [
            exl3_linear(x, *self._weights(layer, index), str(self.codebook))[..., kept]
            for index, kept in enumerate(self.kept)
        ]
        output = outputs[0].contiguous() if len(outputs) == 1 else torch.cat(outputs, dim=-1)
        return output if bias is None else output + bias

    def _weights(self, layer: Any, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """trellis, suh and svh of one source, views of the parameters."""
        trellis, suh, svh = (
            self.fields[name].view(getattr(layer, name), index)
            for name in ("trellis", "suh", "svh")
        )
        return trellis, suh, svh


class DecodedLinearMethod(Exl3LinearMethod):
    """A linear whose dense matrix vLLM takes itself: decoded once, when all of it has come.

    `kv_b_proj` of latent attention is such a one: vLLM multiplies its halves into other matrices.
    """

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
        """Allocate the packed fields as any EXL3 linear does; they are freed when decoded."""
        sizes = input_size_per_partition, output_partition_sizes, input_size, output_size
        super().create_weights(layer, *sizes, params_dtype, **extra_weight_attrs)
        self._in_features, self._dtype = input_size_per_partition, params_dtype

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replace the packed fields by `weight` (out, in) in the model's dtype."""
        super().process_weights_after_loading(layer)
        dense = [
            decode_dense(*self._weights(layer, index), self.codebook, self._dtype)[:, kept].T
            for index, kept in enumerate(self.kept)
        ]
        weight = torch.cat(dense)[:, : self._in_features].contiguous()
        for name in self.fields:
            delattr(layer, name)
        layer.register_parameter("weight", torch.nn.Parameter(weight, requires_grad=False))

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """(…, in) -> (…, out) by the dense matrix."""
        return linear(x, layer.weight, bias)
