"""What a model takes of each GPU under tensor parallelism, from names, shapes and sizes alone.

A rank holds its part of every linear that is cut, whole copies of the rest, the scratch of the
experts' kernels, and its share of the key-value cache. Copies of embedding and head in next-token
layers are not counted: engines take the target's.

Scratch comes from torch's allocator for the length of a call, so target and draft use the same
memory one after the other; the decode plan's stays with the CUDA graphs, hence both count. The
arenas of the published EXL3 engine for vLLM, which keeps one for the target and one for the draft,
are in the plan beside it for comparison (arena.py); they are not what is allocated here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from exl3kit.checkpoint.inventory import EMBEDDING, KINDS, ROUTED, StoredTensor, kind_of, layer_of
from exl3kit.checkpoint.names import PROJECTIONS, RANK_SUFFIX, slice_rules
from exl3kit.checkpoint.widths import check_cut, padded
from exl3kit.errors import CheckpointError
from exl3kit.kernels import cuda_moe, prefill_moe
from exl3kit.kernels.heuristics import decode_tokens
from exl3kit.models.attention import Gqa, Mla
from exl3kit.models.base import ShardKind
from exl3kit.models.decoder import DecoderMap
from exl3kit.runtime.arena import MoeShape, arena_bytes

DECODE_CAPACITY, DECODE_BLOCK, PREFILL_BLOCK = 32, 8, 64
_INPUT_SIDE, _OUTPUT_SIDE = ("suh", "su", "mcg", "mul1"), ("svh", "sv", "bias", "mcg", "mul1")
_WHOLE = (ShardKind.REPLICATED, 1)
_PART = re.compile(r"\.slice\.[0-9]+$")
_EXPERT = re.compile(r"\.experts\.[0-9]+\.")


@dataclass(frozen=True)
class Deployment:
    """Where the model is to run.

    `vram` is what the engine may use of each GPU, in bytes. `file_tp` is the number of ranks the
    experts are stored for, None if they are whole. `is_exl3(module)` tells EXL3 linears.
    """

    tp: int
    file_tp: int | None
    is_exl3: Callable[[str], bool]
    vram: int | None = None
    max_num_batched_tokens: int = 3072
    num_sms: int = 188
    has_fp8_cache: bool = False


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of each rank.

    decode_scratch and prefill_scratch are what this package allocates, for target and draft
    together; decode_arena and prefill_arena what the published engine would for one model, and
    num_arenas counts target and draft.
    """

    weights: dict[str, int]
    decode_scratch: int
    prefill_scratch: int
    decode_arena: int
    prefill_arena: int
    num_arenas: int
    kv_bytes_per_token: int
    kv_bytes: int | None

    @property
    def scratch(self) -> int:
        """Scratch of the decode and the prefill plan together."""
        return self.decode_scratch + self.prefill_scratch

    @property
    def arena(self) -> int:
        """Arena of the published engine for one model, both plans together."""
        return self.decode_arena + self.prefill_arena

    @property
    def kv_tokens(self) -> int | None:
        """Tokens of key-value cache that fit, None if the memory was not given."""
        if self.kv_bytes is None:
            return None
        return max(self.kv_bytes, 0) // self.kv_bytes_per_token


def plan_memory(
    model: DecoderMap, tensors: Sequence[StoredTensor], deployment: Deployment
) -> MemoryPlan:
    """Bytes of each rank for `tensors` of `model`; the tp must be a possible one (`tp_faults`).

    Next-token layers count where the tensors of one are there. CheckpointError without any layer.
    """
    weights = rank_bytes(model, tensors, deployment)
    stored = {layer for tensor in tensors if (layer := layer_of(tensor.name)) is not None}
    if not stored & set(model.layers):
        raise CheckpointError(
            "decoder layers: expected tensors of one or more to plan for, got none"
        )
    decode = prefill = num_arenas = 0
    decode_scratch = prefill_scratch = 0
    if model.moe is not None:
        budget, shape = deployment.max_num_batched_tokens, moe_shape(model, deployment)
        capacity, sms = min(DECODE_CAPACITY, budget), deployment.num_sms
        decode_scratch, prefill_scratch = scratch_bytes(shape, budget, sms)
        decode = arena_bytes(shape, capacity, DECODE_BLOCK, sms)
        if budget > DECODE_CAPACITY:
            prefill = arena_bytes(shape, budget, PREFILL_BLOCK, sms)
        is_exl3_draft = any(
            deployment.is_exl3(model.expert_linears(layer, 0)[0].name)
            for layer in model.mtp_layers
            if layer in stored
        )
        num_arenas = 2 if is_exl3_draft else 1
    used = sum(weights.values()) + decode_scratch + prefill_scratch
    layers = [layer for layer in model.layers if layer in stored]
    return MemoryPlan(
        weights=weights,
        decode_scratch=decode_scratch,
        prefill_scratch=prefill_scratch,
        decode_arena=decode,
        prefill_arena=prefill,
        num_arenas=num_arenas,
        kv_bytes_per_token=sum(_kv_bytes(model.attention, layer, deployment) for layer in layers),
        kv_bytes=None if deployment.vram is None else deployment.vram - used,
    )


