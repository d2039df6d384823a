"""config.json -> the forward pass of its model: one row for each architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from exl3kit.checkpoint.keys import show
from exl3kit.errors import CheckpointError, UnsupportedError
from exl3kit.models.attention import Gqa, Mla
from exl3kit.models.config_keys import WHERE, count, flag, size
from exl3kit.models.decoder import DecoderMap, Moe
from exl3kit.models.forward.base import Attention, Router
from exl3kit.models.forward.gqa import GqaAttention
from exl3kit.models.forward.indexer import KeyPicker
from exl3kit.models.forward.mla import MlaAttention
from exl3kit.models.forward.model import ForwardModel
from exl3kit.models.forward.rotary import read_rope
from exl3kit.models.forward.routers import Groups, SigmoidRouter, SoftmaxRouter
from exl3kit.models.forward.values import choice, number
from exl3kit.models.registry import model_map

Config = Mapping[str, Any]

_WINDOW = 4096  # of Qwen3's configs where the key is absent


@dataclass(frozen=True)
class Family:
    """What is fixed for an architecture: how its attention and its router are read.

    `eps`, `partial_rotary`, `norm_topk_prob`, `groups` (n_group, topk_group) and `routed_scale`
    stand for absent keys, as in transformers' configs.
    """

    attention: Callable[[Config, DecoderMap, Family], Attention]
    router: Callable[[Config, Moe, Family], Router] | None = None
    eps: float = 1e-6
    partial_rotary: float = 1.0
    norm_topk_prob: bool = True
    groups: tuple[int, int] = (1, 1)
    routed_scale: float = 1.0
    has_window: bool = False
    has_mlp_bias: bool = False
    is_half_rope_allowed: bool = False
    is_indexer_interleaved: bool = False


def forward_model(config: Config) -> ForwardModel:
    """The forward pass of the model that a parsed config.json describes.

    UnsupportedError names an architecture or a value that is not computed here, CheckpointError a
    key that is missing or wrong.
    """
    shapes = model_map(config)
    family = FAMILIES[shapes.architecture]
    choice(config, "hidden_act", ["silu"], "silu")
    if not family.has_mlp_bias:
        choice(config, "mlp_bias", [False], False)
    if not family.has_window:
        choice(config, "sliding_window", [None], None)
    return ForwardModel(
        shapes=shapes,
        attention=family.attention(config, shapes, family),
        router=family.router(config, shapes.moe, family) if family.router and shapes.moe else None,
        eps=number(config, "rms_norm_eps", family.eps),
    )


def _gqa(config: Config, shapes: DecoderMap, family: Family) -> GqaAttention:
    assert isinstance(shapes.attention, Gqa)
    window, layers = _window(config, shapes) if family.has_window else (0, frozenset())
    return GqaAttention(
        shape=shapes.attention,
        rope=read_rope(config, shapes.attention.head_dim, family.partial_rotary),
        eps=number(config, "rms_norm_eps", family.eps),
        window=window,
        window_layers=layers,
    )


def _window(config: Config, shapes: DecoderMap) -> tuple[int, frozenset[int]]:
    """The sliding window and its layers: those listed, else from a number on, or all with experts.

    As in transformers, a window of null is none, and none is used without `use_sliding_window`.
    """
    layers, types = range(shapes.num_hidden_layers), config.get("layer_types")
    is_used = flag(config, "use_sliding_window", False)
    is_used = is_used and config.get("sliding_window", _WINDOW) is not None
    if types is None:
        first = 0 if shapes.moe else count(config, "max_window_layers", 28)
        found = frozenset(n for n in layers if is_used and n >= first)
    else:
        known = ["full_attention", *(["sliding_attention"] if is_used else [])]
        is_list = isinstance(types, list) and len(types) == len(layers)
        if not is_list or any(kind not in known for kind in types):
            raise UnsupportedError(
                f"{WHERE}: layer_types: expected {len(layers)} times {' or '.join(known)}, got "
                f"{show(types)}"
            )
        found = frozenset(n for n in layers if types[n] != known[0])
    return size(config, "sliding_window", _WINDOW) if found else 0, found


def _mla(config: Config, shapes: DecoderMap, family: Family) -> MlaAttention:
    shape = shapes.attention
    assert isinstance(shape, Mla)
    known = [True, False] if family.is_half_rope_allowed else [True]
    indexer = shape.indexer
    picker = indexer and KeyPicker(
        shape=indexer,
        topk=size(config, "index_topk", 2048),
        interleaved=flag(config, "indexer_rope_interleave", family.is_indexer_interleaved),
    )
    rope = read_rope(config, shape.qk_rope_head_dim)
    if rope.dim != shape.qk_rope_head_dim:
        raise UnsupportedError(
            f"{WHERE}: partial_rotary_factor: expected 1, got one that turns {rope.dim} of "
            f"qk_rope_head_dim {shape.qk_rope_head_dim} channels"
        )
    return MlaAttention(shape, rope, choice(config, "rope_interleave", known, True), picker)


def _sigmoid(config: Config, moe: Moe, family: Family) -> SigmoidRouter:
    choice(config, "topk_method", ["noaux_tc"], "noaux_tc")
    choice(config, "scoring_func", ["sigmoid"], "sigmoid")
    return SigmoidRouter(
        top_k=moe.num_experts_per_tok,
        is_normalized=flag(config, "norm_topk_prob", family.norm_topk_prob),
        scale=number(config, "routed_scaling_factor", family.routed_scale),
        groups=_groups(config, moe, family, ranked_by=2),
    )


def _qwen3_softmax(config: Config, moe: Moe, family: Family) -> SoftmaxRouter:
    return SoftmaxRouter(
        moe.num_experts_per_tok, flag(config, "norm_topk_prob", family.norm_topk_prob)
    )


def _deepseek_v2_router(config: Config, moe: Moe, family: Family) -> Router:
    method = choice(config, "topk_method", _V2_METHODS, "greedy")
    if method == "noaux_tc":
        return _sigmoid(config, moe, family)
    choice(config, "scoring_func", ["softmax"], "softmax")
    # With it DeepSeek's own code normalises and does not scale, vLLM does both, transformers
    # neither; no published model sets it.
    choice(config, "norm_topk_prob", [False], False)
    has_groups = method == "group_limited_greedy"
    return SoftmaxRouter(
        top_k=moe.num_experts_per_tok,
        is_normalized=False,
        scale=number(config, "routed_scaling_factor", family.routed_scale),
        groups=_groups(config, moe, family, ranked_by=1) if has_groups else Groups(),
    )


def _groups(config: Config, moe: Moe, family: Family, ranked_by: int) -> Groups:
    groups = size(config, "n_group", family.groups[0])
    kept = size(config, "topk_group", family.groups[1])
    per_group = moe.num_experts // groups
    is_whole = moe.num_experts % groups == 0 and (kept == groups or per_group >= ranked_by)
    if not is_whole or kept > groups or moe.num_experts_per_tok > kept * per_group:
        raise CheckpointError(
            f"{WHERE}: n_group {groups}, topk_group {kept}: expected equal groups of "
            f"{ranked_by} or more of the {moe.num_experts} experts, and "
            f"{moe.num_experts_per_tok} or more experts in the groups kept"
        )
    return Groups(groups, kept, ranked_by)


_V2_METHODS = ("greedy", "group_limited_greedy", "noaux_tc")
_DEEPSEEK_V3 = Family(_mla, _sigmoid, groups=(8, 4), routed_scale=2.5)
FAMILIES = {
    "DeepseekV2ForCausalLM": Family(_mla, _deepseek_v2_router),
    "DeepseekV3ForCausalLM": replace(_DEEPSEEK_V3, is_half_rope_allowed=True),
    "DeepseekV32ForCausalLM": _DEEPSEEK_V3,
    "Glm4MoeForCausalLM": Family(_gqa, _sigmoid, eps=1e-5, partial_rotary=0.5),
    "Glm4MoeLiteForCausalLM": Family(
        _mla, _sigmoid, eps=1e-5, routed_scale=1.8, is_half_rope_allowed=True
    ),
    "GlmMoeDsaForCausalLM": Family(
        _mla, _sigmoid, eps=1e-5, routed_scale=2.5, is_indexer_interleaved=True
    ),
    "LlamaForCausalLM": Family(_gqa, has_mlp_bias=True),
    "Qwen3ForCausalLM": Family(_gqa, has_window=True),
    "Qwen3MoeForCausalLM": Family(_gqa, _qwen3_softmax, has_window=True, norm_topk_prob=False),
}
