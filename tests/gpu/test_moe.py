"""exl3::moe on a GPU against the float64 reference: routing, scratch, graphs, batch invariance."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from exl3kit.errors import FormatError
from exl3kit.format.spec import Codebook
from exl3kit.kernels import cuda_moe, gemm
from exl3kit.runtime.experts import matrix_table
from exl3kit.runtime.ops import exl3_moe
from exl3kit.runtime.reference import reference_moe
from exl3kit.testing.compare import assert_bitwise_equal, assert_three_gates
from tests.golden import COMBINATIONS
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

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
E, H, S, TOP_K = 5, 256, 128, 3
EXPERTS = random_experts(E, H, S)
# Edges of a block (8) and of the decode plan (32), and odd tails.
TOKENS = (0, 1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 35, 70)
MAP = torch.tensor([-1, 4, 0, -1, 2, 1, -1, 3], dtype=torch.int32)


def routing_on(device: torch.device, tokens: int) -> Routing:
    """Random routes of the experts."""
    return Routing(*(t.to(device) for t in random_routing(tokens, TOP_K, E)))


def weights_on(device: torch.device, experts: Experts = EXPERTS) -> cuda_moe.MoeWeights:
    """The experts as the launch takes them."""
    return cuda_moe.MoeWeights(*(t.to(device) for t in experts))


def run(
    x: torch.Tensor,
    routing: Routing,
    experts: Experts = EXPERTS,
    codebook: str = "mcg",
    expert_map: torch.Tensor | None = None,
) -> torch.Tensor:
    """The op on copies of everything on the first GPU; the result on the CPU."""
    routes, weights = Routing(*(t.cuda() for t in routing)), Experts(*(t.cuda() for t in experts))
    here = None if expert_map is None else expert_map.cuda()
    return exl3_moe(x.cuda(), *routes, *weights, codebook, here).cpu()


@cache
def truth_of_rows(dtype: str) -> torch.Tensor:
    """The reference for the most tokens; its first rows are those of fewer."""
    x, routing = random_rows(max(TOKENS), H, DTYPES[dtype]), random_routing(max(TOKENS), TOP_K, E)
    return reference_moe(x, *routing, *EXPERTS, "mcg", dtype=torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_of_tokens(dtype: str) -> None:
    for tokens in TOKENS:
        x, routing = random_rows(tokens, H, DTYPES[dtype]), random_routing(tokens, TOP_K, E)
        y = run(x, routing)
        assert y.dtype == x.dtype and y.shape == (tokens, H)
        expected = truth_of_rows(dtype)[:tokens]
        assert_three_gates(y, expected, f"cuda_moe_{dtype}", f"{tokens} tokens")


@pytest.mark.parametrize(("bits", "codebook"), COMBINATIONS)
def test_every_rate_and_codebook(bits: int | float, codebook: Codebook) -> None:
    """Two experts whose down has another rate than gate and up."""
    experts = random_experts(2, 128, 256, bits, 4 if bits == 3 else 3, codebook)
    x, routing = random_rows(3, 128), random_routing(3, 2, 2)
    expected = reference_moe(x, *routing, *experts, codebook, dtype=torch.float64)
    assert_three_gates(run(x, routing, experts, codebook), expected, "cuda_moe_float32")


def test_shift_of_mul1() -> None:
    """Inputs whose transform is constant in each block, for gate and up of other experts alike."""
    experts = random_experts(2, 512, 256, 3, 3, "mul1")
    experts = experts._replace(w13_suh=experts.w13_suh.abs())
    x, routing = torch.zeros(3, 512), random_routing(3, 2, 2)
    x[:, ::128] = 8.0
    expected = reference_moe(x, *routing, *experts, "mul1", dtype=torch.float64)
    assert_three_gates(run(x, routing, experts, "mul1"), expected, "cuda_moe_float32")


@pytest.mark.parametrize("tokens", [5, 16, 32])
def test_all_tokens_on_one_expert(tokens: int) -> None:
    """32 tokens of 3 slots are 96 rows of one expert, twelve blocks; the others have none."""
    x = random_rows(tokens, H)
    routing = Routing(torch.rand(tokens, TOP_K), torch.full((tokens, TOP_K), 2))
    expected = reference_moe(x, *routing, *EXPERTS, "mcg", dtype=torch.float64)
    assert_three_gates(run(x, routing), expected, "cuda_moe_float32")


def test_same_expert_twice_counts_twice() -> None:
    x = random_rows(4, H)
    once = Routing(torch.ones(4, 1), torch.full((4, 1), 3))
    twice = Routing(torch.ones(4, 2), torch.full((4, 2), 3))
    assert_bitwise_equal(run(x, twice), 2 * run(x, once))


def test_expert_map_and_id_dtypes() -> None:
    """Eight model experts of which five are here, in another order: the rest add nothing."""
    x, routing = random_rows(17, H), random_routing(17, TOP_K, 8)
    y = run(x, routing, expert_map=MAP)
    expected = reference_moe(x, *routing, *EXPERTS, "mcg", MAP, dtype=torch.float64)
    assert_three_gates(y, expected, "cuda_moe_float32")
    narrow = Routing(routing.weights, routing.ids.int())
    assert_bitwise_equal(run(x, narrow, expert_map=MAP.long()), y)


def test_routes_of_a_part_of_a_batch(device: torch.device) -> None:
    """Views that start at a row: their addresses are multiples of an element only."""
    x, routing = random_rows(6, H).to(device), routing_on(device, 6)
    weights = weights_on(device)
    whole = exl3_moe(x, *routing, *weights[:6], "mcg")
    part = exl3_moe(x[1:], routing.weights[1:], routing.ids[1:], *weights[:6], "mcg")
    assert_bitwise_equal(part, whole[1:])


@pytest.mark.parametrize("absent", ["map", "weight", "id"])
def test_absent_routes_add_exactly_zero(absent: str) -> None:
    """Even where the expert would give NaN; a batch without any route is zeros."""
    x = random_rows(6, H)
    x[2] = torch.nan
    weights, ids = random_routing(6, TOP_K, E)
    here = None
    if absent == "map":
        here = torch.full((E,), -1, dtype=torch.int32)
    elif absent == "weight":
        weights = torch.zeros_like(weights)
    else:
        ids = torch.tensor([[-1, E, 1 << 30]]).expand(6, 3).contiguous()
    assert_bitwise_equal(run(x, Routing(weights, ids), expert_map=here), torch.zeros(6, H))


def test_a_row_does_not_see_its_batch() -> None:
    x, routing = random_rows(32, H, torch.bfloat16), random_routing(32, TOP_K, E)
    together = run(x, routing)
    for row in (0, 1, 7, 31):
        part = slice(row, row + 1)
        alone = run(x[part].clone(), Routing(routing.weights[part], routing.ids[part]))
        assert_bitwise_equal(alone, together[part], f"row {row}")


def test_poison_stays_in_its_row() -> None:
    x, routing = random_rows(9, H), random_routing(9, TOP_K, E)
    clean = run(x, routing)
    x[4, 77] = torch.nan
    y = run(x, routing)
    assert y[4].isnan().all()
    others = [row for row in range(9) if row != 4]
    assert_bitwise_equal(y[others], clean[others])


@pytest.mark.parametrize("vectors", [1, 2, 3, 6])
def test_shared_vectors_equal_expanded(vectors: int) -> None:
    """Experts that take turns at vectors of the hidden side; gate's are not up's.

    Up to three, the routes of a token, its rotations are shared; six would be more work than a
    rotation for each route.
    """
    experts = random_experts(12, H, S)
    shared = experts._replace(
        w13_suh=experts.w13_suh[:, :vectors].contiguous(),
        w2_svh=experts.w2_svh[:vectors].contiguous(),
    )
    expanded = experts._replace(
        w13_suh=shared.w13_suh.repeat(1, 12 // vectors, 1),
        w2_svh=shared.w2_svh.repeat(12 // vectors, 1),
    )
    for codebook, tokens in (("mcg", 9), ("mul1", 33)):
        x, routing = random_rows(tokens, H), random_routing(tokens, TOP_K, 12)
        found = run(x, routing, shared, codebook)
        assert_bitwise_equal(found, run(x, routing, expanded, codebook), f"{tokens} tokens")


@pytest.mark.parametrize("codebook", list(Codebook))
def test_experts_of_several_rates(codebook: Codebook) -> None:
    """Gate differs from up too; one launch of each product serves all."""
    rates = MIXED_RATES
    if codebook is Codebook.MUL1:
        rates = (*MIXED_RATES[:3], (1.5, 5, 7), (2.5, 1, 3.5))
    experts = mixed_experts(rates, H, S, codebook)
    weights, matrices = Experts(*(t.cuda() for t in experts.weights)), experts.matrices.cuda()
    linears = linears_of(rates, H, S, codebook)
    for tokens in (1, 9, 32, 35):
        x, routing = random_rows(tokens, H), random_routing(tokens, TOP_K, E)
        on_gpu = x.cuda(), routing.weights.cuda(), routing.ids.cuda()
        y = exl3_moe(*on_gpu, *weights, codebook, None, matrices).cpu()
        expected = true_sum(x, routing, linears)
        assert_three_gates(y, expected, "cuda_moe_float32", f"{tokens} tokens")
        alone = on_gpu[0][-1:], on_gpu[1][-1:], on_gpu[2][-1:]
        again = exl3_moe(*alone, *weights, codebook, None, matrices).cpu()
        assert_bitwise_equal(again, y[-1:])


def test_a_table_of_one_rate_changes_nothing(device: torch.device) -> None:
    x, routing = random_rows(17, H).to(device), routing_on(device, 17)
    weights = weights_on(device)
    flat = weights._replace(
        w13_trellis=weights.w13_trellis.flatten(),
        w2_trellis=weights.w2_trellis.flatten(),
        matrices=matrix_table([(3, 3, 4)] * E, H, S).to(device),
    )
    results = [cuda_moe.moe(x, *routing, w, "mcg") for w in (weights, flat)]
    assert_bitwise_equal(results[0], results[1])


@pytest.mark.parametrize("tokens", [1, 8, 32])
def test_scratch_is_garbage_before_and_bounded(tokens: int, device: torch.device) -> None:
    """0xFF before the call changes nothing; canaries around every view survive."""
    sms = gemm.num_multiprocessors(device)
    plan = cuda_moe.plan_moe(tokens, TOP_K, H, S, sms)
    weights = weights_on(device)
    x, routing = random_rows(tokens, H).to(device), routing_on(device, tokens)
    results = []
    for fill in (0, 0xFF):
        scratch = torch.full((plan.scratch_bytes + 256,), fill, dtype=torch.uint8, device=device)
        y = torch.full((tokens, H), torch.nan, device=device)
        cuda_moe.bind_moe(plan, scratch, weights, "mcg").run(x, *routing, y)
        for name, size in plan.items().items():
            start = plan.offsets[name]
            end = start + -(-size // 256) * 256
            assert (scratch[start + size : end] == fill).all(), f"past {name}"
        assert (scratch[plan.scratch_bytes :] == fill).all()
        results.append(y)
    assert_bitwise_equal(results[0], results[1])


@pytest.mark.parametrize("blocks", [1, 2, 7])
def test_few_blocks_change_nothing(blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of threads that take many strips of many experts in turn, as in large batches."""
    experts = random_experts(3, 384, 256)
    x, routing = random_rows(9, 384), random_routing(9, 2, 3)
    apart = run(x, routing, experts)
    monkeypatch.setattr(cuda_moe, "resident_blocks", lambda registers, num_sms: blocks)
    assert_bitwise_equal(run(x, routing, experts), apart)


