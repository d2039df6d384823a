"""exl3::linear on a GPU against float64 truth; batch invariance, streams, graphs, refusals."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from exl3kit.errors import FormatError, MissingKernelError
from exl3kit.format.spec import Codebook
from exl3kit.format.tensors import Exl3Tensor
from exl3kit.jit import launch
from exl3kit.kernels import gemm
from exl3kit.runtime.ops import exl3_linear
from exl3kit.testing.compare import assert_bitwise_equal, assert_three_gates
from exl3kit.testing.generate import random_exl3
from tests.golden import COMBINATIONS
from tests.kernels.cases import random_rows, true_linear

K, N = 256, 384
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# The edges of the token groups (8, 16, 32), of a pass (128), and odd tails.
ROWS = (0, 1, 2, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 64, 127, 128, 129, 200)


class Weights(NamedTuple):
    """Tensors of one linear on a GPU."""

    trellis: torch.Tensor
    suh: torch.Tensor
    svh: torch.Tensor


def weights_of(linear: Exl3Tensor) -> Weights:
    """Copies on the first GPU."""
    return Weights(linear.trellis.cuda(), linear.suh.cuda(), linear.svh.cuda())


def run(x: torch.Tensor, linear: Exl3Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The op on copies of everything on the first GPU; the result on the CPU."""
    on_gpu = None if bias is None else bias.cuda()
    return exl3_linear(x.cuda(), *weights_of(linear), str(linear.codebook), on_gpu).cpu()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codebook", list(Codebook))
def test_every_number_of_rows(codebook: Codebook, dtype: str) -> None:
    linear = random_exl3(K, N, 3, codebook)
    bias = random_rows(1, N, DTYPES[dtype])[0]
    for rows in ROWS:
        x = random_rows(rows, K, DTYPES[dtype])
        y = run(x, linear, bias)
        assert y.dtype == x.dtype and y.shape == (rows, N)
        expected = true_linear(x, linear) + bias.double()
        assert_three_gates(y, expected, f"cuda_{dtype}", f"{rows} rows")


@pytest.mark.parametrize("rows", [3, 12, 20])
@pytest.mark.parametrize(("bits", "codebook"), COMBINATIONS)
def test_every_rate_and_codebook(bits: int | float, codebook: Codebook, rows: int) -> None:
    linear = random_exl3(384, 128, bits, codebook)
    x = random_rows(rows, 384)
    assert_three_gates(run(x, linear), true_linear(x, linear), "cuda_float32")


@pytest.mark.parametrize("rows", [5, 13])
@pytest.mark.parametrize(
    ("k", "n"), [(128, 128), (128, 1024), (4096, 128), (1920, 640), (128, 768)]
)
def test_shapes(k: int, n: int, rows: int) -> None:
    """Fewer rows of tiles than warps, one strip, and counts that no split divides."""
    linear = random_exl3(k, n, 4)
    x = random_rows(rows, k)
    assert_three_gates(run(x, linear), true_linear(x, linear), "cuda_float32")


def test_shift_of_mul1() -> None:
    """Inputs whose transform is constant in each block: the shift of -0.0018 adds up to 3 %."""
    linear = random_exl3(512, 256, 3, Codebook.MUL1)
    x = torch.zeros(2, 512)
    x[:, ::128] = linear.suh[::128].sign().float()
    assert_three_gates(run(x, linear), true_linear(x, linear), "cuda_float32")


def test_a_row_does_not_see_its_batch() -> None:
    linear = random_exl3(2048, 512, 3)
    x = random_rows(32, 2048, torch.bfloat16)  # the decode plan; test_prefill_dense.py has the rest
    together = run(x, linear)
    for rows in (1, 2, 8, 9, 16, 17, 31):
        assert_bitwise_equal(run(x[:rows], linear), together[:rows], f"{rows} rows")
    for row in (7, 31):
        part = slice(row, row + 1)
        assert_bitwise_equal(run(x[part].clone(), linear), together[part], f"row {row}")


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_poison_stays_in_its_row(poison: float) -> None:
    linear = random_exl3(K, N, 3)
    x = random_rows(9, K)
    clean = run(x, linear)
    x[4, 77] = poison
    y = run(x, linear)
    assert not y[4].isfinite().any()
    others = [row for row in range(9) if row != 4]
    assert_bitwise_equal(y[others], clean[others])


def test_large_finite_inputs_saturate() -> None:
    linear = random_exl3(K, N, 3)
    x = torch.full((1, K), 1e30)
    assert run(x, linear).isfinite().all()


