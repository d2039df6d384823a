"""The whole way of one tensor: dense weight and Hessian -> `Exl3Tensor` and what it cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from exl3kit.errors import FormatError
from exl3kit.format.decode import rotate_back
from exl3kit.format.spec import Codebook, check_bits, check_codebook
from exl3kit.format.tensors import Exl3Tensor, make_marker
from exl3kit.format.trellis import pack
from exl3kit.quantize import ldl
from exl3kit.quantize.ldlq import decode_matrix, encode_matrix, ldlq
from exl3kit.quantize.refit import refit
from exl3kit.quantize.regularize import (
    Regularized,
    Signs,
    check_signs,
    check_weight,
    make_signs,
    pad_matrix,
    regularize,
)
from exl3kit.quantize.scale import best_scale, sample_tiles
from exl3kit.quantize.stats import TensorStats, proxy_error

SIGMA_REG = 0.025  # damping of the Hessian, of its mean diagonal
_HALF_MIN_NORMAL = 2.0**-14
_LOWEST_CHANNEL_SCALE = 1e-3  # of the mean, in the feedback's Hessian


@dataclass(frozen=True)
class _Hessian:
    """float64 (k, k) of the padded size, mean diagonal 1."""

    plain: torch.Tensor
    damped: torch.Tensor


@dataclass(frozen=True)
class _Prepared:
    """One matrix ready to encode; sizes are the padded ones."""

    weight: torch.Tensor  # float64 (k, n)
    hessian: _Hessian | None  # None = fallback
    regular: Regularized  # inner already times scale, su already over it
    scale: float
    lower: torch.Tensor | None  # feedback factor (k, k)


def quantize_tensor(
    weight: torch.Tensor,
    hessian: torch.Tensor | None,
    bits: int | float,
    codebook: str = "mcg",
    signs: Signs | None = None,
    scale: float | None = None,
    seed: int = 0,
    sigma_reg: float = SIGMA_REG,
    scaled_hessian: bool = True,
) -> tuple[Exl3Tensor, TensorStats]:
    """Quantise one linear, y = x weight.

    weight     (in, out), any float dtype; both sides are padded with zeros to multiples of 128, and
               the result has the padded sizes (svh is 0 on padded outputs). On a CUDA device
               everything runs there; the result is on the CPU
    hessian    (in, in), sum or mean of x' x over calibration rows: its scale does not matter. None,
               or one with a mean diagonal below 1e-20: no error feedback and no refit
    bits       1..8, with codebook mul1 also 1.5, 2.5, 3.5
    codebook   "3inst", "mcg" or "mul1"
    signs      +-1 vectors (in,) and (out,); default drawn from `seed`
    scale      g, a positive number; default searched for
    sigma_reg  damping of the Hessian, in units of its mean diagonal
    scaled_hessian  feed errors back under the Hessian of the inner basis as it is, channel scales
               included; False takes the signs alone, as exllamav3 does by default, and gives its
               bytes. On a matrix with loud channels this takes 30 % off the proxy error

    The same arguments give the same bytes, on any number of threads and any instruction set of
    the encoder; between machines, and between CPU and GPU, only float64 sums can differ.
    Raises FormatError for shapes, dtypes, rates and values it cannot quantise.
    """
    chosen = None if signs is None else [signs]
    scales = None if scale is None else [scale]
    return quantize_tensors(
        [weight], [hessian], bits, codebook, chosen, scales, [seed], sigma_reg, scaled_hessian
    )[0]


@torch.no_grad()
def quantize_tensors(
    weights: Sequence[torch.Tensor],
    hessians: Sequence[torch.Tensor | None],
    bits: int | float,
    codebook: str = "mcg",
    signs: Sequence[Signs] | None = None,
    scales: Sequence[float] | None = None,
    seeds: Sequence[int] | None = None,
    sigma_reg: float = SIGMA_REG,
    scaled_hessian: bool = True,
) -> list[tuple[Exl3Tensor, TensorStats]]:
    """`quantize_tensor` for several matrices of one shape: the same results, threads kept busy.

    One matrix offers the encoder out/16 tiles at a time; 256 x 128 slices one by one leave
    threads idle, and so does a GPU with less than 2,048 columns. All are on one device. `signs`,
    `scales` and `seeds` (default 0, 1, ...) are one a matrix. Memory: at most 64 in^2 + 96 in out
    bytes a matrix.
    """
    name = check_codebook(codebook)
    rate = check_bits(bits, name)
    _check_call(weights, hessians, signs, scales, seeds, sigma_reg)
    seeds = range(len(weights)) if seeds is None else seeds
    k, n = weights[0].shape
    chosen = [make_signs(k, n, seed) for seed in seeds] if signs is None else signs
    fixed = [None] * len(weights) if scales is None else scales
    conditioned = {key: _condition(h, sigma_reg) for key, h in _distinct(hessians).items()}
    prepared = [
        _prepare(weight, conditioned.get(id(h)), own, rate, name, scale, scaled_hessian)
        for weight, h, own, scale in zip(weights, hessians, chosen, fixed, strict=True)
    ]
    states = _encode_all(prepared, rate, name)
    return [_finish(p, s, rate, name) for p, s in zip(prepared, states, strict=True)]


def _check_call(
    weights: Sequence[torch.Tensor],
    hessians: Sequence[torch.Tensor | None],
    signs: Sequence[Signs] | None,
    scales: Sequence[float] | None,
    seeds: Sequence[int] | None,
    sigma_reg: float,
) -> None:
    if not weights:
        raise FormatError("weights: expected at least one matrix, got none")
    one_each = {"hessians": hessians, "signs": signs, "scales": scales, "seeds": seeds}
    for what, given in one_each.items():
        if given is not None and len(given) != len(weights):
            raise FormatError(f"{what}: expected {len(weights)}, one a weight, got {len(given)}")
    for weight in weights:
        _check_device(weight, weights[0].device, "weights")
    for hessian in _distinct(hessians).values():
        _check_device(hessian, weights[0].device, "hessians")
        ldl.check_hessian(hessian, weights[0].shape[0])
    for weight in weights:
        check_weight(weight)
        if weight.shape != weights[0].shape:
            raise FormatError(
                f"weights: expected equal shapes, got {tuple(weights[0].shape)} "
                f"and {tuple(weight.shape)}"
            )
    for scale in scales or ():
        if not 0 < scale < float("inf"):
            raise FormatError(f"scale: expected a positive finite number, got {scale}")
    if not 0 <= sigma_reg < float("inf"):
        raise FormatError(f"sigma_reg: expected a finite number >= 0, got {sigma_reg}")


def _check_device(tensor: torch.Tensor, device: torch.device, name: str) -> None:
    if tensor.device != device or device.type not in ("cpu", "cuda"):
        raise FormatError(
            f"{name}: expected tensors on the CPU or all on one CUDA device, "
            f"got {tensor.device} beside {device}"
        )


def _distinct(hessians: Sequence[torch.Tensor | None]) -> dict[int, torch.Tensor]:
    """Each Hessian once, by identity: slices of one matrix share theirs."""
    return {id(hessian): hessian for hessian in hessians if hessian is not None}


def _condition(hessian: torch.Tensor, sigma_reg: float) -> _Hessian | None:
    """Padded, scaled and damped; None where it says nothing."""
    if ldl.is_dead(hessian):
        return None
    plain = ldl.normalized(pad_matrix(hessian))
    return _Hessian(plain, ldl.damped(plain, sigma_reg))


def _prepare(
    weight: torch.Tensor,
    hessian: _Hessian | None,
    signs: Signs,
    bits: int | float,
    codebook: Codebook,
    scale: float | None,
    scaled_hessian: bool,
) -> _Prepared:
    padded = pad_matrix(weight.double())
    regular = regularize(padded, check_signs(signs, *weight.shape))
    g = best_scale(sample_tiles(regular.inner), bits, codebook) if scale is None else float(scale)
    scaled = Regularized(regular.inner * g, regular.su / g, regular.sv)
    if hessian is None:
        return _Prepared(padded, None, scaled, g, None)
    channels = _feedback_scales(scaled.su, scaled_hessian)
    lower = ldl.feedback_factor(ldl.rotated(hessian.damped, channels))
    return _Prepared(padded, hessian, scaled, g, lower)


def _encode_all(
    prepared: Sequence[_Prepared], bits: int | float, codebook: Codebook
) -> list[torch.Tensor]:
    """States (k/16, n/16, 256) of each matrix: those with a Hessian together, the others alone."""
    states: dict[int, torch.Tensor] = {}
    factors: dict[int, torch.Tensor] = {}
    for i, p in enumerate(prepared):
        if p.lower is None:
            states[i] = encode_matrix(p.regular.inner, bits, codebook)
        else:
            factors[i] = p.lower
    if factors:
        inner = torch.stack([prepared[i].regular.inner for i in factors])
        chosen = ldlq(inner, torch.stack([*factors.values()]), bits, codebook)
        states.update(zip(factors, chosen, strict=True))
    return [states[i] for i in range(len(prepared))]


def _feedback_scales(su: torch.Tensor, has_magnitudes: bool) -> torch.Tensor:
    """What takes the Hessian (k, k) to the inner basis: su relative to its mean, or its signs.

    The floor keeps all-zero channels, whose errors cost nothing, from making the factor singular.
    """
    signs = torch.where(su < 0, -1.0, 1.0).double()
    mean = su.abs().mean()
    if not has_magnitudes or mean == 0:
        return signs
    return signs * (su.abs() / mean).clamp(min=_LOWEST_CHANNEL_SCALE)


def _finish(
    prepared: _Prepared, states: torch.Tensor, bits: int | float, codebook: Codebook
) -> tuple[Exl3Tensor, TensorStats]:
    inner = decode_matrix(states, codebook)
    suh, svh = prepared.regular.su, prepared.regular.sv
    hessian = prepared.hessian
    if hessian is not None:
        quantized = rotate_back(inner, suh, svh, torch.float64)
        suh, svh = refit(prepared.weight, quantized, hessian.damped, suh, svh)
    suh, svh = _to_half(suh, svh)
    tensor = _assemble(pack(states, bits).cpu(), suh.cpu(), svh.cpu(), codebook)
    dense = rotate_back(inner, suh, svh, torch.float64)
    error = proxy_error(prepared.weight, dense, hessian.plain if hessian is not None else None)
    return tensor, TensorStats(error, prepared.scale, fallback=hessian is None)


def _assemble(
    trellis: torch.Tensor, suh: torch.Tensor, svh: torch.Tensor, codebook: Codebook
) -> Exl3Tensor:
    marker = make_marker(codebook)
    return Exl3Tensor(
        trellis,
        suh,
        svh,
        mcg=marker if codebook is Codebook.MCG else None,
        mul1=marker if codebook is Codebook.MUL1 else None,
    )


def _to_half(suh: torch.Tensor, svh: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp16 vectors of the same product, sharing a power of two between them if suh needs it.

    suh carries the size of the weights: below 6e-5 it would be subnormal in fp16, above 8e4
    infinite, where svh is near 1. FormatError where both together have not the range.
    """
    _, exponent = torch.frexp(suh.abs().max())
    if not -10 <= int(exponent) <= 14:
        shift = 2.0 ** (int(exponent) // 2)
        suh, svh = suh / shift, svh * shift
    halves = suh.half(), svh.half()
    for name, exact, half in (("suh", suh, halves[0]), ("svh", svh, halves[1])):
        largest = float(exact.abs().max())
        if not bool(torch.isfinite(half).all()) or 0 < largest < _HALF_MIN_NORMAL:
            raise FormatError(
                f"{name}: expected a largest magnitude that fp16 holds, got {largest:.3g}; "
                "rescale the weight"
            )
    return halves
