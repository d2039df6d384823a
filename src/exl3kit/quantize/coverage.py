"""How many calibration tokens reached each routed expert, and what its Hessians come from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from exl3kit.quantize.hessian import Coverage
from exl3kit.quantize.journal import MatrixResult
from exl3kit.quantize.place import Place


@dataclass(frozen=True)
class LayerCoverage:
    """The experts of one layer: `tokens` each was calibrated on, and the `origins` of Hessians."""

    layer: int
    tokens: tuple[int, ...]
    origins: tuple[Coverage, ...]

    @property
    def median_tokens(self) -> float:
        """Of the experts."""
        return median(self.tokens)

    def count(self, origin: Coverage) -> int:
        """Experts whose Hessians are of that origin."""
        return self.origins.count(origin)


def layer_coverage(results: Iterable[MatrixResult]) -> list[LayerCoverage]:
    """One entry for each layer with quantised routed experts, in order."""
    layers: dict[int, dict[int, MatrixResult]] = {}
    for result in results:
        place = Place.of(result.name)
        if place.layer is not None and place.expert is not None:
            layers.setdefault(place.layer, {})[place.expert] = result
    return [
        LayerCoverage(
            layer,
            tuple(found[expert].tokens for expert in sorted(found)),
            tuple(found[expert].coverage for expert in sorted(found)),
        )
        for layer, found in sorted(layers.items())
    ]


def coverage_counts(layers: Iterable[LayerCoverage]) -> dict[str, int]:
    """Routed experts by the origin of their Hessians, all origins listed."""
    counts = Counter(origin for layer in layers for origin in layer.origins)
    return {str(kind): counts[kind] for kind in Coverage}
