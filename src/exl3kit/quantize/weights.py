"""The weights of one layer while it is quantised: read when asked for, on one device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from exl3kit.checkpoint.open import Checkpoint
from exl3kit.models.module_weights import ModuleWeights

_EXPERTS = "mlp.experts."


class LayerWeights(Mapping[str, Tensor]):
    """Layer-local names to fp32 tensors on `device`.

    Those of routed experts are read anew each time, so that one is resident; all others are kept,
    since the rows pass in pieces. `replace` puts a quantised matrix in a stored one's place.
    """

    def __init__(self, checkpoint: Checkpoint, layer: int, device: torch.device) -> None:
        self._source = ModuleWeights(checkpoint, f"model.layers.{layer}.")
        self._device = device
        self._kept: dict[str, Tensor] = {}

    def replace(self, name: str, weight: Tensor) -> None:
        """From now on `name` is `weight`."""
        self._kept[name] = weight

    def __getitem__(self, name: str) -> Tensor:
        if name in self._kept:
            return self._kept[name]
        tensor = self._source[name].to(self._device)
        if not name.startswith(_EXPERTS):
            self._kept[name] = tensor
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._source)

    def __len__(self) -> int:
        return len(self._source)
