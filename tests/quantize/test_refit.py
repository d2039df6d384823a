"""The refit of the scale vectors, trellis fixed."""

from __future__ import annotations

import torch

from exl3kit.quantize.refit import refit
from exl3kit.quantize.stats import proxy_error
from tests.quantize import cases


def test_true_scales_are_found() -> None:
    """A weight that differs from its decoded form by channel factors alone is met exactly."""
    generator = torch.Generator().manual_seed(0)
    quantized, hessian = cases.random_case(128, 256)
    rows = 1 + 0.05 * torch.rand(128, generator=generator).double()
    columns = 1 + 0.05 * torch.rand(256, generator=generator).double()
    weight = quantized.double() * rows.unsqueeze(1) * columns
    suh, svh = refit(weight, quantized, hessian.double(), torch.ones(128), torch.ones(256))
    fitted = quantized.double() * suh.unsqueeze(1) * svh
    before, after = (proxy_error(weight, q, hessian) for q in (quantized, fitted))
    assert after < 1e-3 * before


def test_error_falls() -> None:
    weight, hessian = cases.random_case(128, 128)
    noise = torch.randn(128, 128, generator=torch.Generator().manual_seed(1)) * 0.005
    quantized = 0.97 * weight + noise
    suh, svh = refit(weight, quantized, hessian.double(), torch.ones(128), torch.ones(128))
    fitted = quantized * suh.unsqueeze(1) * svh
    assert proxy_error(weight, fitted, hessian) < 0.99 * proxy_error(weight, quantized, hessian)


def test_channels_without_a_positive_factor_are_left_alone() -> None:
    weight, hessian = cases.random_case(128, 128)
    quantized = weight.clone()
    quantized[:, 3] = 0  # nothing to scale
    quantized[:, 4] *= -1  # the best factor is negative
    suh, svh = refit(weight, quantized, hessian.double(), torch.ones(128), torch.ones(128))
    assert svh[3] == 1
    assert svh[4] == 1
    assert (suh > 0).all()
    assert (svh > 0).all()
