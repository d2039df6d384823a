"""Checkpoint folders: safetensors headers, shards, metadata, reading, writing and verifying.

Everything here works on names, bytes and JSON and trusts none of them: a file is checked before a
byte of it is allocated for. What a tensor is for is known in `exl3kit.models`, not here.
"""

from __future__ import annotations
