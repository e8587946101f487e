"""What a task is, and where its rows come from: a local folder in the official formats, or the hub through `datasets`."""

from __future__ import annotations

import abc
import dataclasses
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from prehoc.config import unknown
from prehoc.eval.scoring import ScoreError

if TYPE_CHECKING:
    from prehoc.eval.prompts import Encoder

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Sample:
    """One row of a task.

    Parameters
    ----------
    id : str
        Names the row within its task.
    document, question : str
        The prompt in two parts; ``--decode-question`` feeds the second one as decode steps.
    prefix : str
        What the answer begins with; behind the chat template, read as part of the prompt.
    answers : tuple of str
        References.
    tags : mapping
        More facts of the row, for its scores and the results.
    ids, continuation : tuple of int
        Instead of texts: tokens of a prompt, and the tokens behind it whose likelihood is asked.
    """

    id: str
    document: str = ""
    question: str = ""
    prefix: str = ""
    answers: tuple[str, ...] = ()
    tags: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    ids: tuple[int, ...] = ()
    continuation: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Fault:
    """A row that cannot be used, by file and line."""

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}: {self.reason}"


@dataclasses.dataclass(frozen=True)
class Metric:
    """A score and how it is read.

    Parameters
    ----------
    name : str
        Key in the scores of a sample.
    form : {"percent", "perplexity"}
        Scores in [0, 1] shown as mean x 100, or nats per token shown as the exponential of their mean.
    plausible : (float, float)
        Where the dense row must lie, in shown units; outside, the set-up is at fault (template, stop, scale), not a method.
    floor : float
        What guessing gives: a dense row whose interval reaches it can lose nothing, so the task says nothing.
    """

    name: str
    form: Literal["percent", "perplexity"] = "percent"
    plausible: tuple[float, float] = (0.0, 100.0)
    floor: float = 0.0


@dataclasses.dataclass(frozen=True)
class Loaded:
    """Samples of a task, rows that were left out, and what a reader must know of the data."""

    samples: list[Sample]
    faults: list[Fault] = dataclasses.field(default_factory=list)
    notes: tuple[str, ...] = ()


class MissingData(ValueError):
    """The folder does not hold what a task reads."""


