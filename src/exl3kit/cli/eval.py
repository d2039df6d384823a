"""`exl3kit eval`: perplexity of a checkpoint, and how far it is from a reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from exl3kit.cli.console import err, out, print_json
from exl3kit.errors import UnsupportedError


def evaluate(
    checkpoint: Annotated[Path, typer.Argument(help="Folder of a plain or EXL3 checkpoint.")],
    reference: Annotated[
        Path | None,
        typer.Option(help="Folder of the model it was made from: adds KL divergence to it."),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(help="UTF-8 text to predict; the bundled calibration text if not given."),
    ] = None,
    window: Annotated[int, typer.Option(help="Tokens of a window; windows do not overlap.")] = 512,
    seed: Annotated[int, typer.Option(min=0, help="Draws the resamples of the intervals.")] = 0,
    device: Annotated[str, typer.Option(help="Where to compute: cpu, cuda, cuda:1.")] = "cpu",
    plot: Annotated[
        Path | None, typer.Option(help="PNG of the divergence of the tokens; needs --reference.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Quality by our own fp32 forward pass, EXL3 weights decoded as their tensors say."""
    from exl3kit.evaluate.plot import check_plot
    from exl3kit.quantize.calibration import bundled_text
    from exl3kit.quantize.documents import read_text
    from exl3kit.runtime.checks import check_device

    check_device(device)
    if plot is not None:
        if reference is None:
            raise UnsupportedError("--plot: expected a --reference to plot the divergence from")
        check_plot(plot)
    content = bundled_text() if text is None else read_text(text)
    if reference is None:
        found, shown = _alone(checkpoint, content, window, seed, device)
    else:
        found, shown = _against(checkpoint, reference, content, window, seed, device, plot)
    if json:
        source = {"checkpoint": str(checkpoint), "text": str(text) if text else "bundled"}
        print_json({**source, **_without_infinity(found)})
        return
    name = text or "the bundled calibration text; name one the model was not calibrated on"
    tokens = f"{found['predicted_tokens']} tokens ({found['windows']} windows of {window})"
    out.print(f"{shown}on {tokens} of {name}", markup=False, soft_wrap=True)


def _without_infinity(value: Any) -> Any:
    """A result as JSON can say it, which has no infinite number: null in its place."""
    if isinstance(value, dict):
        return {key: _without_infinity(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_infinity(inner) for inner in value]
    return None if isinstance(value, float) and math.isinf(value) else value


def _alone(
    checkpoint: Path, text: str, window: int, seed: int, device: str
) -> tuple[dict[str, Any], str]:
    """The result as JSON, and as words."""
    from exl3kit.checkpoint.open import open_checkpoint
    from exl3kit.evaluate.perplexity import perplexity

    with _layers() as progress:
        result = perplexity(open_checkpoint(checkpoint), text, window, progress, seed, device)
    words = f"perplexity {result.perplexity:.4f} "
    if result.interval is not None:
        low, high = result.interval
        words += f"(95 % interval {low:.4f} to {high:.4f}) "
    return asdict(result), words


def _against(
    checkpoint: Path,
    reference: Path,
    text: str,
    window: int,
    seed: int,
    device: str,
    plot: Path | None,
) -> tuple[dict[str, Any], str]:
    from exl3kit.checkpoint.open import open_checkpoint
    from exl3kit.evaluate.compare import compare
    from exl3kit.evaluate.metrics import summarize
    from exl3kit.evaluate.plot import plot_divergence
    from exl3kit.evaluate.report import quality_table

    pair = open_checkpoint(checkpoint), open_checkpoint(reference)
    with _layers() as progress:
        metrics = compare(*pair, text, window, progress, device)
    quality = summarize(metrics, seed)
    if plot is not None:
        plot_divergence(metrics.kld, f"{checkpoint} against {reference}", plot)
    found = {"reference": str(reference), **asdict(quality), "window": window}
    return found, f"{quality_table({str(checkpoint): quality})}against {reference} "


@contextmanager
def _layers() -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr; call what this yields with layers done and in all."""
    from rich.progress import Progress

    with Progress(console=err, transient=True) as bar:
        task = bar.add_task("layers", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
