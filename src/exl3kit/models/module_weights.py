"""Dense fp32 weights of a checkpoint's modules, whatever form they are stored in.

A mapping from names below a prefix to tensors, read (and decoded, for EXL3 modules) when asked for
and never kept: walking over one decoder layer holds one matrix at a time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from exl3kit.checkpoint.modules import dense_weight
from exl3kit.models.decoder import DecoderMap
from exl3kit.models.registry import model_map

if TYPE_CHECKING:
    from exl3kit.checkpoint.open import Checkpoint

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


class ModuleWeights(Mapping[str, Tensor]):
    """Tensors of `checkpoint` whose names start with `prefix`, under the rest of their name.

    `NAME.weight` of a module stored as EXL3, FP8 or row table is decoded, all its slices side by
    side, and given in Hugging Face orientation (out_features, in_features). Everything is fp32 and
    has the model's sizes: the zeros that fill EXL3 linears up to multiples of 128 are cut off, and
    lies on `device`. Iteration lists the stored names.
    """

    def __init__(
        self, checkpoint: Checkpoint, prefix: str = "", device: torch.device | None = None
    ) -> None:
        """`device` None: the CPU, where tensors are decoded in any case."""
        self._checkpoint = checkpoint
        self._prefix = prefix
        self._device = device
        self._shapes: dict[int | None, dict[str, tuple[int, ...]]] = {}

    def __getitem__(self, name: str) -> Tensor:
        full = self._prefix + name
        stored = self._stored(full)
        shape = self._shape(full)
        return (stored if shape is None else stored[tuple(map(slice, shape))]).to(self._device)

    def __iter__(self) -> Iterator[str]:
        names = self._checkpoint.names()
        return (n.removeprefix(self._prefix) for n in names if n.startswith(self._prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _stored(self, name: str) -> Tensor:
        module = name.removesuffix(".weight")
        if module == name:
            return self._checkpoint.tensor(name).float()
        if self._checkpoint.is_row_table(module):
            return self._checkpoint.row_table(module).dequantize()
        return dense_weight(self._checkpoint, module)

    def _shape(self, name: str) -> tuple[int, ...] | None:
        """The tensor's shape in the unquantised model; None for one the model does not have."""
        match = _LAYER.match(name)
        layer = int(match[1]) if match else None
        if layer not in self._shapes:
            self._shapes[layer] = _shapes(model_map(self._checkpoint.config), layer)
        return self._shapes[layer].get(name)


def _shapes(model: DecoderMap, layer: int | None) -> dict[str, tuple[int, ...]]:
    """By name, the shapes of the tensors of a layer, or of the linears outside the layers."""
    if layer is None:
        table = (model.vocab_size, model.hidden_size)
        return {"model.embed_tokens.weight": table, "lm_head.weight": table}
    return {spec.name: spec.shape for spec in model.layer_tensors(layer)}
