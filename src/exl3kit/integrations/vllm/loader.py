"""Which tensors of a checkpoint a vLLM worker gets to see, and under which names.

`get_all_weights` is the one hook that runs before any model code, for targets, drafts and reloads
alike. A rank-sliced file stores `...rank{r}.trellis`; a worker takes its own rank's tensors under
the names without `.rank{r}`, which vLLM's models then route by themselves.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

import torch

from exl3kit.checkpoint.manifest import BLOCK_KEY, RankSlicedManifest
from exl3kit.checkpoint.names import check_rank_sliced_marker, layer_index, normalise_name
from exl3kit.checkpoint.r7 import SHARED as R7_SHARED
from exl3kit.checkpoint.runtime_checks import owned_ranks
from exl3kit.checkpoint.signs import is_packed, unpack_signs
from exl3kit.errors import CheckpointError
from exl3kit.integrations.vllm import compat
from exl3kit.integrations.vllm.config import METHOD, Exl3Config
from exl3kit.integrations.vllm.facts import CheckpointFacts, checkpoint_folder, read_facts
from exl3kit.integrations.vllm.moe import Exl3MoEMethod
from exl3kit.integrations.vllm.slices import SliceJoiner
from exl3kit.log import info_once

_logger = logging.getLogger("vllm.exl3kit")  # vLLM shows what is logged below its own name
_RANK_TENSOR = re.compile(r"\.rank\d+\.(trellis|suh|svh|mcg|mul1)$")
_RANK_MARKER = re.compile(r"\.rank\d+\.(mcg|mul1)$")
_EXPERT_TRELLIS = re.compile(r"\.experts\.\d+\.[^.]+\.trellis$")
_R7_SHARED = re.compile(
    rf"(?P<stem>.+\.experts)\.r7_shared\.(?P<vector>{'|'.join({*R7_SHARED.values()})})"
)
_DRAFT_HEAD = re.compile(r"\.shared_head\.head\.(trellis|suh|svh|mcg|mul1)$")

Weights = Iterable[tuple[str, torch.Tensor]]


class Exl3Loader(compat.DefaultModelLoader):
    """vLLM's default loader with the rank filter in front; other models load as before."""

    def __init__(self, load_config: Any) -> None:
        if load_config.load_format == METHOD:
            load_config.load_format = "auto"  # the base class knows its own format names only
        super().__init__(load_config)

    def get_all_weights(
        self, model_config: Any, model: torch.nn.Module
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Tensors for this rank; refuses before the first one when the model cannot hold them."""
        weights = super().get_all_weights(model_config, model)
        config = _exl3_config(model)
        if config is None:
            if model_config.quantization == METHOD:
                raise CheckpointError(
                    f"{model_config.model}: no layer of {type(model).__name__} carries the EXL3 "
                    "config, so every layer was built unquantised"
                )
            return weights
        facts = config.hydrated(type(model).__name__)
        check_same(facts, checkpoint_folder(model_config.model, model_config.revision))
        check_methods(model, facts)
        return local_weights(weights, facts, ranks_here(facts.manifest))


def ranks_here(manifest: RankSlicedManifest | None) -> range:
    """The file's ranks whose slices this process holds; the first process tells if several."""
    tp_size = compat.get_tensor_model_parallel_world_size()
    tp_rank = compat.get_tensor_model_parallel_rank()
    ranks = owned_ranks(manifest, tp_size, tp_rank)
    if manifest is not None and len(ranks) > 1 and tp_rank == 0:
        info_once(
            _logger,
            "expansion",
            f"experts are cut for {manifest.tp} ranks and run on {tp_size}: each rank takes "
            f"{len(ranks)} slices of every expert, each as an expert of its own; results are exact",
        )
    return ranks


def is_registered() -> bool:
    """True when vLLM's default load format already resolves to this loader."""
    return isinstance(compat.get_model_loader(compat.LoadConfig()), Exl3Loader)


def _exl3_config(model: torch.nn.Module) -> Exl3Config | None:
    configs = (getattr(module, "quant_config", None) for module in model.modules())
    return next((config for config in configs if isinstance(config, Exl3Config)), None)


def check_same(facts: CheckpointFacts, path: Path) -> None:
    """CheckpointError unless `path` holds all that the layers were built for.

    It can differ after a reload from another folder, or for a draft that has a folder of its own.
    """
    if read_facts(path, facts.sizes) != facts:
        raise CheckpointError(
            f"{path}: its EXL3 layers (bits, codebook, ranks or names) are not those the model was "
            "built for; start a new engine for this checkpoint"
        )


def check_methods(model: torch.nn.Module, facts: CheckpointFacts) -> None:
    """CheckpointError if a layer whose experts are EXL3 in the file was built as something else.

    A draft whose config missed the checkpoint would otherwise become a stock MoE, and only the
    acceptance rate would tell.
    """
    for name, module in model.named_modules():
        if not isinstance(module, compat.ExpertsLayer):
            continue
        if layer_index(name) in facts.experts and not isinstance(
            module.quant_method, Exl3MoEMethod
        ):
            raise CheckpointError(
                f"{name}: the checkpoint has EXL3 experts for this layer, but it was built with "
                f"{type(module.quant_method).__name__}"
            )


def local_weights(
    weights: Weights, facts: CheckpointFacts, ranks: range
) -> Generator[tuple[str, torch.Tensor], None, None]:
    """The tensors of the file's `ranks`, renamed; an expert's slices as one tensor.

    vLLM 0.26 to 0.31 take a 3-D expert tensor for a fused [E, N, K] one: a trellis comes out as
    2-D, its last two dimensions merged, and slices lie behind one another. `ExpertField` undoes it.
    """
    slices = SliceJoiner(ranks)
    for stored_name, stored in _plain_vectors(weights):
        name, rank = _without_rank(stored_name, facts.manifest)
        is_foreign = rank is not None and rank not in ranks
        if is_foreign or _is_draft_head(name, facts):
            continue
        if _RANK_MARKER.search(stored_name):
            check_rank_sliced_marker(stored_name, stored)
        tensor = stored.flatten(1) if _EXPERT_TRELLIS.search(name) else stored
        if rank is not None and len(ranks) > 1:
            tensor = slices.add(stored_name, rank, tensor)
        if tensor is not None:
            yield name, tensor
    slices.check_done()


def _plain_vectors(weights: Weights) -> Weights:
    """Packed signs as the vectors they stand for; what r7 shares as vectors of expert 0."""
    for name, tensor in weights:
        if is_packed(name):
            yield f"{name}h", unpack_signs(tensor, name)
        elif match := _R7_SHARED.fullmatch(name):
            for (projection, field), vector in R7_SHARED.items():
                if vector == match["vector"]:
                    yield f"{match['stem']}.0.{projection}.{field}", tensor
        else:
            yield name, tensor


def _is_draft_head(name: str, facts: CheckpointFacts) -> bool:
    """True for a quantised head of a next-token layer: vLLM drafts always use the target's head."""
    return bool(_DRAFT_HEAD.search(name)) and layer_index(name) >= facts.sizes.num_hidden_layers


def _without_rank(name: str, manifest: RankSlicedManifest | None) -> tuple[str, int | None]:
    if manifest is not None:
        return normalise_name(name, manifest)
    if _RANK_TENSOR.search(name):
        raise CheckpointError(f"{name}: rank-sliced tensor, but config.json has no {BLOCK_KEY}")
    return name, None
