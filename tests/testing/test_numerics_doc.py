from __future__ import annotations

from itertools import takewhile
from pathlib import Path

from exl3kit.testing.compare import TOLERANCES

DOC = Path(__file__).parents[2] / "docs" / "numerics.md"


def test_documented_tolerances_are_the_ones_in_use() -> None:
    lines = DOC.read_text().splitlines()
    start = lines.index("| --- | --- | --- | --- | --- |") + 1
    documented = list(takewhile(lambda line: line.startswith("| "), lines[start:]))
    assert documented == [
        f"| {name} | {rule.absolute:g} | {rule.relative:g} | {rule.cosine:g} | {rule.reason} |"
        for name, rule in TOLERANCES.items()
    ]
