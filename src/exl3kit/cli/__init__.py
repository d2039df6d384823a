"""The `exl3kit` command: one file a command, each imported in `app` and registered in one line.

A command imports what it needs inside its function, so that `exl3kit --help` does not load torch.
"""

from __future__ import annotations
