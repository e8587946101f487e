"""Double Sparsity: label channels from the prompt or from a file, and the keys they choose."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from prehoc.books import Books
from prehoc.kernels import host
from prehoc.methods import DoubleSparsity, parse_method
from prehoc.methods.double_sparsity import FORMAT
from prehoc.selection import State, Step
from walking import read, steps, walk


def calibration(path: Path, channels: list[list[list[int]]]) -> Path:
    path.write_text(json.dumps({"format": FORMAT, "channels": channels}))
    return path


def by_hand(
    step: Step, row: int, head: int, heads: int, channels: list[int], k: int, sink: int, local: int
) -> list[int]:
    """Sinks, the k best keys of the middle by the label channels alone, and the local keys."""
    pad, kv = step.rows.pad[row], head * 2 // heads
    visible = list(range(pad, step.columns))
    queries = step.q[row, head * (4 // heads) : (head + 1) * (4 // heads)].double() * step.scale
    shares = []
    for q in queries:
        logits = torch.stack([sum(q[c] * step.k[row, kv, j, c].double() for c in channels) for j in visible])
        shares.append(torch.log_softmax(logits, 0))
    score = torch.stack(shares).amax(0) if len(queries) > 1 else shares[0]
    middle = visible[sink : len(visible) - local]
    best = sorted(middle, key=lambda j: (-score[j - pad].item(), j))[:k]
    return sorted(visible[:sink] + best + visible[len(visible) - local :])


@pytest.mark.parametrize("granularity", ["kv_head", "query_head"])
@pytest.mark.parametrize("pad", [(0,), (0, 5, 52)], ids=["one", "ragged"])
@pytest.mark.parametrize("size", ["critical=9", "ratio=0.25"])
def test_the_best_keys_by_label_channels_are_read(granularity: str, pad: tuple[int, ...], size: str) -> None:
    text = f"double_sparsity:{size},sink=3,local=4,channels=3,granularity={granularity}"
    heads, chosen = 2 if granularity == "kv_head" else 4, 0
    for step, decision in walk(text, pad, 70, 5):
        for row, begin in enumerate(pad):
            prompt = 70 - begin
            k = 9 if size == "critical=9" else max(prompt // 4 - 7, 8)
            covered = step.columns - begin - 7 <= k
            assert decision.counted[row] is not covered
            for head in range(heads):
                keys = step.k[row, head * 2 // heads, begin:70].double()
                channels = keys.var(0, correction=0).argsort(descending=True)[:3].tolist()
                wanted = by_hand(step, row, head, heads, channels, k, 3, 4)
                assert read(decision, row, head) == (list(range(begin, step.columns)) if covered else wanted)
                chosen += not covered
    assert chosen


def test_channels_of_a_file_are_used(tmp_path: Path) -> None:
    order = [[[7 - i, *(c for c in range(8) if c != 7 - i)] for i in (2 * layer, 2 * layer + 1)] for layer in range(2)]
    path = calibration(tmp_path / "channels.json", order)
    for layer in range(2):
        text = f"double_sparsity:critical=9,sink=3,local=4,channels=2,calibration={path}"
        for step, decision in walk(text, (0, 5), 70, 3, layer):
            for row in range(2):
                for head in range(2):
                    assert read(decision, row, head) == by_hand(step, row, head, 2, order[layer][head][:2], 9, 3, 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_labels_follow_new_keys_in_every_dtype(dtype: torch.dtype) -> None:
    state, method = State(), DoubleSparsity(critical=9, sink=3, local=4, channels=3)
    for step in steps((0, 3), 70, 270, dtype=dtype):  # more columns than were allocated at first
        method.decide(step, state)
    labels = state["labels"][:, :, : step.columns]
    assert labels.dtype == dtype
    assert torch.equal(labels, step.k.gather(3, state["channels"][:, :, None].expand(-1, -1, step.columns, -1)))


def test_books_hold_labels_and_keys() -> None:
    books, state, method = Books(), State(), DoubleSparsity(critical=9, sink=3, local=4, channels=3)
    for step in steps((0, 3), 70, 4):
        books.decision(step, 8, method.decide(step, state))
    books.flush()
    visible = sum(2 * n - 3 for n in (71, 72, 73, 74))
    assert books.traffic.bytes_scored == (visible * 3 + (74 + 71) * 8) * 2 * 4  # labels; once every key, to label it
    assert books.traffic.keys_read == 4 * 2 * 2 * 16
    assert books.traffic.retrievals == 0 and books.traffic.counted_triples == 16


def test_nothing_is_asked_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "may_look", lambda device: False)
    method, state = DoubleSparsity(critical=9, sink=3, local=4), State()
    with FakeTensorMode(allow_non_fake_inputs=True):
        for step in steps((0, 3), 70, 3, backend="reference"):  # C++ reads memory, which fake tensors lack
            decision = method.decide(step, state)
    assert decision.selection is not None


def test_the_path_without_a_look_chooses_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "double_sparsity:ratio=0.3,sink=3,local=4"
    expected = walk(text, (0, 5, 52), 70, 4)
    monkeypatch.setattr(host, "may_look", lambda device: False)
    for (_, a), (_, b) in zip(expected, walk(text, (0, 5, 52), 70, 4), strict=True):
        assert all(read(a, row, head) == read(b, row, head) for row in range(3) for head in range(2))


def test_bad_files_are_refused_at_once_with_the_command(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no calibration .*; make it with: prehoc tune double-sparsity --out"):
        DoubleSparsity(calibration=str(tmp_path / "none.json"))
    for content in ("", "[]", '{"format": "x"}', json.dumps({"format": FORMAT, "channels": [[[0, 0]]]}),
                    json.dumps({"format": FORMAT, "channels": 3}), json.dumps({"format": FORMAT})):  # fmt: skip
        path = tmp_path / "bad.json"
        path.write_text(content)
        with pytest.raises(ValueError, match="is not a calibration of double_sparsity .*prehoc tune double-sparsity"):
            DoubleSparsity(calibration=str(path))


def test_a_file_of_another_model_and_too_many_channels(tmp_path: Path) -> None:
    path = calibration(tmp_path / "channels.json", [[[0, 1, 2, 3]] * 2])
    with pytest.raises(
        ValueError, match=r"made for \(1, 2, 4\) layers, KV heads and channels; layer 0 .* 2 KV heads of 8"
    ):
        walk(f"double_sparsity:critical=9,sink=3,local=4,channels=2,calibration={path}", (0,), 70, 1)
    with pytest.raises(ValueError, match="channels=9 exceeds the head dimension 8"):
        walk("double_sparsity:critical=9,sink=3,local=4,channels=9", (0,), 70, 1)
    with pytest.raises(ValueError, match="channels=0 must be at least 1"):
        parse_method("double_sparsity:channels=0")
