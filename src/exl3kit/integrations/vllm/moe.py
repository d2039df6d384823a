"""Routed experts of one layer: parameters, completeness, forward.

The packed trellis words, as the checkpoint stores them, are the only resident copy of the weights.
`experts` says how they lie in the parameters, `exl3kit.runtime.experts` how they run.
"""

from __future__ import annotations

from typing import Any

import torch

from exl3kit.checkpoint.names import check_complete
from exl3kit.checkpoint.padding import check_padding
from exl3kit.checkpoint.r7 import SHARED as R7_SHARED
from exl3kit.checkpoint.runtime_checks import owned_ranks
from exl3kit.checkpoint.widths import padded
from exl3kit.integrations.vllm.compat import FusedMoEMethodBase
from exl3kit.integrations.vllm.experts import SHARDS, ExpertField, ExpertTensor
from exl3kit.integrations.vllm.facts import ExpertFacts
from exl3kit.integrations.vllm.layout import check_layer
from exl3kit.integrations.vllm.params import Cut, MatrixSpec, make_parameter
from exl3kit.runtime.experts import (
    ExpertWeights,
    Rates,
    exl3_experts,
    is_uniform,
    matrix_table,
)
from exl3kit.runtime.prepare import prepare_moe

_ROLES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}  # in the order of Rates
_H_SIDE = {("w1", "suh"), ("w3", "suh"), ("w2", "svh")}


