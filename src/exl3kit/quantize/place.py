"""Where a matrix of the log belongs, read from its name."""

from __future__ import annotations

import re
from dataclasses import dataclass

_NAME = re.compile(
    r"(?:model\.layers\.(?P<layer>\d+)\.)?(?:mlp\.experts\.(?P<expert>\d+)\.)?"
    r"(?P<module>.+?)(?:\.rank\d+)?"
)


@dataclass(frozen=True)
class Place:
    """Where a matrix belongs: `expert` None for dense linears, `layer` None for the head."""

    layer: int | None
    expert: int | None
    module: str

    @classmethod
    def of(cls, name: str) -> Place:
        """Of a matrix by its name in the log; `module` is a routed expert's projection alone."""
        match = _NAME.fullmatch(name)
        assert match is not None, name
        return cls(_number(match["layer"]), _number(match["expert"]), match["module"])


def _number(digits: str | None) -> int | None:
    return None if digits is None else int(digits)
