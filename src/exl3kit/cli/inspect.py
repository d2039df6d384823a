"""`exl3kit inspect`: what is in a checkpoint and what it takes to run it, from headers alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from exl3kit.cli.console import print_json


def inspect(
    checkpoint: Annotated[
        Path, typer.Argument(help="Checkpoint folder, or a config.json to plan from.")
    ],
    bits: Annotated[
        int | None, typer.Option(help="With a config.json: bits of the routed experts.")
    ] = None,
    tp: Annotated[
        int | None, typer.Option(help="Plan the memory of each of so many GPUs.", min=1, max=1024)
    ] = None,
    vram: Annotated[
        float | None,
        typer.Option(help="GiB of each GPU for the engine.", min=0, max=2**20),
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Tokens of the longest sequence.", min=1)
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(help="Sequences that should fit at that length; 1.", min=1)
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(help="The scheduler's token budget; sizes the MoE arena; 3072.", min=1),
    ] = None,
    num_sms: Annotated[
        int | None,
        typer.Option(
            help="Multiprocessors of the GPU: RTX PRO 6000 188, the default; H200 132.", min=1
        ),
    ] = None,
    fp8_kv_cache: Annotated[bool, typer.Option("--fp8-kv-cache", help="Cache in FP8.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Show dialect, architecture and bits, where the bytes go, and what each GPU must hold."""
    from exl3kit.cli.inspect_facts import config_summary, folder_summary
    from exl3kit.cli.inspect_plan import PlanOptions, plan_summary
    from exl3kit.cli.inspect_print import print_summary

    _check_needs("--tp", tp, {"--vram": vram, "--max-num-batched-tokens": max_num_batched_tokens})
    _check_needs("--tp", tp, {"--num-sms": num_sms, "--fp8-kv-cache": fp8_kv_cache or None})
    _check_needs("--vram", vram, {"--max-model-len": max_model_len})
    _check_needs("--max-model-len", max_model_len, {"--max-num-seqs": max_num_seqs})
    options = PlanOptions(
        tp=tp,
        vram=None if vram is None else int(vram * 2**30),
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs or 1,
        max_num_batched_tokens=max_num_batched_tokens or 3072,
        num_sms=num_sms or 188,
        has_fp8_cache=fp8_kv_cache,
    )
    subject, summary = (
        config_summary(checkpoint, bits, tp or 1)
        if checkpoint.is_file()
        else folder_summary(checkpoint, bits)
    )
    result: dict[str, Any] = summary | plan_summary(subject, options)
    if json:
        print_json(result)
    else:
        print_summary(result)


def _check_needs(needed: str, value: object, options: dict[str, object]) -> None:
    """A usage error for an option that has no effect without `needed`."""
    for option, given in options.items():
        if given is not None and value is None:
            raise typer.BadParameter(f"has no effect without {needed}", param_hint=option)
