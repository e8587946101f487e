"""The command line: ``prehoc <command>``.

A command is one module ``cli/<name>.py`` with a function ``command`` (or a typer ``app`` of several), and one line in
`COMMANDS`. Its module is imported only when the command runs, so ``prehoc --help`` answers without importing torch.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from prehoc.cli import _common

COMMANDS = {
    "pull": "List the catalogue, or fetch a small real model.",
    "demo": "Dense and CPE side by side: a real model, a long text.",
    "generate": "Answer a question about a text and report what was read.",
    "trace": "Record what a method reads and misses on a real text.",
    "eval": "Evaluate methods on tasks, dense beside every row.",
    "bench": "Measure speed, dense beside every row.",
    "tune": "Choose settings by measurement.",
    "report": "Draw results on one page, beside the paper's.",
    "inspect": "Look at one trace: keys by step, layer and head.",
    "env": "Show versions, processor, compiler and folders.",
}


class _Commands(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        if ctx.meta.get("prehoc.listing"):
            return TyperCommand(cmd_name, help=COMMANDS[cmd_name])
        module = importlib.import_module(f"prehoc.cli.{cmd_name}")
        if hasattr(module, "app"):  # a group of commands
            return typer.main.get_command(module.app)
        single = typer.Typer(add_completion=False, rich_markup_mode=None)
        single.command(cmd_name)(module.command)
        return typer.main.get_command(single)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        ctx.meta["prehoc.listing"] = True  # names and one line each are enough: import no command
        super().format_help(ctx, formatter)


app = typer.Typer(
    cls=_Commands, add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None
)


@app.callback()
def _root(
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where an error was raised.")] = False,
) -> None:
    """Decode over long contexts by reading only the keys that matter, and see the attention mass that was left out."""
    _common.show_traceback = traceback


def _warn(message: Warning | str, *where: Any, **more: Any) -> None:
    print(f"warning: {message}", file=sys.stderr)


def main() -> None:
    """Run the command line; a bad input ends in one line on stderr and exit code 2."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("once", RuntimeWarning)
            warnings.showwarning = _warn
            app()
    except (ValueError, OSError) as error:
        if _common.show_traceback:
            raise
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
