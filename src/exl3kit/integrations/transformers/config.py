"""The `quantization_config` of an EXL3 checkpoint as transformers carries it."""

from __future__ import annotations

import copy
from typing import Any

from exl3kit.integrations.transformers import compat

METHOD = "exl3"
# Published rank-sliced files name this method, for tools that read only their plain weights.
SHIM = "modelopt"


class Exl3Config(compat.QuantizationConfigMixin):
    """The dict of config.json, kept whole; the files say what is EXL3, not its keys."""

    def __init__(self, **keys: Any) -> None:
        self.quant_method = keys.get("quant_method", METHOD)
        self.keys = keys

    def to_dict(self) -> dict[str, Any]:
        """The dict this was made of, as `save_pretrained` writes it."""
        return copy.deepcopy({"quant_method": self.quant_method, **self.keys})
