"""May this vLLM engine run one layer's EXL3 experts? Asked when the layer is built."""

from __future__ import annotations

from typing import Any

import torch

from exl3kit.checkpoint.manifest import RankSlicedManifest
from exl3kit.checkpoint.runtime_checks import RuntimeLayout, check_runtime
from exl3kit.integrations.vllm import compat
from exl3kit.integrations.vllm.facts import ExpertFacts


def check_layer(facts: ExpertFacts, layer: Any, moe: Any, params_dtype: torch.dtype) -> None:
    """Refuse what `check_runtime` refuses; `moe` is vLLM's FusedMoEConfig of `layer`."""
    layout = _layout(layer, moe, params_dtype)
    check_runtime(facts.manifest or _whole_as_sliced(facts, layout.tp_size), layout)


def _layout(layer: Any, moe: Any, params_dtype: torch.dtype) -> RuntimeLayout:
    parallel = moe.moe_parallel_config
    return RuntimeLayout(
        tp_size=compat.get_tensor_model_parallel_world_size(),
        moe_tp_size=parallel.tp_size,
        num_experts=moe.num_experts,
        hidden_size=moe.hidden_dim,
        intermediate_size=moe.intermediate_size_per_partition * parallel.tp_size,
        dtype=params_dtype,
        max_num_batched_tokens=compat.max_num_batched_tokens(),
        device_type=compat.device_type(),
        activation=_activation(layer),
        ep_size=parallel.ep_size,
        has_expert_map=getattr(layer, "expert_map", None) is not None,
        use_eplb=parallel.enable_eplb,
        has_bias=moe.has_bias,
        router_weight_on_input=layer.apply_router_weight_on_input,
    )


def _activation(layer: Any) -> str:
    """The activation's name, and its limit where the model clips what goes into it."""
    name = str(getattr(layer.activation, "value", layer.activation))
    limit = getattr(layer, "swiglu_limit", None)
    return f"{name} clipped at {limit}" if limit else name


def _whole_as_sliced(facts: ExpertFacts, tp_size: int) -> RankSlicedManifest:
    """Whole experts are cut while they load: to the checks that is a file made for `tp_size`."""
    return RankSlicedManifest(
        tp=tp_size,
        first_layer=facts.layer,
        last_layer=facts.layer,
        experts_per_layer=facts.num_experts,
        layer_bits={},
    )
