"""`exl3kit quantize`: an unquantised checkpoint to an EXL3 one, ordinary or rank-sliced."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from exl3kit.cli.console import err, out
from exl3kit.cli.report import error_table

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from exl3kit.quantize.report import QuantizeReport
    from exl3kit.quantize.store import Step

_HEAD_BITS = 6.0  # exllamav3's default: the head is read once a token and decides it


def quantize(
    source: Annotated[
        Path, typer.Argument(help="Folder of a BF16, FP16, FP32 or FP8 (block scales) checkpoint.")
    ],
    output: Annotated[
        Path, typer.Argument(help="Folder to write: new, empty, or of a stopped run to go on with.")
    ],
    bits: Annotated[
        float | None,
        typer.Option(
            help="Bits per weight of the routed experts. A number between two rates is a mean: "
            "experts whose errors cost more get more. mul1 has half rates up to 3.5."
        ),
    ] = None,
    recipe: Annotated[
        Path | None, typer.Option(help="TOML file of all this; options given here win over it.")
    ] = None,
    tp: Annotated[
        int | None,
        typer.Option(help="Ranks to cut the experts for; without it the checkpoint is ordinary."),
    ] = None,
    slice_mode: Annotated[
        Literal["independent", "cut"],
        typer.Option(help="With --tp: quantise every rank's part, or the whole and cut it."),
    ] = "independent",
    codebook: Annotated[
        Literal["mcg", "mul1", "3inst"], typer.Option(help="With --tp mcg only.")
    ] = "mcg",
    dense: Annotated[
        str | None,
        typer.Option(
            help="Other linears to quantise: any of attention, mlp, shared_experts, head, "
            "separated by commas, each with =BITS or at --bits (head: 6)."
        ),
    ] = None,
    calibration: Annotated[
        list[Path] | None,
        typer.Option(help="UTF-8 text or JSON lines to calibrate on; may be repeated."),
    ] = None,
    text_field: Annotated[
        str | None, typer.Option(help="Field of the JSON lines that has the text.")
    ] = None,
    rows: Annotated[int | None, typer.Option(help="Calibration rows (64).")] = None,
    cols: Annotated[int | None, typer.Option(help="Tokens of a calibration row (512).")] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Draws rows and sign vectors (0).")
    ] = None,
    route_all: Annotated[
        bool, typer.Option("--route-all", help="Calibrate every expert on all tokens.")
    ] = False,
    mtp: Annotated[
        Literal["bf16", "trellis"] | None,
        typer.Option(help="Next-token layers: copy them (bf16), or quantise them as the others."),
    ] = None,
    shim: Annotated[
        Literal["modelopt"] | None,
        typer.Option(help="With --tp: write this quant_method, for tools that do not know exl3."),
    ] = None,
    device: Annotated[
        str,
        typer.Option(help="Where to compute: cpu, cuda, cuda:1; experts on all of cuda:0,cuda:1."),
    ] = "cpu",
    jobs: Annotated[int, typer.Option(help="Experts encoded together on a device.")] = 1,
    spill: Annotated[
        Path | None, typer.Option(help="Folder for activations that do not fit in memory.")
    ] = None,
) -> None:
    """Quantise a checkpoint layer by layer; a run that was stopped goes on where it was."""
    from exl3kit.quantize.job import quantize_checkpoint
    from exl3kit.quantize.preflight import QuantizeOptions
    from exl3kit.quantize.recipe import Recipe, RecipeError
    from exl3kit.quantize.recipe_file import read_recipe

    chosen = (Recipe() if recipe is None else read_recipe(recipe)).overridden(
        experts=None if bits is None else _number(bits),
        mtp=mtp,
        seed=seed,
        files=tuple(calibration) if calibration else None,
        text_field=text_field,
        rows=rows,
        cols=cols,
        route_all=route_all or None,
    )
    mean = chosen.experts
    if mean is None:
        raise RecipeError("bits: expected --bits, or experts = ... in a --recipe, got neither")
    chosen = chosen.overridden(dense=_groups(dense, mean))
    texts = chosen.calibration
    options = QuantizeOptions(
        bits=mean,
        tp=tp,
        slice_mode=slice_mode,
        codebook=codebook,
        dense=chosen.dense,
        rules=chosen.rules,
        rows=texts.rows,
        cols=texts.cols,
        seed=chosen.seed,
        route_all=texts.route_all,
        mtp=chosen.mtp,
        shim=shim,
        device=device,
        jobs=jobs,
        spill=spill,
    )
    with _progress() as bar:
        show = _Bars(bar)
        report = quantize_checkpoint(
            source, output, options, texts.files, texts.text_field, progress=show
        )
    _print(report, output)


def _number(value: float) -> int | float:
    """3.0 as 3: a whole rate is an int everywhere."""
    return int(value) if value.is_integer() else value


def _groups(text: str | None, bits: float) -> dict[str, int | float]:
    """`attention=5,head` as bits by group."""
    from exl3kit.quantize.recipe import GROUPS, RecipeError

    found: dict[str, int | float] = {}
    for part in text.split(",") if text else ():
        group, equals, rate = part.strip().partition("=")
        if group not in GROUPS:
            raise RecipeError(f"--dense: expected some of {', '.join(GROUPS)}, got {group!r}")
        try:
            value = float(rate) if equals else _HEAD_BITS if group == "head" else bits
        except ValueError:
            raise RecipeError(f"--dense {group}: expected a number of bits, got {rate!r}") from None
        found[group] = _number(value)
    return found


class _Bars:
    """Two lines: the job, and the layer at work; each with the time it will still take."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._whole = bar.add_task("reading", total=None)
        self._layer: TaskID | None = None
        self._shown: str | None = None

    def __call__(self, step: Step) -> None:
        """Show a finished matrix; what an earlier run did does not count for the speed."""
        layer = step.name.removeprefix("model.").partition(".mlp")[0].partition(".self_attn")[0]
        if self._shown is None:
            self._bar.reset(self._whole, total=step.total, completed=step.done, description="job")
        self._bar.update(self._whole, completed=step.done)
        if layer != self._shown:
            if self._layer is not None:
                self._bar.remove_task(self._layer)
            self._layer = self._bar.add_task(
                layer, total=step.layer_total, completed=step.layer_done
            )
            self._shown = layer
        elif self._layer is not None:
            self._bar.update(self._layer, completed=step.layer_done)


def _progress() -> Progress:
    """Name, bar, matrices done, time gone and time left, on stderr."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=err,
    )


def _print(report: QuantizeReport, output: Path) -> None:
    from exl3kit.quantize.report import REPORT_NAME

    out.print(error_table(report.summaries()))
    _print_coverage(report)
    summary = f"{output}: mean proxy error {report.mean_proxy_error:.5f}; see {REPORT_NAME}"
    out.print(summary, markup=False, soft_wrap=True)


def _print_coverage(report: QuantizeReport) -> None:
    """A line for each layer with experts that fewer tokens reached than their Hessians want."""
    from exl3kit.quantize.hessian import Coverage

    for layer in report.coverage():
        few, none = layer.count(Coverage.MOSTLY_LAYER), layer.count(Coverage.LAYER)
        if few or none:
            out.print(
                f"layer {layer.layer}: {min(layer.tokens)} to {max(layer.tokens)} tokens an expert "
                f"(median {layer.median_tokens:.0f}); Hessians mostly of the layer's tokens: {few} "
                f"of {len(layer.tokens)}, only: {none}",
                soft_wrap=True,
            )
