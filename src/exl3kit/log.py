"""Loggers under the name `exl3kit`, and lines that are given once a process."""

from __future__ import annotations

import logging

_warned: set[str] = set()


def get_logger(name: str) -> logging.Logger:
    """The logger of a module; pass `__name__`."""
    return logging.getLogger(name)


def warn_once(logger: logging.Logger, key: str, message: str) -> None:
    """Log `message` as a warning the first time `key` is seen in this process."""
    _log_once(logger, logging.WARNING, key, message)


def info_once(logger: logging.Logger, key: str, message: str) -> None:
    """Log `message` as information the first time `key` is seen in this process."""
    _log_once(logger, logging.INFO, key, message)


def _log_once(logger: logging.Logger, level: int, key: str, message: str) -> None:
    if key not in _warned:
        _warned.add(key)
        logger.log(level, message)
