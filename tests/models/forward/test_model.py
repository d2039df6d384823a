"""Steps of a layer: independence of the attention batch, routing, observed inputs."""

from __future__ import annotations

import pytest
import torch

from exl3kit.models.forward import forward_model, model
from exl3kit.models.forward.base import Routing

from . import reference


def test_rows_are_independent_of_the_attention_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    config = reference.tiny("glm4_moe")
    tensors = reference.checkpoint_tensors(reference.reference_model(config))
    tokens, ours = reference.token_rows(5, 16), forward_model(config)
    whole = reference.our_logits(ours, tensors, tokens)
    monkeypatch.setattr(model, "_ATTENTION_TOKENS", 32)
    torch.testing.assert_close(reference.our_logits(ours, tensors, tokens), whole)


def test_by_expert_gives_every_routed_token_once() -> None:
    generator = torch.Generator().manual_seed(3)
    ids = torch.rand(50, 8, generator=generator).topk(3).indices
    ids[ids == 5] = 6  # an expert without tokens
    routing = Routing(ids, torch.rand(50, 3, generator=generator))
    seen = [len(tokens) for _, tokens, _ in routing.by_expert(8)]
    assert seen == routing.counts(8) and sum(seen) == 150 and seen[5] == 0
    for expert, tokens, weights in routing.by_expert(8):
        rows, _ = (ids == expert).nonzero(as_tuple=True)
        assert torch.equal(tokens, rows)
        assert torch.equal(weights, routing.topk_weights[ids == expert])
