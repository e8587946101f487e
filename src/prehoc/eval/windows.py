"""Windows of equal length, cut from texts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prehoc.files import read_text


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


Text = tuple[str, dict[str, Any]]
"""The content of a file and what identifies it, as `prehoc.files.read_text` returns them."""


def read_texts(files: Sequence[Path], count: int) -> list[Text]:
    """Read the files that `count` windows are to be cut from; needs no tokenizer.

    Raises
    ------
    ValueError
        When a file is missing, empty or not UTF-8, or the windows do not divide among the files.
    """
    if count < 1 or count % len(files):
        raise ValueError(f"windows={count} cannot be shared equally by {len(files)} text files; give a multiple")
    return [read_text(file) for file in files]


def cut_windows(tokenizer: Any, texts: Sequence[Text], count: int, length: int) -> Windows:
    """Cut `count` windows of `length` tokens, evenly spread and apart from each other, equally many from each text.

    Each window begins with the special tokens that the tokenizer itself puts in front of a text.

    Raises
    ------
    ValueError
        When a text is too short.
    """
    special = list(tokenizer("")["input_ids"])
    body, each = length - len(special), count // len(texts)
    rows, places = [], []
    for text, facts in texts:
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) < each * body:
            raise ValueError(
                f"{facts['file']} has {len(ids)} tokens, too short for {each} windows of {length}: give a longer text, fewer "
                "windows or a shorter window"
            )
        for i in range(each):
            begin = (len(ids) - body) * i // max(each - 1, 1)
            rows.append(special + ids[begin : begin + body])
            places.append((facts["file"], begin))
    return Windows(torch.tensor(rows), tuple(places), tuple(facts for _, facts in texts))
