"""What quantising one tensor cost: figures that travel into reports and tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class TensorStats:
    """Quality of one quantised tensor, of what is stored (fp16 scales included).

    proxy_error  tr(E' H E) / tr(W' H W), E = W - dequantised, H the Hessian as given, undamped;
                 without a Hessian H is the identity (relative squared error)
    scale        g, the factor between regularised weights and codebook
    fallback     True where there was no usable Hessian: no error feedback, no refit
    """

    proxy_error: float
    scale: float
    fallback: bool

    def __getitem__(self, name: str) -> Any:
        """`stats["proxy_error"]` is `stats.proxy_error`."""
        if name not in self.__dataclass_fields__:
            raise KeyError(name)
        return getattr(self, name)


def proxy_error(
    weight: torch.Tensor, quantized: torch.Tensor, hessian: torch.Tensor | None
) -> float:
    """tr(E' H E) / tr(W' H W) of (k, n) matrices in float64; 0 where there is nothing to lose.

    H None is the identity. An error where the weight has no energy is infinite.
    """
    w, e = weight.double(), (weight.double() - quantized.double())
    hw, he = (w, e) if hessian is None else (hessian.double() @ w, hessian.double() @ e)
    lost, energy = float((e * he).sum()), float((w * hw).sum())
    if energy <= 0:
        return 0.0 if lost <= 0 else float("inf")
    return lost / energy
