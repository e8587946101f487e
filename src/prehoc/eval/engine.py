"""One prefill, many decodes: a prompt is read once and every method that shares its prefill decodes from a copy."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from prehoc.books import Traffic
from prehoc.eval.perplexity import base_and_head, token_nll
from prehoc.integrations.transformers import fork, sparsify
from prehoc.integrations.transformers.compat import cache_key
from prehoc.selection import Method
from prehoc.trace import last_only

KL_STEPS = 64
"""Steps whose full distribution is compared with dense: 64 rows of 152,000 logits are 39 MB a sample."""


@dataclasses.dataclass(frozen=True)
class Ask:
    """What one row decodes behind its prompt.

    Parameters
    ----------
    forced : tuple of int
        Tokens that are fed one by one whatever the model says: a question, or the text whose likelihood is asked.
    new_tokens : int
        Tokens to generate after them, at most.
    score : bool
        Measure the forced tokens instead of generating.
    """

    forced: tuple[int, ...] = ()
    new_tokens: int = 0
    score: bool = False

    @property
    def columns(self) -> int:
        """Cache columns that the row can take."""
        return len(self.forced) + self.new_tokens


@dataclasses.dataclass
class Prefilled:
    """Prompts that were read, ready to be decoded any number of times.

    Attributes
    ----------
    cache : Cache
        Keys and values; `Engine.decode` works on a copy.
    logits : Tensor
        ``[B, V]`` of each row's last token.
    mask : Tensor or None
        bool ``[B, n]``, None without padding.
    tokens : tuple of int
        Real tokens of each row.
    seconds : float
        Wall time.
    operations, operations_dense : int
        Work done, and dense.
    nll : tuple of float or None
        Per row, mean negative log likelihood of the prompt's own tokens in nats, if it was asked for and has a meaning.
    """

    cache: Any
    logits: Tensor
    mask: Tensor | None
    tokens: tuple[int, ...]
    seconds: float
    operations: int
    operations_dense: int
    nll: tuple[float, ...] | None = None


@dataclasses.dataclass
class Decoded:
    """One row's answer.

    Attributes
    ----------
    tokens : list of int
        Generated tokens without the end token; of scored rows the likeliest token at each forced one.
    finish : {"eos", "stop", "length"}
        Why it ended.
    steps : int
        Decode steps: tokens whose attention the method chose. The first answer token behind a prefill is none.
    nll : list of float
        Of scored rows, minus the log probability of each forced token.
    kl : list of float
        KL(dense || method) in nats at the first steps whose prefix is dense's own.
    log_probs : list of Tensor
        float32 ``[V]`` of those first steps, when asked for.
    masses : list of float
        Audited retained masses.
    """

    tokens: list[int] = dataclasses.field(default_factory=list)
    finish: str = "length"
    steps: int = 0
    nll: list[float] = dataclasses.field(default_factory=list)
    kl: list[float] = dataclasses.field(default_factory=list)
    log_probs: list[Tensor] = dataclasses.field(default_factory=list)
    masses: list[float] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Batch:
    """The rows of one decode, and what they read together.

    Parameters
    ----------
    rows : list of Decoded
        In the order of the prompts.
    traffic : Traffic
        Of all rows.
    seconds : float
        Wall time.
    """

    rows: list[Decoded]
    traffic: Traffic
    seconds: float


class Engine:
    """Runs prompts of one model.

    Parameters
    ----------
    model : Module
        A supported transformers model in evaluation mode.
    backend : str, optional
        Kernel backend.
    audit : float
        Share of decode triples whose retained mass is measured.
    """

    def __init__(self, model: Any, backend: str | None = None, audit: float = 0.01) -> None:
        self.model, self._backend, self._audit = model, backend, audit
        self._cache = cache_key({}, model)

    @torch.inference_mode()
    def prefill(self, method: Method, prompts: Sequence[Sequence[int]], room: int, *, nll: bool = False) -> Prefilled:
        """Read prompts in one forward, shorter ones padded at the left.

        Parameters
        ----------
        method : Method
            Any of the methods that share the prefill.
        prompts : sequence of sequence of int
            Tokens of each row, at least one.
        room : int
            Columns that decoding will need.
        nll : bool
            Also measure the prompts' own tokens (rows of equal length).
        """
        began, lengths = time.perf_counter(), [len(prompt) for prompt in prompts]
        longest = max(lengths)
        ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        ids = ids.to(self.model.device)
        mask = None
        if min(lengths) < longest:
            mask = torch.arange(longest)[None] >= longest - torch.tensor(lengths)[:, None]
        losses = None
        scored = base_and_head(self.model, ids[:1, :2]) if nll else None
        with sparsify(self.model, method, backend=self._backend, audit=0.0) as session:
            inputs = {"input_ids": ids, "use_cache": True, self._cache: session.new_cache(longest + room)}
            inputs |= _padded(mask, longest, self.model.device)
            if scored is None:
                logits = self.model(**inputs, **last_only(self.model)).logits[:, -1]
            else:
                base, head = scored
                hidden = base(**inputs).last_hidden_state  # [B, n, C]
                logits = head(hidden[:, -1])
                if session.plan.freeze is None:  # the logits of frozen rows mean nothing
                    losses = tuple(token_nll(head, hidden[:, :-1], ids[:, 1:]).double().mean(1).tolist())
            work = session.report().prefill
        seconds = time.perf_counter() - began
        cache = inputs[self._cache]
        return Prefilled(cache, logits, mask, tuple(lengths), seconds, work.operations, work.operations_dense, losses)

    @torch.inference_mode()
    def decode(
        self,
        method: Method,
        prompt: Prefilled,
        asks: Sequence[Ask],
        *,
        ended: Callable[[list[int]], str | None],
        seed: int = 0,
        references: Sequence[Decoded] | None = None,
        remember: bool = False,
        tick: Callable[[], None] = lambda: None,
    ) -> Batch:
        """Decode every row greedily behind its prompt; rows that have ended leave the batch.

        Parameters
        ----------
        method : Method
            The method, which must share the prompt's prefill.
        prompt : Prefilled
            The prompts; left as they are.
        asks : sequence of Ask
            One per row.
        ended : callable
            Given the tokens generated so far, says why the answer has ended ("eos", "stop") or None.
        seed : int
            Seed of the audit.
        references : sequence of Decoded, optional
            Dense's rows with their `log_probs`, to compare with.
        remember : bool
            Keep the first `KL_STEPS` distributions of each row.
        tick : callable
            Called after every step.
        """
        rows = [Decoded() for _ in asks]
        cache, mask, active = fork(prompt.cache), prompt.mask, list(range(len(asks)))
        audited: list[int] = []  # the row of each audit; a row's place in the batch changes when others have ended
        began = time.perf_counter()
        with sparsify(self.model, method, backend=self._backend, audit=self._audit, seed=seed) as session:
            logits = prompt.logits
            while True:
                going, inputs = [], []
                best = logits.argmax(-1).tolist()
                for i, r in enumerate(active):
                    reference = references[r] if references else None
                    token = _advance(rows[r], asks[r], logits[i], best[i], ended, reference, remember)
                    if token is not None:
                        going.append(i)
                        inputs.append(token)
                if not going:
                    break
                if len(going) < len(active):
                    index = torch.tensor(going)
                    cache.batch_select_indices(index)
                    mask = None if mask is None else mask[index]
                    active = [active[i] for i in going]
                if mask is not None:
                    mask = F.pad(mask, (0, 1), value=True)
                ids = torch.tensor(inputs, device=self.model.device)[:, None]
                step = {"input_ids": ids, "use_cache": True, self._cache: cache}
                logits = self.model(**step, **_padded(mask, 1, self.model.device)).logits[:, -1]
                for r in active:
                    rows[r].steps += 1
                audited += [active[i] for i in session.books.audited_rows[len(audited) :]]
                tick()
            session.books.flush()
            for r, mass in zip(audited, session.books.audited().tolist(), strict=True):
                rows[r].masses.append(mass)
            return Batch(rows, session.books.traffic, time.perf_counter() - began)


def _padded(mask: Tensor | None, new: int, device: Any) -> dict[str, Tensor]:
    """Return the attention mask and positions of the last `new` columns; nothing without padding."""
    if mask is None:
        return {}
    positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -new:]
    return {"attention_mask": mask.long().to(device), "position_ids": positions.to(device)}


def _advance(
    row: Decoded,
    ask: Ask,
    logits: Tensor,
    best: int,
    ended: Callable[[list[int]], str | None],
    reference: Decoded | None,
    remember: bool,
) -> int | None:
    """Take in the logits ``[V]`` behind all that the row was fed; return the next token to feed, None at the end."""
    fed = row.steps
    if fed < len(ask.forced) and not ask.score:
        return ask.forced[fed]
    number = len(row.tokens)
    compare = (
        reference is not None
        and number < len(reference.log_probs)
        and (ask.score or row.tokens == reference.tokens[:number])
    )
    if ask.score or compare or (remember and number < KL_STEPS):
        found = F.log_softmax(logits.float(), -1)
        if ask.score:
            row.nll.append(-float(found[ask.forced[fed]]))
        if compare and reference is not None:
            dense = reference.log_probs[number]
            row.kl.append(max(float((dense.exp() * (dense - found)).sum()), 0.0))
        if remember and number < KL_STEPS:
            row.log_probs.append(found)
    row.tokens.append(best)
    if ask.score:
        return ask.forced[fed] if fed + 1 < len(ask.forced) else None
    why = ended(row.tokens)
    if why is not None:
        row.finish = why
        if why == "eos":
            row.tokens.pop()
        return None
    return best if number + 1 < ask.new_tokens else None
