"""What a quantisation reached: proxy errors by layer and projection, and the Hessians used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from exl3kit.quantize.hessian import Coverage

REPORT_NAME = "quantization_report.json"


@dataclass(frozen=True)
class SliceResult:
    """One quantised slice; `proxy_error` = tr(E^T H E) / tr(W^T H W), H = 1 where there is none."""

    layer: int
    expert: int
    projection: str
    rank: int
    proxy_error: float
    scale: float
    coverage: Coverage

    @property
    def name(self) -> str:
        """The slice's name, to which its tensors' fields are added."""
        return slice_name(self.layer, self.expert, self.projection, self.rank)


def slice_name(layer: int, expert: int, projection: str, rank: int) -> str:
    """Name of one rank's slice of one expert's projection in a rank-sliced checkpoint."""
    return f"model.layers.{layer}.mlp.experts.{expert}.{projection}.rank{rank}"


@dataclass(frozen=True)
class ProjectionSummary:
    """All slices of one projection of one layer; `scale` is the g they share."""

    layer: int
    projection: str
    scale: float
    mean_proxy_error: float
    max_proxy_error: float
    worst: str


@dataclass(frozen=True)
class QuantizeReport:
    """Every slice in the order it was written, and how the calibration was made."""

    slices: tuple[SliceResult, ...]
    calibration: dict[str, Any]

    def summaries(self) -> list[ProjectionSummary]:
        """One line a layer and projection, in layer order."""
        groups: dict[tuple[int, str], list[SliceResult]] = {}
        for result in self.slices:
            groups.setdefault((result.layer, result.projection), []).append(result)
        return [_summary(results) for results in groups.values()]

    @property
    def mean_proxy_error(self) -> float:
        """Mean over all slices."""
        return sum(r.proxy_error for r in self.slices) / len(self.slices)

    def to_json(self) -> dict[str, Any]:
        """The content of quantization_report.json; no times: equal runs write equal bytes."""
        return {
            "calibration": self.calibration,
            "summary": [asdict(summary) for summary in self.summaries()],
            "proxy_error": {result.name: result.proxy_error for result in self.slices},
        }


def _summary(results: list[SliceResult]) -> ProjectionSummary:
    errors = [r.proxy_error for r in results]
    worst = max(results, key=lambda r: r.proxy_error)
    return ProjectionSummary(
        layer=worst.layer,
        projection=worst.projection,
        scale=worst.scale,
        mean_proxy_error=sum(errors) / len(errors),
        max_proxy_error=worst.proxy_error,
        worst=worst.name,
    )


def coverage_counts(slices: Iterable[SliceResult]) -> dict[str, int]:
    """Experts by the origin of their Hessians, all origins listed."""
    counts = Counter({(s.layer, s.expert): s.coverage for s in slices}.values())
    return {str(kind): counts[kind] for kind in Coverage}
