"""exl3::moe for many tokens on a GPU against the float64 reference: routes, scratch, cuts."""

from __future__ import annotations

import pytest
import torch

from exl3kit.errors import FormatError, UnsupportedError
from exl3kit.format.spec import Codebook
from exl3kit.kernels import cuda_moe, parity, prefill_moe
from exl3kit.kernels.prefill_core import Core
from exl3kit.runtime import cuda_paths
from exl3kit.runtime.ops import exl3_moe
from exl3kit.runtime.reference import reference_moe
from exl3kit.testing.compare import assert_bitwise_equal, assert_three_gates
from tests.golden import COMBINATIONS
from tests.gpu.test_moe import (
    DTYPES,
    EXPERTS,
    MAP,
    TOP_K,
    E,
    H,
    S,
    routing_on,
    truth_of_rows,
    weights_on,
)
from tests.gpu.test_prefill_dense import CORES, core_or_skip
from tests.kernels.cases import (
    MIXED_RATES,
    Experts,
    Routing,
    linears_of,
    mixed_experts,
    random_experts,
    random_routing,
    random_rows,
    true_sum,
)

# Edges of the decode plan (32), and where experts get more than a block of 64 rows.
TOKENS = (0, 1, 5, 32, 33, 64, 70)


@pytest.fixture(params=list(CORES))
def core(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Core:
    """Each core, made the chosen one."""
    chosen = core_or_skip(request.param)
    monkeypatch.setattr(prefill_moe, "choose_core", lambda *_: chosen)
    return chosen


def run(
    x: torch.Tensor,
    routing: Routing,
    experts: Experts = EXPERTS,
    codebook: str = "mcg",
    expert_map: torch.Tensor | None = None,
) -> torch.Tensor:
    """The prefill plan on copies of everything on the first GPU; the result on the CPU."""
    routes = Routing(*(t.cuda() for t in routing))
    here = None if expert_map is None else expert_map.cuda()
    weights = weights_on(torch.device("cuda", 0), experts)
    return prefill_moe.moe(x.cuda(), *routes, weights, codebook, here).cpu()


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_of_tokens(core: Core, dtype: str) -> None:
    for tokens in TOKENS:
        x, routing = random_rows(tokens, H, DTYPES[dtype]), random_routing(tokens, TOP_K, E)
        y = run(x, routing)
        assert y.dtype == x.dtype and y.shape == (tokens, H)
        expected = truth_of_rows(dtype)[:tokens]
        assert_three_gates(y, expected, f"cuda_moe_{dtype}", f"{tokens} tokens")


@pytest.mark.parametrize(("bits", "codebook"), COMBINATIONS)
def test_every_rate_and_codebook(core: Core, bits: int | float, codebook: Codebook) -> None:
    """Two experts whose down has another rate than gate and up; the parity path beside them."""
    experts = random_experts(2, 128, 256, bits, 4 if bits == 3 else 3, codebook)
    x, routing = random_rows(40, 128), random_routing(40, 2, 2)
    expected = reference_moe(x, *routing, *experts, codebook, dtype=torch.float64)
    assert_three_gates(run(x, routing, experts, codebook), expected, "cuda_moe_float32")
    routes = Routing(*(t.cuda() for t in routing))
    weights = weights_on(torch.device("cuda", 0), experts)
    y = parity.moe(x.cuda(), *routes, weights, codebook)
    assert_three_gates(y.cpu(), expected, "cuda_moe_float32", "parity")


@pytest.mark.parametrize("tokens", [22, 43, 44, 100, 200])
def test_all_routes_to_one_expert(core: Core, tokens: int) -> None:
    """66 to 600 rows of one expert, around one, two and more blocks; the others have none."""
    x = random_rows(tokens, H)
    routing = Routing(torch.rand(tokens, TOP_K), torch.full((tokens, TOP_K), 2))
    expected = reference_moe(x, *routing, *EXPERTS, "mcg", dtype=torch.float64)
    assert_three_gates(run(x, routing), expected, "cuda_moe_float32")


def test_an_empty_expert(core: Core) -> None:
    x, routing = random_rows(70, H), random_routing(70, 2, 3)
    empty = Routing(routing.weights, torch.tensor([0, 4, 3])[routing.ids])  # none to 1 and 2
    expected = reference_moe(x, *empty, *EXPERTS, "mcg", dtype=torch.float64)
    assert_three_gates(run(x, empty), expected, "cuda_moe_float32")


def test_expert_map_and_id_dtypes(core: Core) -> None:
    """Eight model experts of which five are here, in another order: the rest add nothing."""
    x, routing = random_rows(70, H), random_routing(70, TOP_K, 8)
    y = run(x, routing, expert_map=MAP)
    expected = reference_moe(x, *routing, *EXPERTS, "mcg", MAP, dtype=torch.float64)
    assert_three_gates(y, expected, "cuda_moe_float32")
    narrow = Routing(routing.weights, routing.ids.int())
    assert_bitwise_equal(run(x, narrow, expert_map=MAP.long()), y)


@pytest.mark.parametrize("absent", ["map", "far map", "weight", "id"])
def test_absent_routes_add_exactly_zero(core: Core, absent: str) -> None:
    """Even where the expert would give NaN; a batch without any route is zeros."""
    x = random_rows(40, H)
    x[2] = torch.nan
    weights, ids = random_routing(40, TOP_K, E)
    here = None
    if absent.endswith("map"):
        here = torch.full((E,), -1 if absent == "map" else E, dtype=torch.int32)
    elif absent == "weight":
        weights = torch.zeros_like(weights)
    else:
        ids = torch.tensor([[-1, E, 1 << 40]]).expand(40, 3).contiguous()
    assert_bitwise_equal(run(x, Routing(weights, ids), expert_map=here), torch.zeros(40, H))


def test_a_row_sees_neither_its_batch_nor_the_cuts(
    core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, routing = random_rows(200, H, torch.bfloat16), random_routing(200, TOP_K, E)
    together = run(x, routing)
    for row in (0, 7, 63, 199):
        part = slice(row, row + 1)
        alone = run(x[part].clone(), Routing(routing.weights[part], routing.ids[part]))
        assert_bitwise_equal(alone, together[part], f"row {row}")
    for capacity in (33, 64, 199):
        monkeypatch.setattr(prefill_moe, "CAPACITY", capacity)
        assert_bitwise_equal(run(x, routing), together, f"cut at {capacity}")


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_poison_stays_in_its_row(core: Core, poison: float) -> None:
    x, routing = random_rows(70, H), random_routing(70, TOP_K, E)
    clean = run(x, routing)
    x[4, 77] = poison
    y = run(x, routing)
    assert not y[4].isfinite().any()
    others = [row for row in range(70) if row != 4]
    assert_bitwise_equal(y[others], clean[others])


@pytest.mark.parametrize("vectors", [1, 3])
def test_shared_vectors_equal_expanded(core: Core, vectors: int) -> None:
    """Experts that take turns at vectors of the hidden side; gate's are not up's."""
    experts = random_experts(6, H, S)
    shared = experts._replace(
        w13_suh=experts.w13_suh[:, :vectors].contiguous(),
        w2_svh=experts.w2_svh[:vectors].contiguous(),
    )
    expanded = experts._replace(
        w13_suh=shared.w13_suh.repeat(1, 6 // vectors, 1),
        w2_svh=shared.w2_svh.repeat(6 // vectors, 1),
    )
    x, routing = random_rows(70, H), random_routing(70, TOP_K, 6)
    assert_bitwise_equal(run(x, routing, shared), run(x, routing, expanded))


@pytest.mark.parametrize("codebook", list(Codebook))
def test_experts_of_several_rates(codebook: Codebook) -> None:
    """Gate differs from up too; the parity path beside them."""
    experts = mixed_experts(MIXED_RATES, H, S, codebook)
    weights = weights_on(torch.device("cuda", 0), experts.weights)
    weights = weights._replace(matrices=experts.matrices.cuda())
    x, routing = random_rows(70, H), random_routing(70, TOP_K, E)
    expected = true_sum(x, routing, linears_of(MIXED_RATES, H, S, codebook))
    scores, ids = (t.cuda() for t in routing)
    for path in (prefill_moe.moe, parity.moe):
        y = path(x.cuda(), scores, ids, weights, codebook)
        assert_three_gates(y.cpu(), expected, "cuda_moe_float32", path.__module__)


@pytest.mark.parametrize("tokens", [1, 40, 70])
def test_scratch_is_garbage_before_and_bounded(
    core: Core, tokens: int, device: torch.device
) -> None:
    """0xFF before the call changes nothing; canaries around every view survive."""
    plan = prefill_moe.plan_prefill(tokens, TOP_K, E, H, S, core.block_rows)
    weights, x, routing = (
        weights_on(device),
        random_rows(tokens, H).to(device),
        routing_on(device, tokens),
    )
    results = []
    for fill in (0, 0xFF):
        scratch = torch.full((plan.scratch_bytes + 256,), fill, dtype=torch.uint8, device=device)
        y = torch.full((tokens, H), torch.nan, device=device)
        prefill_moe.bind_prefill(plan, scratch, weights, "mcg", core).run(x, *routing, y)
        for name, size in plan.items().items():
            start = plan.offsets[name]
            end = start + -(-size // 256) * 256
            assert (scratch[start + size : end] == fill).all(), f"past {name}"
        assert (scratch[plan.scratch_bytes :] == fill).all()
        results.append(y)
    assert_bitwise_equal(results[0], results[1])


def test_a_call_takes_the_planned_bytes(core: Core, device: torch.device) -> None:
    """The scratch and the result, measured at torch's allocator, which rounds up to 512."""
    weights, x, routing = weights_on(device), random_rows(70, H).to(device), routing_on(device, 70)
    prefill_moe.moe(x, *routing, weights, "mcg")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = prefill_moe.moe(x, *routing, weights, "mcg")
    plan = prefill_moe.plan_prefill(70, TOP_K, E, H, S, core.block_rows)
    planned = plan.scratch_bytes + y.nbytes
    taken = torch.cuda.max_memory_allocated() - before
    assert planned <= taken < planned + 1024


def test_graph_replay_with_other_routes(core: Core, device: torch.device) -> None:
    weights = weights_on(device)
    x = torch.empty(50, H, dtype=torch.bfloat16, device=device)
    scores = torch.rand(50, TOP_K, device=device)
    ids = torch.zeros(50, TOP_K, dtype=torch.int64, device=device)
    prefill_moe.moe(x, scores, ids, weights, "mcg")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = prefill_moe.moe(x, scores, ids, weights, "mcg")
    for seed in range(3):
        random = torch.Generator().manual_seed(seed)
        x.copy_(torch.randn(50, H, generator=random))
        ids.copy_(torch.rand(50, E, generator=random).topk(TOP_K).indices)
        graph.replay()
        assert_bitwise_equal(y, prefill_moe.moe(x, scores, ids, weights, "mcg"))


def test_the_tokens_choose_the_path(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = weights_on(device)
    called: list[str] = []
    for module in (cuda_moe, prefill_moe, parity):
        name = module.__name__.rpartition(".")[2]
        monkeypatch.setattr(module, "moe", lambda x, *_, name=name: called.append(name))
    for tokens, switch, expected in (
        (32, "1", "cuda_moe"), (33, "1", "prefill_moe"), (32, "0", "cuda_moe"), (33, "0", "parity"),
    ):  # fmt: skip
        monkeypatch.setenv("VLLM_EXL3_PREFILL_TRELLIS", switch)
        cuda_paths.moe(
            random_rows(tokens, H).to(device), *routing_on(device, tokens), weights, "mcg"
        )
        assert called.pop() == expected, f"{tokens} tokens, switch {switch}"


def test_parity_is_refused_in_a_capture(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_EXL3_PREFILL_TRELLIS", "0")
    x, routing, weights = random_rows(40, H).to(device), routing_on(device, 40), weights_on(device)
    with (
        pytest.raises(UnsupportedError, match="40 tokens: expected to run eagerly"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        exl3_moe(x, *routing, *weights[:6], "mcg")


def test_refusals(core: Core, device: torch.device) -> None:
    plan = prefill_moe.plan_prefill(2, TOP_K, E, H, S, core.block_rows)
    weights, x = weights_on(device), random_rows(3, H).to(device)
    scores, ids = routing_on(device, 3)
    scratch = torch.empty(plan.scratch_bytes, dtype=torch.uint8, device=device)
    with pytest.raises(FormatError, match="1 to 2 tokens of the plan, got 3"):
        prefill_moe.bind_prefill(plan, scratch, weights, "mcg", core).run(x, scores, ids, x)
    with pytest.raises(FormatError, match=f"scratch: expected {plan.scratch_bytes} bytes"):
        prefill_moe.bind_prefill(plan, scratch[:-1], weights, "mcg", core)
