"""The stages of a job in their order, from the first that is not complete.

A stage is one shard: a decoder layer, or what lies outside the layers (None), which holds the head
and so comes after the target's last layer; next-token layers come last. When a stage is complete,
its shard, the log and the hidden states behind it are on the disk before state.json says so.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from exl3kit.checkpoint.shard import final_name, part_name
from exl3kit.errors import CheckpointError
from exl3kit.models.module_weights import ModuleWeights
from exl3kit.quantize.activations import Hidden, Scratch
from exl3kit.quantize.bit_plan import HEAD
from exl3kit.quantize.copying import copy_dense
from exl3kit.quantize.hessian import Coverage, InputMoments
from exl3kit.quantize.journal import Journal
from exl3kit.quantize.layer import Buffers, LayerPass
from exl3kit.quantize.layout import WHOLE
from exl3kit.quantize.linears import Assignment, LinearQuantizer
from exl3kit.quantize.preflight import JobPlan
from exl3kit.quantize.shard_file import ShardFile
from exl3kit.quantize.store import Progress, Store
from exl3kit.quantize.weights import LayerWeights
from exl3kit.quantize.work_folder import State

_EMBEDDING, _NORM = "model.embed_tokens.weight", "model.norm.weight"


class Stages:
    """The work on `plan` with calibration `rows` (R, S), written to `out`."""

    def __init__(
        self,
        plan: JobPlan,
        rows: Tensor,
        out: Path,
        state: State,
        journal: Journal,
        progress: Progress | None,
    ) -> None:
        self._plan, self._contents, self._model = plan, plan.contents, plan.forward
        self._rows, self._out, self._state = rows, out, state
        self._journal, self._progress = journal, progress
        self._device = plan.options.devices[0]
        self._scratch = Scratch(self._device, plan.options.spill)
        self._weights = ModuleWeights(plan.contents.checkpoint)
        target = range(plan.forward.num_hidden_layers)
        others = [n for n in plan.contents.layers if n is not None and n not in target]
        self._order: list[int | None] = [*target, None, *others]
        self._buffers: Buffers | None = None

    def run(self) -> None:
        """Complete every stage that is not. Behind the last with a linear to quantise the rows are
        not needed any more, and the rest is copied."""
        counts = [len(self._contents.matrices(layer)) for layer in self._order]
        last = max(index for index, count in enumerate(counts) if count)
        hidden: Hidden | None = None
        for index, layer in enumerate(self._order):
            if index < self._state.stages:
                self._require_complete(layer)
                continue
            if index <= last and hidden is None:
                hidden = self._first_hidden()
            with ShardFile(self._part(layer), self._contents.entries(layer)) as shard:
                copy_dense(self._contents, layer, shard)
                if hidden is not None and index <= last:
                    before, total = sum(counts[:index]), sum(counts)
                    store = self._store(shard, layer, before, total)
                    hidden = self._quantize(layer, hidden, store)
                shard.sync()
                self._complete(index, layer, shard.digest(), hidden if index < last else None)

    def _require_complete(self, layer: int | None) -> None:
        """CheckpointError if a stage that an earlier run completed has lost its shard or its log:
        the hidden states to make it again from are gone."""
        number, count = self._contents.shard_number(layer), len(self._contents.layers)
        part = self._part(layer)
        if not part.exists() and not (self._out / final_name(number, count)).exists():
            raise CheckpointError(
                f"{part}: expected this shard, which an earlier run completed, found none; restore "
                "it, or begin again in another folder"
            )
        for matrix in self._contents.matrices(layer):
            self._journal.result(matrix.name)

    def _part(self, layer: int | None) -> Path:
        return self._out / part_name(self._contents.shard_number(layer))

    def _store(self, shard: ShardFile, layer: int | None, before: int, total: int) -> Store:
        contents = self._contents
        return Store(
            shard,
            self._journal,
            contents.codebook,
            contents.matrices(layer),
            before,
            total,
            self._progress,
        )

    def _complete(self, index: int, layer: int | None, digest: str, hidden: Hidden | None) -> None:
        state = self._state
        self._journal.sync()
        state.stages, state.digests[layer] = index + 1, digest
        state.hidden = None
        if hidden is not None:
            state.hidden = f"hidden-{index + 1:05d}.safetensors"
            hidden.save(state.work / state.hidden)
        state.write()

    def _first_hidden(self) -> Hidden:
        """The hidden states in front of the first stage of this run."""
        if self._state.hidden is not None:
            return Hidden.load(self._state.work / self._state.hidden, self._scratch)
        embedding = self._contents.checkpoint.tensor(_EMBEDDING)
        hidden = Hidden(self._scratch.make(*self._rows.shape, embedding.shape[1]))
        rows = self._rows.split(len(hidden.pieces[0]))
        for piece, tokens in zip(hidden.pieces, rows, strict=True):
            piece.copy_(self._model.embed(tokens, embedding))
        return hidden

    def _quantize(self, layer: int | None, hidden: Hidden, store: Store) -> Hidden:
        """Quantise a stage's linears; the hidden states behind it."""
        options = self._plan.options
        quantizer = LinearQuantizer(store, self._contents.codebook, options.seed, options.devices)
        if layer is None:
            self._head(hidden, quantizer)
            return hidden
        weights = LayerWeights(self._contents.checkpoint, layer, self._device)
        if layer >= self._model.num_hidden_layers:
            hidden = self._next_token_input(layer, hidden, weights)
        if self._buffers is None or len(self._buffers.tokens) != hidden.num_tokens:
            self._buffers = Buffers(hidden, self._scratch)
        LayerPass(
            self._model,
            layer,
            self._contents.linears(layer),
            weights,
            quantizer,
            self._device,
            options.jobs,
            options.route_all,
        ).run(hidden, self._buffers)
        return hidden

    def _head(self, hidden: Hidden, quantizer: LinearQuantizer) -> None:
        """The head, if it is to become EXL3; a tied one is the embedding."""
        (*_, planned), names = self._contents.linears(None) or [None], self._contents.checkpoint
        if planned is None or quantizer.is_done(HEAD, WHOLE):
            return
        moments, norm = InputMoments((HEAD,)), self._weights[_NORM].to(self._device)
        for piece in hidden.pieces:
            moments.observe((HEAD,), self._model.final_norm(piece.to(self._device), norm))
        stored = f"{HEAD}.weight" if names.has(f"{HEAD}.weight") else _EMBEDDING
        work = Assignment(
            spec=planned.spec,
            bits=planned.bits,
            weight=self._weights[stored].to(self._device),
            hessian=moments.of(HEAD),
            coverage=Coverage.ALL,
            tokens=hidden.num_tokens,
        )
        quantizer.quantize([[work]], WHOLE)

    def _next_token_input(self, layer: int, before: Hidden, weights: LayerWeights) -> Hidden:
        """What a next-token layer is given: the states in front of it, normed, and embeddings."""
        ahead = layer - self._model.num_hidden_layers
        name = _NORM if not ahead else f"model.layers.{layer - 1}.shared_head.norm.weight"
        norm = self._weights[name].to(self._device)
        embedding = self._contents.checkpoint.tensor(_EMBEDDING)
        rows, positions, width = before.x.shape
        hidden = Hidden(self._scratch.make(rows, positions - 1, width))
        tokens = self._rows[:, 1 + ahead :].split(len(hidden.pieces[0]))
        states = before.x.split(len(hidden.pieces[0]))
        for piece, part, state in zip(hidden.pieces, tokens, states, strict=True):
            normed = self._model.final_norm(state.to(self._device), norm)[:, :-1]
            embeds = self._model.embed(part, embedding).to(self._device)
            piece.copy_(self._model.mtp_input(normed, embeds, weights))
        return hidden
