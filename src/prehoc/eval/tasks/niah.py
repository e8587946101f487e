"""The needle test (one odd sentence in real prose) and the passkey test (five digits in noise), at any length."""

from __future__ import annotations

import dataclasses
import random

from prehoc.eval.scoring import found_share
from prehoc.eval.tasks import haystack
from prehoc.eval.tasks.base import Context, Loaded, Metric, Sample, Task

NEEDLE = "The best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny day."
DEPTHS = 11


@dataclasses.dataclass(frozen=True)
class Needle(Task):
    """Share of the needle's two facts found in the output; the needle's depth goes from 0 to 100 % in eleven steps."""

    def load(self, context: Context) -> Loaded:
        """Build the samples; the prose is that of RULER."""
        sentences, name = haystack.prose(context)
        length = context.length or haystack.LENGTH

        def sample(number: int) -> Sample:
            depth = number % DEPTHS / (DEPTHS - 1)
            begin = random.Random(f"{context.seed}/niah/{number}").randrange(len(sentences))
            turned = [*sentences[begin:], *sentences[:begin]]

            def build(size: int) -> Sample:
                hay = haystack.insert(haystack.cycle(turned, size), ["\n" + NEEDLE + "\n"], [depth])
                ask = "\n\nAnswer from the text above: What is the best thing to do in San Francisco?"
                facts = ("eat a sandwich", "Dolores Park")
                return Sample(f"{length}-{number}", " ".join(hay), ask, answers=facts, tags={"depth": depth})

            return haystack.largest(context, self.name, length, self.chat, self.new_tokens, build)

        count = DEPTHS if context.limit is None else context.limit
        return Loaded([sample(i) for i in range(count)], notes=(f"haystack: {name}",))

    def score(self, sample: Sample, output: str) -> dict[str, float]:
        """Look for the facts."""
        return {"found": found_share(output, sample.answers)}


@dataclasses.dataclass(frozen=True)
class Passkey(Task):
    """1 if the key occurs in the output; its depth goes from 0 to 100 % in eleven steps."""

    def load(self, context: Context) -> Loaded:
        """Build the samples; no data is read."""
        length = context.length or haystack.LENGTH

        def sample(number: int) -> Sample:
            key = str(random.Random(f"{context.seed}/passkey/{number}").randrange(10**4, 10**5))
            depth = number % DEPTHS / (DEPTHS - 1)

            def build(size: int) -> Sample:
                needle = f"The pass key is {key}. Keep it in mind: {key} is the pass key."
                hay = haystack.insert([haystack.NOISE] * size, [needle], [depth])
                document = "A pass key is hidden in the text below. Find it.\n\n" + "\n".join(hay)
                ask, prefix = "\n\nWhat is the pass key?", " The pass key is"
                return Sample(f"{length}-{number}", document, ask, prefix, answers=(key,), tags={"depth": depth})

            return haystack.largest(context, self.name, length, self.chat, self.new_tokens, build)

        count = DEPTHS if context.limit is None else context.limit
        return Loaded([sample(i) for i in range(count)])

    def score(self, sample: Sample, output: str) -> dict[str, float]:
        """Look for the key."""
        return {"found": found_share(output, sample.answers)}


TASKS: tuple[Task, ...] = (
    Needle("niah", (Metric("found"),), 48, chat=True),
    Passkey("passkey", (Metric("found"),), 16, chat=True),
)
