"""What a checkpoint's bytes are spent on: by kind of tensor, and by layer and kind."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from exl3kit.checkpoint.fp8 import SCALE_FIELD
from exl3kit.checkpoint.header import TensorInfo
from exl3kit.checkpoint.open import Checkpoint
from exl3kit.format.row_table import NGRAM_WIDTH
from exl3kit.format.spec import TILE_SIZE

ROUTED = "routed experts"
EMBEDDING = "embedding and head"
_OTHER = "norms and other"
# By Hugging Face's names; of those that begin at the same place the first wins.
_PATTERNS = {
    ROUTED: r"\.mlp\.experts\.",
    "shared experts": r"\.mlp\.shared_experts\.",
    "attention": r"\.self_attn\.",
    EMBEDDING: r"embed_tokens\.|lm_head\.|shared_head\.head\.",
    "router": r"\.mlp\.gate\.",
    "dense MLP": r"\.mlp\.",
    "draft projection": r"\.eh_proj\.",
}
KINDS = (*_PATTERNS, _OTHER)
_KIND = re.compile("|".join(f"({pattern})" for pattern in _PATTERNS.values()))
_COMPANIONS = ("suh", "svh", "su", "sv", "mcg", "mul1", "signs", SCALE_FIELD)
_LAYER = re.compile(r"(?:^|\.)layers\.([0-9]{1,6})\.")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor, or `count` of the same size: bytes and the weights it stands for, of one."""

    name: str
    num_bytes: int
    num_weights: int
    count: int = 1


@dataclass
class KindRow:
    """Totals of one kind in one layer (None: outside the layers, or all layers together).

    `rates` counts EXL3 matrices by bits, each rank's slice as one; `num_weights` are the weights
    that the tensors stand for, `trellis_*` those in trellises only.
    """

    kind: str
    layer: int | None = None
    num_tensors: int = 0
    num_bytes: int = 0
    num_weights: int = 0
    trellis_bytes: int = 0
    trellis_weights: int = 0
    rates: dict[float, int] = field(default_factory=dict)

    @property
    def bits_per_weight(self) -> float:
        """Bits on disk, scale vectors and markers included, over the weights."""
        return 8 * self.num_bytes / self.num_weights if self.num_weights else 0.0

    @property
    def trellis_bits(self) -> float | None:
        """Bits per weight of the trellises alone; None where there is none."""
        return 8 * self.trellis_bytes / self.trellis_weights if self.trellis_weights else None

    def add(self, tensor: StoredTensor) -> None:
        """Count `tensor` in."""
        self.num_tensors += tensor.count
        self.num_bytes += tensor.count * tensor.num_bytes
        self.num_weights += tensor.count * tensor.num_weights
        if tensor.name.endswith(".trellis") and tensor.num_weights:
            self.trellis_bytes += tensor.count * tensor.num_bytes
            self.trellis_weights += tensor.count * tensor.num_weights
            bits = 8 * tensor.num_bytes / tensor.num_weights
            self.rates[bits] = self.rates.get(bits, 0) + tensor.count

    def add_row(self, other: KindRow) -> None:
        """Count in what `other` counted."""
        self.num_tensors += other.num_tensors
        self.num_bytes += other.num_bytes
        self.num_weights += other.num_weights
        self.trellis_bytes += other.trellis_bytes
        self.trellis_weights += other.trellis_weights
        for bits, count in other.rates.items():
            self.rates[bits] = self.rates.get(bits, 0) + count


def stored_tensors(checkpoint: Checkpoint) -> list[StoredTensor]:
    """The tensors of a checkpoint, in the order of their names."""
    infos = (checkpoint.info(name) for name in checkpoint.names())
    return [StoredTensor(info.name, info.nbytes, _num_weights(checkpoint, info)) for info in infos]


def by_layer(tensors: Iterable[StoredTensor]) -> list[KindRow]:
    """One row a layer and kind; what lies outside the layers comes last."""
    rows: dict[tuple[int | None, str], KindRow] = {}
    for tensor in tensors:
        key = (layer_of(tensor.name), kind_of(tensor.name))
        rows.setdefault(key, KindRow(key[1], key[0])).add(tensor)
    return sorted(
        rows.values(), key=lambda row: (row.layer is None, row.layer or 0, KINDS.index(row.kind))
    )


def by_kind(rows: Iterable[KindRow]) -> list[KindRow]:
    """The rows of `by_layer` with all layers together, one row a kind, in a fixed order."""
    totals: dict[str, KindRow] = {}
    for row in rows:
        totals.setdefault(row.kind, KindRow(row.kind)).add_row(row)
    return sorted(totals.values(), key=lambda row: KINDS.index(row.kind))


def kind_of(name: str) -> str:
    """The kind of tensor that `name` is, `norms and other` if it is none of the known ones."""
    match = _KIND.search(name)
    return _OTHER if match is None or match.lastindex is None else KINDS[match.lastindex - 1]


def layer_of(name: str) -> int | None:
    """The layer a tensor is in, None for one outside the layers."""
    match = _LAYER.search(name)
    return int(match[1]) if match else None


def _num_weights(checkpoint: Checkpoint, info: TensorInfo) -> int:
    """Weights a tensor stands for: 256 a tile of a trellis, 0 for companions, else its elements."""
    prefix, _, name = info.name.rpartition(".")
    if name in _COMPANIONS:
        return 0
    if name != "trellis" or not info.shape:
        return math.prod(info.shape)
    if checkpoint.is_exl3(prefix):
        return math.prod(info.shape[:2]) * TILE_SIZE
    signs = f"{prefix}.signs"  # a row table: of embeddings with signs, of n-grams without
    row = math.prod(checkpoint.info(signs).shape) if checkpoint.has(signs) else NGRAM_WIDTH
    return info.shape[0] * row
