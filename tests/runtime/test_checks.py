"""Refusals that no call of the ops on a CPU can reach: tensors on different devices."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from exl3kit.errors import FormatError
from exl3kit.runtime.checks import check_readable


def test_every_tensor_is_on_the_device_of_x() -> None:
    x, suh = torch.zeros(2, 128), torch.zeros(128, device="meta")
    check_readable({"x": x, "bias": None}, x.device)
    with pytest.raises(FormatError, match="suh is on device meta, expected cpu"):
        check_readable({"x": x, "suh": suh}, x.device)


def test_a_view_that_is_not_contiguous_is_not_copied() -> None:
    with pytest.raises(FormatError, match=r"x has strides \(1, 2\), expected a contiguous tensor"):
        check_readable({"x": torch.zeros(128, 2).t()}, torch.device("cpu"))


def test_address_on_a_gpu() -> None:
    """Read 16 bytes at a time: a multiple of 16. Routes are read one by one."""
    device = torch.device("cuda", 0)
    row: Any = SimpleNamespace(device=device, is_contiguous=lambda: True, data_ptr=lambda: 24)
    check_readable({"topk_ids": row}, device, read_bytes=1)
    with pytest.raises(FormatError, match="x starts at address 0x18, expected a multiple of 16"):
        check_readable({"x": row}, device)
