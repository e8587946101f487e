"""The page of the committed results and of one trace: numbers, the paper's beside them, figures, and how a browser shows it."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from bench_shapes import record
from browser import look
from prehoc.methods import METHODS, PRESETS
from prehoc.plot import figures_trace, paper
from prehoc.plot.inspect import inspect
from prehoc.plot.page import _ORDER, method_styles
from prehoc.plot.pareto import Point, pareto
from prehoc.plot.report import report
from prehoc.plot.runs import Run, read_run
from prehoc.trace import trace as trace_model

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
NAMES = ("decode_torch", "demo", "theory_looseness", "tune_cis_smollm2", "tune_prefill_smollm2")


@pytest.fixture(scope="module")
def trace(tiny_llama: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "<tiny>.npz"
    method = "cis:critical=12,sink=4,local=9,tau=0.2,block_size=4"
    found = record(tiny_llama, 117, 40, method, record=("selections", "qk"))
    dataclasses.replace(found, tokens=None).save(path)
    return path


@pytest.fixture(scope="module")
def page(trace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    (folder / "figures").mkdir()
    runs = [read_run(path) for path in (*(BENCHMARKS / f"{name}.json" for name in NAMES), trace)]
    (folder / "page.html").write_text(report(runs, folder / "figures"), encoding="utf-8")
    return folder / "page.html"


class Structure(HTMLParser):
    """The elements of a page, and the cells of its tables."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        if tag in ("th", "td"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data.strip("\n")

    def handle_endtag(self, tag: str) -> None:
        if tag == "table":
            self.rows.append([])

    def every(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]


def test_nothing_lies_outside_the_page(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"https?:|//\w+\.\w", text)
    parts = Structure(text)
    assert not {"link", "script", "iframe", "object"} & {tag for tag, _ in parts.found}
    for tag, attributes in parts.found:
        for name in ("src", "href", "xlink:href"):
            target = attributes.get(name) or "#"
            assert target[0] == "#" or target.startswith("data:image/png;base64,"), (tag, target)
    ids = [attributes["id"] for _, attributes in parts.found if "id" in attributes]
    assert len(ids) == len(set(ids)), "figures must not share names"
    used = set(re.findall(r"url\(#([^)]+)\)", text)) | {
        href[1:] for _, attributes in parts.found if (href := attributes.get("xlink:href") or "").startswith("#")
    }
    assert used and used <= set(ids)


