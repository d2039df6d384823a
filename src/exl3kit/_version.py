"""The version of exl3kit, read by the build and by `exl3kit env`."""

from __future__ import annotations

__version__ = "0.1.0"
