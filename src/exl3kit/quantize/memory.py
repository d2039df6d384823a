"""How much memory a job takes, by a formula: what docs/quantising.md states, in one place.

With T tokens of calibration, of which P = 16,384 pass a part of a layer at a time, H the hidden
size, I the width of a routed expert and j experts encoded together, on all devices, in bytes:

    activations   12 T H                             three buffers; none of it with a spill folder
    layer         4 D                                D parameters of a layer outside its experts
    and the largest of
    a part        4 P (4 H + 3 A), 4 P (2 H + 3 M)   A outputs of all its attention linears, M the
                                                     width of its dense MLP or shared experts
    experts       4 T (2 H + 3 I) + 8 H^2 + j (12 H I + 8 (H^2 + I^2) + 2 E(H, I))
    dense EXL3    2 E(in, out) of its largest linear, E alone of the head
    E(in, out)    2^26 + 64 in^2 + 96 in out         the encoder's tables, its Hessian and factor
                                                     in float64, the matrix in several forms

It is an upper bound: T stands for the tokens of the busiest expert too. It does not depend on the
number of layers. Encoding one matrix was measured at 2^26 + 55 in^2 + 80 in out.
"""

from __future__ import annotations

from pathlib import Path

from exl3kit.log import get_logger
from exl3kit.models.base import LinearSpec
from exl3kit.quantize.activations import PIECE_TOKENS
from exl3kit.quantize.preflight import JobPlan

_log = get_logger(__name__)


def peak_bytes(plan: JobPlan) -> int:
    """An upper bound on what the job holds at a time, on its device, in bytes."""
    layers = plan.forward.shapes.layers
    hidden = plan.contents.model.hidden_size
    activations = 0 if plan.options.spill else 12 * _tokens(plan) * hidden
    linears = [plan.contents.model.linears(layer) for layer in layers]
    layer = 4 * max(sum(spec.in_features * spec.out_features for spec in own) for own in linears)
    parts = max(_part(plan, own) for own in linears)
    return activations + layer + max(parts, _experts(plan), _dense(plan))


def warn_of_memory(plan: JobPlan) -> None:
    """Say so if the bound is more than the machine has to give; the job may still fit."""
    if plan.options.devices[0].type != "cpu":
        return
    needed, free = peak_bytes(plan), _available_bytes()
    if needed > free:
        _log.warning(
            "the job may need %.1f GB of memory, %.1f GB are available; fewer rows, a spill "
            "folder, or fewer experts at once take less",
            needed / 1e9,
            free / 1e9,
        )


def _available_bytes() -> int:
    """What the kernel can give out without swapping."""
    (line,) = (x for x in Path("/proc/meminfo").read_text().splitlines() if "MemAvailable" in x)
    return 1024 * int(line.split()[1])


def _tokens(plan: JobPlan) -> int:
    return plan.options.rows * plan.options.cols


def _part(plan: JobPlan, linears: list[LinearSpec]) -> int:
    piece = min(_tokens(plan), max(PIECE_TOKENS, plan.options.cols))
    hidden = plan.contents.model.hidden_size
    attention = sum(spec.out_features for spec in linears if ".self_attn." in spec.name)
    width = max((s.in_features for s in linears if s.name.endswith(".down_proj")), default=0)
    return 4 * piece * max(4 * hidden + 3 * attention, 2 * hidden + 3 * width)


def _experts(plan: JobPlan) -> int:
    model, together = plan.contents.model, plan.options.jobs * len(plan.options.devices)
    hidden, width = model.hidden_size, model.moe_intermediate_size
    moments = 8 * (hidden**2 + width**2)
    one = 12 * hidden * width + moments + 2 * _encoding(hidden, width)
    return 4 * _tokens(plan) * (2 * hidden + 3 * width) + 8 * hidden**2 + together * one


def _dense(plan: JobPlan) -> int:
    """Linears that become EXL3, of which two may have one shape; the head is alone."""
    contents = plan.contents
    modules = [p.spec for layer in contents.layers for p in contents.linears(layer)]
    sizes = [_encoding(s.in_features, s.out_features) for s in modules if ".experts." not in s.name]
    return 2 * max(sizes, default=0)


def _encoding(ins: int, outs: int) -> int:
    return 2**26 + 64 * ins**2 + 96 * ins * outs
