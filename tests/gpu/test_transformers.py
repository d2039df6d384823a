"""Models that transformers loads onto a GPU answer as they do on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from tests.integrations.transformers.conftest import (
    Agreement,
    agreement,
    load,
    logits,
    ordinary,
    sliced,
    tokens,
)

__all__ = ["ordinary", "sliced"]  # fixtures

# H(x * suh) is rounded to fp16 in every linear: 4e-4 RMS each, 1e-3 after two layers, so
# 1 - cosine is below 1e-6. A router's near tie may send a token of the experts elsewhere.
MIN_COSINE = {"llama": 0.99999, "glm4_moe": 0.999}


@pytest.mark.parametrize("device_map", ["cuda", "auto", {"": 0}])
@pytest.mark.parametrize("model_type", MIN_COSINE)
def test_logits(
    model_type: str,
    device_map: str | dict[str, int],
    ordinary: Callable[..., Path],
    record_property: Callable[[str, object], None],
) -> None:
    checkpoint = ordinary(model_type)
    expected = logits(load(checkpoint), tokens())
    model = load(checkpoint, device_map=device_map)
    assert {buffer.device.type for buffer in model.buffers()} == {"cuda"}
    found = agreement(logits(model, tokens().cuda()).cpu(), expected)
    for name in Agreement.__annotations__:
        record_property(name, getattr(found, name))
    assert found.cosine > MIN_COSINE[model_type] and found.top1 > 0.9, found


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rank_sliced_generates(dtype: torch.dtype, sliced: Callable[..., Path]) -> None:
    """Greedy tokens are the likeliest ones of the logits of the whole sequence."""
    model = load(sliced("glm4_moe", 3, 2, (1, 1)), dtype=dtype, device_map="cuda")
    ids = tokens(1).cuda()
    answer = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert answer.shape == (1, ids.shape[1] + 8) and answer.is_cuda
    with torch.no_grad():
        whole = model(answer).logits[0, ids.shape[1] - 1 : -1].float()
    chosen = whole.gather(1, answer[0, ids.shape[1] :, None])[:, 0]
    # Logits are up to 4; with the cache they differ by roundings of the half type.
    assert (whole.max(dim=1).values - chosen).max() < 0.1
