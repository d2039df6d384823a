"""Routed experts of one layer: parameters, loading, completeness, forward.

The packed trellis words, as the checkpoint stores them, are the only resident copy of the weights.
Gate and up are the two halves of `w13_*`, down is `w2_*`:

    w13_trellis int16 (2, E, H/16, S/16, 16 K)   w13_suh fp16 (2, E, H)   w13_svh fp16 (2, E, S)
    w2_trellis  int16 (E, S/16, H/16, 16 K)      w2_suh  fp16 (E, S)      w2_svh  fp16 (E, H)

with E experts, hidden size H and S intermediate channels on this rank; markers are int32 (2, E)
and (E,).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from exl3kit.checkpoint.names import TensorRule, check_complete, check_rule
from exl3kit.errors import FormatError
from exl3kit.format.spec import Codebook
from exl3kit.format.tensors import check_marker
from exl3kit.integrations.vllm.compat import FusedMoEMethodBase
from exl3kit.integrations.vllm.facts import ExpertFacts
from exl3kit.integrations.vllm.layout import check_layer
from exl3kit.integrations.vllm.params import Cut, MatrixSpec, make_parameter
from exl3kit.runtime.ops import exl3_moe

_HALF = {"w1": 0, "w3": 1}
_H_SIDE = {("w13", "suh"), ("w2", "svh")}
_SHARDS = {"w13": ("w1", "w3"), "w2": ("w2",)}


@dataclass
class ExpertField:
    """One field of one fused group, e.g. w13_suh: loads each expert's tensor into its row.

    `labels` has the checkpoint's name of each shard's tensor, with {} for the expert, and `stored`
    what that tensor must be. `cut` is this rank's part of it, None where the checkpoint stores
    slices. With `is_shared` the layer's one stored vector (rotation layout shared_h_v1) goes to
    every row.
    """

    group: str
    name: str
    labels: Mapping[str, str]
    stored: TensorRule
    codebook: Codebook
    num_experts: int
    cut: Cut | None
    is_shared: bool
    received: set[tuple[str, int]] = field(default_factory=set)

    def load(
        self,
        param: torch.nn.Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        """vLLM's expert loader: check one tensor, copy it into `param`; True for success.

        A trellis arrives as 2-D (see `loader`). FormatError for a wrong shape, dtype or marker.
        """
        weight = self._checked(self.labels[shard_id].format(expert_id), loaded_weight)
        experts = range(self.num_experts) if self.is_shared else (expert_id,)
        for expert in experts:
            row = (_HALF[shard_id], expert) if self.group == "w13" else (expert,)
            param.data[row].copy_(weight)
            self.received.add((shard_id, expert))
        return True if return_success else None

    def _checked(self, label: str, weight: torch.Tensor) -> torch.Tensor:
        if self.name == "trellis" and weight.dim() == 2:
            weight = self._unflattened(label, weight)
        check_rule(label, weight.dtype, tuple(weight.shape), self.stored)
        if self.name == self.codebook:
            check_marker(weight, self.codebook, label)
            return weight.reshape(())
        return weight if self.cut is None else self.cut.apply(self.name, weight)

    def _unflattened(self, label: str, weight: torch.Tensor) -> torch.Tensor:
        words = self.stored.shape[-1]
        if weight.shape[1] % words:
            raise FormatError(
                f"{label}: expected tiles of {words} words, got rows of {weight.shape[1]}"
            )
        return weight.unflatten(1, (-1, words))

    def missing(self) -> list[str]:
        """Checkpoint names of the tensors not loaded yet."""
        return [
            label.format(expert)
            for shard, label in self.labels.items()
            for expert in range(self.num_experts)
            if (shard, expert) not in self.received
        ]


class Exl3MoEMethod(FusedMoEMethodBase):
    """vLLM quant method of one layer of routed EXL3 experts."""

    def __init__(self, moe: Any, facts: ExpertFacts, prefix: str) -> None:
        super().__init__(moe)
        self.facts = facts
        self.prefix = prefix
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
        width, tp = intermediate_size_per_partition, self.moe.tp_size
        start = self.moe.tp_rank * width
        stored_width = width if self.facts.is_sliced else width * tp
        groups = {
            "w13": (Cut(0, hidden_size, start, width), (hidden_size, stored_width)),
            "w2": (Cut(start, width, 0, hidden_size), (stored_width, hidden_size)),
        }
        for group, (cut, stored_size) in groups.items():
            local = self._spec(cut.in_size, cut.out_size).rules()
            for name, stored in self._spec(*stored_size).rules().items():
                loader = ExpertField(
                    group=group,
                    name=name,
                    labels=self._labels(layer, group, name),
                    stored=stored,
                    codebook=self.facts.codebook,
                    num_experts=num_experts,
                    cut=None if self.facts.is_sliced else cut,
                    is_shared=self.facts.is_shared_h and (group, name) in _H_SIDE,
                )
                lead = (2, num_experts) if group == "w13" else (num_experts,)
                parameter = make_parameter(lead + local[name].shape, stored.dtype, loader.load)
                layer.register_parameter(f"{group}_{name}", parameter)
                self.fields[f"{group}_{name}"] = loader

    def _spec(self, in_features: int, out_features: int) -> MatrixSpec:
        return MatrixSpec(in_features, out_features, self.facts.bits, self.facts.codebook)

    def _labels(self, layer: Any, group: str, field_name: str) -> dict[str, str]:
        """Shard id -> checkpoint name; layers of vLLM <= 0.23 do not tell projection names."""
        projections = {
            "w1": getattr(layer, "ckpt_gate_proj_name", "gate_proj"),
            "w2": getattr(layer, "ckpt_down_proj_name", "down_proj"),
            "w3": getattr(layer, "ckpt_up_proj_name", "up_proj"),
        }
        rank = f".rank{self.moe.tp_rank}" if self.facts.is_sliced else ""
        return {
            shard: f"{self.prefix}.{{}}.{projections[shard]}{rank}.{field_name}"
            for shard in _SHARDS[group]
        }

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """None: the kernel is our own, not one of vLLM's."""
        return None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check that every tensor of every local expert came; no repacking takes place."""
        loaders = self.fields.values()
        check_complete(self.facts.layer, [name for loader in loaders for name in loader.missing()])
        for loader in loaders:
            loader.received.clear()

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
        return exl3_moe(
            x,
            topk_weights,
            topk_ids,
            layer.w13_trellis,
            layer.w13_suh,
            layer.w13_svh,
            layer.w2_trellis,
            layer.w2_suh,
            layer.w2_svh,
            str(self.facts.codebook),
            getattr(layer, "expert_map", None),
        )