def test_capacity_does_not_show(device: torch.device) -> None:
    weights = weights_on(device)
    x, routing = random_rows(5, H).to(device), routing_on(device, 5)
    results = []
    for capacity in (5, 32):
        plan = cuda_moe.plan_moe(capacity, TOP_K, H, S, gemm.num_multiprocessors(device))
        scratch = torch.empty(plan.scratch_bytes, dtype=torch.uint8, device=device)
        y = torch.empty_like(x)
        cuda_moe.bind_moe(plan, scratch, weights, "mcg").run(x, *routing, y)
        results.append(y)
    assert_bitwise_equal(results[0], results[1])


@pytest.mark.parametrize("vectors", [1, E])
def test_planned_bytes_are_the_bytes_taken(vectors: int, device: torch.device) -> None:
    """Of the allocator, in one call: the scratch of the plan and the output."""
    weights = weights_on(device)
    weights = weights._replace(w13_suh=weights.w13_suh[:, :vectors].contiguous())
    x, routing = random_rows(8, H).to(device), routing_on(device, 8)
    cuda_moe.moe(x, *routing, weights, "mcg")
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_stats(device)["requested_bytes.all.current"]
    y = cuda_moe.moe(x, *routing, weights, "mcg")
    taken = torch.cuda.memory_stats(device)["requested_bytes.all.peak"] - before
    shared = vectors if vectors < E else None
    plan = cuda_moe.plan_moe(8, TOP_K, H, S, gemm.num_multiprocessors(device), shared)
    assert taken == plan.scratch_bytes + y.nbytes