class Source:
    """The place of the data.

    Parameters
    ----------
    folder : Path or None
        Folder with one folder a data set; None: the hub.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def find(self, *names: str) -> Path:
        """Return the first of `names` (patterns below the folder) that exists.

        Raises
        ------
        MissingData
            When there is none, or no folder was given.
        """
        if self.folder is None:
            raise MissingData(f"{names[0]} is not on the hub; give its folder with --data")
        for name in names:
            for path in sorted(self.folder.glob(name)):
                return path
        raise MissingData(f"there is no {' or '.join(names)} below the data folder {str(self.folder)!r}")

    def rows(self, names: Sequence[str], hub: tuple[str, str | None, str] | None = None) -> Iterator[Row]:
        """Yield the rows of a JSON lines file, or of a hub data set (name, configuration, split).

        Raises
        ------
        MissingData
            When the data cannot be found or loaded.
        """
        if self.folder is None and hub is not None:
            yield from _hub_rows(hub)
            return
        path = self.find(*names)
        for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
            if line.strip():
                yield Row(f"{path.parent.name}/{path.name}", number, line)


@dataclasses.dataclass(frozen=True)
class Row:
    """A row that was not read yet: its file and line, and its content as bytes of JSON or as a mapping."""

    file: str
    line: int
    content: bytes | Mapping[str, Any]

    def read(self) -> Mapping[str, Any]:
        """Return the content as a mapping; raises ValueError or TypeError when it is none."""
        if not isinstance(self.content, bytes):
            return self.content
        row = json.loads(self.content.decode("utf-8"))
        if not isinstance(row, dict):
            raise TypeError("it is not a JSON object")
        return row


def _hub_rows(hub: tuple[str, str | None, str]) -> Iterator[Row]:
    name, configuration, split = hub
    try:
        import datasets
    except ImportError:
        raise MissingData(
            f"{name} comes from the hub, which needs the package datasets: pip install datasets, or give --data FOLDER"
        ) from None
    try:
        found = datasets.load_dataset(name, configuration, split=split)
    except Exception as error:  # the hub client has no common error of its own
        raise MissingData(f"cannot load {name} from the hub ({error}); give --data FOLDER") from error
    for number, row in enumerate(found, 1):
        yield Row(f"{name}:{split}", number, row)


@dataclasses.dataclass(frozen=True)
class Context:
    """What a task needs to make its samples.

    Parameters
    ----------
    source : Source
        Where the data is.
    encoder : Encoder
        Counts tokens as the model will read them.
    limit : int or None
        Samples wanted; None: all (of a generated task, its own number).
    length : int or None
        Tokens of generated prompts and text windows, the answer included; None: the task's own.
    seed : int
        Seed of every draw.
    """

    source: Source
    encoder: Encoder
    limit: int | None = None
    length: int | None = None
    seed: int = 0

    def draw(self, items: Sequence[T], task: str) -> list[T]:
        """Return `limit` items drawn with the seed; a larger limit draws these and more."""
        if self.limit is None or self.limit >= len(items):
            return list(items)
        order = list(range(len(items)))
        random.Random(f"{self.seed}/{task}").shuffle(order)
        return [items[i] for i in sorted(order[: self.limit])]


@dataclasses.dataclass(frozen=True)
class Task(abc.ABC):
    """A family of prompts with their scores.

    Parameters
    ----------
    name : str
        Its name on the command line.
    metrics : tuple of Metric
        The first one decides; all are reported.
    new_tokens : int
        Most tokens of an answer; 0 where likelihoods are measured.
    stop : tuple of str
        Texts that end an answer (leading newlines do not count).
    chat : bool
        Whether the prompt is a user turn of the chat template.
    cuttable : bool
        Whether a document that is too long may lose its middle.
    split : str or None
        The tag by whose values the first metric is reported apart, too.
    """

    name: str
    metrics: tuple[Metric, ...]
    new_tokens: int
    stop: tuple[str, ...] = ()
    chat: bool = False
    cuttable: bool = dataclasses.field(default=True, kw_only=True)
    split: str | None = dataclasses.field(default=None, kw_only=True)

    @abc.abstractmethod
    def load(self, context: Context) -> Loaded:
        """Return the samples; raises MissingData when the data is not there."""

    @abc.abstractmethod
    def score(self, sample: Sample, output: str) -> dict[str, float]:
        """Return a value in [0, 1] for every metric; raises ScoreError when one has none."""

    def gather(self, rows: Iterable[Row], parse: Callable[[Mapping[str, Any], int], list[Sample]]) -> Loaded:
        """Return the samples of all rows that are sound, and the faults of the others.

        A row is sound when `parse` takes it and every metric can be computed for it.
        """
        samples: list[Sample] = []
        faults: list[Fault] = []
        names: set[str] = set()
        for row in rows:
            try:
                found = parse(row.read(), row.line)
                for sample in found:
                    if sample.id in names:
                        raise ValueError(f"its id {sample.id!r} was there before")
                    if not (sample.document or sample.question):
                        raise ValueError("its prompt is empty")
                    self.score(sample, "")
                samples += found
                names.update(sample.id for sample in found)
            except KeyError as error:
                faults.append(Fault(row.file, row.line, f"it has no field {error}"))
            except json.JSONDecodeError as error:
                faults.append(Fault(row.file, row.line, f"it is not JSON ({error.msg} at character {error.pos + 1})"))
            except (ScoreError, TypeError, ValueError, AttributeError, IndexError) as error:
                faults.append(Fault(row.file, row.line, str(error)))
        return Loaded(samples, faults)


def text(row: Mapping[str, Any], key: str) -> str:
    """Return a field that must be a text."""
    value = row[key]
    if not isinstance(value, str):
        raise TypeError(f"field {key!r} is {type(value).__name__}, not text")
    return value


def texts(row: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Return a field that must be a list of texts."""
    value = row[key]
    if not isinstance(value, (list, tuple)) or not all(isinstance(one, str) for one in value):
        raise TypeError(f"field {key!r} is not a list of texts")
    return tuple(value)


def check_known(name: str, known: Iterable[str]) -> None:
    """Raise ValueError, with the nearest known name, for a task that does not exist."""
    if name not in (names := list(known)):
        raise unknown("task", name, names)
