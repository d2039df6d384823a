"""The global scale g: how far regularised weights are stretched into the codebook.

Too small wastes resolution, too large clips at the codebook's edge; the best g falls from about 1.05
at one bit to 0.65 at eight (3inst, mcg). It is found by encoding sample tiles at several scales and
taking the minimum of the mean squared error, from a coarse grid, then a fine one, then a parabola.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from exl3kit.format.codebook import codebook_values
from exl3kit.format.spec import TILE_SIZE, check_codebook
from exl3kit.format.tiles import to_tiles
from exl3kit.quantize.regularize import make_signs, pad_matrix, regularize
from exl3kit.quantize.viterbi import encode

_COARSE = tuple(0.1 + 0.2 * i for i in range(10))
_FINE_STEP = 0.075
_LOWEST = 0.01
# Error feedback makes the encoder's targets larger than the weights, most at low rates.
_GROWTH = {1: 1.08, 1.5: 1.035, 2: 1.018, 2.5: 1.009, 3: 1.004}
# 512 tiles pin g to about 0.5 %: more matrices in a pool would cost time and change nothing.
_MAX_TILES = 512


def sample_tiles(inner: torch.Tensor) -> torch.Tensor:
    """float32 (m, 256) of a regularised (k, n): a wrapped diagonal three tiles wide, and the tiles
    of highest and lowest RMS."""
    tiles = to_tiles(inner)
    rows, columns, _ = tiles.shape
    diagonal = max(rows, columns)
    along = torch.arange(diagonal)
    picked = [tiles[along % rows, (along + offset) % columns] for offset in range(3)]
    flat = tiles.reshape(-1, TILE_SIZE)
    extremes = min(max(8, 3 * diagonal // 16), len(flat))
    by_energy = flat.square().sum(dim=1).argsort()
    picked += [flat[by_energy[:extremes]], flat[by_energy[-extremes:]]]
    return torch.cat(picked)


def best_scale(samples: torch.Tensor, bits: int | float, codebook: str) -> float:
    """The g of least mean squared error for sample tiles float32 (m, 256); 1.0 if all are zero."""
    if not bool(samples.any()):
        return 1.0
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

    Signs are drawn from `seed`; g does not depend on them in any way that matters. At most 512
    tiles are encoded, taken evenly from all matrices.
    """
    pooled = []
    for index, weight in enumerate(weights):
        padded = pad_matrix(weight.float())
        signs = make_signs(*padded.shape, seed=seed + index)
        pooled.append(sample_tiles(regularize(padded, signs).inner))
    samples = torch.cat(pooled)
    step = -(-len(samples) // _MAX_TILES)
    return best_scale(samples[::step], bits, codebook)


def _errors(
    samples: torch.Tensor, scales: Sequence[float], bits: int | float, codebook: str
) -> list[float]:
    """Mean squared error of the samples encoded at each scale, in one call of the encoder."""
    factors = torch.tensor(scales, dtype=torch.float32).view(-1, 1, 1)
    states = encode((samples * factors).view(-1, TILE_SIZE), bits, codebook)
    values = codebook_values(check_codebook(codebook))[states.long()].double()
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
