"""The CUDA encoder and quantiser against the CPU's: the same states, bit for bit."""

from __future__ import annotations

import pytest
import torch

from exl3kit.errors import FormatError
from exl3kit.format.spec import HALF_BITS, SUPPORTED_BITS, Codebook
from exl3kit.format.trellis import pack
from exl3kit.kernels.encode import encode_tiles
from exl3kit.kernels.encode_cuda import CudaEncoder
from exl3kit.quantize.ldlq import ldlq
from exl3kit.quantize.scale import search_scale
from exl3kit.quantize.tensor import quantize_tensor, quantize_tensors
from exl3kit.quantize.viterbi import encode
from tests import golden
from tests.kernels.test_encode import awkward_tiles, tiles_of
from tests.quantize import cases


def gaussian(count: int, seed: int) -> torch.Tensor:
    """Tiles of unit variance."""
    return torch.randn(count, 256, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("bits", "codebook"), golden.COMBINATIONS, ids=lambda v: str(v))
def test_golden_states(device: torch.device, bits: int | float, codebook: Codebook) -> None:
    stored = golden.tensors()[f"enc.{golden.tag(bits, codebook)}.states"].int() & 0xFFFF
    assert torch.equal(encode(tiles_of(codebook).to(device), bits, codebook).cpu(), stored)


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
def test_states_of_the_cpu(device: torch.device, bits: int | float) -> None:
    """Blocks with two tiles and with three, where there are 132; scales from flat to clipped."""
    codebook = "mul1" if bits in HALF_BITS else "mcg"
    tiles = gaussian(301, 7) * torch.linspace(0.02, 3, 301).unsqueeze(1)
    assert torch.equal(
        encode(tiles.to(device), bits, codebook).cpu(), encode_tiles(tiles, bits, codebook)
    )


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
def test_where_rounding_is_hard(device: torch.device, bits: int | float) -> None:
    tiles = awkward_tiles()
    found = encode(tiles.to(device), bits, "mul1").cpu()
    assert torch.equal(found, encode_tiles(tiles, bits, "mul1"))


def test_company_and_stream_change_nothing(device: torch.device) -> None:
    tiles = gaussian(140, 8).to(device)
    encoder = CudaEncoder(3, "mcg", device)
    together = encoder(tiles)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        alone = encoder(tiles[77:78])
    stream.synchronize()
    assert torch.equal(alone[0], together[77])
    assert encoder(tiles[:0]).shape == (0, 256)


def test_launch_can_be_captured(device: torch.device) -> None:
    tiles = gaussian(5, 9).to(device)
    encoder = CudaEncoder(2, "mul1", device)
    expected = encoder(tiles)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = encoder(tiles)
    captured.zero_()
    graph.replay()
    assert torch.equal(captured, expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -65520.0])
def test_values_beyond_fp16_are_refused(device: torch.device, value: float) -> None:
    tiles = gaussian(3, 10).to(device)
    encoder = CudaEncoder(3, "mcg", device)
    tiles[2, 255] = value
    encoder(tiles)
    with pytest.raises(FormatError, match="finite values of magnitude <= 65504"):
        encoder.check()
    tiles[2, 255] = 65504
    encoder(tiles)
    encoder.check()


def test_refused_tiles(device: torch.device) -> None:
    encoder = CudaEncoder(3, "mcg", device)
    with pytest.raises(FormatError, match="on cuda:0, got cpu"):
        encoder(gaussian(1, 0))
    with pytest.raises(FormatError, match="float64"):
        encoder(gaussian(1, 0).double().to(device))


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
def test_packing(device: torch.device, bits: int | float) -> None:
    states = torch.randint(0, 65536, (3, 5, 256), dtype=torch.int32)
    assert torch.equal(pack(states.to(device), bits).cpu(), pack(states, bits))


@pytest.mark.parametrize(
    ("bits", "codebook"), [(1, Codebook.MUL1), (2.5, Codebook.MUL1), (4, Codebook.MCG)]
)
def test_error_feedback_block_by_block(
    device: torch.device, bits: int | float, codebook: Codebook
) -> None:
    """With the errors of exllamav3's own choice fed back, every block has the CPU's states."""
    scale = golden.combination(bits, codebook)["g_scale"]
    inner, lower = cases.inner()[None] * scale, cases.lower()[None]
    given = cases.golden_inner(bits, codebook)[None]
    on_cpu = ldlq(inner, lower, bits, codebook, given)
    on_gpu = ldlq(inner.to(device), lower.to(device), bits, codebook, given.to(device)).cpu()
    equal = (on_cpu == on_gpu).all(dim=-1)
    # float64 sums in another order: few targets fall on the other side of a midpoint.
    assert int(equal.sum()) >= equal.numel() - 2


@pytest.mark.parametrize(("bits", "codebook"), [(3, "mcg"), (3.5, "mul1"), (6, "3inst")])
def test_whole_matrix(device: torch.device, bits: int | float, codebook: str) -> None:
    weight, hessian = cases.random_case(384, 256)
    on_cpu, cpu_stats = quantize_tensor(weight, hessian, bits, codebook)
    on_gpu, gpu_stats = quantize_tensor(weight.to(device), hessian.to(device), bits, codebook)
    assert on_gpu.trellis.device.type == "cpu"
    assert gpu_stats.scale == pytest.approx(cpu_stats.scale, abs=1e-3)
    # Sums differ in the last bit of float64; where that flips a target in fp16, errors go on apart.
    assert gpu_stats.proxy_error == pytest.approx(cpu_stats.proxy_error, rel=0.03)
    same = (on_gpu.trellis == on_cpu.trellis).all(dim=-1).float().mean()
    assert same > 0.9


def test_several_matrices_are_each_as_alone(device: torch.device) -> None:
    pairs = [cases.random_case(128, 256, seed) for seed in range(3)]
    weights = [weight.to(device) for weight, _ in pairs]
    hessians = [hessian.to(device) for _, hessian in pairs]
    together = quantize_tensors(weights, [*hessians[:2], None], 3)
    for i, (tensor, stats) in enumerate(together):
        hessian = hessians[i] if i < 2 else None
        alone, alone_stats = quantize_tensor(weights[i], hessian, 3, seed=i)
        assert stats.proxy_error == pytest.approx(alone_stats.proxy_error, rel=0.03)
        assert stats.fallback == (i == 2) == alone_stats.fallback
        assert (tensor.trellis == alone.trellis).all(dim=-1).float().mean() > 0.9


def test_scale_of_a_pool(device: torch.device) -> None:
    weights = [cases.random_case(128, 256, seed)[0] for seed in range(3)]
    on_gpu = search_scale([weight.to(device) for weight in weights], 3, "mcg")
    assert on_gpu == pytest.approx(search_scale(weights, 3, "mcg"), abs=1e-6)


def test_mixed_devices_are_refused(device: torch.device) -> None:
    weight, hessian = cases.random_case(128, 128)
    with pytest.raises(FormatError, match="hessians: expected tensors on the CPU or all on one"):
        quantize_tensor(weight.to(device), hessian, 3)
