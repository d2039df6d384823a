"""Running EXL3 weights: torch custom ops over the kernels, and the slow torch reference.

`ops` holds the public calls `exl3_linear` and `exl3_moe`, which work under torch.compile; `experts`
runs with them the layers whose experts come in slices or have several rates; `reference` is the
same maths in plain torch, the oracle of the ops and what runs where no compiler is found.
"""

from __future__ import annotations
