"""`python -m exl3kit`: the command line without the installed script."""

from __future__ import annotations

from exl3kit.cli.app import main

main()
