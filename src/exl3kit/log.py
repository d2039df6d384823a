"""Loggers under the name `exl3kit`, and warnings that are given once a process."""

from __future__ import annotations

import logging

_warned: set[str] = set()


def get_logger(name: str) -> logging.Logger:
    """The logger of a module; pass `__name__`."""
    return logging.getLogger(name)


def warn_once(logger: logging.Logger, key: str, message: str) -> None:
    """Log `message` as a warning the first time `key` is seen in this process."""
    if key in _warned:
        return
    _warned.add(key)
    logger.warning(message)
