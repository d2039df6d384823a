"""What a quantisation reached: proxy errors by layer and linear, and the Hessians used."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from exl3kit.log import get_logger
from exl3kit.quantize.calibration import Calibration
from exl3kit.quantize.contents import Contents
from exl3kit.quantize.hessian import Coverage
from exl3kit.quantize.journal import Journal, MatrixResult
from exl3kit.quantize.preflight import QuantizeOptions

_log = get_logger(__name__)

REPORT_NAME = "quantization_report.json"

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


@dataclass(frozen=True)
class ModuleSummary:
    """All matrices of one linear of a layer; of routed experts, those of one projection.

    `scale` is the g of the worst, which routed experts of one rate share.
    """

    layer: int | None
    module: str
    bits: float
    scale: float
    mean_proxy_error: float
    max_proxy_error: float
    worst: str


@dataclass(frozen=True)
class QuantizeReport:
    """Every matrix in the order of the checkpoint, and how the calibration was made."""

    results: tuple[MatrixResult, ...]
    calibration: dict[str, Any]

    def summaries(self) -> list[ModuleSummary]:
        """One line a layer and linear, in the order of the checkpoint."""
        groups: dict[tuple[int | None, str], list[MatrixResult]] = {}
        for result in self.results:
            place = Place.of(result.name)
            groups.setdefault((place.layer, place.module), []).append(result)
        return [_summary(*key, results) for key, results in groups.items()]

    @property
    def mean_proxy_error(self) -> float:
        """Mean over all matrices."""
        return sum(r.proxy_error for r in self.results) / len(self.results)

    def to_json(self) -> dict[str, Any]:
        """The content of quantization_report.json; no times: equal jobs write equal bytes."""
        return {
            "calibration": self.calibration,
            "summary": [asdict(summary) for summary in self.summaries()],
            "proxy_error": {result.name: result.proxy_error for result in self.results},
        }


def _summary(layer: int | None, module: str, results: list[MatrixResult]) -> ModuleSummary:
    errors = [r.proxy_error for r in results]
    worst = max(results, key=lambda r: r.proxy_error)
    return ModuleSummary(
        layer=layer,
        module=module,
        bits=sum(r.bits for r in results) / len(results),
        scale=worst.scale,
        mean_proxy_error=sum(errors) / len(errors),
        max_proxy_error=worst.proxy_error,
        worst=worst.name,
    )


def coverage_counts(results: Iterable[MatrixResult]) -> dict[str, int]:
    """Routed experts by the origin of their Hessians, all origins listed."""
    origins: dict[tuple[int | None, int], Coverage] = {}
    for result in results:
        place = Place.of(result.name)
        if place.expert is not None:
            origins[place.layer, place.expert] = result.coverage
    counts = Counter(origins.values())
    return {str(kind): counts[kind] for kind in Coverage}


def make_report(
    contents: Contents, journal: Journal, texts: Calibration, options: QuantizeOptions
) -> QuantizeReport:
    """The report of a job whose matrices are all in the log; it also logs what was not covered."""
    matrices = (matrix for layer in contents.layers for matrix in contents.matrices(layer))
    results = tuple(journal.result(matrix.name) for matrix in matrices)
    counts = coverage_counts(results)
    if any(counts[kind] for kind in (Coverage.MOSTLY_LAYER, Coverage.LAYER, Coverage.NONE)):
        _log.warning("experts by the origin of their Hessians: %s", counts)
    calibration = {
        "text": ", ".join(texts.texts),
        "rows": texts.rows.shape[0],
        "cols": texts.rows.shape[1],
        "seed": options.seed,
        "tokens_per_layer": texts.rows.numel(),
        "experts_by_hessian": counts,
    }
    return QuantizeReport(results, calibration)
