"""Results that are shown as tables alone: the prompt's cost, where dense stops winning, the demo."""

from __future__ import annotations

from prehoc.plot.figures_bench import grouped, shape_and_batch
from prehoc.plot.page import Block, Table, interval, number
from prehoc.plot.runs import Run


def prefill(run: Run) -> list[Block]:
    """Return the tables of ``prehoc bench prefill``."""
    header = ("system", "seconds", "10-90 %", "tokens/s", "x sdpa", "x dense", "operations of dense")
    return [
        Table(
            f"Prompt of {length} tokens, batch {batch}: time to the first token",
            header,
            [
                [
                    row["system"],
                    f"{row['seconds']:.3f}",
                    f"{row['seconds_10']:.3f}-{row['seconds_90']:.3f}",
                    f"{row['tokens_per_second']:.0f}",
                    f"{row['times_sdpa']:.2f}",
                    f"{row['times_dense']:.2f}",
                    f"{row['operations'] / row['operations_dense']:.1%}" if "operations" in row else "",
                ]
                for row in rows
            ],
            f"Medians of n = {rows[0]['rounds']} interleaved rounds.",
        )
        for (length, batch), rows in grouped(run.document["rows"], lambda row: (row["length"], row["batch"])).items()
    ]


def break_even(run: Run) -> list[Block]:
    """Return the tables of ``prehoc bench break-even``."""
    settings = run.document["settings"]
    return [
        Table(
            f"{found['method']} against dense: {shape_and_batch(run.document)}",
            ("cached tokens", "dense ms", "method ms", "x dense", "rho"),
            [
                [str(tokens), f"{dense:.3f}", f"{ours:.3f}", f"{dense / ours:.2f}", number(ratio, 2)]
                for tokens, dense, ours, ratio in zip(
                    *(found[name] for name in ("lengths", "dense_ms", "method_ms", "retrieval_ratio")), strict=True
                )
            ],
            f"{_begin(found['length'])}; n = {settings['steps']} steps, {settings['rounds']} rounds.",
        )
        for found in run.document["methods"]
    ]


def _begin(length: int | None) -> str:
    return "Faster at none of these lengths" if length is None else f"Faster from {length} tokens on"


def demo(run: Run) -> list[Block]:
    """Return the table of ``prehoc demo --json``."""
    rows = []
    for answer in run.document["answers"]:
        found = answer["report"]
        read = found["decode"]
        rows.append(
            [
                answer["method"],
                f"{answer['first_token_seconds']:.2f}",
                f"{answer['decode_tokens_per_second']:.2f}",
                f"{read['keys_read'] / read['triples']:.0f} of {read['keys_visible'] / read['triples']:.0f}",
                f"{read['bytes_read'] / read['bytes_dense']:.1%}",
                number(read["retrieval_ratio"], 2),
                interval(found["retained_mass"], 4),
                answer["text"],
            ]
        )
    header = ("method", "first token s", "tokens/s", "keys", "bytes of dense", "rho", "mass audited", "answer")
    tokens = run.document["tokens_in_common"]
    return [
        Table(
            f"One question about {run.document['prompt_tokens']} tokens",
            header,
            rows,
            f"The first {tokens} tokens of the answers are the same.",
        )
    ]
