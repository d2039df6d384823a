"""Every private or moved vLLM name in one place.

Read from the sources of 0.20 to 0.33: the class that owns expert weights is `FusedMoE` up to 0.23
and `RoutedExperts` from 0.24 on. Tests run 0.32, on a GPU 0.26. Arguments that differ between
versions are taken variadically where they arrive (`Exl3MoEMethod.apply`).
"""

from __future__ import annotations

from vllm.config import get_current_vllm_config
from vllm.config.load import LoadConfig
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase
from vllm.model_executor.layers.linear import (
    LinearBase,
    LinearMethodBase,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader import get_model_loader, register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.platforms import current_platform

try:
    from vllm.model_executor.layers.fused_moe import RoutedExperts as ExpertsLayer
except ImportError:  # vLLM 0.20 to 0.23
    from vllm.model_executor.layers.fused_moe import (
        FusedMoE as ExpertsLayer,  # pyright: ignore[reportAttributeAccessIssue]
    )

__all__ = [
    "DefaultModelLoader",
    "ExpertsLayer",
    "FusedMoEMethodBase",
    "LinearBase",
    "LinearMethodBase",
    "LoadConfig",
    "ParallelLMHead",
    "QuantizationConfig",
    "QuantizeMethodBase",
    "UnquantizedLinearMethod",
    "device_type",
    "get_model_loader",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_world_size",
    "has_lora",
    "load_format",
    "max_num_batched_tokens",
    "register_model_loader",
    "register_quantization_config",
]


def max_num_batched_tokens() -> int:
    """The scheduler's token budget; valid while vLLM builds a model."""
    return get_current_vllm_config().scheduler_config.max_num_batched_tokens


def has_lora() -> bool:
    """True if the engine was started for LoRA adapters; valid while vLLM builds a model."""
    return get_current_vllm_config().lora_config is not None


def load_format() -> str:
    """`--load-format`; valid while vLLM builds a model."""
    return str(get_current_vllm_config().load_config.load_format)


def device_type() -> str:
    """`cpu`, `cuda`, ... of the platform vLLM runs on."""
    return current_platform.device_type
