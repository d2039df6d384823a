"""Scratch memory cut into views: offsets from sizes, and what a caller hands in."""

from __future__ import annotations

import torch

from exl3kit.errors import FormatError

ALIGNMENT = 256  # bytes; every view starts at a multiple


def offsets_of(items: dict[str, int]) -> dict[str, int]:
    """Byte at which each view starts; `end` is the size of the whole."""
    starts, end = {}, 0
    for name, size in items.items():
        starts[name] = end
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return {**starts, "end": end}


def views_of(
    scratch: torch.Tensor, offsets: dict[str, int], device: torch.device
) -> dict[str, torch.Tensor]:
    """The views of `scratch`, each reaching to its end.

    FormatError for a scratch of another dtype or device, too small, or not aligned to 256 bytes.
    """
    if scratch.dtype != torch.uint8 or scratch.device != device or not scratch.is_contiguous():
        raise FormatError(
            f"scratch: expected contiguous torch.uint8 on {device}, "
            f"got {scratch.dtype} on {scratch.device}"
        )
    if scratch.numel() < offsets["end"] or scratch.data_ptr() % ALIGNMENT:
        raise FormatError(
            f"scratch: expected {offsets['end']} bytes aligned to {ALIGNMENT}, "
            f"got {scratch.numel()} at address {scratch.data_ptr():#x}"
        )
    return {name: scratch[start:] for name, start in offsets.items()}
