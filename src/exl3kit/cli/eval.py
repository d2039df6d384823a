"""`exl3kit eval`: perplexity of a checkpoint on a text."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from exl3kit.cli.console import err, out, print_json


def evaluate(
    checkpoint: Annotated[Path, typer.Argument(help="Folder of a plain or EXL3 checkpoint.")],
    text: Annotated[
        Path | None,
        typer.Option(help="UTF-8 text to predict; the bundled calibration text if not given."),
    ] = None,
    window: Annotated[int, typer.Option(help="Tokens of a window; windows do not overlap.")] = 512,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Perplexity by our own fp32 forward pass, EXL3 weights decoded as their tensors say."""
    from rich.progress import Progress

    from exl3kit.checkpoint.open import open_checkpoint
    from exl3kit.evaluate.perplexity import perplexity
    from exl3kit.quantize.calibration import bundled_text
    from exl3kit.quantize.documents import read_text

    opened = open_checkpoint(checkpoint)
    content = bundled_text() if text is None else read_text(text)
    with Progress(console=err, transient=True) as bar:
        task = bar.add_task("layers", total=None)
        result = perplexity(
            opened,
            content,
            window,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    if json:
        source = {"checkpoint": str(checkpoint), "text": str(text) if text else "bundled"}
        print_json({**source, **asdict(result)})
        return
    out.print(
        f"perplexity {result.perplexity:.4f} on {result.predicted_tokens} tokens "
        f"({result.windows} windows of {result.window}) of "
        f"{text or 'the bundled calibration text; name one the model was not calibrated on'}",
        markup=False,
        soft_wrap=True,
    )
