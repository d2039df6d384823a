"""A checkpoint becomes an EXL3 one, streamed layer by layer, in a job that may be killed.

Calibration rows pass the model once. In each layer the linears are quantised on what reaches them,
and the layer's output is that of the quantised ones: what the next layer is calibrated on is what
it will see. Resident are the hidden states of the rows, and of one layer the dense weights outside
its routed experts and a few experts with their Hessians.

Each layer is one shard, filled in place; each finished matrix is a line of the log. A run that
finds an unfinished job in its output folder goes on with it: at the layer it stopped in, with the
hidden states saved after the one before, and of that layer it decodes what is done and quantises
the rest. So both runs compute the same bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from exl3kit._version import __version__
from exl3kit.checkpoint.open import open_checkpoint
from exl3kit.quantize.calibration import Calibration, calibration_rows
from exl3kit.quantize.journal import LOG_NAME, Journal
from exl3kit.quantize.memory import warn_of_memory
from exl3kit.quantize.output import output_config, output_files
from exl3kit.quantize.preflight import (
    JobPlan,
    QuantizeOptions,
    check_disk,
    check_finite,
    plan_job,
)
from exl3kit.quantize.publish import FinishedShard, publish
from exl3kit.quantize.report import QuantizeReport, make_report
from exl3kit.quantize.sensitivity import measure_experts
from exl3kit.quantize.stages import Stages
from exl3kit.quantize.store import Progress
from exl3kit.quantize.work_folder import State, claimed, remove_work


@torch.inference_mode()
def quantize_checkpoint(
    src: Path,
    out: Path,
    options: QuantizeOptions,
    calibration: Sequence[Path] = (),
    text_field: str | None = None,
    progress: Progress | None = None,
) -> QuantizeReport:
    """Quantise `src` into the folder `out`, or go on with the job that was stopped there.

    `calibration` are text or JSON-lines files (see `calibration_rows`); none takes the text of the
    package. Refuses with an Exl3Error, before any weight is quantised, whatever `plan_job`, the
    texts or the output folder rule out. A run that fails later, or is killed, leaves no model
    behind but all that it has finished.
    """
    checkpoint = open_checkpoint(src)
    plan = plan_job(checkpoint, options)
    vocab_size, size = plan.forward.vocab_size, (options.rows, options.cols)
    texts = calibration_rows(
        checkpoint.path, vocab_size, calibration, *size, options.seed, text_field
    )
    check_disk(out, plan)
    warn_of_memory(plan)
    with claimed(out, _identity(plan, texts)) as work, Journal(out / LOG_NAME) as journal:
        state = State.read(work)
        if not state.is_checked:
            check_finite(checkpoint)
            state.is_checked = True
            state.write()
        if plan.needs_weights:
            plan = _weighed(plan, texts.rows, state)
            check_disk(out, plan)
        Stages(plan, texts.rows, out, state, journal, progress).run()
        checkpoint.check_unchanged()
        report = make_report(plan, journal, texts)
        layers = plan.contents.layers
        shards = [FinishedShard(plan.contents.entries(x), state.digests[x]) for x in layers]
        publish(out, shards, output_files(plan, report), output_config(plan, report))
        remove_work(work)
    return report


def _weighed(plan: JobPlan, rows: Tensor, state: State) -> JobPlan:
    """The plan with its mean bits shared out, by what the job's first run found of the experts.

    Sums that differ in their last bits, as on another number of threads, must not change the plan.
    """
    checkpoint = plan.contents.checkpoint
    if state.expert_weights is None:
        layers = [x for x in plan.contents.bits.experts if x < plan.forward.num_hidden_layers]
        device = plan.options.devices[0]
        state.expert_weights = measure_experts(checkpoint, plan.forward, rows, layers, device)
        state.write()
    return plan_job(checkpoint, plan.options, state.expert_weights)


def _identity(plan: JobPlan, texts: Calibration) -> dict[str, Any]:
    """What decides the output's bytes, as JSON: two runs that agree in it are one job."""
    options, bits = plan.options, plan.contents.bits
    checkpoint, device = plan.contents.checkpoint, options.devices[0].type
    files = {info.file for info in checkpoint.infos.values()}
    files |= {checkpoint.path / name for name in ("config.json", "tokenizer.json")}
    source = {}
    for file in sorted(files):
        stat = file.stat()
        source[file.name] = f"{stat.st_size} bytes, modified at {stat.st_mtime_ns} ns"
    return {
        "exl3kit": __version__,
        "tp": options.tp,
        "slice_mode": options.slice_mode,
        "codebook": options.codebook,
        "seed": options.seed,
        "route_all": options.route_all,
        "mtp": options.mtp,
        "shim": options.shim,
        "device": device,
        "jobs": None if device == "cpu" else options.jobs,  # orders a GPU's sums
        "calibration": {
            "texts": list(texts.texts),
            "size": list(texts.rows.shape),
            "sha256": hashlib.sha256(texts.rows.numpy().tobytes()).hexdigest(),
        },
        "mean_bits": options.bits if plan.needs_weights else None,
        "bits": {"experts": dict(bits.experts), "modules": dict(bits.modules)},
        "source": source,
    }
