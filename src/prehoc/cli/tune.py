"""``prehoc tune``: choose settings by measurement."""

from __future__ import annotations

import typer

from prehoc.cli import tune_cis, tune_double_sparsity, tune_prefill

app = typer.Typer(
    no_args_is_help=True, add_completion=False, rich_markup_mode=None, help="Choose settings by measurement."
)


@app.callback()
def _group() -> None:
    """Choose settings by measurement, dense beside every row."""


app.command("cis")(tune_cis.command)
app.command("double-sparsity")(tune_double_sparsity.command)
app.command("prefill")(tune_prefill.command)
