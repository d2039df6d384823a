"""Dense fp32 weights of a checkpoint's modules, whatever form they are stored in.

A mapping from names below a prefix to tensors, read (and decoded, for EXL3 modules) when asked for
and never kept: walking over one decoder layer holds one matrix at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from exl3kit.checkpoint.open import Checkpoint


class ModuleWeights(Mapping[str, Tensor]):
    """Tensors of `checkpoint` whose names start with `prefix`, under the rest of their name.

    `NAME.weight` of a module stored as EXL3 is decoded, all rank slices side by side, and given in
    Hugging Face orientation (out_features, in_features). Everything is fp32. Iteration lists the
    stored names.
    """

    def __init__(self, checkpoint: Checkpoint, prefix: str = "") -> None:
        self._checkpoint = checkpoint
        self._prefix = prefix

    def __getitem__(self, name: str) -> Tensor:
        full = self._prefix + name
        module = full.removesuffix(".weight")
        if self._checkpoint.has(full) or module == full:
            return self._checkpoint.tensor(full).float()
        return self._decode(module).T

    def _decode(self, module: str) -> Tensor:
        """EXL3 module -> (in_features, out_features); slices cut the inner (intermediate) side."""
        if self._checkpoint.has(f"{module}.trellis"):
            return self._checkpoint.exl3(module).dequantize()
        ranks = range(self._checkpoint.tp or 1)
        slices = [self._checkpoint.exl3(f"{module}.rank{r}").dequantize() for r in ranks]
        return torch.cat(slices, dim=0 if module.endswith("down_proj") else 1)

    def __iter__(self) -> Iterator[str]:
        names = self._checkpoint.names()
        return (n.removeprefix(self._prefix) for n in names if n.startswith(self._prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)
