"""An EXL3 output head: the vocabulary is cut where vLLM wants it, not on 128 columns.

vLLM splits the vocabulary evenly, padded to 64, which is not a multiple of 128 for most models
(129280 over 4 ranks is 252.5 blocks). The output Hadamard needs whole blocks, so a rank holds the
blocks that its columns touch and drops the surplus logits.
"""

from __future__ import annotations

from typing import Any

import torch

from exl3kit.errors import CheckpointError
from exl3kit.format.spec import HADAMARD_BLOCK
from exl3kit.integrations.vllm.linear import Exl3LinearMethod
from exl3kit.integrations.vllm.params import Cut


class Exl3HeadMethod(Exl3LinearMethod):
    """vLLM quant method of an `lm_head` with a trellis."""

    def tie_weights(self, layer: torch.nn.Module, embed_tokens: torch.nn.Module) -> torch.nn.Module:
        """The head as it is: a file that stores one has untied it, whatever its config says."""
        return layer

    def _cuts(self, layer: Any, in_size: int, out_sizes: list[int]) -> list[Cut]:
        """The whole blocks around this rank's columns."""
        (part,) = self.parts
        stored, vocabulary = part.spec.out_features, layer.org_vocab_size
        first = layer.shard_indices.padded_org_vocab_start_index
        last = first + out_sizes[0]
        is_padded = 0 <= stored - vocabulary < HADAMARD_BLOCK
        if part.spec.in_features != in_size or not is_padded or last > stored:
            raise CheckpointError(
                f"{part.name}: stored sizes are ({part.spec.in_features}, {stored}), but the model "
                f"expects ({in_size}, {vocabulary}) with the vocabulary padded to 128"
            )
        start, stop = first - first % HADAMARD_BLOCK, last + -last % HADAMARD_BLOCK
        return [Cut(0, in_size, start, stop - start)]

    def _kept(self, layer: Any, out_sizes: list[int]) -> list[slice]:
        """This rank's columns in those blocks."""
        first = layer.shard_indices.padded_org_vocab_start_index % HADAMARD_BLOCK
        return [slice(first, first + out_sizes[0])]
