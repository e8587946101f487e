"""Key-value retrieval: one value of a JSON object of random identifiers (Liu et al., Lost in the Middle)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from prehoc.eval.scoring import found_any
from prehoc.eval.tasks.base import Context, Loaded, Metric, Sample, Task, text

_HEAD = "Extract the value corresponding to the specified key in the JSON object below.\n\nJSON data:\n"


@dataclasses.dataclass(frozen=True)
class KeyValue(Task):
    """1 if the value occurs in the output, upper and lower case alike."""

    pairs: int = 75

    def load(self, context: Context) -> Loaded:
        """Read ``kv_retrieval/kv_PAIRS.jsonl`` (or the release's ``kv-retrieval-PAIRS_keys.jsonl``)."""
        names = (f"kv_retrieval/kv_{self.pairs}.jsonl", f"**/kv-retrieval-{self.pairs}_keys.jsonl")
        loaded = self.gather(context.source.rows(names), self._parse)
        return dataclasses.replace(loaded, samples=context.draw(loaded.samples, self.name))

    def _parse(self, row: Mapping[str, Any], line: int) -> list[Sample]:
        pairs = [(str(key), str(value)) for key, value in row["ordered_kv_records"]]
        key, value = text(row, "key"), text(row, "value")
        if (key, value) not in pairs:
            raise ValueError(f"the pair of key {key!r} is not among its records")
        data = "{" + ",\n ".join(f'"{one}": "{other}"' for one, other in pairs) + "}"
        place = [one for one, _ in pairs].index(key) / max(len(pairs) - 1, 1)
        ask = f'\n\nKey: "{key}"\nCorresponding value:'
        return [Sample(f"row-{line}", _HEAD + data, ask, answers=(value,), tags={"depth": round(place, 3)})]

    def score(self, sample: Sample, output: str) -> dict[str, float]:
        """Look for the value."""
        return {"found": found_any(output, sample.answers)}


TASKS: tuple[Task, ...] = (
    KeyValue("kv_retrieval", (Metric("found"),), 64, stop=("\n",), cuttable=False),
    KeyValue("kv_retrieval_140", (Metric("found"),), 64, stop=("\n",), pairs=140, cuttable=False),
)
