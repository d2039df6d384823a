"""The cut of one linear, dense or EXL3; views of the input, nothing is decoded or copied.

column  output channels: columns of W are independent, and the output transform mixes only within
        a block of 128, so trellis columns and svh are cut and suh goes to every rank whole.
row     input channels: the product is a sum over input rows and the output transform is linear, so
        trellis rows and suh are cut, svh goes to every rank whole, and the ranks' outputs add up.
"""

from __future__ import annotations

import torch

from exl3kit.errors import SliceError
from exl3kit.format.spec import TILE
from exl3kit.format.tensors import Exl3Tensor
from exl3kit.models.base import ShardKind
from exl3kit.slicing.axes import check_range


def cut_dense(weight: torch.Tensor, kind: ShardKind, channels: range) -> torch.Tensor:
    """A matrix (in, out) cut to `channels` of its output (column) or input (row) side."""
    if kind is ShardKind.REPLICATED:
        return weight
    dim = 1 if kind is ShardKind.COLUMN else 0
    check_range(f"{kind} cut", channels, weight.shape[dim])
    return weight.narrow(dim, channels.start, len(channels))


def cut_exl3(tensor: Exl3Tensor, kind: ShardKind, channels: range) -> Exl3Tensor:
    """An EXL3 linear cut to `channels` of its output (column) or input (row) side.

    SliceError for a boundary inside a block of 128, and for a bias under a row cut: every rank
    would add it.
    """
    if kind is ShardKind.REPLICATED:
        return tensor
    is_column = kind is ShardKind.COLUMN
    name = f"{tensor.name}: {kind} cut" if tensor.name else f"{kind} cut"
    check_range(name, channels, tensor.out_features if is_column else tensor.in_features)
    tiles = slice(channels.start // TILE, channels.stop // TILE)
    part = slice(channels.start, channels.stop)
    if is_column:
        cut = {"trellis": tensor.trellis[:, tiles], "svh": tensor.svh[part]}
        cut |= {"bias": tensor.bias[part]} if tensor.bias is not None else {}
    elif tensor.bias is not None:
        raise SliceError(f"{name}: a bias cannot be cut along the input side")
    else:
        cut = {"trellis": tensor.trellis[tiles], "suh": tensor.suh[part]}
    return Exl3Tensor(**tensor.tensors() | cut, name=tensor.name)
