"""exl3::linear for many rows on a GPU: panels, the fused product, scratch, invariances."""

from __future__ import annotations

import pytest
import torch

from exl3kit.format.decode import decode_inner
from exl3kit.format.spec import Codebook
from exl3kit.kernels import (
    heuristics,
    prefill_linear,
    prefill_mma,
    prefill_panel,
    prefill_wgmma,
)
from exl3kit.kernels.gemm import num_multiprocessors
from exl3kit.kernels.prefill_core import Core
from exl3kit.runtime.ops import exl3_linear
from exl3kit.testing.compare import assert_bitwise_equal, assert_three_gates
from exl3kit.testing.generate import random_exl3
from tests.golden import COMBINATIONS
from tests.gpu.test_linear import weights_of
from tests.kernels.cases import random_rows, true_linear

K, N = 256, 384
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# The edge of the decode plan (32), of blocks (64, 128), odd tails, and less than eight rows.
ROWS = (1, 7, 33, 63, 64, 65, 127, 128, 129, 200)
CORES = {"mma": prefill_mma.CORE, "wgmma": prefill_wgmma.CORE}


def core_or_skip(name: str) -> Core:
    """A core by its name; skips the test where the first GPU has no such instructions."""
    if name == "wgmma" and torch.cuda.get_device_capability(0) != (9, 0):
        pytest.skip("wgmma is an instruction of capability 9.0")
    return CORES[name]


