"""The bitrate map of a mixed rank-sliced checkpoint: bits of every routed expert, by layer.

`bits_per_expert` in the config is `<file.json>:<field>`; the file lies beside config.json and maps
the decimal string of each layer to an object whose `field` lists one integer an expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from exl3kit.checkpoint.index import INDEX_NAME
from exl3kit.checkpoint.jsonfile import is_bare_name, is_int, read_json_object
from exl3kit.checkpoint.keys import show
from exl3kit.errors import CheckpointError

_TAKEN = ("config.json", INDEX_NAME)
TAIL_BITS = 3  # published MTP overlays list their experts under `tail_tr3` without saying 3


def parse_reference(reference: str, where: str) -> tuple[str, str]:
    """File and field of `file.json:field`, split on the last colon.

    Only a bare file name is accepted: the map must lie in the checkpoint's own folder, and be a
    file of its own there, which can go with the weights when they are written again.
    """
    file, colon, field = reference.rpartition(":")
    is_json = is_bare_name(file) and file.endswith(".json") and file != ".json"
    if not colon or not field or not is_json or file in _TAKEN:
        raise CheckpointError(
            f"{where}: bits_per_expert must be '<file.json>:<field>' with a bare file name "
            f"other than {' and '.join(_TAKEN)}, got {show(reference)}"
        )
    return file, field


def read_bits_map(
    path: Path, field: str, layers: range, experts: int, k_values: tuple[int, ...]
) -> dict[int, tuple[int, ...]]:
    """Bits of every expert of every layer in `layers`, each a member of `k_values`.

    CheckpointError names the file, or the layer and field, with expected and got.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: the bitrate map that bits_per_expert names is missing")
    table = read_json_object(path)
    return {layer: _layer_bits(table, layer, field, experts, k_values, path) for layer in layers}


def _layer_bits(
    table: Mapping[str, Any],
    layer: int,
    field: str,
    experts: int,
    k_values: tuple[int, ...],
    path: Path,
) -> tuple[int, ...]:
    where = f"{path}: layer {layer}"
    entry = table.get(str(layer))
    if not isinstance(entry, dict):
        raise CheckpointError(f"{where}: expected an object, got {show(entry)}")
    if field not in entry and _is_tail(entry, experts, k_values):
        return (TAIL_BITS,) * experts
    bits = entry.get(field)
    if not isinstance(bits, list) or len(bits) != experts:
        got = f"{len(bits)} entries" if isinstance(bits, list) else show(bits)
        raise CheckpointError(f"{where}: {field} must list {experts} integers, got {got}")
    if wrong := [value for value in bits if not is_int(value)]:
        raise CheckpointError(f"{where}: {field} must hold integers, got {show(wrong[0])}")
    if undeclared := sorted(set(bits) - set(k_values)):
        raise CheckpointError(
            f"{where}: {field} holds bitrates {undeclared}, declared k_values are {list(k_values)}"
        )
    return tuple(bits)


def _is_tail(entry: Mapping[str, Any], experts: int, k_values: tuple[int, ...]) -> bool:
    tail = entry.get("tail_tr3")
    return isinstance(tail, list) and len(tail) == experts and TAIL_BITS in k_values
