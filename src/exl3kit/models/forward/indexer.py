"""The token picker of sparse attention (DeepSeek-V3.2, GLM-5).

Query t attends to the `topk` keys s <= t with the best scores

    sum over heads of weight[t, head] x relu(query[t, head] . key[s])

with queries from the latent query, one key a token, and head weights from x. A row of at most
`topk` tokens has no key to leave out: its attention is the dense one, exactly, and nothing is
scored.
The published kernels score in FP8 after a Hadamard transform of query and key, which leaves the
products unchanged; scores here are fp32. Constant positive factors do not change the order and are
left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from exl3kit.models.attention import Indexer
from exl3kit.models.forward.base import MAX_VALUES, Weights, linear
from exl3kit.models.forward.rotary import rotate

_PREFIX = "self_attn.indexer"
_EPS = 1e-6  # of the key's layer norm


@dataclass(frozen=True)
class KeyPicker:
    """Picks `topk` keys; the layers `shape.shared_layers` take those of the layer before."""

    shape: Indexer
    topk: int
    interleaved: bool

    def __call__(
        self,
        x: Tensor,
        latent_query: Tensor,
        weights: Weights,
        layer: int,
        selected: Tensor | None,
        table: tuple[Tensor, Tensor],
    ) -> Tensor | None:
        """The keys (R, S, S) bool that the tokens of x (R, S, H) attend to; None for all before.

        ValueError if the layer shares a choice and `selected`, that of the layer before, is None.
        """
        if x.shape[1] <= self.topk:
            return None
        if layer in self.shape.shared_layers:
            if selected is None:
                raise ValueError(
                    f"layer {layer} attends to the keys that an earlier layer chose: pass the "
                    f"Carry of its {x.shape[1]} tokens"
                )
            return selected
        query = linear(latent_query, weights, f"{_PREFIX}.wq_b")
        query = query.unflatten(-1, (self.shape.num_heads, -1)).transpose(1, 2)
        key = F.layer_norm(
            linear(x, weights, f"{_PREFIX}.wk"),
            (self.shape.head_dim,),
            weights[f"{_PREFIX}.k_norm.weight"],
            weights[f"{_PREFIX}.k_norm.bias"],
            _EPS,
        )
        return self._pick(
            rotate(query, *table, interleaved=self.interleaved).transpose(1, 2),
            rotate(key, *table, interleaved=self.interleaved),
            linear(x, weights, f"{_PREFIX}.weights_proj"),
        )

    def _pick(self, query: Tensor, key: Tensor, head_weights: Tensor) -> Tensor:
        """Choice by query (R, S, heads, n), key (R, S, n) and weights (R, S, heads), in pieces."""
        rows, length = key.shape[:2]
        causal = torch.ones(length, length, dtype=torch.bool, device=key.device).tril()
        chosen = torch.zeros(rows, length, length, dtype=torch.bool, device=key.device)
        step = max(1, MAX_VALUES // (self.shape.num_heads * length))
        for row in range(rows):
            for start in range(0, length, step):
                piece = slice(start, start + step)
                scores = (query[row, piece] @ key[row].T).relu_()
                scores = (head_weights[row, piece].unsqueeze(1) @ scores).squeeze(1)
                best = scores.masked_fill_(~causal[piece], -torch.inf).topk(self.topk).indices
                chosen[row, piece].scatter_(1, best, True)
        return chosen & causal