def test_graph_replay_with_other_routes(device: torch.device) -> None:
    weights = weights_on(device)
    x = torch.empty(8, H, dtype=torch.bfloat16, device=device)
    scores = torch.rand(8, TOP_K, device=device)
    ids = torch.zeros(8, TOP_K, dtype=torch.int64, device=device)
    exl3_moe(x, scores, ids, *weights[:6], "mcg")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = exl3_moe(x, scores, ids, *weights[:6], "mcg")
    for seed in range(3):
        random = torch.Generator().manual_seed(seed)
        x.copy_(torch.randn(8, H, generator=random))
        ids.copy_(torch.rand(8, E, generator=random).topk(TOP_K).indices)
        graph.replay()
        assert_bitwise_equal(y, exl3_moe(x, scores, ids, *weights[:6], "mcg"))


@pytest.mark.parametrize("has_table", [False, True])
def test_experts_past_eight_gigabytes(has_table: bool, device: torch.device) -> None:
    """Live weights lie beyond 2^31 words of 32 bits of the slab: offsets of experts are 64-bit."""
    count, bits = 4200, 8  # a MiB each
    experts = random_experts(1, 1024, 1024, bits, bits)
    tall = torch.empty(2, count, 64, 64, 16 * bits, dtype=torch.int16, device=device)
    down = torch.empty(count, 64, 64, 16 * bits, dtype=torch.int16, device=device)
    tall[:, -1], down[-1] = experts.w13_trellis[:, 0].to(device), experts.w2_trellis[0].to(device)
    assert tall[1, -1].data_ptr() - tall.data_ptr() > 4 << 31
    vectors = [
        t.to(device).expand(*shape).contiguous()
        for t, shape in (
            (experts.w13_suh, (2, count, 1024)),
            (experts.w13_svh, (2, count, 1024)),
            (experts.w2_suh, (count, 1024)),
            (experts.w2_svh, (count, 1024)),
        )
    ]
    weights = Experts(tall, vectors[0], vectors[1], down, vectors[2], vectors[3])
    x, scores = random_rows(2, 1024).to(device), torch.ones(2, 1, device=device)
    ids = torch.full((2, 1), count - 1, device=device)
    table = None
    if has_table:
        table = matrix_table([(bits, bits, bits)] * count, 1024, 1024).to(device)
        weights = weights._replace(w13_trellis=tall.view(-1), w2_trellis=down.view(-1))
    y = exl3_moe(x, scores, ids, *weights, "mcg", None, table).cpu()
    routing = Routing(torch.ones(2, 1), torch.zeros(2, 1, dtype=torch.int64))
    expected = reference_moe(random_rows(2, 1024), *routing, *experts, "mcg", dtype=torch.float64)
    assert_three_gates(y, expected, "cuda_moe_float32")


def test_refusals(device: torch.device) -> None:
    plan = cuda_moe.plan_moe(2, TOP_K, H, S, 132)
    weights, x = weights_on(device), random_rows(3, H).to(device)
    scores, ids = routing_on(device, 3)
    scratch = torch.empty(plan.scratch_bytes, dtype=torch.uint8, device=device)
    with pytest.raises(FormatError, match="1 to 2 tokens of the plan, got 3"):
        cuda_moe.bind_moe(plan, scratch, weights, "mcg").run(x, scores, ids, x)
    with pytest.raises(FormatError, match=f"scratch: expected {plan.scratch_bytes} bytes"):
        cuda_moe.bind_moe(plan, scratch[:-1], weights, "mcg")
    with pytest.raises(FormatError, match=r"scratch: expected contiguous torch.uint8 on cuda:0"):
        cuda_moe.bind_moe(plan, scratch.cpu(), weights, "mcg")
    with pytest.raises(FormatError, match="1 to 4096 routes, got 513 tokens of 8"):
        cuda_moe.plan_moe(513, 8, H, S, 132)
