"""Adapters that let other engines load EXL3 checkpoints; each folder imports its own engine."""

from __future__ import annotations
