"""May an engine, laid out like this, run this rank-sliced checkpoint? Asked before loading."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from exl3kit.checkpoint.manifest import RankSlicedManifest
from exl3kit.checkpoint.widths import check_cut, padded, stored_cut, valid_tp
from exl3kit.errors import CheckpointError, SliceError, UnsupportedError

_ACTIVATION = "silu"


@dataclass(frozen=True)
class RuntimeLayout:
    """What an engine says about one MoE layer and about itself.

    `moe_tp_size` is the group the experts' width is cut over (tp x dp in some layouts);
    `hidden_size` and `intermediate_size` are the model's, before any cut.
    """

    tp_size: int
    moe_tp_size: int
    num_experts: int
    hidden_size: int
    intermediate_size: int
    dtype: torch.dtype
    max_num_batched_tokens: int | None
    device_type: str
    activation: str = _ACTIVATION
    ep_size: int = 1
    has_expert_map: bool = False
    use_eplb: bool = False
    has_bias: bool = False
    router_weight_on_input: bool = False


def check_runtime(manifest: RankSlicedManifest, layout: RuntimeLayout) -> None:
    """Refuse what cannot run, most telling reason first.

    UnsupportedError: expert parallelism, EPLB, bias, router weight on input, an activation that is
    not SiLU, experts cut over another group than TP. SliceError: a tp that does not divide the
    file's, a width that is not a multiple of 128. CheckpointError: another expert count, an
    activation dtype the kernels do not take, an engine that does not state its token budget.
    """
    _check_features(layout)
    _check_tp(manifest, layout)
    if layout.num_experts != manifest.experts_per_layer:
        raise CheckpointError(
            f"experts: the checkpoint has {manifest.experts_per_layer} a layer, "
            f"the model has {layout.num_experts}"
        )
    check_cut("hidden_size", layout.hidden_size, 1)
    stored_cut("moe_intermediate_size", layout.intermediate_size, manifest.tp)
    _check_dtype(layout)
    if not layout.max_num_batched_tokens or layout.max_num_batched_tokens < 1:
        raise CheckpointError(
            "max_num_batched_tokens: expected the scheduler's token budget, "
            f"got {layout.max_num_batched_tokens}; set --max-num-batched-tokens"
        )


def _check_features(layout: RuntimeLayout) -> None:
    refused = {
        f"expert parallelism (ep_size {layout.ep_size})": layout.ep_size > 1,
        "EPLB (redundant experts)": layout.use_eplb,
        "an expert_map": layout.has_expert_map,
        "expert bias": layout.has_bias,
        "router weight on input": layout.router_weight_on_input,
        f"activation {layout.activation!r}": layout.activation != _ACTIVATION,
    }
    for feature, is_used in refused.items():
        if is_used:
            raise UnsupportedError(
                f"{feature} is not supported with rank-sliced experts; "
                "use tensor parallelism, SiLU and no expert bias"
            )
    if layout.moe_tp_size != layout.tp_size:
        raise UnsupportedError(
            f"experts cut over {layout.moe_tp_size} ranks while the tensor-parallel group has "
            f"{layout.tp_size} (data parallelism flattened into the MoE group) is not supported; "
            "use data_parallel_size 1"
        )


def owned_ranks(manifest: RankSlicedManifest | None, tp_size: int, tp_rank: int) -> range:
    """The file's ranks whose slices rank `tp_rank` of an engine of `tp_size` holds.

    One rank when the file is cut for as many; several when it is cut for a multiple: each slice
    then runs as an expert of its own, which is exact. `range(1)` for experts that are stored whole.
    """
    if manifest is None:
        return range(1)
    slices = manifest.tp // tp_size
    return range(tp_rank * slices, (tp_rank + 1) * slices)


def _check_tp(manifest: RankSlicedManifest, layout: RuntimeLayout) -> None:
    if layout.tp_size in manifest.runs_at:
        return
    lawful = valid_tp(padded(layout.intermediate_size))
    finer = [tp for tp in lawful if tp > manifest.tp and tp % manifest.tp == 0]
    further = f"cuts slices further, to tp {_listed(finer)}, and " if finer else ""
    again = ", or quantise the model again for it" if layout.tp_size in lawful else ""
    raise SliceError(
        f"tp: the checkpoint is cut for {manifest.tp} ranks, the engine runs {layout.tp_size}; "
        f"as it is it runs with --tensor-parallel-size {_listed(manifest.runs_at)}. "
        f"exl3kit slice {further}merges slices where their hidden-side vectors are identical{again}"
    )


def _listed(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))


def _check_dtype(layout: RuntimeLayout) -> None:
    allowed = [torch.bfloat16, torch.float16]
    if layout.device_type == "cpu":
        allowed.append(torch.float32)
    if layout.dtype not in allowed:
        raise CheckpointError(
            f"activation dtype must be one of {', '.join(map(str, allowed))} on "
            f"{layout.device_type}, got {layout.dtype}"
        )
