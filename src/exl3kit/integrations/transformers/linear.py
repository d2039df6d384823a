"""EXL3 linears as torch modules: buffers under the checkpoint's names, `exl3::linear` on them.

Sizes in the file are padded to multiples of 128. A module takes and returns the model's own
widths: inputs are extended by zeros, surplus outputs are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.functional import pad

from exl3kit.checkpoint.forms import EXL3_FIELDS
from exl3kit.checkpoint.header import TensorInfo
from exl3kit.checkpoint.signs import unpack_signs
from exl3kit.format.tensors import Exl3Tensor
from exl3kit.runtime.ops import exl3_linear

FIELDS = (*EXL3_FIELDS, "bias")


def register_tensor(module: torch.nn.Module, path: str, info: TensorInfo) -> None:
    """An empty buffer of the stored shape and dtype at the dotted `path` below `module`."""
    *parents, leaf = path.split(".")
    for name in parents:
        if name not in module._modules:
            module.add_module(name, torch.nn.Module())
        module = module.get_submodule(name)
    module.register_buffer(leaf, torch.empty(info.shape, dtype=info.dtype))


def without_cast(fn: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`fn` of `Module._apply` for EXL3 buffers: moves between devices, never casts.

    `model.to(torch.bfloat16)` would take 3 of the 11 bits of every scale. Casts skip integers, so
    float buffers are shown as such.
    """
    return lambda t: fn(t.view(torch.int16)).view(t.dtype) if t.is_floating_point() else fn(t)


def stored_fields(module: torch.nn.Module, name: str) -> dict[str, torch.Tensor]:
    """What `Exl3Tensor` takes of a module's buffers; signs of an early EXL3 are unpacked."""
    fields = dict(module.named_buffers())
    for vector in ("suh", "svh"):
        words = fields.pop(vector.removesuffix("h"), None)
        if words is not None and vector not in fields:
            fields[vector] = unpack_signs(words, f"{name}.{vector}")
    return fields


def extend(x: torch.Tensor, width: int) -> torch.Tensor:
    """`x` with zeros behind its last dimension up to `width`, contiguous."""
    missing = width - x.shape[-1]
    return pad(x, (0, missing)) if missing else x.contiguous()


def crop(y: torch.Tensor, width: int) -> torch.Tensor:
    """The first `width` of the last dimension, contiguous."""
    return y if y.shape[-1] == width else y[..., :width].contiguous()


class Exl3Linear(torch.nn.Module):
    """y = x W + bias with W packed, in place of a `torch.nn.Linear`; for inference only."""

    trellis: torch.Tensor
    suh: torch.Tensor
    svh: torch.Tensor

    def __init__(self, in_features: int, out_features: int, fields: dict[str, TensorInfo]) -> None:
        """Sizes are the model's; `fields` has the stored tensors by leaf name."""
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        for name, info in fields.items():
            register_tensor(self, name, info)
        self.codebook = next((name for name in ("mcg", "mul1") if name in fields), "3inst")

    def finish(self, name: str) -> None:
        """Check the loaded values; FormatError names the tensor, `name` being the module's.

        Vectors made of packed signs are kept beside these and are not saved.
        """
        fields = stored_fields(self, name)
        Exl3Tensor(**fields, name=name)
        for vector in ("suh", "svh"):
            if vector not in self._buffers:
                self.register_buffer(vector, fields[vector], persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(…, in_features) -> (…, out_features) in the dtype of x."""
        wide = extend(x, self.suh.shape[0])
        bias = self._buffers.get("bias")
        y = exl3_linear(wide, self.trellis, self.suh, self.svh, self.codebook, bias)
        return crop(y, self.out_features)

    def extra_repr(self) -> str:
        """Sizes, bits and codebook, for `print(model)`."""
        bits = self.trellis.shape[-1] / 16
        return f"{self.in_features}, {self.out_features}, bits={bits:g}, codebook={self.codebook}"

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Exl3Linear:
        return super()._apply(without_cast(fn), recurse)


class Exl3SlicedLinear(torch.nn.Module):
    """A linear that exllamav3 stores as `slice.{i}`, because its MLP is wider than 55,296.

    Slices lie side by side along the intermediate side: inputs of down_proj, outputs of the others.
    """

    def __init__(self, parts: Sequence[Exl3Linear], is_cut_along_input: bool) -> None:
        super().__init__()
        self.slice = torch.nn.ModuleList(parts)
        self.is_cut_along_input = is_cut_along_input

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(…, in_features) -> (…, out_features) in the dtype of x."""
        if not self.is_cut_along_input:
            return torch.cat([part(x) for part in self.slice], dim=-1)
        inputs = x.split([part.in_features for part in self.slice], dim=-1)
        outputs = [part(piece).float() for part, piece in zip(self.slice, inputs, strict=True)]
        return torch.stack(outputs).sum(dim=0).to(x.dtype)
