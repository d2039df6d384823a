"""What a checkpoint's bytes are spent on, by kind of tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass

from exl3kit.checkpoint.header import TensorInfo
from exl3kit.checkpoint.open import Checkpoint
from exl3kit.format.spec import TILE_SIZE

# First match wins; names are Hugging Face's.
_KINDS = (
    ("routed experts", (".mlp.experts.",)),
    ("shared experts", (".mlp.shared_experts.",)),
    ("attention", (".self_attn.",)),
    ("embedding and head", ("embed_tokens.", "lm_head.", "shared_head.head.")),
    ("router", (".mlp.gate.",)),
    ("dense MLP", (".mlp.",)),
)
_OTHER = "norms and other"


@dataclass(frozen=True)
class KindRow:
    """Totals of one kind: tensors, bytes in the files, and the weights they stand for."""

    kind: str
    num_tensors: int
    num_bytes: int
    num_weights: int

    @property
    def bits_per_weight(self) -> float:
        """Bits on disk, scale vectors and markers included, over the weights."""
        return 8 * self.num_bytes / self.num_weights if self.num_weights else 0.0


def inventory(checkpoint: Checkpoint) -> list[KindRow]:
    """One row a kind that occurs, in a fixed order; the rows add up to the checkpoint."""
    totals: dict[str, list[int]] = {}
    for name in checkpoint.names():
        info = checkpoint.info(name)
        total = totals.setdefault(_kind(name), [0, 0, 0])
        total[0] += 1
        total[1] += info.nbytes
        total[2] += _weights(name, info)
    order = [kind for kind, _ in _KINDS] + [_OTHER]
    return [KindRow(kind, *totals[kind]) for kind in order if kind in totals]


def _kind(name: str) -> str:
    return next((kind for kind, keys in _KINDS if any(key in name for key in keys)), _OTHER)


def _weights(name: str, info: TensorInfo) -> int:
    """Weights a tensor stands for: its elements, 256 a tile of a trellis, 0 for its companions."""
    field = name.rpartition(".")[2]
    if field == "trellis":
        return math.prod(info.shape[:2]) * TILE_SIZE
    return 0 if field in ("suh", "svh", "su", "sv", "mcg", "mul1") else math.prod(info.shape)
