"""The dense twin of an EXL3 checkpoint: the same weights decoded, for engines without EXL3."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from exl3kit.checkpoint.fp8 import SCALE_FIELD
from exl3kit.checkpoint.manifest import BLOCK_KEY
from exl3kit.checkpoint.modules import dense_weight
from exl3kit.checkpoint.open import Checkpoint, open_checkpoint
from exl3kit.checkpoint.writer import CheckpointWriter
from exl3kit.models.registry import model_map

_PART = re.compile(r"\.(rank|slice\.)[0-9]+$")
_SHARED = re.compile(r"\.experts\.(shared_h|r7_shared)\.")
_FIELDS = {"trellis", "suh", "svh", "su", "sv", "mcg", "mul1", "signs", SCALE_FIELD}


def write_dense_twin(source: Path, out: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Write `source` with each EXL3 or FP8 module decoded to `.weight` (out, in) in `dtype`.

    A module in several parts becomes one matrix, its slices side by side along the cut; an
    embedding in a row table becomes one too. Padding is cropped; other tensors are copied as they
    are. The config loses its EXL3 parts.
    """
    quantised = open_checkpoint(source)
    shapes = {spec.name: spec.shape for spec in model_map(quantised.config).tensors()}
    fp8 = {n.removesuffix(f".{SCALE_FIELD}") for n in quantised.names() if n.endswith(SCALE_FIELD)}
    modules = fp8 | {_PART.sub("", prefix) for prefix in quantised.exl3_prefixes()}
    with CheckpointWriter(out) as writer:
        for name in quantised.names():
            if not _is_decoded(name, fp8):
                writer.add(name, _crop(quantised.tensor(name), shapes.get(name)))
        for module in sorted(modules | set(quantised.row_tables())):
            name = f"{module}.weight"
            weight = _decode(quantised, module)
            writer.add(name, _crop(weight, shapes.get(name)).to(dtype))
        writer.copy_side_files(source)
        dropped = (BLOCK_KEY, "quantization_config", "torch_dtype")
        config = {key: value for key, value in quantised.config.items() if key not in dropped}
        return writer.finish({**config, "dtype": str(dtype).removeprefix("torch.")})


def _decode(checkpoint: Checkpoint, module: str) -> torch.Tensor:
    if checkpoint.is_row_table(module):
        return checkpoint.row_table(module).dequantize()
    return dense_weight(checkpoint, module)


def _is_decoded(name: str, fp8: set[str]) -> bool:
    """True for what a `.weight` of the twin stands for."""
    is_companion = name.rpartition(".")[2] in _FIELDS or _SHARED.search(name) is not None
    return is_companion or name.removesuffix(".weight") in fp8


def _crop(tensor: torch.Tensor, shape: tuple[int, ...] | None) -> torch.Tensor:
    """`tensor` without the zeros that fill a linear's sides up to multiples of 128."""
    if shape is None or len(shape) != tensor.dim():
        return tensor
    return tensor[tuple(slice(size) for size in shape)]