@pytest.fixture(params=list(CORES))
def core(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Core:
    """Each core, made the chosen one."""
    chosen = core_or_skip(request.param)
    monkeypatch.setattr(heuristics, "choose_core", lambda *_: chosen)
    return chosen


@pytest.mark.parametrize(("bits", "codebook"), COMBINATIONS)
def test_panel_is_the_format_bit_for_bit(bits: int | float, codebook: Codebook) -> None:
    linear = random_exl3(384, 512, bits, codebook)
    panel = torch.empty(256, 384, dtype=torch.float16, device="cuda")
    prefill_panel.reconstruct(linear.trellis.cuda(), codebook, 128, panel)
    expected = decode_inner(linear.trellis, codebook)[:, 128:384].T.contiguous()
    assert_bitwise_equal(panel.cpu(), expected.half())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codebook", list(Codebook))
def test_every_number_of_rows(core: Core, codebook: Codebook, dtype: str) -> None:
    linear = random_exl3(K, N, 3, codebook)
    bias = random_rows(1, N, DTYPES[dtype])[0]
    for rows in ROWS:
        x = random_rows(rows, K, DTYPES[dtype])
        expected = true_linear(x, linear) + bias.double()
        for way in (prefill_linear.linear, prefill_panel.linear):
            y = way(x.cuda(), *weights_of(linear), str(codebook), bias.cuda())
            assert y.dtype == x.dtype and y.shape == (rows, N)
            assert_three_gates(y.cpu(), expected, f"cuda_{dtype}", f"{way.__module__}, {rows} rows")


@pytest.mark.parametrize(("bits", "codebook"), COMBINATIONS)
def test_every_rate_and_codebook(core: Core, bits: int | float, codebook: Codebook) -> None:
    linear = random_exl3(384, 128, bits, codebook)
    x = random_rows(70, 384)
    y = prefill_linear.linear(x.cuda(), *weights_of(linear), str(codebook))
    assert_three_gates(y.cpu(), true_linear(x, linear), "cuda_float32")


@pytest.mark.parametrize("rows", [40, 200])
@pytest.mark.parametrize(
    ("k", "n"), [(128, 128), (128, 1024), (4096, 128), (1920, 640), (2304, 768)]
)
def test_shapes(core: Core, k: int, n: int, rows: int) -> None:
    """One strip and one panel, parts of K that are no power of two, strips that do not come out."""
    linear = random_exl3(k, n, 4)
    x = random_rows(rows, k)
    y = prefill_linear.linear(x.cuda(), *weights_of(linear), "mcg")
    assert_three_gates(y.cpu(), true_linear(x, linear), "cuda_float32")


def test_panels_in_turn_change_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix too large for one panel, and more rows than a product has."""
    linear = random_exl3(K, N, 3)
    x = random_rows(70, K, torch.bfloat16)
    bias = random_rows(1, N, torch.float32)[0]
    monkeypatch.setattr(prefill_panel, "PANEL_BYTES", 2 * 128 * K)
    monkeypatch.setattr(prefill_panel, "MAX_ROWS", 40)
    y = prefill_panel.linear(x.cuda(), *weights_of(linear), "mcg", bias.cuda())
    assert_three_gates(y.cpu(), true_linear(x, linear) + bias.double(), "cuda_bfloat16")


def test_a_row_does_not_see_its_batch(core: Core) -> None:
    """Bit for bit, where the number of splits is the same."""
    linear = random_exl3(2048, 512, 3)
    x = random_rows(200, 2048, torch.bfloat16).cuda()
    weights = weights_of(linear)
    whole = prefill_linear.linear(x, *weights, "mcg")
    sms = num_multiprocessors(x.device)
    splits = prefill_linear.plan_fused(200, 2048, 512, core, sms).splits
    for rows in (1, 33, 64, 65, 130, 199):
        plan = prefill_linear.FusedPlan(rows, 2048, 512, splits, core.block_rows)
        scratch = torch.empty(plan.offsets["end"], dtype=torch.uint8, device=x.device)
        y = torch.empty(rows, 512, dtype=x.dtype, device=x.device)
        prefill_linear.run_fused(plan, scratch, core, x[:rows], *weights, "mcg", None, y)
        assert_bitwise_equal(y, whole[:rows], f"{rows} rows")


def test_a_long_batch_is_cut(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    linear = random_exl3(K, N, 3)
    x = random_rows(150, K, torch.float16)
    monkeypatch.setattr(prefill_linear, "MAX_ROWS", 70)
    y = prefill_linear.linear(x.cuda(), *weights_of(linear), "mcg")
    assert_three_gates(y.cpu(), true_linear(x, linear), "cuda_float16")


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_poison_stays_in_its_row(core: Core, poison: float) -> None:
    linear = random_exl3(K, N, 3)
    x = random_rows(70, K).cuda()
    clean = prefill_linear.linear(x, *weights_of(linear), "mcg")
    x[4, 77] = poison
    y = prefill_linear.linear(x, *weights_of(linear), "mcg")
    assert not y[4].isfinite().any()
    others = [row for row in range(70) if row != 4]
    assert_bitwise_equal(y[others], clean[others])


@pytest.mark.parametrize("rows", [33, 130])
def test_scratch_is_garbage_before_and_bounded(core: Core, rows: int, device: torch.device) -> None:
    linear = random_exl3(1024, N, 3)
    x = random_rows(rows, 1024, torch.float16).cuda()
    plan = prefill_linear.FusedPlan(rows, 1024, N, 2, core.block_rows)
    results = []
    for fill in (0, 0xFF):
        scratch = torch.full((plan.offsets["end"] + 256,), fill, dtype=torch.uint8, device=device)
        y = torch.full((rows, N), torch.nan, dtype=x.dtype, device=device)
        prefill_linear.run_fused(plan, scratch, core, x, *weights_of(linear), "mcg", None, y)
        for name, size in plan.items().items():
            start = plan.offsets[name]
            end = start + -(-size // 256) * 256
            assert (scratch[start + size : end] == fill).all(), f"past {name}"
        assert (scratch[plan.offsets["end"] :] == fill).all()
        results.append(y)
    assert_bitwise_equal(results[0], results[1])


@pytest.mark.parametrize("rows", [40, 1200])
def test_graph_replay_equals_eager(rows: int, device: torch.device) -> None:
    """Both ways, as the op chooses them."""
    linear = random_exl3(K, N, 3)
    weights = weights_of(linear)
    x = torch.empty(rows, K, dtype=torch.bfloat16, device=device)
    exl3_linear(x, *weights, "mcg")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = exl3_linear(x, *weights, "mcg")
    for seed in range(2):
        x.copy_(torch.randn(rows, K, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        assert_bitwise_equal(y, exl3_linear(x, *weights, "mcg"))


def test_switch_turns_the_fused_way_off(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = random_exl3(K, N, 3)
    x = random_rows(64, K)
    monkeypatch.setenv("VLLM_EXL3_PREFILL_TRELLIS", "off")
    monkeypatch.setattr(prefill_linear, "linear", None)
    y = exl3_linear(x.cuda(), *weights_of(linear), "mcg")
    assert_three_gates(y.cpu(), true_linear(x, linear), "cuda_float32")
