"""Helpers with which a test proves a build: comparison with tolerances, random EXL3, tiny models.

Imported by tests and benchmarks only, never by the package itself.
"""

from __future__ import annotations
