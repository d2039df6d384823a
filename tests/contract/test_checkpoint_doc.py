"""docs/checkpoints.md: its example parses, and each refusal has a file and a test that names it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import exl3kit
from exl3kit.checkpoint.manifest import BLOCK_KEY, RankSlicedManifest

ROOT = Path(__file__).parents[2]
DOC = (ROOT / "docs" / "checkpoints.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (R\d+) \|.*\| `([a-z_/]+\.py)` \|$", DOC, flags=re.MULTILINE)


def test_example_is_a_valid_manifest(tmp_path: Path) -> None:
    (example,) = re.findall(r"```json\n(.*?)```", DOC, flags=re.DOTALL)
    table = {str(layer): {"k": [3, 4] * 4} for layer in (1, 2, 3)}
    (tmp_path / "tier_bitmap.json").write_text(json.dumps(table))
    manifest = RankSlicedManifest.from_config(json.loads("{" + example + "}"), tmp_path)
    assert manifest is not None
    assert manifest.to_config() == json.loads("{" + example + "}")[BLOCK_KEY]


def test_every_row_has_its_file_and_a_test() -> None:
    assert [row for row, _ in ROWS] == [f"R{number}" for number in range(1, 23)]
    tests = "\n".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "checkpoint").glob("*.py")
    )
    for row, file in ROWS:
        assert (Path(exl3kit.__file__).parent / file).is_file(), file
        assert re.search(rf"\b{row}\b", tests), f"no test names {row}"
