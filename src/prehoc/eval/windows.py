"""Windows of equal length, cut from texts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prehoc.provenance import describe_text


@dataclasses.dataclass(frozen=True)
class Windows:
    """Windows of texts, all of one length.

    Attributes
    ----------
    tokens : Tensor
        int64 ``[n, W]``.
    places : tuple of (str, int)
        Per window, the file's name and the number of its first token in the text.
    texts : tuple of dict
        Name, size and SHA-256 of each file.
    """

    tokens: Tensor
    places: tuple[tuple[str, int], ...]
    texts: tuple[dict[str, Any], ...]


def cut_windows(tokenizer: Any, files: Sequence[Path], count: int, length: int) -> Windows:
    """Cut `count` windows of `length` tokens, evenly spread and apart from each other, equally many from each file.

    Each window begins with the special tokens that the tokenizer itself puts in front of a text.

    Raises
    ------
    ValueError
        When a file is missing, empty or too short, or the windows do not divide among the files.
    """
    if count < 1 or count % len(files):
        raise ValueError(f"windows={count} cannot be shared equally by {len(files)} text files; give a multiple")
    special = list(tokenizer("")["input_ids"])
    body, each = length - len(special), count // len(files)
    rows, places, texts = [], [], []
    for file in files:
        if not file.is_file():
            raise ValueError(f"there is no text file {str(file)!r}; give an existing one")
        raw = file.read_bytes()
        texts.append(describe_text(file, raw))
        ids = tokenizer(raw.decode("utf-8"), add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) < each * body:
            raise ValueError(
                f"{file.name} has {len(ids)} tokens, too short for {each} windows of {length}: give a longer text, fewer "
                "windows or a shorter window"
            )
        for i in range(each):
            begin = (len(ids) - body) * i // max(each - 1, 1)
            rows.append(special + ids[begin : begin + body])
            places.append((file.name, begin))
    return Windows(torch.tensor(rows), tuple(places), tuple(texts))
