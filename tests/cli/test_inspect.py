"""``prehoc inspect`` on a tiny model, and its page in a browser."""

from __future__ import annotations

import base64
import dataclasses
import gzip
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bench_shapes import record
from browser import look
from prehoc import cli
from prehoc.plot.inspect import inspect
from prehoc.plot.recorded import Layer
from prehoc.trace import Trace

METHOD = "cis:critical=12,sink=4,local=9,tau=0.2,block_size=4"
DRAWN = """
const drawn = (name) => new Promise((done) => {
  const look = () => document.body.dataset.drawn === name ? done() : setTimeout(look, 20);
  look();
});
const picture = () => document.querySelector("#map .heatmaplayer image").getAttribute("href");
const pick = (id, value) => {
  document.getElementById(id).value = value;
  document.getElementById(id).dispatchEvent(new Event("change"));
};
await drawn("0/0");
"""


def call(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.argv", ["prehoc", *words])
    try:
        cli.main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


@pytest.fixture(scope="module")
def found(tiny_llama: Callable[..., Path]) -> Trace:
    made = record(tiny_llama, 117, 13, METHOD, record=("selections", "qk"))
    return dataclasses.replace(made, tokens=np.array(["</script><b>", *(f"w{i}" for i in range(1, 130))]))


@pytest.fixture
def page(found: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    found.save(tmp_path / "t.npz")
    assert call(monkeypatch, "inspect", str(tmp_path / "t.npz"), "--out", str(tmp_path / "page.html")) == 0
    return tmp_path / "page.html"


def test_the_page_holds_the_trace(found: Trace, page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    inside = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert inside
    data = json.loads(inside[1])
    assert data["tokens"] == found.tokens.tolist() and "</script><b>" not in text
    assert data["layers"] == [0, 1] and data["heads"] == 2
    np.testing.assert_allclose(data["retained"], found.retained, atol=1e-4)
    for layer, packed in data["kinds"].items():
        kinds = [np.frombuffer(gzip.decompress(base64.b64decode(one)), np.uint8).reshape(13, 130) for one in packed]
        np.testing.assert_array_equal(kinds, Layer(found, int(layer)).kinds())
    assert found.meta["method"] in text and not re.search(r'(src|href)="https?:', text[: text.index("plotly.js")])


def test_one_json_document(
    found: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found.save(tmp_path / "t.npz")
    assert call(monkeypatch, "inspect", str(tmp_path / "t.npz"), "--out", str(tmp_path / "page.html"), "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["out"] == str(tmp_path / "page.html") and document["trace"] == "t.npz"
    assert document["meta"]["method"] == found.meta["method"]
    assert document["summary"]["keys"] == pytest.approx(found.summary()["keys"])


def test_another_head_draws_another_picture(page: Path) -> None:
    script = f"""{DRAWN}
    const first = picture();
    pick("head", "1"); await drawn("0/1");
    seen.head = picture() !== first;
    pick("layer", "1"); await drawn("1/1");
    seen.layer = document.getElementById("summary").textContent;
    const all = picture();
    for (const box of document.querySelectorAll("#legend input")) box.click();
    await new Promise((done) => setTimeout(done, 200));
    seen.hidden = picture() !== all;
    const map = document.getElementById("map");
    const point = {{ data: map.data[0], x: 2, z: 5, customdata: 0 }};
    map.emit("plotly_hover", {{ points: [point] }});
    seen.told = document.getElementById("keyinfo").textContent;
    """
    seen = look(page, 390, script)
    assert seen["errors"] == [] and seen["loaded"] == []
    assert seen["width"] == 390 and seen["content"] == 390
    assert seen["head"] and seen["hidden"]
    assert seen["layer"].startswith("Layer 1, head 1: ")
    assert 'Step 2, token 119 "w119"' in seen["told"] and 'Key 0 "</script><b>": critical.' in seen["told"]


def test_zooming_reads_the_keys_in_view(page: Path) -> None:
    script = f"""{DRAWN}
    const map = document.getElementById("map");
    await Plotly.relayout("map", {{ "yaxis.range[0]": 9.6, "yaxis.range[1]": 30.2 }});
    await new Promise((done) => setTimeout(done, 200));
    seen.keys = map.data[0].y;
    document.getElementById("whole").click();
    await new Promise((done) => setTimeout(done, 200));
    seen.whole = map.data[0].y.length;
    """
    seen = look(page, 390, script)
    assert seen["errors"] == [] and seen["whole"] == 130
    assert seen["keys"] == list(range(10, 31))


def test_the_command_that_traces_keeps_the_tokens(
    tiny_llama: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out = tiny_llama({"text.txt": 60}), tmp_path / "t.npz"
    words = ["--model", str(folder), "--text-file", str(folder / "text.txt"), "--prompt-tokens", "40", "--steps", "3"]
    assert call(monkeypatch, "trace", *words, "--method", "dense", "--out", str(out)) == 0
    assert Trace.load(out).tokens.tolist() == [f"w{i}" for i in range(43)]


def test_what_is_not_installed_is_named(found: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(ValueError, match=r"needs plotly: pip install 'prehoc\[plot\]'"):
        inspect(found, "t")


def test_errors(
    found: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dataclasses.replace(found, indices=None).save(tmp_path / "bare.npz")
    for words, why in (
        ((str(tmp_path / "none.npz"), "--out", str(tmp_path / "a.html")), "there is no trace"),
        (
            (str(tmp_path / "bare.npz"), "--out", str(tmp_path / "a.html")),
            "record it with --record selections --record qk",
        ),
        ((str(tmp_path / "bare.npz"), "--out", str(tmp_path / "no/a.html")), "there is no folder"),
    ):
        assert call(monkeypatch, "inspect", *words) == 2
        assert why in capsys.readouterr().err
    assert not (tmp_path / "a.html").exists()
