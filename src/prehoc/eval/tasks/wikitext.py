"""WikiText-2: perplexity per token of windows of the test split, while a prompt is read and while a text is decoded."""

from __future__ import annotations

import dataclasses

from prehoc.eval.tasks.base import Context, Loaded, Metric, Sample, Task

LENGTH = 2048


@dataclasses.dataclass(frozen=True)
class WikiText(Task):
    """Mean negative log likelihood in nats: ``decode`` of a window's last eighth, decoded; ``prefill`` of the rest, read at once.

    Only the first can show what a decode method costs; the second says what pruning a prompt costs.
    """

    def load(self, context: Context) -> Loaded:
        """Read ``wikitext2/wiki.test.raw`` (or the hub) and cut it into windows that follow each other."""
        source = context.source
        if source.folder is None:
            rows = source.rows((), ("Salesforce/wikitext", "wikitext-2-raw-v1", "test"))
            whole = "".join(str(row.read()["text"]) for row in rows)
        else:
            path = source.find("wikitext2/wiki.test.raw", "wikitext*/wiki.test.raw", "wiki.test.raw")
            try:
                whole = path.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{path.name} is not UTF-8 at byte {error.start}; take the official raw file"
                ) from error
        length = context.length or min(LENGTH, context.encoder.most or LENGTH)
        tokenizer = context.encoder.tokenizer
        special = tuple(tokenizer("")["input_ids"])
        tokens = tokenizer(whole, add_special_tokens=False, verbose=False)["input_ids"]
        body, tail = length - len(special), max(length // 8, 1)
        starts = context.draw(range(0, len(tokens) - body + 1, body), self.name)
        if not starts:
            raise ValueError(f"the text has {len(tokens)} tokens, too short for a window of {length}; lower --length")
        samples = []
        for start in starts:
            window = special + tuple(tokens[start : start + body])
            samples.append(Sample(f"token-{start}", ids=window[:-tail], continuation=window[-tail:]))
        return Loaded(samples, notes=(f"windows of {length} tokens, the last {tail} decoded",))

    def score(self, sample: Sample, output: str) -> dict[str, float]:
        """Likelihoods come from the model, not from an output."""
        raise NotImplementedError("wikitext has no outputs to score")


_RANGE = (1.5, 500.0)
TASKS: tuple[Task, ...] = (
    WikiText(
        "wikitext", (Metric("decode", "perplexity", _RANGE), Metric("prefill", "perplexity", _RANGE)), 0, cuttable=False
    ),
)
