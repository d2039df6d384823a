"""Was this file made by a newer exllamav3 than the one whose format is implemented here?"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from exl3kit.log import get_logger, warn_once

SUPPORTED = (1, 6, 5)
_VERSION = re.compile(r"v?([0-9]{1,6}(?:\.[0-9]{1,6}){0,3})")
_log = get_logger(__name__)


def warn_if_newer(config: Mapping[str, Any]) -> None:
    """One warning with both versions where `quantization_config` names a newer one.

    No more than that: what a newer file adds shows in its tensors, and those are refused one by one
    if they cannot be read. A file without a version, or with one of another maker, passes.
    """
    quantization = config.get("quantization_config")
    if not isinstance(quantization, Mapping) or quantization.get("quant_method") != "exl3":
        return
    version = quantization.get("version")
    match = _VERSION.match(version) if isinstance(version, str) else None
    if match is None or tuple(map(int, match[1].split("."))) <= SUPPORTED:
        return
    known = ".".join(map(str, SUPPORTED))
    warn_once(
        _log,
        f"version {match[1]}",
        f"this checkpoint was made by exllamav3 {match[1]}, exl3kit reads the format of 0.0.1 to "
        f"{known}; if tensors are refused, look for a newer exl3kit",
    )
