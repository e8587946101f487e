"""``prehoc bench``: measurements of speed, each with its dense baseline, its machine and its command."""

from __future__ import annotations

import typer

from prehoc.cli import bench_attention, bench_breakeven, bench_decode, bench_prefill

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None, help="Measure speed.")
app.command("decode")(bench_decode.command)
app.command("attention")(bench_attention.command)
app.command("prefill")(bench_prefill.command)
app.command("break-even")(bench_breakeven.command)


@app.callback()
def _group() -> None:
    """Measure speed, dense beside every row."""
