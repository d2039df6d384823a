"""Quality of a checkpoint by its own forward pass: perplexity on a text, no serving engine."""

from __future__ import annotations
