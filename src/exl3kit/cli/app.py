"""The command tree. A refusal, or an error of the system such as a folder that must not be read,
becomes one red line and exit code 2; --debug shows it whole.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from exl3kit import __version__
from exl3kit.cli import cache, env, eval, generate, inspect, quantize, report, slice, verify
from exl3kit.cli.console import print_error
from exl3kit.errors import Exl3Error


class _Group(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        """Run the command; `ctx` is the context of click or of the copy newer typers carry."""
        try:
            return super().invoke(ctx)
        except (Exl3Error, OSError) as error:
            if ctx.params.get("debug") or isinstance(error, BrokenPipeError):
                raise
            print_error(_words(error))
            ctx.exit(2)


def _words(error: Exl3Error | OSError) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Quantise, slice, verify and evaluate EXL3 checkpoints of mixture-of-experts models."""


app.command()(inspect.inspect)
app.command()(verify.verify)
app.command()(quantize.quantize)
app.command()(report.report)
app.command("slice")(slice.slice_)
app.command("eval")(eval.evaluate)
app.command()(generate.generate)
app.command()(env.env)
app.add_typer(cache.app, name="cache")


def main() -> None:
    """Entry point of the `exl3kit` script."""
    app()
