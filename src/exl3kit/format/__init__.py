"""What EXL3 is: codebooks, tile order, packed rings, Hadamard blocks, dense decode.

Plain torch on the CPU and numpy, bit-exact, written for clarity: every kernel of this project is
tested against this folder, and this folder against vectors made by exllamav3 itself.
Nothing here knows files, models or engines.
"""

from __future__ import annotations
