"""Cutting linears for tensor parallelism: which cuts the format allows, and the cuts themselves."""

from __future__ import annotations
