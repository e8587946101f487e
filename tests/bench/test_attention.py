"""The attention benchmark: which steps every row runs, what its books say, and that a wrong kernel is found."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from bench_shapes import TINY
from prehoc import kernels
from prehoc.bench import attention, lineup, memory, rows
from prehoc.bench.attention import Cell, Setup, bench_cell
from prehoc.bench.held import Held
from prehoc.bench.inputs import RandomInputs
from prehoc.bench.refcheck import RefcheckError
from prehoc.kernels import flex, reference
from prehoc.selection import Decision

CELL = Cell(TINY, 2, 512)
METHODS = ("streaming", "oracle", "cis-8:matched=true", "cpe-16:phi=0.5,start_layer=0.25")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a tiny cache, and FlexAttention as it is: compiling it takes longer than all tests here."""
    monkeypatch.setattr(memory, "last_cache_bytes", lambda device: 1)
    monkeypatch.setattr(memory, "YARDSTICK", {"cpu": 0})
    monkeypatch.setattr(flex, "_compiled", lambda: torch.nn.attention.flex_attention.flex_attention)


def setup(methods: tuple[str, ...] = METHODS, **more: Any) -> Setup:
    return Setup(methods, **{"dtype": torch.float32, "backend": "reference", "steps": 16, "rounds": 2, **more})


def by_name(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["row"]: row for row in found["rows"]}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_every_row_reads_what_its_method_says() -> None:
    found = bench_cell(CELL, RandomInputs(), setup(refcheck=True))
    assert found["layers"] == [0, 1, 2, 3] and found["batch"] == 2 and found["shape"]["name"] == "tiny"
    row = by_name(found)
    flexed = "flex (cis-8:matched=true)"
    assert list(row) == ["sdpa-flash", "sdpa-math", "dense", flexed, *METHODS]
    visible = 512 - (16 - 1) / 2  # the mean over 16 steps, the last of which sees all
    for one in row.values():
        assert 0 < one["ms_10"] <= one["ms"] <= one["ms_90"] and one["attention_ms"] > 0
        assert one["refcheck"]["error"] < 1e-5 and one["refcheck"]["overlap"] >= 0.99 and one["repeats"] == 2
    for name in METHODS:
        assert row[name]["calls"] == 4 * 16
        assert row[name]["ms"] == pytest.approx(row[name]["selection_ms"] + row[name]["attention_ms"])
        assert row[name]["visible_per_head"] == visible
    for name in ("sdpa-flash", "sdpa-math", "dense"):
        assert row[name]["keys_per_head"] == row[name]["visible_per_head"] == pytest.approx(visible, abs=4)
        assert row[name]["bytes_read"] == row[name]["bytes_dense"]
        assert 8 <= row[name]["calls"] < 4 * 16 and row[name]["retrieval_ratio"] is None
    assert row["streaming"]["keys_per_head"] == 64 and not row["streaming"]["gathers"]
    assert row["oracle"]["retrieval_ratio"] == 1 and row["oracle"]["keys_per_head"] == 64 and row["oracle"]["gathers"]
    assert row["oracle"]["bytes_scored"] == 2 * 2 * visible * 8 * 4
    assert row[METHODS[2]]["retrieval_ratio"] == 1 / 8 and row[METHODS[2]]["keys_per_head"] <= 64
    assert row[METHODS[3]]["retrieval_ratio"] == 1 / 16
    assert row[METHODS[3]]["bytes_scored"] < row[METHODS[2]]["bytes_scored"] / 2, "deep layers score a window"
    assert row[METHODS[2]]["method"] == "cis:budget=64,gate=query,matched=True"
    assert row[flexed]["mask_ms"] > 0 and 128 < row[flexed]["keys_per_head"] <= 512, "whole blocks"


def test_a_gate_on_hidden_states_is_refused() -> None:
    with pytest.raises(ValueError, match="gate=hidden compares the hidden states.*run the whole model"):
        bench_cell(CELL, RandomInputs(), setup(("cis_hidden:budget=64",)))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_parts_of_the_bytes_add_up() -> None:
    found = bench_cell(CELL, RandomInputs(), setup(("cis-8:budget=64,retrieval=compact",), rounds=1, layers=1))
    for row in found["rows"]:
        parts = [row[f"bytes_{part}"] for part in ("scored", "compact", "processed", "copied", "indices", "anchors")]
        assert sum(parts) == pytest.approx(row["bytes_read"])
    assert found["rows"][-1]["bytes_compact"] > 0


