"""exllamav3's own modules around given tensors: the peer of the CUDA benchmarks, where installed.

Its routed experts run without router and shared expert: the routes are handed in.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from exl3kit.kernels.cuda_moe import MoeWeights

Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@functools.cache
def exllamav3() -> ModuleType | None:
    """The package, None where it is not installed."""
    try:
        import exllamav3  # type: ignore[import-not-found]
    except ModuleNotFoundError as error:
        if error.name != "exllamav3":
            raise
        return None
    return exllamav3


def version() -> str:
    """Version of the peer, empty without one."""
    package = exllamav3()
    return "" if package is None else str(package.version.__version__)


def _linear(trellis: torch.Tensor, suh: torch.Tensor, svh: torch.Tensor, codebook: str) -> Any:
    from exllamav3.modules.quant import LinearEXL3  # type: ignore[import-not-found]

    marker = {codebook: torch.ones((), dtype=torch.int32)} if codebook != "3inst" else {}
    k, n = len(suh), len(svh)
    return LinearEXL3(None, k, n, suh=suh, svh=svh, trellis=trellis, **marker)


def linear(
    trellis: torch.Tensor, suh: torch.Tensor, svh: torch.Tensor, codebook: str
) -> Callable[[torch.Tensor], torch.Tensor]:
    """x float16 (T, k) -> float16 (T, n)."""
    module = _linear(trellis, suh, svh, codebook)
    return lambda x: module.forward(x, {})


def experts(weights: MoeWeights, codebook: str, top_k: int) -> Experts:
    """x float16 (T, H), routing weights float16 and ids int64 (T, top_k) -> float32 (T, H)."""
    from exllamav3.modules import BlockSparseMLP, Linear  # type: ignore[import-not-found]

    count, inner = weights.w2_suh.shape
    hidden, device = weights.w2_svh.shape[1], weights.w2_suh.device

    def module(key: str, dtype: torch.dtype, tensors: Sequence[torch.Tensor]) -> Any:
        trellis, suh, svh = tensors
        made = Linear(None, key, len(suh), len(svh), out_dtype=dtype)
        made.inner, made.quant_type = _linear(trellis, suh, svh, codebook), "exl3"
        made.device = device
        return made

    def side(index: int) -> list[Any]:
        tensors = (weights.w13_trellis[index], weights.w13_suh[index], weights.w13_svh[index])
        rows = enumerate(zip(*tensors, strict=True))
        return [module(f"{index}.{expert}", torch.half, row) for expert, row in rows]

    downs = enumerate(zip(weights.w2_trellis, weights.w2_suh, weights.w2_svh, strict=True))
    block = BlockSparseMLP(
        None, "experts", hidden, inner, count, top_k,
        interm_dtype=torch.half, gates=side(0), ups=side(1),
        downs=[module(f"2.{expert}", torch.float, row) for expert, row in downs],
    )  # fmt: skip
    block.device = device
    block.load_local()
    routes: list[torch.Tensor] = []
    block.routing_gate, block.routing_fn = object(), lambda *_: tuple(routes)

    def run(x: torch.Tensor, scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        routes[:] = ids, scores
        return block.forward(x, {})

    return run


def kernels_us(calls: Sequence[Callable[[], object]]) -> float:
    """Mean of what a call's kernels take together, without the gaps between them.

    Its experts read back counts beyond 8 tokens, so no graph can hold them.
    """
    for call in calls:
        call()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for call in calls:
            call()
        torch.cuda.synchronize()
    events = profile.key_averages()
    return sum(event.self_device_time_total for event in events) / len(calls)
