"""Channels that only fill an expert's width up to a multiple of 128: they must come to nothing.

The engine multiplies gate's and up's outputs and passes all channels on to down, padding included,
so one of the two must be 0 there, which it is where its svh is. exllamav3 writes such zeros.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from exl3kit.checkpoint.modules import exl3_parts
from exl3kit.checkpoint.open import Checkpoint
from exl3kit.checkpoint.widths import padded
from exl3kit.errors import CheckpointError, Exl3Error

_GATE = re.compile(r"(.+\.mlp\.experts\.[0-9]+)\.gate_proj(?:$|\.)")


def check_padding(vectors: Mapping[str, torch.Tensor], count: int) -> None:
    """CheckpointError unless gate's or up's svh, by its tensor's name, ends in `count` zeros."""
    if all(bool(vector.reshape(-1)[-count:].any()) for vector in vectors.values()):
        raise CheckpointError(
            f"tensors {', '.join(map(repr, vectors))}: expected 0 in one of them for the last "
            f"{count} channels, which are padding; other values would reach the output"
        )


def padding_faults(checkpoint: Checkpoint, intermediate_size: int) -> list[str]:
    """One line for each EXL3 expert whose padding is not 0; `intermediate_size` is I."""
    count = padded(intermediate_size) - intermediate_size
    faults = []
    for expert in _experts(checkpoint) if count else ():
        sides = [exl3_parts(checkpoint, f"{expert}.{proj}_proj") for proj in ("gate", "up")]
        last = [parts[-1] for parts in sides if parts]
        try:
            found = {f"{part}.svh": checkpoint.exl3_field(part, "svh") for part in last}
            vectors = {name: vector for name, vector in found.items() if vector is not None}
            if len(vectors) == len(sides):  # what is missing is a fault already
                check_padding(vectors, count)
        except Exl3Error as err:
            faults.append(str(err))
    return faults


def _experts(checkpoint: Checkpoint) -> list[str]:
    """Names of the routed experts of which at least the gate is EXL3, in whatever form."""
    found = map(_GATE.match, checkpoint.exl3_prefixes())
    return list(dict.fromkeys(match[1] for match in found if match))