@pytest.mark.parametrize("rows", [1, 9, 32])
def test_workspace_is_garbage_before_and_bounded(rows: int, device: torch.device) -> None:
    """0xFF before the call changes nothing; no byte past the plan's size is touched."""
    linear = random_exl3(K, N, 3)
    x = random_rows(rows, K, torch.float16).cuda()
    weights = weights_of(linear)
    plan = gemm.plan_linear(rows, K, N, gemm.num_multiprocessors(device))
    results = []
    for fill in (0, 0xFF):
        workspace = torch.full(
            (plan.workspace_bytes + 256,), fill, dtype=torch.uint8, device=device
        )
        y = torch.full((rows, N), torch.nan, dtype=x.dtype, device=device)
        gemm.run_linear(plan, workspace, x, *weights, "mcg", None, y)
        assert (workspace[plan.workspace_bytes :] == fill).all()
        assert (workspace[-260:-256] != fill).any(), "the last view ends with the plan"
        results.append(y)
    assert_bitwise_equal(results[0], results[1])


def test_planned_bytes_are_the_bytes_taken(device: torch.device) -> None:
    """Of the allocator, in one call: the workspace of the plan and the output."""
    weights = weights_of(random_exl3(K, N, 3))
    x = random_rows(9, K, torch.float16).cuda()
    exl3_linear(x, *weights, "mcg")
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_stats(device)["requested_bytes.all.current"]
    y = exl3_linear(x, *weights, "mcg")
    taken = torch.cuda.memory_stats(device)["requested_bytes.all.peak"] - before
    plan = gemm.plan_linear(9, K, N, gemm.num_multiprocessors(device))
    assert taken == plan.workspace_bytes + y.nbytes


def test_two_streams_at_once(device: torch.device) -> None:
    """Each call has a workspace of its own: what runs beside it does not matter."""
    linears = [random_exl3(2048, 2048, 3, seed=seed) for seed in (1, 2)]
    x = random_rows(8, 2048, torch.float16).cuda()
    weights = [weights_of(linear) for linear in linears]
    expected = [exl3_linear(x, *w, "mcg") for w in weights]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(device) for _ in weights]
    results: list[list[torch.Tensor]] = [[], []]
    for _ in range(20):
        for own, stream, found in zip(weights, streams, results, strict=True):
            with torch.cuda.stream(stream):
                found.append(exl3_linear(x, *own, "mcg"))
    torch.cuda.synchronize()
    for wanted, found in zip(expected, results, strict=True):
        for y in found:
            assert_bitwise_equal(y, wanted)


def test_graph_replay_equals_eager(device: torch.device) -> None:
    linear = random_exl3(K, N, 3)
    weights = weights_of(linear)
    x = torch.empty(4, K, dtype=torch.bfloat16, device=device)
    exl3_linear(x, *weights, "mcg")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = exl3_linear(x, *weights, "mcg")
    for seed in range(3):
        x.copy_(torch.randn(4, K, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        assert_bitwise_equal(y, exl3_linear(x, *weights, "mcg"))


def test_first_use_in_a_capture_is_refused(device: torch.device) -> None:
    linear = random_exl3(128, 128, 8, "3inst")
    weights, x = weights_of(linear), random_rows(1, 128).to(device)
    launch._load.cache_clear()
    with (
        pytest.raises(MissingKernelError, match="before a CUDA graph is captured"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        exl3_linear(x, *weights, "3inst")
    assert_three_gates(
        exl3_linear(x, *weights, "3inst").cpu(), true_linear(x.cpu(), linear), "cuda_float32"
    )


def test_refusals(device: torch.device) -> None:
    linear = random_exl3(K, N, 3)
    x = random_rows(2, K, torch.float16).to(device)
    weights = weights_of(linear)
    with pytest.raises(FormatError, match="suh is on device cpu, expected cuda:0"):
        exl3_linear(x, weights[0], linear.suh, weights[2], "mcg")
    odd = torch.empty(2 * K + 1, dtype=x.dtype, device=device)[1:].view(2, K)
    with pytest.raises(FormatError, match=r"x starts at address .*multiple of 16"):
        exl3_linear(odd, *weights, "mcg")


def test_compiled_equals_eager(device: torch.device) -> None:
    linear = random_exl3(K, N, 3)
    weights = weights_of(linear)
    step = torch.compile(
        lambda x: exl3_linear(x, *weights, "mcg"), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for rows in (5, 2, 17, 1):
        x = random_rows(rows, K, torch.bfloat16).to(device)
        assert_bitwise_equal(step(x), exl3_linear(x, *weights, "mcg"))