def test_every_figure_says_what_it_shows_and_its_letters_are_text(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    parts = Structure(text)
    pictures = [found for found in parts.every("svg") if found.get("role") == "img"]
    assert len(pictures) == len(parts.every("figure")) == len(parts.every("figcaption")) > 12
    for found in pictures:
        for name in (found["aria-labelledby"] or "").split():
            assert re.search(rf'id="{name}">[^<]{{8,}}<', text)
    assert "<text" in text and ">retained attention mass, audited</text>" in text.replace("\n", "")
    files = {path.suffix: 0 for path in (page.parent / "figures").iterdir()}
    for path in (page.parent / "figures").iterdir():
        files[path.suffix] += 1
        assert path.stat().st_size > 1000
    assert files == {".svg": len(pictures), ".png": len(pictures)}


def steps(decode: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a decode benchmark."""
    return [row for cell in decode["cells"] for row in cell["rows"]]


def test_cells_of_the_papers_size_stand_beside_it() -> None:
    rows = steps(json.loads((BENCHMARKS / "decode_torch.json").read_text()))
    named = [
        {**row, "system": "cis-16:ratio=0.1" if row["system"].startswith("cis") else row["system"]} for row in rows
    ]
    cells = [{"batch": 16, "context": 4096, "rows": named}, {"batch": 3, "context": 4096, "rows": named}]
    found = Structure(report([Run("decode", "d.json", {"cells": cells})])).rows
    ours = [row for row in found if row and row[0] == "cis-16:ratio=0.1"]
    assert [row[-1] for row in ours] == ["2.68", ""]  # 364 / 136 tokens/s
    step = next(row["step_ms"] for row in named if row["system"] == "cis-16:ratio=0.1")
    assert [row[3] for row in ours] == [f"{16e3 / step:.1f}", f"{3e3 / step:.1f}"]


def test_numbers_stand_beside_their_source_and_the_papers(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    rows = Structure(text).rows
    decode = json.loads((BENCHMARKS / "decode_torch.json").read_text())
    measured = steps(decode)
    for found in measured:
        row = next(row for row in rows if row and row[0] == found["system"] and f"{found['step_ms']:.1f}" in row)
        assert f"{found['times_dense']:.2f}" in row
        if found.get("retained_mass"):
            assert f"{found['retained_mass']:.4f}, n {found['audited']}" in row
    assert decode["command"].split(" --methods")[0] in text and decode["machine"]["cpu"] in text
    sweep = json.loads((BENCHMARKS / "tune_cis_smollm2.json").read_text())
    found = next(row for row in sweep["rows"] if row["budget"] == 128 and row["label"] == "tau=0.7")
    beta = "{mean:.4f} [{low:.4f}, {high:.4f}]".format(**found["beta"])
    ours = [f"{found['retrieval_ratio']['mean']:.3f}", f"{found['keys']['mean']:.0f}", beta]
    assert ["s 8, tau 0.7, r 1", *ours, "0.152", "131", "18.01"] in rows
    psaw = next(row for row in rows if row and row[0].startswith("psaw:phi=0.5,alpha=1.0") and row[-1])
    assert psaw[-1] == "6.120"
    assert [
        "8 x 2048",
        "1.21",
        "1.24",
        "1.10",
        "1.13",
        "1.18",
        "1.15",
        "1.19",
        "1.20",
        "1.24",
    ] in rows  # Table V / GPT-Fast
    assert "&lt;tiny&gt;.npz" in text and "<tiny>" not in text


def test_what_is_missing_is_said(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    section = text[text.index('id="missing"') :]
    assert "Figure 12:" in section and "Table II:" in section and "prehoc eval of gsm8k or coqa" in section
    drawn = (
        "Figure 2/11",
        "Figure 3",
        "Figure 4",
        "Figure 5",
        "Figure 6",
        "Figure 7",
        "Figure 8",
        "Figure 9",
        "Figure 10",
    )
    for part in (*drawn, "Table V:", "Table VIII:", "Pareto"):
        assert f"{part}:" not in section.replace("::", ":"), part


def test_layers_that_slide_are_left_out() -> None:
    shape = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "sliding_window": 16}
    model = Gemma3ForCausalLM(Gemma3TextConfig(layer_types=kinds, **shape, **sizes)).eval()
    ids = torch.randint(1, 60, (100,), generator=torch.Generator().manual_seed(0))
    method = "cis:critical=12,sink=4,local=9,tau=0.2,block_size=4"
    found = trace_model(model, ids, 80, 20, method, observe=True, record=("selections", "qk"), backend="reference")
    text = report([Run("trace", "slides.npz", found.meta, found)])
    assert "layers 1, head 0" in text and ">layer 1</text>" in text and ">layer 0</text>" not in text
    assert 'id="data"' in inspect(found, "slides") and '"layers":[1]' in inspect(found, "slides")


def test_a_run_without_its_keys_is_refused() -> None:
    with pytest.raises(ValueError, match="half.json is no complete decode result .*cells.*; run its command again"):
        report([Run("decode", "half.json", {"benchmark": "decode"})])


def test_an_invalid_run_says_so_first() -> None:
    document = json.loads((BENCHMARKS / "decode_torch.json").read_text())
    text = report([Run("decode", "fast.json", {**document, "invalid": ["dense reads at 140 % of the stream"]})])
    assert 'class="warning">This run is invalid' in text and "dense reads at 140 %" in text


def test_controls_and_methods_stand_beside_tables_six_and_seven() -> None:
    def row(method: str, budget: int | None, beta: float) -> dict[str, Any]:
        triples = {name: [0.5, 0.4, 0.6] for name in ("retained", "beta_equal_keys", "overlap", "keys", "retrieved")}
        return {"method": method, "budget": budget, "n": 9, "bytes_share": 0.2, "beta": [beta, 0.0, None], **triples}

    rows = [row("dense", None, 0.0), row("cis:gate=query", 128, 0.0125), row("random_expansion:seed=3", 128, 0.0375)]
    found = Structure(report([Run("rivals", "rivals.json", {"rows": rows})])).rows
    assert ["cis:gate=query", "0.500", "0", "0.0125", "0.019", "0.018", "80.07"] in found
    assert ["random_expansion:seed=3", "0.500", "0", "0.0375", "0.041", "0.036", "71.87"] in found
    alone = report([Run("rivals", "rivals.json", {"rows": rows[:2]})])
    assert "Tables VI/VII:" in alone[alone.index('id="missing"') :], "CIS alone is no control"


def test_gates_stand_beside_table_nine() -> None:
    def row(method: str, beta: float) -> dict[str, Any]:
        triples = {name: [0.5, 0.4, 0.6] for name in ("retained", "beta_equal_keys", "overlap", "keys", "retrieved")}
        return {"method": method, "budget": 128, "n": 9, "bytes_share": 0.2, "beta": [beta, 0.0, None], **triples}

    rows = [row("cis:tau=0.5,gate=query", 0.0125), row("cis_key:tau=0.25", 0.0375), row("cis:gate=hidden", 0.05)]
    found = Structure(report([Run("rivals", "rivals.json", {"rows": rows})])).rows
    assert ["cis:tau=0.5,gate=query", "query", "0.500", "0", "0.0125", "", ""] in found
    assert ["cis_key:tau=0.25", "key", "0.500", "0", "0.0375", "15.47", "14.05"] in found
    assert ["cis:gate=hidden", "hidden", "0.500", "0", "0.0500", "13.03", "11.21"] in found
    alone = report([Run("rivals", "rivals.json", {"rows": [rows[0], row("cis:tau=0.5", 0.012)]})])
    assert "Table IX:" in alone[alone.index('id="missing"') :], "gates on queries and scores are no controls"


def test_our_rows_find_the_papers_columns() -> None:
    names = {
        "sdpa-flash": "Flash",
        "flex (cis-8:matched=true)": "Flex-BS",
        "cpe-16:matched=true": "CPE-16",
        "h2o": "H2O",
    }
    for ours, theirs in names.items():
        place = paper.column(ours)
        assert place is not None and paper.COLUMNS[place] == theirs
    assert paper.column("dense") is None and paper.column("oracle:budget=8") is None
    for table in (paper.ATTENTION_MS, paper.DECODE_TOKENS):
        assert all(len(row) == len(paper.COLUMNS) for row in table.values())


def test_a_method_looks_the_same_in_every_figure() -> None:
    assert set(_ORDER) <= {*METHODS, *PRESETS} and len(set(_ORDER)) == len(_ORDER)
    some = ["dense", "sdpa-flash", "cis:tau=0.5", "quest", "cis:tau=0.7", "flex (cis-8)", "cis-8:matched=true"]

    def drawn(names: list[str]) -> dict[str, Any]:
        figure = pareto(
            "t", "mass", [Point(name, 0.5 + 0.1 * (i % 3), share=0.2) for i, name in enumerate(names)]
        ).draw()
        lines = {one.get_label(): one[0] for one in figure.axes[0].containers}
        return {name: (line.get_color(), line.get_marker(), line.get_linestyle()) for name, line in lines.items()}

    first, second = drawn(some), drawn(["h2o", "cis", "quest", "dense"])
    assert first["quest"] == second["quest"] and first["dense"] == second["dense"]
    assert first["cis:tau=0.5"] == second["cis"] != first["cis:tau=0.7"]
    assert first["cis:tau=0.5"][0] == first["cis:tau=0.7"][0] == first["cis-8:matched=true"][0]
    assert len(set(first.values())) == len(some)
    every = [tuple(look.items()) for look in method_styles([*METHODS, *PRESETS, *some]).values()]
    assert len(set(every)) == len(every)


@pytest.mark.parametrize(
    ("value", "most", "top"), [(100.0, 100, 100), (1.0, 1, 1), (97.0, 100, None), (12.0, 100, None)]
)
def test_an_axis_ends_at_the_largest_value_there_can_be(value: float, most: float, top: float | None) -> None:
    points = [Point("cis", value * (1 - 0.1 * i), (value * 0.85, value), share=0.1 + i) for i in range(2)]
    axis = pareto("t", "score", points, most).draw().axes[0]
    if top is None:
        assert value < axis.get_ylim()[1] < 2 * value
    else:
        assert axis.get_ylim()[1] == top and not axis.lines[0].get_clip_on()
    free = pareto("t", "score", points, 1e9).draw().axes[0].get_ylim()
    assert axis.get_ylim()[0] == free[0], "only the upper end moves"


def test_steps_are_whole_numbers(trace: Path) -> None:
    found = read_run(trace).trace
    assert found is not None and found.retrieved.any()
    for axis in (
        figures_trace._overlap(found).axes[0],
        figures_trace._maps(found, [0], lambda _: np.eye(3), "x").axes[0],
    ):
        ticks = axis.get_xticks()
        assert len(ticks) > 2 and (ticks == ticks.round()).all()


def test_one_thread_is_no_threads() -> None:
    document = json.loads((BENCHMARKS / "decode_torch.json").read_text())
    machine = {**document["machine"], "torch_threads": 1, "cpu_count": 2}
    assert ", 2 cores, 1 thread, " in report([Run("decode", "d.json", {**document, "machine": machine})])


def test_a_phone_shows_it_whole(page: Path) -> None:
    seen = look(page, 390)
    assert seen["errors"] == [] and seen["loaded"] == []
    assert seen["width"] == 390 and seen["content"] == 390, "the page itself must not scroll sideways"