def test_the_yardstick_is_the_best_between_the_rounds_of_the_cell() -> None:
    measured = iter([3e9, 7e9, 5e9])
    found = bench_cell(CELL, RandomInputs(), setup(("streaming",), rounds=2, layers=1), stream=lambda: next(measured))
    assert found["stream_bytes_per_second"] == 7e9 and next(measured, None) is None


def test_rows_take_turns_and_keep_their_state(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int, int]] = []
    real = rows.MethodRow.decide

    def spy(self: rows.MethodRow, step: Any) -> Decision:
        seen.append((self.name, step.layer, step.columns))
        return real(self, step)

    monkeypatch.setattr(rows.MethodRow, "decide", spy)
    monkeypatch.setattr(lineup, "SDPA", {"cpu": ()})
    monkeypatch.setattr(attention, "SAMPLES", 10**6)
    monkeypatch.setattr(attention, "misfit", lambda cell, setup: None)
    monkeypatch.setattr(memory, "free_bytes", lambda device: 2 * TINY.kv_bytes(2, 512, torch.float32))
    found = bench_cell(CELL, RandomInputs(), setup(("streaming", "oracle"), steps=3, layers=2))
    assert found["layers"] == [1, 3]
    names = ["dense", "streaming", "oracle"]
    timed = seen[len(names) :]  # one warm-up each
    for layer_number, layer in enumerate((1, 3)):
        for turn in range(2):
            block = timed[(layer_number * 2 + turn) * 12 :][:12]  # memory for one layer at a time
            assert {one[1] for one in block} == {layer}
            assert [one[2] for one in block] == [509] * 3 + [510] * 3 + [511] * 3 + [512] * 3  # the first is not timed
            for step in range(4):
                shift = (turn + step) % 3
                own = [one[0] for one in block[3 * step :][:3]]
                assert own == names[shift:] + names[:shift]


def _broken(**changes: Any) -> Any:
    """The reference backend with an operation replaced, under another name."""
    module = types.SimpleNamespace(**{name: getattr(reference, name) for name in reference.__all__})
    module.__dict__.update(changes)
    return module


def _noise(*args: Any, **more: Any) -> Any:
    return reference.decode_selected(*args, **more) * 1.01


def _late(*args: Any, **more: Any) -> Any:
    found = reference.retrieve(*args, **more)
    found.order = (found.order + 3).clamp(max=args[1].shape[2] - 1 - args[7])
    return found


@pytest.mark.parametrize(
    ("operation", "replacement", "method", "message"),
    [
        ("decode_selected", _noise, "oracle", "oracle is wrong at layer 2, step 0, batch row 0: its output differs"),
        ("retrieve", _late, "oracle", r"oracle is wrong at layer 2, step 0, batch row 0: it reads [\d.]+% of the keys"),
        ("decode_dense", lambda *args: torch.full_like(args[0], torch.nan), "streaming", "dense is wrong .* by nan"),
    ],
)
def test_refcheck_finds_a_wrong_kernel(
    monkeypatch: pytest.MonkeyPatch, operation: str, replacement: Any, method: str, message: str
) -> None:
    broken = _broken(**{operation: replacement})
    real = kernels.get
    monkeypatch.setattr(kernels, "get", lambda name, device: broken if name == "broken" else real(name, device))
    with pytest.raises(RefcheckError, match=message):
        bench_cell(CELL, RandomInputs(), setup((method,), backend="broken", refcheck=True, layers=1))


