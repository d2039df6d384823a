"""The memory plan that `exl3kit inspect` shows, as JSON values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from exl3kit.cli.inspect_facts import Subject
from exl3kit.errors import SliceError
from exl3kit.runtime.memory import Deployment, MemoryPlan, plan_memory
from exl3kit.runtime.parallel import tp_faults

_MOST_RANKS = 16


@dataclass(frozen=True)
class PlanOptions:
    """What the user asked; `vram` in bytes. Without `tp` only the possible sizes are listed."""

    tp: int | None
    vram: int | None
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    num_sms: int
    has_fp8_cache: bool


def plan_summary(subject: Subject, options: PlanOptions) -> dict[str, Any]:
    """The note on an unknown architecture, or the possible tp values and the plan for one.

    SliceError with every reason if the tp that was asked for is impossible.
    """
    if subject.model is None:
        return {"note": subject.note}
    sizes = {
        tp: tp_faults(subject.model, tp, subject.file_tp, subject.is_exl3)
        for tp in sorted({*range(1, _MOST_RANKS + 1), options.tp or 1})
    }
    possible = [tp for tp, faults in sizes.items() if not faults]
    found: dict[str, Any] = {
        "possible_tp": possible,
        "impossible_tp": {str(tp): faults for tp, faults in sizes.items() if faults},
    }
    if options.tp is None:
        return found
    if faults := sizes[options.tp]:
        raise SliceError(
            f"tp {options.tp}: {'; '.join(faults)}. tp values that work: "
            f"{', '.join(map(str, possible)) or 'none'}"
        )
    deployment = Deployment(
        tp=options.tp,
        file_tp=subject.file_tp,
        is_exl3=subject.is_exl3,
        vram=options.vram,
        max_num_batched_tokens=options.max_num_batched_tokens,
        num_sms=options.num_sms,
        has_fp8_cache=options.has_fp8_cache,
    )
    plan = plan_memory(subject.model, subject.tensors, deployment)
    return found | {"plan": _plan(plan, deployment, options)}


def _plan(plan: MemoryPlan, deployment: Deployment, options: PlanOptions) -> dict[str, Any]:
    tokens, length = plan.kv_tokens, options.max_model_len
    wanted = options.max_num_seqs * length if length else None
    return {
        "tp": deployment.tp,
        "num_sms": deployment.num_sms,
        "max_num_batched_tokens": deployment.max_num_batched_tokens,
        "weights": plan.weights,
        "weights_bytes": sum(plan.weights.values()),
        "decode_scratch_bytes": plan.decode_scratch,
        "prefill_scratch_bytes": plan.prefill_scratch,
        "decode_arena_bytes": plan.decode_arena,
        "prefill_arena_bytes": plan.prefill_arena,
        "arenas": plan.num_arenas,
        "kv_bytes_per_token": plan.kv_bytes_per_token,
        "vram_bytes": deployment.vram,
        "kv_bytes": plan.kv_bytes,
        "kv_tokens": tokens,
        "max_model_len": length,
        "max_num_seqs": options.max_num_seqs if length else None,
        "sequences_that_fit": tokens // length if tokens is not None and length else None,
        "fits": None if tokens is None else tokens >= (wanted or 1),
    }
