"""What each tensor of an architecture is for: names, shapes, which linear is cut how, MTP layers.

`architectures` has a row for each, found through `registry.model_map`; `glm4_moe_block` is that
model's forward pass in plain torch, for calibration and perplexity.
"""

from __future__ import annotations
