"""The folder of a run: what was asked in ``run.json``, one line a finished (sample, method) in ``TASK.jsonl``."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import filelock

from prehoc import provenance
from prehoc.files import write_document

FORMAT = 2
Line = dict[str, Any]


class Results:
    """Finished lines of a run; opened again, a run goes on where it stopped.

    Parameters
    ----------
    folder : Path
        The run's folder, made when it is missing.
    identity : mapping
        What decides a line beside its task, sample and method: a folder holds lines of one identity only.
    methods : mapping of str to mapping
        Every key of each method by its description; defaults that have changed since make another method.
    about : mapping
        More facts for ``run.json``; those of ``tasks`` join what is there.
    """

    def __init__(
        self,
        folder: Path,
        identity: Mapping[str, Any],
        methods: Mapping[str, Mapping[str, Any]],
        about: Mapping[str, Any],
    ) -> None:
        self.folder = folder
        self._identity: dict[str, Any] = json.loads(json.dumps(identity))
        self._methods: dict[str, Any] = json.loads(json.dumps(methods))
        self._about = about

    @contextlib.contextmanager
    def opened(self) -> Iterator[Results]:
        """Hold the folder for this process, check that it belongs to this run, and write ``run.json``.

        Raises
        ------
        ValueError
            When the folder holds another run or another process writes to it.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = filelock.FileLock(self.folder / ".lock")
            lock.acquire(timeout=0)
        except OSError as error:
            if isinstance(error, filelock.Timeout):
                raise ValueError(
                    f"another process writes to {str(self.folder)!r}; wait for it or choose another"
                ) from None
            raise ValueError(
                f"cannot write to {str(self.folder)!r} ({error.strerror}); choose another folder"
            ) from error
        try:
            self._claim()
            yield self
        finally:
            lock.release()

    def _claim(self) -> None:
        file = self.folder / "run.json"
        commands: list[str] = []
        if file.exists():
            before = self._read(file)
            self._check(before)
            commands = list(before["commands"])
            self._methods = {**before["methods"], **self._methods}
            self._about = {**self._about, "tasks": {**before["tasks"], **self._about["tasks"]}}
        elif any(self.folder.glob("*.jsonl")):
            raise ValueError(f"{str(self.folder)!r} holds files of something else; choose another folder for --out")
        if provenance.command() not in commands:
            commands.append(provenance.command())
        document = {
            "format": FORMAT,
            "identity": self._identity,
            "methods": self._methods,
            "commands": commands,
            **self._about,
        }
        write_document(file, document)

    def _read(self, file: Path) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            if found["format"] != FORMAT:
                raise ValueError(f"format {found['format']}, this version reads {FORMAT}")
            return found
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{str(file)!r} is not a run of prehoc eval ({error}); choose another folder") from error

    def _check(self, before: Mapping[str, Any]) -> None:
        theirs = before["identity"]
        differ = [key for key in {**theirs, **self._identity} if theirs.get(key) != self._identity.get(key)]
        if differ:
            pairs = ", ".join(f"{key} {theirs.get(key)!r} there, {self._identity.get(key)!r} now" for key in differ)
            raise ValueError(f"{str(self.folder)!r} holds another run ({pairs}); choose another folder for --out")
        for name, keys in self._methods.items():
            if name in before["methods"] and before["methods"][name] != keys:
                raise ValueError(
                    f"{str(self.folder)!r} was made when {name} had other defaults; choose another folder for --out"
                )

    def read(self, task: str) -> list[Line]:
        """Return the finished lines of a task; a last line that was cut off is removed from the file.

        Raises
        ------
        ValueError
            When another line is damaged.
        """
        file = self._file(task)
        content = file.read_bytes() if file.exists() else b""
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.truncate(file, whole)
        lines = []
        for number, line in enumerate(content[:whole].splitlines(), 1):
            try:
                lines.append(json.loads(line))
            except ValueError as error:
                raise ValueError(f"{str(file)!r}, line {number} is damaged ({error}); remove that line") from error
        return lines

    def append(self, task: str, lines: Sequence[Line]) -> None:
        """Add finished lines in one write that has reached the disk when this returns."""
        content = "".join(json.dumps(line, allow_nan=False, ensure_ascii=False) + "\n" for line in lines).encode()
        with self._file(task).open("ab", buffering=0) as file:
            file.write(content)
            os.fsync(file.fileno())

    def _file(self, task: str) -> Path:
        return self.folder / f"{task}.jsonl"
