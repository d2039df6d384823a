"""Architecture name in config.json -> names and shapes of the model's tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from exl3kit.errors import UnsupportedError
from exl3kit.models.architectures import ARCHITECTURES, read_model
from exl3kit.models.decoder import DecoderMap


def model_map(config: Mapping[str, Any]) -> DecoderMap:
    """Tensor names and shapes of the model `config` describes.

    UnsupportedError lists the known architectures; CheckpointError names a wrong config key.
    """
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise UnsupportedError(
            f"architecture: expected one of {', '.join(ARCHITECTURES)}, got {str(name)[:80]!r}"
        )
    return read_model(name, config)
