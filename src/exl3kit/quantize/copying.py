"""Tensors that stay dense, from the source's files into the output's shard."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from exl3kit.checkpoint.fp8 import FP8_DTYPES
from exl3kit.checkpoint.modules import dense_weight
from exl3kit.checkpoint.open import Checkpoint
from exl3kit.checkpoint.reader import read_bytes
from exl3kit.checkpoint.widths import padded
from exl3kit.errors import CheckpointError
from exl3kit.quantize.contents import Contents
from exl3kit.quantize.shard_file import ShardFile

_BLOCK_BYTES = 8 * 2**20


def copy_dense(contents: Contents, layer: int | None, shard: ShardFile) -> None:
    """Write every tensor of the layer that does not become EXL3, and the biases of those that do.

    Bytes are copied in blocks; FP8 matrices become BF16, biases fp16 of the padded length.
    """
    for name in contents.copied(layer):
        if contents.checkpoint.info(name).dtype in FP8_DTYPES:
            weight = dense_weight(contents.checkpoint, name.removesuffix(".weight"))
            shard.write(name, weight.bfloat16())
        else:
            _copy_bytes(contents.checkpoint, name, shard)
    for spec in contents.biases(layer):
        name = f"{spec.name}.bias"
        bias = contents.checkpoint.tensor(name).half()
        if not torch.isfinite(bias).all():
            raise CheckpointError(f"tensor {name!r}: expected values that fp16 holds, got larger")
        shard.write(name, F.pad(bias, (0, padded(spec.out_features) - len(bias))))


def _copy_bytes(checkpoint: Checkpoint, name: str, shard: ShardFile) -> None:
    info = checkpoint.info(name)
    for start in range(0, info.nbytes, _BLOCK_BYTES):
        block = read_bytes(info, start, min(start + _BLOCK_BYTES, info.nbytes))
        shard.write_bytes(name, start, block.numpy().data)
