"""Which CUDA kernels serve how many tokens, as data.

Estimates for an H200 from counted instructions and bytes (2026-12-03), not measurements yet:
benchmarks/prefill.py measures them.
"""

from __future__ import annotations

import functools

import torch

from exl3kit.format.spec import HADAMARD_BLOCK
from exl3kit.kernels import prefill_mma, prefill_wgmma
from exl3kit.kernels.prefill_core import Core

DECODE_TOKENS = 32  # up to here the decode plans, bit for bit
# Routes for each expert up to which blocks of eight rows decode few weights twice.
DECODE_ROUTES_PER_EXPERT = 4
# Rows of a linear from which writing the decoded matrix once, 45 us for 151 MB, costs less than
# decoding it for every block of rows, 16 us a time.
PANEL_ROWS = 1024


@functools.cache
def choose_core(device: torch.device, has_rates: bool = False) -> Core:
    """The product of many tokens on a CUDA device; `has_rates`: of experts of several rates."""
    is_hopper = torch.cuda.get_device_capability(device) == (9, 0)
    return prefill_wgmma.CORE if is_hopper and not has_rates else prefill_mma.CORE


def decode_tokens(top_k: int, experts: int) -> int:
    """Tokens up to which routed experts run on the decode plan."""
    return max(DECODE_TOKENS, DECODE_ROUTES_PER_EXPERT * experts // max(top_k, 1))


def uses_panel(rows: int) -> bool:
    """Is a linear of so many rows faster by decoding it to a panel first?"""
    return rows >= PANEL_ROWS


# Microseconds: of an item's K on one multiprocessor shared by all its items, and of writing and
# reading a MiB of products.
_US_PER_K, _US_PER_MIB = 0.008, 0.5
_MIN_SPLIT = 512  # K of a split at least


def choose_prefill_splits(rows: int, k: int, n: int, core: Core, num_sms: int) -> int:
    """Parts of K for `rows` rows: whole waves of items against the sums that splits write."""
    items = -(-n // core.strip) * -(-rows // core.block_rows)
    slots = core.items_per_sm * num_sms

    def cost(splits: int) -> float:
        waves = -(-items * splits // slots)
        return waves * k / splits * _US_PER_K + splits * rows * n / (1 << 19) * _US_PER_MIB

    blocks = k // HADAMARD_BLOCK
    lawful = [s for s in range(1, blocks + 1) if blocks % s == 0 and k // s >= _MIN_SPLIT]
    return min(lawful or [1], key=cost)
