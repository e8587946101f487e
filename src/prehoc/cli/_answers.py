"""Run a prompt under one method after another, time what a user waits for, and show the answers side by side."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from prehoc.report import Report
    from prehoc.selection import Method

Told = Callable[[int], None]


@dataclasses.dataclass(frozen=True)
class Answer:
    """What one method answered, and how long it took.

    Parameters
    ----------
    tokens : tuple of int
        Generated tokens, the end token included.
    text : str
        The same as text, without special tokens.
    prompt_tokens : int
        Tokens of the prompt.
    first_token_seconds : float
        From the call to the first token.
    decode_seconds : float
        From the first token to the last.
    report : Report
        The session's report.
    """

    tokens: tuple[int, ...]
    text: str
    prompt_tokens: int
    first_token_seconds: float
    decode_seconds: float
    report: Report

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second until the first token."""
        return self.prompt_tokens / self.first_token_seconds

    @property
    def decode_rate(self) -> float | None:
        """Tokens per second after the first one; None when there is only one."""
        return (len(self.tokens) - 1) / self.decode_seconds if len(self.tokens) > 1 else None

    def to_dict(self) -> dict[str, Any]:
        """Return the answer for JSON."""
        return {
            "method": self.report.method,
            "text": self.text,
            "tokens": list(self.tokens),
            "first_token_seconds": self.first_token_seconds,
            "decode_seconds": self.decode_seconds,
            "prefill_tokens_per_second": self.prefill_rate,
            "decode_tokens_per_second": self.decode_rate,
            "report": self.report.to_dict(),
        }


@dataclasses.dataclass(frozen=True)
class Settings:
    """How to generate.

    Parameters
    ----------
    new_tokens : int
        Most tokens to generate.
    temperature : float
        0 takes the likeliest token, anything above samples.
    backend : str or None
        Kernel backend.
    audit : float
        Share of decode triples to audit.
    seed : int
        Seed of sampling and of the audit.
    pack : bool
        Pack the model's linear layers.
    """

    new_tokens: int
    temperature: float = 0.0
    backend: str | None = None
    audit: float = 0.01
    seed: int = 0
    pack: bool = False


def quiet() -> None:
    """Keep transformers' own bars and notices off the terminal; errors still come through."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def warm_up(model: Any, ids: list[int], settings: Settings) -> None:
    """Run a few tokens, so that the method that happens to be first pays neither for start-up nor for compiling kernels."""
    import torch

    import prehoc

    few = torch.tensor([ids[:16]], device=model.device)
    with prehoc.sparsify(model, "dense", backend=settings.backend):
        model.generate(few, attention_mask=torch.ones_like(few), max_new_tokens=2, do_sample=False, pad_token_id=0)


def answer(
    model: Any,
    tokenizer: Any,
    ids: list[int],
    method: Method | str,
    settings: Settings,
    on_token: Callable[[Any], None] | None = None,
) -> Answer:
    """Generate from `ids` under `method`.

    Parameters
    ----------
    model, tokenizer
        A transformers model and its tokenizer.
    ids : list of int
        The prompt.
    method : Method or str
        The method.
    settings : Settings
        How to generate.
    on_token : callable, optional
        Called with each new token (int64 ``[1]``).

    Returns
    -------
    Answer
    """
    import torch
    from transformers.generation.streamers import BaseStreamer

    import prehoc

    class Clock(BaseStreamer):
        """Note when each token comes; the first call brings the prompt."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def put(self, value: Any) -> None:
            self.times.append(time.perf_counter())
            if len(self.times) > 1 and on_token is not None:
                on_token(value)

        def end(self) -> None:
            pass

    clock = Clock()
    prompt = torch.tensor([ids], device=model.device)
    sampling: dict[str, Any] = {"do_sample": False}
    if settings.temperature:
        sampling = {"do_sample": True, "temperature": settings.temperature}
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    torch.manual_seed(settings.seed)
    with prehoc.sparsify(model, method, backend=settings.backend, audit=settings.audit, seed=settings.seed) as session:
        began = time.perf_counter()
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=settings.new_tokens,
            num_beams=1,
            pad_token_id=pad,
            streamer=clock,
            **sampling,
        )
        report = session.report()
    tokens = tuple(out[0, len(ids) :].tolist())
    first, last = clock.times[1], clock.times[-1]
    text = tokenizer.decode(tokens, skip_special_tokens=True).strip()
    return Answer(tokens, text, len(ids), first - began, last - first, report)


def agreement(one: Answer, other: Answer) -> int:
    """Return how many tokens the answers have in common before they first differ."""
    pairs = list(zip(one.tokens, other.tokens, strict=False))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))


def show(answers: list[Answer], console: Console) -> None:
    """Print the answers in columns."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, expand=False, padding=(0, 1), show_edge=False)
    table.add_column("", no_wrap=True)
    for one in answers:
        table.add_column(Text(one.report.method), overflow="fold", ratio=1)
    for label, cell in _ROWS:
        table.add_row(Text(label), *(Text(cell(one)) for one in answers))
    table.add_row("")
    table.add_row("answer", *(Text(one.text) for one in answers))
    console.print(table)
    if len(answers) == 2:
        same, longest = agreement(*answers), max(len(one.tokens) for one in answers)
        alike = "all tokens are the same" if same == longest else f"the first {same} of {longest} tokens are the same"
        console.print(f"\n{alike}; one run: for timings to rely on use prehoc bench", highlight=False, soft_wrap=True)


def _keys(one: Answer) -> str:
    d = one.report.decode
    return f"{d.keys_read / d.triples:.0f} of {d.keys_visible / d.triples:.0f}" if d.triples else "-"


def _bytes(one: Answer) -> str:
    d = one.report.decode
    if not d.steps:
        return "-"
    return f"{d.bytes_read / d.steps / 1e6:.2f} of {d.bytes_dense / d.steps / 1e6:.2f} MB"


def _retrievals(one: Answer) -> str:
    d = one.report.decode
    return f"{d.retrieval_ratio:.3f}" if d.counted_triples else "-"


def _mass(one: Answer) -> str:
    from prehoc.report import FEW

    mean, low, high = one.report.retained_mass
    if 0 < one.report.audited < FEW:
        return f"{mean:.4f}, n = {one.report.audited}: too few for an interval"
    if one.report.audited:
        return f"{mean:.4f}, 95 % [{low:.4f}, {high:.4f}], n = {one.report.audited}"
    d = one.report.decode
    return "1, every key is read" if d.keys_read == d.keys_visible else "not audited"


def _operations(one: Answer) -> str:
    p = one.report.prefill
    return f"{p.operations / 1e12:.2f} T, {p.operations / p.operations_dense:.1%} of dense"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} tokens/s"


_ROWS: tuple[tuple[str, Callable[[Answer], str]], ...] = (
    ("prompt", lambda one: f"{one.prompt_tokens} tokens"),
    ("time to first token", lambda one: f"{one.first_token_seconds:.2f} s"),
    ("prefill", lambda one: _rate(one.prefill_rate)),
    ("prefill operations", _operations),
    ("decode", lambda one: _rate(one.decode_rate)),
    ("new tokens", lambda one: str(len(one.tokens))),
    ("keys read per head, step", _keys),
    ("bytes read per step", _bytes),
    ("retrieval ratio", _retrievals),
    ("retained mass, audited", _mass),
)
