"""What a quantisation reached: proxy errors by layer and linear, and the Hessians used."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from exl3kit.log import get_logger
from exl3kit.quantize.calibration import Calibration
from exl3kit.quantize.coverage import LayerCoverage, coverage_counts, layer_coverage
from exl3kit.quantize.hessian import Coverage
from exl3kit.quantize.journal import Journal, MatrixResult
from exl3kit.quantize.place import Place
from exl3kit.quantize.preflight import JobPlan

_log = get_logger(__name__)

REPORT_NAME = "quantization_report.json"


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
    """Every matrix in the order of the checkpoint, and how the calibration was made.

    `allocation` is the mean bits asked for and the experts' weights they were shared out by.
    """

    results: tuple[MatrixResult, ...]
    calibration: dict[str, Any]
    allocation: dict[str, Any] | None = None

    def summaries(self) -> list[ModuleSummary]:
        """One line a layer and linear, in the order of the checkpoint."""
        return summarise(self.results)

    def coverage(self) -> list[LayerCoverage]:
        """What the routed experts of each layer were calibrated on."""
        return layer_coverage(self.results)

    @property
    def mean_proxy_error(self) -> float:
        """Mean over all matrices."""
        return sum(r.proxy_error for r in self.results) / len(self.results)

    def to_json(self) -> dict[str, Any]:
        """The content of quantization_report.json; no times: equal jobs write equal bytes."""
        allocation = {} if self.allocation is None else {"allocation": self.allocation}
        return {
            "calibration": self.calibration,
            "tokens_by_expert": {str(x.layer): list(x.tokens) for x in self.coverage()},
            **allocation,
            "summary": [asdict(summary) for summary in self.summaries()],
            "proxy_error": {result.name: result.proxy_error for result in self.results},
        }


def summarise(results: Iterable[MatrixResult]) -> list[ModuleSummary]:
    """One line a layer and linear, in the order they come first."""
    groups: dict[tuple[int | None, str], list[MatrixResult]] = {}
    for result in results:
        place = Place.of(result.name)
        groups.setdefault((place.layer, place.module), []).append(result)
    return [_summary(*key, found) for key, found in groups.items()]


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


def make_report(plan: JobPlan, journal: Journal, texts: Calibration) -> QuantizeReport:
    """The report of a job whose matrices are all in the log; it also logs what was not covered."""
    contents = plan.contents
    matrices = (matrix for layer in contents.layers for matrix in contents.matrices(layer))
    results = tuple(journal.result(matrix.name) for matrix in matrices)
    counts = coverage_counts(layer_coverage(results))
    if any(counts[kind] for kind in (Coverage.MOSTLY_LAYER, Coverage.LAYER, Coverage.NONE)):
        _log.warning("experts by the origin of their Hessians: %s", counts)
    calibration = {
        "text": ", ".join(texts.texts),
        "rows": texts.rows.shape[0],
        "cols": texts.rows.shape[1],
        "seed": plan.options.seed,
        "tokens_per_layer": texts.rows.numel(),
        "experts_by_hessian": counts,
    }
    return QuantizeReport(results, calibration, _allocation(plan))


def _allocation(plan: JobPlan) -> dict[str, Any] | None:
    if plan.expert_weights is None:
        return None
    layers: dict[str, list[float]] = {}
    for (layer, _), weight in sorted(plan.expert_weights.items()):
        layers.setdefault(str(layer), []).append(weight)
    return {"mean_bits": plan.options.bits, "expert_weights": layers}
