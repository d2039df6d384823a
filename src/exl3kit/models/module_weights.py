"""Dense fp32 weights of a checkpoint's modules, whatever form they are stored in.

A mapping from names below a prefix to tensors, read (and decoded, for EXL3 modules) when asked for
and never kept: walking over one decoder layer holds one matrix at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from exl3kit.checkpoint.modules import dense_weight

if TYPE_CHECKING:
    from exl3kit.checkpoint.open import Checkpoint


class ModuleWeights(Mapping[str, Tensor]):
    """Tensors of `checkpoint` whose names start with `prefix`, under the rest of their name.

    `NAME.weight` of a module stored as EXL3 or FP8 is decoded, all its slices side by side, and
    given in Hugging Face orientation (out_features, in_features). Everything is fp32. Iteration
    lists the stored names.
    """

    def __init__(self, checkpoint: Checkpoint, prefix: str = "") -> None:
        self._checkpoint = checkpoint
        self._prefix = prefix

    def __getitem__(self, name: str) -> Tensor:
        full = self._prefix + name
        module = full.removesuffix(".weight")
        if module == full:
            return self._checkpoint.tensor(full).float()
        return dense_weight(self._checkpoint, module)

    def __iter__(self) -> Iterator[str]:
        names = self._checkpoint.names()
        return (n.removeprefix(self._prefix) for n in names if n.startswith(self._prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)
