"""Tiny checkpoints, loaded by transformers as a user would, and the comparison of two models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

import exl3kit.integrations.transformers  # noqa: F401  what the tests are about
from exl3kit.testing.checkpoints import OrdinaryOptions, write_ordinary, write_plain
from exl3kit.testing.generate import make_rank_sliced
from exl3kit.testing.tiny_configs import VOCAB_SIZE, tiny_config_of

transformers_logging.disable_progress_bar()

# Half the sizes of testing.tiny_configs: most of a test's time is the exact decoding of its twin.
_SMALL = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128}


@dataclass(frozen=True)
class Agreement:
    """How close the logits of two models are on the same tokens."""

    cosine: float
    max_abs: float
    top1: float


def load(path: Path, **options: Any) -> Any:
    """`AutoModelForCausalLM.from_pretrained(path)`, in float32 unless said otherwise."""
    return AutoModelForCausalLM.from_pretrained(path, **{"dtype": torch.float32, **options})


def tokens(rows: int = 2, length: int = 24) -> torch.Tensor:
    """Random token ids (rows, length), always the same."""
    random = torch.Generator().manual_seed(7)
    return torch.randint(0, VOCAB_SIZE, (rows, length), generator=random)


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """float64 (rows, length, vocabulary)."""
    return model(ids).logits.double()


def agreement(actual: torch.Tensor, expected: torch.Tensor) -> Agreement:
    """Compare two tensors of logits."""
    cosine = torch.nn.functional.cosine_similarity(actual.flatten(), expected.flatten(), dim=0)
    top1 = (actual.argmax(-1) == expected.argmax(-1)).double().mean()
    return Agreement(float(cosine), float((actual - expected).abs().max()), float(top1))


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """For every test of this folder."""


@pytest.fixture
def ordinary(tmp_path: Path) -> Callable[..., Path]:
    """Writes an ordinary checkpoint of a model type; `keys` go into its config."""

    def write(model_type: str, options: OrdinaryOptions | None = None, **keys: Any) -> Path:
        mtp = keys.pop("mtp_layers", 0)
        config = {**tiny_config_of(model_type, mtp_layers=mtp), **_SMALL, **keys}
        return write_ordinary(tmp_path / "ordinary", config, options)

    return write


@pytest.fixture
def sliced(tmp_path: Path) -> Callable[..., Path]:
    """Writes a rank-sliced checkpoint of a model type: bits, tp, first and last layer, layout."""

    def write(model_type: str, bits: Any, tp: int, layers: tuple[int, int], **keys: Any) -> Path:
        layout = keys.pop("rotation_layout", "per_expert_v1")
        mtp = keys.pop("mtp_layers", 0)
        width = {"moe_intermediate_size": 128 * tp}
        config = {**tiny_config_of(model_type, mtp_layers=mtp), **_SMALL, **width, **keys}
        plain = write_plain(tmp_path / "plain", config)
        return make_rank_sliced(
            plain, tmp_path / "sliced", bits, tp, layers, rotation_layout=layout
        )

    return write
