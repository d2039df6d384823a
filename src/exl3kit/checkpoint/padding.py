"""Channels that only fill an expert's width up to a multiple of 128: they must come to nothing.

The engine multiplies gate's and up's outputs and passes all channels on to down, padding included,
so one of the two must be 0 there, which it is where its svh is. exllamav3 writes such zeros.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from exl3kit.checkpoint.manifest import RankSlicedManifest
from exl3kit.checkpoint.open import Checkpoint
from exl3kit.checkpoint.widths import padded
from exl3kit.errors import CheckpointError, Exl3Error


def check_padding(vectors: Mapping[str, torch.Tensor], count: int) -> None:
    """CheckpointError unless gate's or up's svh, by its tensor's name, ends in `count` zeros."""
    if all(bool(vector[-count:].any()) for vector in vectors.values()):
        raise CheckpointError(
            f"tensors {', '.join(map(repr, vectors))}: expected 0 in one of them for the last "
            f"{count} channels, which are padding; other values would reach the output"
        )


def padding_faults(
    checkpoint: Checkpoint, manifest: RankSlicedManifest, intermediate_size: int
) -> list[str]:
    """One line for each rank-sliced expert whose padding is not 0; `intermediate_size` is I."""
    count = padded(intermediate_size) - intermediate_size
    faults = []
    for layer in manifest.moe_layers if count else ():
        for expert in range(manifest.experts_per_layer):
            stem = f"model.layers.{layer}.mlp.experts.{expert}"
            names = [f"{stem}.{p}_proj.rank{manifest.tp - 1}.svh" for p in ("gate", "up")]
            try:
                if all(map(checkpoint.has, names)):  # what is missing is a fault already
                    check_padding({name: checkpoint.tensor(name) for name in names}, count)
            except Exl3Error as err:
                faults.append(str(err))
    return faults
