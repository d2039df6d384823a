"""The plugin's registrations: found by entry point, idempotent, and nothing of vLLM patched."""

from __future__ import annotations

from importlib.metadata import entry_points

import pytest
import torch
from vllm.config.load import LoadConfig
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.model_loader import get_model_loader

from exl3kit.integrations.vllm import LOAD_FORMATS, register
from exl3kit.integrations.vllm.config import Exl3Config
from exl3kit.integrations.vllm.loader import Exl3Loader


def test_the_entry_point_is_installed() -> None:
    (entry,) = entry_points(group="vllm.general_plugins", name="exl3kit")
    assert entry.load() is register


def test_register_twice(caplog: pytest.LogCaptureFixture) -> None:
    register()
    caplog.clear()
    register()
    assert get_quantization_config("exl3") is Exl3Config
    for load_format in LOAD_FORMATS:
        assert isinstance(get_model_loader(LoadConfig(load_format=load_format)), Exl3Loader)
    assert not caplog.records
    assert hasattr(torch.ops.exl3, "moe") and hasattr(torch.ops.exl3, "linear")


def test_the_own_load_format_reads_like_auto() -> None:
    register()
    loader = get_model_loader(LoadConfig(load_format="exl3"))
    assert loader.load_config.load_format == "auto"
