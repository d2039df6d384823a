"""`exl3kit generate`: an answer from a checkpoint, without a server."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from exl3kit.cli.console import err, format_bytes, out
from exl3kit.errors import UnsupportedError

if TYPE_CHECKING:
    from exl3kit.integrations.transformers.generate import Generator, Timing

BENCH_RUNS = 5


class Dtype(StrEnum):
    """Activations and plain weights; `auto` is the dtype of config.json."""

    AUTO = "auto"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


def generate(
    checkpoint: Annotated[Path, typer.Argument(help="Folder of a plain or EXL3 checkpoint.")],
    prompt: Annotated[str, typer.Argument(help="A question, or with --raw a text to go on with.")],
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to write at most.")] = 256,
    temperature: Annotated[
        float, typer.Option(min=0, help="0 takes the likeliest token, 1 samples as trained.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    raw: Annotated[bool, typer.Option("--raw", help="Leave the chat template out.")] = False,
    dtype: Annotated[Dtype, typer.Option(help="Of activations and plain weights.")] = Dtype.AUTO,
    device: Annotated[str, typer.Option(help="Where to compute, as torch names it.")] = "cpu",
    bench: Annotated[
        bool, typer.Option("--bench", help="Then measure prompt and decode speed and memory.")
    ] = False,
) -> None:
    """Answer a prompt by transformers, text appearing as it is written.

    For one prompt at a time; `vllm serve` is the engine for many. Needs the extra `transformers`.
    """
    import torch

    generator = _load(checkpoint, dtype, device)
    ids = generator.encode(prompt, raw)
    torch.manual_seed(seed)
    generator.run(ids, max_tokens, temperature, _emit)
    _emit("\n")
    if bench:
        _report(generator, generator.bench(ids, max_tokens, BENCH_RUNS))


def _load(checkpoint: Path, dtype: Dtype, device: str) -> Generator:
    try:
        from exl3kit.integrations.transformers.generate import Generator
    except ModuleNotFoundError as error:
        if error.name not in ("transformers", "jinja2"):
            raise
        raise UnsupportedError(
            f"generate: expected {error.name} to be installed; pip install 'exl3kit[transformers]'"
        ) from None
    with err.status("loading"):
        return Generator(checkpoint, dtype, device)


def _emit(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _report(generator: Generator, timings: list[Timing]) -> None:
    from exl3kit.integrations.transformers.generate import median

    for name, tokens in (("prompt", timings[0].prompt_tokens), ("decode", timings[0].new_tokens)):
        middle, low, high = median(timings, f"{name}_speed")
        out.print(
            f"{name}  {middle:.1f} tokens/s  ({tokens} tokens, median of {len(timings)} runs, "
            f"{low:.1f} to {high:.1f})"
        )
    out.print(f"memory  {format_bytes(generator.peak_bytes())} at most")
