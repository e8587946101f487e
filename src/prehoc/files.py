"""Files of the user: texts that are read, results that are written whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from prehoc.provenance import describe_text


def read_text(path: str | Path) -> tuple[str, dict[str, Any]]:
    """Return a text file's content, without a byte order mark, and what identifies it.

    Raises
    ------
    ValueError
        When the file is missing, a folder, unreadable, empty or not UTF-8.
    """
    file = Path(path).expanduser()
    try:
        content = file.read_bytes()
    except FileNotFoundError as error:
        raise ValueError(f"the text file {str(path)!r} does not exist; give an existing one") from error
    except IsADirectoryError as error:
        raise ValueError(f"{str(path)!r} is a folder; give a text file") from error
    except OSError as error:
        raise ValueError(
            f"the text file {str(path)!r} cannot be read ({error.strerror}); give a file that can be"
        ) from error
    try:
        text = content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"the text file {str(path)!r} is not UTF-8: byte {error.start} is 0x{content[error.start]:02x}; convert it "
            "first, for example with iconv -f latin1 -t utf-8"
        ) from error
    if not text.strip():
        raise ValueError(f"the text file {str(path)!r} is empty; give one with text")
    return text, describe_text(file, content)


def check_writable(path: str | Path) -> None:
    """Raise ValueError unless a file can be written at `path` (an existing file is replaced)."""
    target = Path(path)
    if target.is_dir():
        raise ValueError(f"{str(path)!r} is a folder; give the name of a file")
    if not target.parent.is_dir():
        raise ValueError(f"there is no folder {str(target.parent)!r} to write {target.name!r} to; create it first")
    try:
        tempfile.TemporaryFile(dir=target.parent).close()
    except OSError as error:
        raise ValueError(
            f"cannot write to the folder {str(target.parent)!r} ({error.strerror}); choose another"
        ) from error


@contextlib.contextmanager
def atomic_path(target: str | Path) -> Iterator[Path]:
    """Yield an empty file beside `target`, which takes its place when the block ends and is removed when it fails.

    The file has the permissions that any new file of the user has.
    """
    goal = Path(target)
    part = goal.with_name(f".{goal.name}.{secrets.token_hex(4)}.part")
    part.touch(exist_ok=False)
    try:
        yield part
        os.replace(part, goal)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_document(path: Path, document: Mapping[str, Any]) -> None:
    """Write a document in one go: lists of numbers on one line, the rest indented."""
    text = json.dumps(document, indent=1, allow_nan=False)
    text = re.sub(r"\[\s+([-\d.,\s]+?)\s+\]", lambda found: f"[{' '.join(found[1].split())}]", text)
    with atomic_path(path) as part:
        part.write_text(text + "\n", encoding="utf-8")
