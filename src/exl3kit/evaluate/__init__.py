"""Quality of a checkpoint by its own forward pass, no serving engine.

`states` runs a text through the layers, `perplexity` scores one checkpoint, `compare` one against
another by the `metrics` KL divergence and top-1 agreement, `report` makes tables and plots of them.
"""

from __future__ import annotations