class Exl3MoEMethod(FusedMoEMethodBase):
    """vLLM quant method of one layer of routed EXL3 experts."""

    def __init__(self, moe: Any, facts: ExpertFacts, prefix: str) -> None:
        super().__init__(moe)
        self.facts = facts
        self.prefix = prefix
        self.ranks = range(1)
        self.padding = 0  # channels at the end of this rank's part that the model does not have
        self.matrices: torch.Tensor | None = None
        self.fields: dict[str, ExpertField] = {}

    def maybe_roundup_sizes(
        self,
        hidden_size: int,
        intermediate_size_per_partition: int,
        act_dtype: torch.dtype,
        moe_parallel_config: Any,
    ) -> tuple[int, int]:
        """No padding: the stored sizes are the sizes."""
        return hidden_size, intermediate_size_per_partition

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Allocate every field at full size, unless `check_layer` refuses this layout."""
        check_layer(self.facts, layer, self.moe, params_dtype)
        self.ranks = owned_ranks(self.facts.manifest, self.moe.tp_size, self.moe.tp_rank)
        tp_size = self.moe.tp_size
        width = intermediate_size_per_partition * tp_size
        sizes = hidden_size, padded(width) // tp_size  # as files store it, rounded up to 128
        if self.moe.tp_rank == tp_size - 1:
            self.padding = padded(width) - width
        for group, shards in SHARDS.items():
            tensors = {
                rates: {shard: self._tensors(layer, shard, rates, *sizes) for shard in shards}
                for rates in set(self.facts.rates)
            }
            for name in tensors[self.facts.rates[0]][shards[0]]:
                by_rates = {
                    rates: {shard: found[shard][name] for shard in shards}
                    for rates, found in tensors.items()
                }
                stored = [by_rates[rates] for rates in self.facts.rates]
                field = ExpertField(name, self.facts.codebook, self.ranks, stored)
                parameter = make_parameter((field.numel,), field.dtype, field.load)
                layer.register_parameter(f"{group}_{name}", parameter)
                self.fields[f"{group}_{name}"] = field
        if not is_uniform(self.facts.rates):
            self.matrices = self._matrix_table().to(layer.w2_suh.device)

    def _matrix_table(self) -> torch.Tensor:
        rates = [own for own in self.facts.rates for _ in self.ranks]
        hidden_size, width = (self.fields[f"w2_{name}"].width for name in ("svh", "suh"))
        return matrix_table(rates, hidden_size, width)

    def _tensors(
        self, layer: Any, shard: str, rates: Rates, hidden_size: int, width: int
    ) -> dict[str, ExpertTensor]:
        """What the file stores of one projection, by field; `width` is this rank's part of I."""
        bits = rates[list(_ROLES).index(shard)]
        if self.facts.is_sliced:
            width //= len(self.ranks)
            whole, start = width, 0
        else:
            whole, start = width * self.moe.tp_size, width * self.moe.tp_rank
        if shard == "w2":
            cut, stored_size = Cut(start, width, 0, hidden_size), (whole, hidden_size)
        else:
            cut, stored_size = Cut(0, hidden_size, start, width), (hidden_size, whole)
        local = MatrixSpec(cut.in_size, cut.out_size, bits, self.facts.codebook).rules()
        stored = MatrixSpec(*stored_size, bits, self.facts.codebook).rules()
        return {
            field: ExpertTensor(
                label=self._label(layer, shard, field),
                stored=rule,
                local=local[field].shape,
                cut=None if self.facts.is_sliced else cut,
                is_shared=self._is_shared(shard, field),
            )
            for field, rule in stored.items()
        }

    def _is_shared(self, shard: str, field: str) -> bool:
        return self.facts.is_shared_h and (shard, field) in _H_SIDE

    def _label(self, layer: Any, shard: str, field: str) -> str:
        """The checkpoint's name; layers of vLLM <= 0.23 do not tell projection names."""
        if self.facts.is_r7 and self._is_shared(shard, field):
            return f"{self.prefix}.r7_shared.{R7_SHARED[_ROLES[shard], field]}"
        projection = getattr(layer, f"ckpt_{_ROLES[shard]}_name", _ROLES[shard])
        expert = "shared_h" if self._is_shared(shard, field) else "{expert}"
        rank = ".rank{rank}" if self.facts.is_sliced else ""
        return f"{self.prefix}.{expert}.{projection}{rank}.{field}"

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """None: the kernel is our own, not one of vLLM's."""
        return None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check that every tensor of every local expert came; no repacking takes place.

        Kernels are loaded now, before vLLM measures the memory that is left, and not in a step.
        The table is written again, in place since CUDA graphs hold their address: sleep of level 2
        discards all memory of the model, and a reload brings back parameters alone.
        """
        missing = {name for field in self.fields.values() for name in field.missing()}
        check_complete(self.facts.layer, missing)
        if self.padding:
            self._check_padding(layer)
        if self.matrices is not None:
            self.matrices.copy_(self._matrix_table())
        for field in self.fields.values():
            field.received.clear()
        prepare_moe(self.facts.rates, self.facts.codebook, layer.w2_suh.device)

    def _check_padding(self, layer: Any) -> None:
        """CheckpointError if channels that only fill the width up would reach the output."""
        field = self.fields["w13_svh"]
        for expert, shards in enumerate(field.tensors):
            vectors = {
                tensor.label.format(expert=expert, rank=self.ranks[-1]): field.rows(
                    layer.w13_svh, shard, expert
                )[-1].cpu()
                for shard, tensor in shards.items()
            }
            check_padding(vectors, self.padding)

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        *_: Any,
        **__: Any,
    ) -> torch.Tensor:
        """Weighted sum over each token's experts, (T, H) in the dtype of x, not reduced over ranks.

        vLLM adds shared experts, scales and reduces; the arguments it passes for that are ignored.
        """
        views = [self._view(layer, name) for name in ExpertWeights._fields[:-1]]
        weights = ExpertWeights(*views, matrices=self.matrices)
        codebook, slices = str(self.facts.codebook), len(self.ranks)
        return exl3_experts(x, topk_weights, topk_ids, weights, codebook, slices)

    def _view(self, layer: Any, name: str) -> torch.Tensor:
        """A parameter as the op takes it; nothing is copied. Trellises with a table stay flat."""
        flat = getattr(layer, name)
        is_flat = self.matrices is not None and name.endswith("trellis")
        return flat if is_flat else self.fields[name].view(flat)