def test_a_row_of_torch_that_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lineup, "SDPA", {"cpu": ("flash", "cudnn", "math")})
    free = TINY.kv_bytes(2, 512, torch.bfloat16) + 2**28 + 2**20
    monkeypatch.setattr(memory, "free_bytes", lambda device: free)

    def fails(*args: Any) -> None:
        raise RuntimeError("no compiler\nand much more")

    monkeypatch.setattr(rows, "decode_flex", fails)
    real = rows.SdpaRow.__init__

    def init(self: Any, kernel: str, *more: Any) -> None:
        real(self, kernel, *more)
        self.extra_bytes = 2**40 if kernel == "math" else 0

    monkeypatch.setattr(rows.SdpaRow, "__init__", init)
    found = by_name(bench_cell(CELL, RandomInputs(), setup(("cis-8",), steps=2, layers=1)))
    assert "ms" in found["sdpa-flash"] and "ms" in found["cis-8"]
    assert found["sdpa-cudnn"]["why"].startswith("RuntimeError: ")
    assert found["sdpa-math"]["why"] == "needs 1024.0 GiB more, 0.3 are free"
    assert found["flex (cis-8)"]["why"] == "RuntimeError: no compiler"


def test_a_cell_that_does_not_fit_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: 2**28)
    found = bench_cell(CELL, RandomInputs(), setup())
    assert found["skipped"] == "needs 0.3 GiB of memory, 0.2 are free" and "rows" not in found
    monkeypatch.setattr(memory, "YARDSTICK", {"cpu": 2**30})
    assert bench_cell(CELL, RandomInputs(), setup())["skipped"] == "needs 1.3 GiB of memory, 0.2 are free"


def test_buffers_exceed_the_cache_and_half_of_the_memory_is_the_most(monkeypatch: pytest.MonkeyPatch) -> None:
    one = TINY.kv_bytes(2, 512, torch.float32)
    monkeypatch.setattr(memory, "last_cache_bytes", lambda device: one // 4)  # wanted: 32 caches, eight layers' worth
    held = Held.of(CELL, setup(), 4)
    assert held.layers == 4 and [len(copies) for copies in held.copies] == [2] * 4
    monkeypatch.setattr(memory, "free_bytes", lambda device: 6 * one)
    assert Held.of(CELL, setup(), 4).layers == 3
    monkeypatch.setattr(memory, "free_bytes", lambda device: 10 * one)  # five may be held, of four layers
    held = Held.of(CELL, setup(), 4)
    assert held.layers == 4 and [len(copies) for copies in held.copies] == [1] * 4
    monkeypatch.setattr(memory, "YARDSTICK", {"cpu": 4 * one})
    assert Held.of(CELL, setup(), 4).layers == 3
    monkeypatch.setattr(memory, "free_bytes", lambda device: one)
    assert Held.of(CELL, setup(), 4).layers == 1


def test_layers_are_spread_over_the_depth() -> None:
    assert setup(layers=None).chosen(TINY) == [0, 1, 2, 3]
    assert setup(layers=2).chosen(TINY) == [1, 3]
    assert setup(layers=9).chosen(TINY) == [0, 1, 2, 3]


def test_a_stated_size_wins_over_an_eighth_of_the_length() -> None:
    assert lineup.sized("cis-8", 4096).budget == 512
    assert lineup.sized("oracle:critical=70", 4096).budget is None
    assert lineup.sized("cpe:ratio=1/4", 4096).ratio == 0.25 and lineup.sized("cpe:ratio=1/4", 4096).budget is None
    assert lineup.sized("psaw", 4096).phi == 0.7


@pytest.mark.skipif(
    kernels.resolve("auto", torch.device("cpu")) != "cpu", reason="no compiler: the yardstick is a C++ kernel"
)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_bare_read_reads_what_the_first_cis_selects() -> None:
    row = by_name(
        bench_cell(CELL, RandomInputs(), setup(("cis-8:matched=true",), refcheck=True, backend="cpu", steps=8))
    )
    bare, method = row["read (cis-8:matched=true)"], row["cis-8:matched=true"]
    assert bare["gathers"] and "refcheck" not in bare and "selection_ms" not in bare
    assert bare["bytes_read"] == bare["bytes_processed"] + bare["bytes_indices"]
    assert bare["bytes_processed"] == pytest.approx(method["bytes_processed"], rel=0.02)  # a sample of the steps
    assert bare["bytes_scored"] == bare["bytes_anchors"] == 0


def test_a_method_that_shares_between_layers_shares_between_those_that_are_held() -> None:
    name = "hshare:layers=0.5,heads=0.5,queries=0.5"
    found = bench_cell(CELL, RandomInputs(), setup((name,), refcheck=True))
    assert found["held_layers"] == 4
    assert by_name(found)[name]["retrieval_ratio"] == 1 / 8
