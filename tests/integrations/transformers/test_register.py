"""Registration: by import alone, once, and without displacing anybody."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

import exl3kit.integrations.transformers as integration
from exl3kit.errors import UnsupportedError
from exl3kit.integrations.transformers import compat


def test_import_registers_both_names() -> None:
    for method in ("exl3", "modelopt"):
        assert AUTO_QUANTIZATION_CONFIG_MAPPING[method] is integration.Exl3Config
        assert AUTO_QUANTIZER_MAPPING[method] is integration.Exl3Quantizer


def test_a_second_import_changes_nothing() -> None:
    before = dict(AUTO_QUANTIZER_MAPPING)
    importlib.reload(integration)
    assert before == AUTO_QUANTIZER_MAPPING


def test_a_method_of_somebody_else_is_left_alone() -> None:
    theirs = AUTO_QUANTIZER_MAPPING["gptq"]
    compat.register("gptq", integration.Exl3Config, integration.Exl3Quantizer)
    assert AUTO_QUANTIZER_MAPPING["gptq"] is theirs


@pytest.mark.parametrize("module", ["exl3kit", "exl3kit.cli.app", "exl3kit.runtime.ops"])
def test_nothing_else_imports_transformers(module: str) -> None:
    code = f"import sys, {module}; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_versions() -> None:
    for version in ("5.16.0", "5.19.0", "5.30.1.dev0"):
        compat.check_version(version)
    for version in ("4.57.1", "5.15.0", "6.0.0.dev0"):
        with pytest.raises(UnsupportedError, match=rf"5\.16 or newer and below 6, got {version}"):
            compat.check_version(version)
