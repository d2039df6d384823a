"""The dense twin of an EXL3 checkpoint: the same weights decoded, for engines without EXL3."""

from __future__ import annotations

from pathlib import Path

import torch

from exl3kit.checkpoint.manifest import BLOCK_KEY
from exl3kit.checkpoint.names import RANK_SUFFIX
from exl3kit.checkpoint.open import open_checkpoint
from exl3kit.checkpoint.writer import CheckpointWriter
from exl3kit.models.module_weights import ModuleWeights
from exl3kit.models.registry import model_map

_FIELDS = {"trellis", "suh", "svh", "su", "sv", "mcg", "mul1"}


def write_dense_twin(source: Path, out: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Write `source` with each EXL3 linear decoded to `.weight` (out, in) in `dtype`.

    A rank-sliced expert becomes one matrix, its slices side by side along the cut. Padding is
    cropped; other tensors are copied as they are. The config loses its EXL3 parts.
    """
    quantised = open_checkpoint(source)
    shapes = {spec.name: spec.shape for spec in model_map(quantised.config).tensors()}
    modules = sorted({RANK_SUFFIX.sub("", prefix) for prefix in quantised.exl3_prefixes()})
    weights = ModuleWeights(quantised)
    with CheckpointWriter(out) as writer:
        for name in quantised.names():
            if name.rpartition(".")[2] not in _FIELDS:
                writer.add(name, _crop(quantised.tensor(name), shapes.get(name)))
        for module in modules:
            name = f"{module}.weight"
            writer.add(name, _crop(weights[name], shapes.get(name)).to(dtype))
        writer.copy_side_files(source)
        dropped = (BLOCK_KEY, "quantization_config", "torch_dtype")
        config = {key: value for key, value in quantised.config.items() if key not in dropped}
        return writer.finish({**config, "dtype": str(dtype).removeprefix("torch.")})


def _crop(tensor: torch.Tensor, shape: tuple[int, ...] | None) -> torch.Tensor:
    """`tensor` without the zeros that fill a linear's sides up to multiples of 128."""
    if shape is None or len(shape) != tensor.dim():
        return tensor
    return tensor[tuple(slice(size) for size in shape)]
