"""Architecture name in config.json -> the file that knows its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from exl3kit.errors import UnsupportedError
from exl3kit.models.base import ModelMap
from exl3kit.models.glm4_moe import Glm4MoeMap

_MAPS = {"Glm4MoeForCausalLM": Glm4MoeMap}


def model_map(config: Mapping[str, Any]) -> ModelMap:
    """Tensor names and shapes of the model `config` describes.

    UnsupportedError lists the known architectures; CheckpointError names a wrong config key.
    """
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str) or name not in _MAPS:
        raise UnsupportedError(f"architecture: expected one of {', '.join(_MAPS)}, got {name!r}")
    return _MAPS[name].from_config(config)
