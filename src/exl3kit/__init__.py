"""exl3kit: quantise, slice, verify, evaluate and serve EXL3 mixture-of-experts checkpoints.

Importing the package loads neither torch's CUDA, vllm nor transformers: public names are resolved
on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from exl3kit._version import __version__

if TYPE_CHECKING:
    from exl3kit.checkpoint.open import open_checkpoint
    from exl3kit.format.tensors import Exl3Tensor
    from exl3kit.quantize.tensor import quantize_tensor

__all__ = ["Exl3Tensor", "__version__", "open_checkpoint", "quantize_tensor"]

_HOMES = {
    "Exl3Tensor": "exl3kit.format.tensors",
    "open_checkpoint": "exl3kit.checkpoint.open",
    "quantize_tensor": "exl3kit.quantize.tensor",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'exl3kit' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
