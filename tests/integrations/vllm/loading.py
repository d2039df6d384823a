"""Loads one layer of a checkpoint without an engine, and the float64 sum that it must give."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from exl3kit.checkpoint.open import Checkpoint, open_checkpoint
from exl3kit.integrations.vllm import compat
from exl3kit.integrations.vllm.facts import CheckpointFacts, read_facts
from exl3kit.integrations.vllm.loader import local_weights
from exl3kit.integrations.vllm.moe import Exl3MoEMethod
from tests.integrations.vllm.conftest import (
    LAYER,
    SIZES,
    SPEC,
    FakeMoE,
    FakeParallel,
    build_experts,
    make_layer,
)

SHARDS = {"gate_proj": ("w13", "w1"), "down_proj": ("w2", "w2"), "up_proj": ("w13", "w3")}
ONE = range(1)
Tensors = dict[str, torch.Tensor]


def stored(checkpoint: Checkpoint) -> Tensors:
    return {name: checkpoint.tensor(name) for name in checkpoint.names() if LAYER in name}


def load(
    layer: torch.nn.Module,
    tensors: Tensors,
    facts: CheckpointFacts,
    ranks: range = ONE,
) -> None:
    """What vLLM does with the loader's stream: route each expert tensor to its parameter."""
    for name, tensor in local_weights(tensors.items(), facts, ranks):
        expert, projection, leaf = name.removeprefix(f"{LAYER}.").split(".")
        group, shard = SHARDS[projection]
        param = getattr(layer, f"{group}_{leaf}")
        assert param.weight_loader(
            param=param,
            loaded_weight=tensor,
            weight_name=name,
            shard_id=shard,
            expert_id=int(expert),
            return_success=True,
        )


def loaded_rank(path: Path, rank: int, tp_size: int = 2) -> tuple[Exl3MoEMethod, torch.nn.Module]:
    """Layer 1 of a file as rank `rank` of `tp_size` holds it."""
    facts, layer = read_facts(path, SIZES), make_layer()
    with patch.object(compat, "get_tensor_model_parallel_world_size", lambda: tp_size):
        moe = FakeMoE(tp_rank=rank, moe_parallel_config=FakeParallel(tp_size))
        method = build_experts(facts, moe, layer)
    load(layer, stored(open_checkpoint(path)), facts, method.ranks)
    method.process_weights_after_loading(layer)
    return method, layer


def rows(
    method: Exl3MoEMethod, layer: torch.nn.Module, field: str, shard: str, expert: int
) -> torch.Tensor:
    """One expert's rows of a parameter, e.g. of w13_suh, a slice each."""
    return method.fields[field].rows(getattr(layer, field), shard, expert)


def route(num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(5)
    x = torch.randn(6, SPEC.hidden_size, generator=random)
    ids = torch.stack([torch.randperm(num_experts, generator=random)[:2] for _ in range(6)])
    return x, torch.rand(6, 2, generator=random), ids.to(torch.int32)


def dense_experts(path: Path, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> Any:
    """The same sum in float64 from decoded slices, one expert and rank at a time."""
    checkpoint, x = open_checkpoint(path), x.double()
    out = torch.zeros_like(x)
    for token, slot in torch.cartesian_prod(torch.arange(len(x)), torch.arange(ids.shape[1])):
        for rank in ("",) if checkpoint.manifest is None else (".rank0", ".rank1"):
            name = f"{LAYER}.{ids[token, slot]}.{{}}{rank}"
            gate, up, down = (
                checkpoint.exl3(name.format(proj)).dequantize(torch.float64)
                for proj in ("gate_proj", "up_proj", "down_proj")
            )
            inner = torch.nn.functional.silu(x[token] @ gate) * (x[token] @ up)
            out[token] += weights[token, slot] * (inner @ down)
    return out
