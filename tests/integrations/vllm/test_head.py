"""An EXL3 output head without an engine: vocabularies that do not split on 128 columns."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from exl3kit.errors import CheckpointError
from exl3kit.integrations.vllm.head import Exl3HeadMethod
from exl3kit.integrations.vllm.linear import LinearPart
from exl3kit.integrations.vllm.params import MatrixSpec
from exl3kit.testing.generate import random_exl3

HIDDEN = 128


def build(stored: int, vocabulary: int, tp: int, rank: int) -> tuple[Exl3HeadMethod, Any]:
    """vLLM pads the vocabulary to a multiple of 64 and gives each rank an equal part."""
    size = -(-vocabulary // 64) * 64 // tp
    layer: Any = torch.nn.Module()
    layer.org_vocab_size, layer.num_embeddings_per_partition = vocabulary, size
    layer.shard_indices = SimpleNamespace(padded_org_vocab_start_index=rank * size)
    spec = MatrixSpec(HIDDEN, stored, 4, random_exl3(HIDDEN, 128, 4).codebook)
    method = Exl3HeadMethod([LinearPart("lm_head", spec)])
    method.create_weights(layer, HIDDEN, [size], HIDDEN, size * tp, torch.float32)
    return method, layer


@pytest.mark.parametrize(
    ("vocabulary", "stored", "tp"),
    [
        (512, 512, 2),  # on whole blocks
        (384, 384, 2),  # 192 columns a rank
        (384, 384, 4),  # 96 columns a rank: ranks 1 and 2 start inside a block
        (300, 384, 1),  # padded in the file to 384, by vLLM to 320
        (300, 384, 5),  # 64 columns a rank
    ],
)
def test_ranks_together_give_every_logit(vocabulary: int, stored: int, tp: int) -> None:
    head, x = random_exl3(HIDDEN, stored, 4, name="lm_head"), torch.randn(3, HIDDEN)
    logits = []
    for rank in range(tp):
        method, layer = build(stored, vocabulary, tp, rank)
        for field, tensor in head.tensors().items():
            param = getattr(layer, field)
            param.weight_loader(param, tensor)
        method.process_weights_after_loading(layer)
        logits.append(method.apply(layer, x))
        assert logits[-1].is_contiguous()
        assert logits[-1].shape[-1] == layer.num_embeddings_per_partition
    expected = x @ head.dequantize()[:, :vocabulary]
    found = torch.cat(logits, dim=-1)[:, :vocabulary]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_a_head_of_another_vocabulary_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"lm_head: stored sizes are \(128, 384\)"):
        build(384, 512, 1, 0)


def test_a_stored_head_is_not_tied() -> None:
    method, layer = build(384, 384, 1, 0)
    assert method.tie_weights(layer, torch.nn.Embedding(384, HIDDEN)) is layer
    assert not hasattr(layer, "weight")
