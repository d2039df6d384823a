"""The global scale g: how far regularised weights are stretched into the codebook.

Too small wastes resolution, too large clips at the codebook's edge; the best g falls from about
1.05 at one bit to 0.65 at eight (3inst, mcg). It is found by encoding sample tiles at several
scales and taking the minimum of the mean squared error: a coarse grid, a fine one, a parabola.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from exl3kit.format.codebook import codebook_values
from exl3kit.format.spec import TILE_SIZE
from exl3kit.format.tiles import to_tiles
from exl3kit.quantize.regularize import check_weight, make_signs, pad_matrix, regularize
from exl3kit.quantize.viterbi import encode

_COARSE = tuple(0.1 + 0.2 * i for i in range(10))
_FINE_STEP = 0.075
_LOWEST = 0.01
# Error feedback makes the encoder's targets larger than the weights, most at low rates.
_GROWTH = {1: 1.08, 1.5: 1.035, 2: 1.018, 2.5: 1.009, 3: 1.004}
# Of a pool of matrices: the search encodes each tile about eight times, as many tiles as all of a
# 256 x 256 expert projection has, and g is flat around its minimum.
_MAX_POOLED_TILES = 128
# Of one matrix: the 1,296 samples of a 6144 x 2048 matrix cost a quarter of what the matrix itself
# does, and 256 of them find a g within 0.006 of theirs.
_MAX_TILES = 256


def sample_tiles(inner: torch.Tensor) -> torch.Tensor:
    """float64 (m, 256) of a regularised (k, n): typical tiles, then those of extreme RMS.

    A wrapped diagonal, each tile with its two right neighbours; the highest, the lowest.
    The coarse grid takes every third one, so the order matters: this one finds exllamav3's g.
    """
    tiles = to_tiles(inner)
    rows, columns, _ = tiles.shape
    diagonal = max(rows, columns)
    row = torch.arange(diagonal, device=inner.device).unsqueeze(1)
    along = tiles[row % rows, (row + torch.arange(3, device=inner.device)) % columns]
    flat = tiles.reshape(-1, TILE_SIZE)
    extremes = min(max(8, 3 * diagonal // 16), len(flat))
    by_energy = flat.square().sum(dim=1).argsort(descending=True)
    ends = torch.cat([by_energy[:extremes], by_energy[-extremes:]])
    return torch.cat([along.reshape(-1, TILE_SIZE), flat[ends]])


def best_scale(samples: torch.Tensor, bits: int | float, codebook: str) -> float:
    """The g of least mean squared error for sample tiles float64 (m, 256); 1.0 if all are zero.

    At most 256 of them are used, evenly.
    """
    if not bool(samples.any()):
        return 1.0
    samples = samples[:: -(-len(samples) // _MAX_TILES)]
    grown = samples * _GROWTH.get(bits, 1.0)
    coarse = _errors(grown[::3], _COARSE, bits, codebook)
    centre = _COARSE[coarse.index(min(coarse))]
    fine = [max(centre + _FINE_STEP * i, _LOWEST) for i in (-2, -1, 0, 1, 2)]
    errors = _errors(grown, fine, bits, codebook)
    return max(_vertex(fine, errors), _LOWEST)


def search_scale(
    weights: Sequence[torch.Tensor], bits: int | float, codebook: str, seed: int = 0
) -> float:
    """One g for several weights (in, out) of any float dtype and shape, pooled over their samples.

    Signs are drawn from `seed`; g does not depend on them in any way that matters. At most 128
    tiles are used, taken evenly from all matrices.
    """
    pooled = []
    for index, weight in enumerate(weights):
        check_weight(weight)
        padded = pad_matrix(weight.double())
        signs = make_signs(*padded.shape, seed=seed + index)
        pooled.append(sample_tiles(regularize(padded, signs).inner))
    samples = torch.cat(pooled)
    step = -(-len(samples) // _MAX_POOLED_TILES)
    return best_scale(samples[::step], bits, codebook)


def _errors(
    samples: torch.Tensor, scales: Sequence[float], bits: int | float, codebook: str
) -> list[float]:
    """Mean squared error of the samples encoded at each scale, in one call of the encoder."""
    factors = torch.tensor(scales, dtype=torch.float64, device=samples.device).view(-1, 1, 1)
    states = encode((samples * factors).view(-1, TILE_SIZE).float(), bits, codebook)
    values = codebook_values(codebook, samples.device)[states.long()].double()
    decoded = values.view(len(scales), *samples.shape) / factors
    return (decoded - samples).square().mean(dim=(1, 2)).tolist()


def _vertex(scales: Sequence[float], errors: Sequence[float]) -> float:
    """Minimum of the parabola through the best of equidistant points and its neighbours.

    An end point is taken as it is; the shift is at most half a step.
    """
    best = errors.index(min(errors))
    if best in (0, len(scales) - 1):
        return scales[best]
    left, middle, right = errors[best - 1 : best + 2]
    curvature = left - 2 * middle + right
    shift = 0.5 * (left - right) / curvature if curvature > 0 else 0.0
    return scales[best] + min(max(shift, -0.5), 0.5) * (scales[best + 1] - scales[best])