def moe_shape(model: DecoderMap, deployment: Deployment) -> MoeShape:
    """The experts as one rank's kernels see them.

    Slices of a file for more ranks run as experts of their own, each route once for every slice.
    """
    assert model.moe is not None, "a dense model has no experts"
    parts = deployment.file_tp or deployment.tp
    slices = parts // deployment.tp
    return MoeShape(
        hidden_size=model.hidden_size,
        slice_size=padded(model.moe_intermediate_size) // parts,
        num_experts=model.num_experts * slices,
        top_k=model.moe.num_experts_per_tok * slices,
    )


def scratch_bytes(shape: MoeShape, tokens: int, num_sms: int) -> tuple[int, int]:
    """Scratch of the decode and of the prefill plan for batches of up to `tokens`, in bytes."""
    top_k, experts, sizes = shape.top_k, shape.num_experts, (shape.hidden_size, shape.slice_size)
    most = decode_tokens(top_k, experts)
    few = min(cuda_moe.CAPACITY, cuda_moe.MAX_ROUTES // top_k, most, tokens)
    decode = cuda_moe.plan_moe(few, top_k, *sizes, num_sms).scratch_bytes
    if tokens <= most:
        return decode, 0
    many = min(prefill_moe.CAPACITY, tokens)
    return decode, prefill_moe.plan_prefill(many, top_k, experts, *sizes, 64).scratch_bytes


def rank_bytes(
    model: DecoderMap, tensors: Iterable[StoredTensor], deployment: Deployment
) -> dict[str, int]:
    """Bytes of the weights on each rank by kind of tensor."""
    cuts = _cuts(model, deployment.tp)
    totals: dict[str, int] = {}
    for tensor in tensors:
        kind = kind_of(tensor.name)
        if kind == EMBEDDING and layer_of(tensor.name) is not None:
            continue
        module, _, field = tensor.name.rpartition(".")
        shard, ways = cuts.get(_PART.sub("", _EXPERT.sub(".experts.0.", module)), _WHOLE)
        if RANK_SUFFIX.search(module):
            ways = deployment.tp
        elif field in (_OUTPUT_SIDE if shard is ShardKind.ROW else _INPUT_SIDE):
            ways = 1
        size = tensor.num_bytes * tensor.count
        totals[kind] = totals.get(kind, 0) + -(-size // ways)
    return {kind: totals[kind] for kind in KINDS if kind in totals}


def _cuts(model: DecoderMap, tp: int) -> dict[str, tuple[ShardKind, int]]:
    """Module -> how it is cut and into how many different parts; experts under the number 0."""
    column = (ShardKind.COLUMN, tp)
    found: dict[str, tuple[ShardKind, int]] = {"model.embed_tokens": column, "lm_head": column}
    for layer in model.layers:
        specs = model.linears(layer)
        if layer in model.moe_layers:
            specs += model.expert_linears(layer, 0)
        found |= {spec.name: (spec.shard, model.ways(spec, tp)) for spec in specs}
    return found


def _kv_bytes(attention: Gqa | Mla, layer: int, deployment: Deployment) -> int:
    """Cache of one token in one layer on one rank, in bytes.

    MLA's is not cut. In FP8, sparse MLA keeps a float32 scale for each 128 of the compressed vector
    and the rotated key in BF16 (656 bytes for 512 + 64). The indexer's key is always FP8 with a
    scale for each 128 (132 bytes for 128). Both as in vLLM 0.32.
    """
    width = 1 if deployment.has_fp8_cache else 2
    if isinstance(attention, Gqa):
        heads = max(attention.num_kv_heads // deployment.tp, 1)
        return 2 * heads * attention.head_dim * width
    compressed, rotated = attention.kv_lora_rank, attention.qk_rope_head_dim
    if attention.indexer is None:
        return (compressed + rotated) * width
    main = (compressed + rotated) * 2
    if deployment.has_fp8_cache:
        main = compressed + 4 * -(-compressed // 128) + 2 * rotated
    if layer in attention.indexer.shared_layers:
        return main
    key = attention.indexer.head_dim
    return main + key + 4 * -(-key // 128)


def planned_tensors(model: DecoderMap, bits: int, tp: int) -> list[StoredTensor]:
    """The tensors `model` would have rank-sliced: experts of `bits` for `tp` ranks, the rest BF16.

    One entry stands for the same tensor of all experts of a layer. SliceError if tp is impossible.
    """
    found = []
    for spec in model.tensors():
        if kind_of(spec.name) != ROUTED and not spec.is_optional:
            width = 4 if spec.name.endswith("e_score_correction_bias") else 2
            size = math.prod(spec.shape)
            found.append(StoredTensor(spec.name, width * size, size))
    if not model.num_experts:
        return found
    check_cut("hidden_size", model.hidden_size, 1)
    width = check_cut("moe_intermediate_size", model.moe_intermediate_size, tp)
    for layer in model.moe_layers:
        stem = f"model.layers.{layer}.mlp.experts.0"
        for proj in PROJECTIONS:
            for field, rule in slice_rules(proj, bits, model.hidden_size, width).items():
                size = rule.dtype.itemsize * math.prod(rule.shape)
                weights = model.hidden_size * width if field == "trellis" else 0
                name = f"{stem}.{proj}.rank0.{field}"
                found.append(StoredTensor(name, size, weights, tp * model.num_experts))
    return found
