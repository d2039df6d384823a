"""Which tensor-parallel sizes a model can run at, and why the others are impossible."""

from __future__ import annotations

from collections.abc import Callable

from exl3kit.checkpoint.widths import padded
from exl3kit.format.spec import HADAMARD_BLOCK
from exl3kit.models.attention import Gqa
from exl3kit.models.base import LinearSpec, ShardKind
from exl3kit.models.decoder import DecoderMap

_VOCAB_PADDING = 64  # vLLM's; the padded vocabulary is cut evenly


def tp_faults(
    model: DecoderMap, tp: int, file_tp: int | None, is_exl3: Callable[[str], bool]
) -> list[str]:
    """Every reason why `model` cannot run at `tp`, none if it can.

    `file_tp` is the number of ranks that rank-sliced experts are stored for, None if they are
    whole. `is_exl3(module)` tells which linears are EXL3 and can be cut at multiples of 128 only.
    """
    faults = _head_faults(model, tp)
    widths: dict[tuple[str, int, bool], str] = {}
    for spec in _distinct_linears(model):
        width = spec.out_features if spec.shard is ShardKind.COLUMN else spec.in_features
        leaf = ".".join(spec.name.split(".")[3:]).replace(".experts.0.", ".experts.*.")
        if not leaf.startswith("self_attn."):
            widths.setdefault(("MLP", width, is_exl3(spec.name)), leaf)
        elif is_exl3(spec.name):
            ways = model.ways(spec, tp)
            if width % ways == 0 and (width // ways) % HADAMARD_BLOCK:
                faults.append(_not_128(leaf, width, ways))
    for (_, width, exl3), leaf in widths.items():
        if exl3 and padded(width) % (HADAMARD_BLOCK * tp):
            faults.append(_not_128(leaf, width, tp))
        elif width % tp and not exl3:
            faults.append(f"{leaf}: {width} cannot be divided by {tp}")
    vocab = -(-model.vocab_size // _VOCAB_PADDING) * _VOCAB_PADDING
    if vocab % tp:
        faults.append(f"vocabulary: {vocab} (padded to {_VOCAB_PADDING}) cannot be divided by {tp}")
    if file_tp is not None and file_tp % tp:
        cut = "cut it finer with exl3kit slice"
        merge = "merge it with exl3kit slice if it was cut from whole matrices, else quantise again"
        way = merge if tp % file_tp else cut
        faults.append(f"experts are stored for {file_tp} ranks, no multiple of {tp}: {way}")
    return list(dict.fromkeys(faults))  # dense and expert layers have the same attention


def _head_faults(model: DecoderMap, tp: int) -> list[str]:
    heads = model.attention.num_heads
    faults = [f"{heads} attention heads cannot be divided by {tp}"] if heads % tp else []
    if isinstance(model.attention, Gqa):
        pairs = model.attention.num_kv_heads
        if pairs % tp and tp % pairs:
            faults.append(f"{pairs} key-value heads can be neither divided by {tp} nor repeated")
    return faults


def _distinct_linears(model: DecoderMap) -> list[LinearSpec]:
    """The linears that are cut: of the first dense and the first expert layer, and one expert."""
    found = []
    dense = (layer for layer in model.layers if layer not in model.moe_layers)
    if (layer := next(dense, None)) is not None:
        found += model.linears(layer)
    if model.moe_layers:
        layer = model.moe_layers[0]
        found += [*model.linears(layer), *model.expert_linears(layer, 0)]
    return [spec for spec in found if spec.shard is not ShardKind.REPLICATED]


def _not_128(leaf: str, width: int, ways: int) -> str:
    stored = padded(width)
    size = f"{width}" if stored == width else f"{width}, stored as {stored},"
    return f"{leaf}: {size} / {ways} = {stored / ways:g} is not a multiple of {HADAMARD_BLOCK}"
