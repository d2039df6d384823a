"""Every name of transformers that this integration uses, public or not, in one place.

Read from the sources of 5.16.1 and 5.19.0; tests run 5.19.0. Two names are not public: the model's
patterns of keys that it leaves unread, and its table of tied weights.
"""

from __future__ import annotations

from collections.abc import Iterable

from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, TextStreamer
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils.logging import disable_progress_bar
from transformers.utils.quantization_config import QuantizationConfigMixin

from exl3kit.errors import UnsupportedError

__all__ = [
    "AutoModelForCausalLM",
    "AutoTokenizer",
    "HfQuantizer",
    "PreTrainedModel",
    "QuantizationConfigMixin",
    "TextStreamer",
    "check_version",
    "disable_progress_bar",
    "ignore_unexpected",
    "register",
    "untie_head",
]

_FIRST, _NEXT_MAJOR = (5, 16), 6


def check_version(version: str) -> None:
    """UnsupportedError for a version of transformers that this integration is not written for."""
    found = tuple(int(part) for part in version.split(".")[:2])
    if found < _FIRST or found[0] >= _NEXT_MAJOR:
        raise UnsupportedError(
            f"transformers: expected version {_FIRST[0]}.{_FIRST[1]} or newer and below "
            f"{_NEXT_MAJOR}, got {version}; pip install 'exl3kit[transformers]'"
        )


def register(
    method: str, config: type[QuantizationConfigMixin], quantizer: type[HfQuantizer]
) -> None:
    """Tell transformers which classes serve the `quant_method` of a config.json.

    A method that transformers itself or another package serves already is left to it.
    """
    if method not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        register_quantization_config(method)(config)
        register_quantizer(method)(quantizer)


def ignore_unexpected(model: PreTrainedModel, patterns: Iterable[str]) -> None:
    """Leave tensors whose names match out of the loading report, for this model object only."""
    known = model._keys_to_ignore_on_load_unexpected or ()
    model._keys_to_ignore_on_load_unexpected = {*known, *patterns}


def untie_head(model: PreTrainedModel) -> None:
    """Give the output head a weight of its own, in the config and in what loading would tie."""
    model.config.get_text_config().tie_word_embeddings = False
    model.config.tie_word_embeddings = False
    model.all_tied_weights_keys.pop("lm_head.weight", None)
