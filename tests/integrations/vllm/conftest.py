"""Tiny checkpoints and stand-ins for the few attributes of vLLM layers that the plugin reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from exl3kit.integrations.vllm import compat
from exl3kit.integrations.vllm.facts import CheckpointFacts, ModelSizes, read_facts
from exl3kit.integrations.vllm.moe import Exl3MoEMethod
from exl3kit.testing.generate import make_rank_sliced
from exl3kit.testing.tiny_model import TinyGlm4Moe, write_tiny_model

SPEC = TinyGlm4Moe(
    hidden_size=128, moe_intermediate_size=256, num_experts=4, num_layers=3, dense_layers=1
)
SIZES = ModelSizes(SPEC.num_layers, SPEC.hidden_size, SPEC.moe_intermediate_size)
LAYER = "model.layers.1.mlp.experts"


@dataclass
class FakeParallel:
    """FusedMoEParallelConfig."""

    tp_size: int = 2
    ep_size: int = 1
    enable_eplb: bool = False


@dataclass
class FakeMoE:
    """FusedMoEConfig of one rank."""

    tp_rank: int = 0
    num_experts: int = SPEC.num_experts
    hidden_dim: int = SPEC.hidden_size
    has_bias: bool = False
    moe_parallel_config: FakeParallel = field(default_factory=FakeParallel)

    @property
    def tp_size(self) -> int:
        return self.moe_parallel_config.tp_size

    @property
    def intermediate_size_per_partition(self) -> int:
        return SPEC.moe_intermediate_size // self.tp_size


def make_layer(**attributes: Any) -> torch.nn.Module:
    """A module with what vLLM's experts layer carries; `attributes` replace the defaults."""
    layer = torch.nn.Module()
    defaults = {"activation": "silu", "expert_map": None, "apply_router_weight_on_input": False}
    for name, value in {**defaults, **attributes}.items():
        setattr(layer, name, value)
    return layer


def build_experts(
    facts: CheckpointFacts, moe: FakeMoE, layer: torch.nn.Module, dtype: torch.dtype = torch.float32
) -> Exl3MoEMethod:
    """Create the parameters of layer 1 on `layer`."""
    method = Exl3MoEMethod(moe, facts.experts[1], LAYER)
    method.create_weights(
        layer,
        num_experts=moe.num_experts,
        hidden_size=moe.hidden_dim,
        intermediate_size_per_partition=moe.intermediate_size_per_partition,
        params_dtype=dtype,
    )
    return method


@pytest.fixture(autouse=True)
def parallel(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The engine's tensor-parallel group and token budget, without an engine."""
    state = SimpleNamespace(tp_size=2, tp_rank=0, tokens=512, has_lora=False, load_format="auto")
    monkeypatch.setattr(compat, "get_tensor_model_parallel_world_size", lambda: state.tp_size)
    monkeypatch.setattr(compat, "get_tensor_model_parallel_rank", lambda: state.tp_rank)
    monkeypatch.setattr(compat, "max_num_batched_tokens", lambda: state.tokens)
    monkeypatch.setattr(compat, "has_lora", lambda: state.has_lora)
    monkeypatch.setattr(compat, "load_format", lambda: state.load_format)
    return state


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unquantised tiny model, with one next-token layer that has its own head."""
    spec = TinyGlm4Moe(**{**SPEC.__dict__, "mtp_layers": 1, "mtp_own_head": True})
    return write_tiny_model(tmp_path_factory.mktemp("plain") / "model", spec)


@pytest.fixture(scope="session")
def sliced(plain: Path) -> Path:
    """Layers 1 and 2 rank-sliced for two ranks at 3 bits; the next-token layer stays BF16."""
    return make_rank_sliced(plain, plain.parent / "sliced", 3, 2, (1, 2))


@pytest.fixture(scope="session")
def facts(sliced: Path) -> CheckpointFacts:
    return read_facts(sliced, SIZES)
