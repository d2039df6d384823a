"""What each tensor of an architecture is for: names, shapes, which linear is cut how, MTP layers.

`architectures` has a row for each, found through `registry.model_map`; `forward` is
their forward pass in plain torch, for calibration and evaluation.
"""

from __future__ import annotations
