"""Can these values be weights? Non-finite and absent values, and sizes unlike all of their kind.

The root mean square of a decoded linear needs no decoding: the Hadamard transforms keep it, and the
decoded trellis has the codebook's deviation s (1.24 for mcg), so rms(W) = rms(suh) s rms(svh).
What a transfer that broke off leaves behind reads as zeros: a trellis with a tile of zeros only,
which no encoder writes (it stands for 256 equal weights in the codebook's tail), or a whole shard.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from exl3kit.checkpoint.header import TensorInfo
from exl3kit.checkpoint.names import RANK_SUFFIX
from exl3kit.checkpoint.open import Checkpoint
from exl3kit.checkpoint.reader import read_bytes
from exl3kit.checkpoint.values import TensorFacts, is_linear_trellis
from exl3kit.format.codebook import codebook_values
from exl3kit.format.spec import Codebook

Facts = Mapping[str, TensorFacts]

_FACTOR = 100.0  # layers of real models spread over 10, of shaped test models over 50
_MIN_PEERS = 4
_LAYER = re.compile(r"(.*\.layers\.[0-9]+)\.(.+)", re.DOTALL)
_EXPERT = re.compile(r".*\.experts\.[0-9]+\.(\w+)", re.DOTALL)


def sanity_faults(checkpoint: Checkpoint, facts: Facts) -> list[str]:
    """One line for each tensor, or file, whose values cannot be right."""
    empty = _empty_files(checkpoint, facts)
    faults = [
        f"{file}: all {size} bytes of tensor data are 0: they were never written; copy or download "
        "it again"
        for file, size in empty.items()
    ]
    rest = {name: f for name, f in facts.items() if checkpoint.infos[name].file not in empty}
    for name, found in rest.items():
        faults += _tensor_faults(checkpoint.infos[name], found)
    return faults + _outliers(_linear_rms(checkpoint, rest))


def _empty_files(checkpoint: Checkpoint, facts: Facts) -> dict[Path, int]:
    """Bytes of each file that was read and holds nothing but zeros."""
    sizes: dict[Path, int] = defaultdict(int)
    full: set[Path] = set()
    for name, found in facts.items():
        info = checkpoint.infos[name]
        sizes[info.file] += info.nbytes
        if not found.is_zero:
            full.add(info.file)
    return {file: size for file, size in sizes.items() if size and file not in full}


def _tensor_faults(info: TensorInfo, facts: TensorFacts) -> list[str]:
    name = info.name
    if facts.first_bad is not None:
        place, value = facts.first_bad
        found = f"{facts.num_bad} of {facts.num_values} values are not finite"
        return [f"tensor {name!r}: {found}, first {value} at {place}"]
    if is_linear_trellis(info):
        return _trellis_faults(name, facts)
    tail = facts.num_values - facts.num_tail, facts.num_tail
    for (start, count), place in ((tail, "the last"), (facts.gap, "in between")):
        if _is_hole(info, facts, start, count):
            return [f"tensor {name!r}: {place} {count} values are 0, from the middle of a row on"]
    must_count = name.endswith((".suh", ".svh")) or len(info.shape) > 1
    if facts.is_zero and facts.num_values and must_count:
        return [f"tensor {name!r}: all {facts.num_values} values are 0"]
    if must_count and math.isinf(facts.sum_squares):
        return [f"tensor {name!r}: the sum of its squares is beyond float32"]
    return []


def _is_hole(info: TensorInfo, facts: TensorFacts, start: int, count: int) -> bool:
    """True for `count` zeros of a matrix that are more than padding: rows or columns of zeros.

    Those that a broken transfer leaves begin inside a row, whose predecessor goes on.
    """
    row = info.shape[-1] if len(info.shape) > 1 else 0
    if not 0 < row < count < facts.num_values or start % row == 0 or start < row:
        return False
    width = info.dtype.itemsize
    above = (start - row) * width, (start // row) * row * width
    return bool(read_bytes(info, *above).any())


def _trellis_faults(name: str, facts: TensorFacts) -> list[str]:
    if facts.zero_tiles:
        again = "they were never written; copy or download the file again"
        return [f"tensor {name!r}: {facts.zero_tiles} tiles hold zeros only: {again}"]
    if facts.is_constant:
        return [f"tensor {name!r}: every word of the trellis is the same"]
    return []


def _linear_rms(checkpoint: Checkpoint, facts: Facts) -> dict[str, float]:
    """Root mean square of every matrix below a decoder layer whose values are finite."""
    found: dict[str, float] = {}
    for name, fact in facts.items():
        module, _, field = name.rpartition(".")
        info = checkpoint.infos[name]
        if field == "weight" and len(info.shape) == 2 and info.dtype.itemsize > 1:  # not FP8
            found[module] = fact.rms
        elif is_linear_trellis(info):
            sides = [_side_rms(checkpoint, facts, module, side) for side in ("suh", "svh")]
            found[module] = math.prod(sides) * _deviation(_codebook(checkpoint, module))
    return {module: rms for module, rms in found.items() if math.isfinite(rms) and rms > 0}


def _side_rms(checkpoint: Checkpoint, facts: Facts, module: str, field: str) -> float:
    """Of a scale vector; packed signs, the legacy form, have magnitude 1."""
    name = checkpoint.shared_name(module, field) or f"{module}.{field}"
    return facts[name].rms if name in facts else 1.0


def _codebook(checkpoint: Checkpoint, module: str) -> Codebook:
    marked = (book for book in (Codebook.MCG, Codebook.MUL1) if checkpoint.has(f"{module}.{book}"))
    return next(marked, Codebook.THREE_INST)


@cache
def _deviation(codebook: Codebook) -> float:
    return float(codebook_values(codebook).double().square().mean().sqrt())


def _outliers(rms: Mapping[str, float]) -> list[str]:
    """Matrices far from the median of their peers: of a layer's experts, or its other linears."""
    groups: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for module, value in rms.items():
        if match := _LAYER.fullmatch(module):
            expert = _EXPERT.fullmatch(RANK_SUFFIX.sub("", module))
            groups[match[1], expert[1] if expert else "linears"][module] = value
    faults = []
    for (layer, kind), peers in groups.items():
        middle = statistics.median_low(peers.values())
        for module, value in peers.items() if len(peers) >= _MIN_PEERS else ():
            if not middle / _FACTOR <= value <= middle * _FACTOR:
                faults.append(
                    f"{module}: the decoded weights have a root mean square of {value:.3g}, the "
                    f"median of the {len(peers)} {kind} of {layer} is {middle:.3g}"
                )
    return faults
