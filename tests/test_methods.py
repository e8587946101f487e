"""Methods by name: strings, presets, defaults, and errors that name the value and the fix."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import prehoc
from prehoc.methods import (
    CIS,
    CPE,
    ETF,
    METHODS,
    PRESETS,
    PSAW,
    Dense,
    Oracle,
    Streaming,
    describe,
    parse_method,
    parse_pairs,
)
from prehoc.selection import Rows, Selection, State, Step, Window


def test_every_method_by_name() -> None:
    selecting = {"dense", "streaming", "oracle", "cis", "psaw", "etf", "cpe", "auto", "quest", "double_sparsity"}
    assert set(METHODS) == selecting | {"random_expansion", "h2o", "snapkv", "hshare", "static_window", "linear_window"}
    for name, kind in METHODS.items():
        assert parse_method(name) == kind()
        assert dataclasses.is_dataclass(kind) and kind.name == name
        assert getattr(prehoc, kind.__name__) is kind and kind.__name__ in prehoc.__all__


def test_defaults_are_the_designs() -> None:
    cis = CIS()
    assert (cis.sink, cis.local, cis.block_size, cis.tau, cis.radius) == (8, 32, 8, 0.6, 1)
    assert (cis.refresh, cis.local_window, cis.granularity, cis.matched, cis.dilate) == (
        "rolling",
        "frozen",
        "kv_head",
        False,
        None,
    )
    assert CIS(budget=1024).size().critical_for(10**5) == 984
    assert CIS().size().ratio == 1 / 8


def test_strings() -> None:
    assert parse_method("cis:budget=1024,tau=0.7") == CIS(budget=1024, tau=0.7)
    assert parse_method(" CIS : budget = 1024 ") == CIS(budget=1024)
    assert parse_method("cis:ratio=1/16,granularity=query_head,matched=true,dilate=none") == CIS(
        ratio=1 / 16, granularity="query_head", matched=True
    )
    assert parse_method("psaw:phi=0.5,start_layer=3") == PSAW(phi=0.5, start_layer=3)
    assert parse_method("psaw:start_layer=0.25").start_layer == 0.25  # type: ignore[attr-defined]
    assert parse_method("cpe:parts=psaw+etf") == CPE(parts=("psaw", "etf"))
    assert parse_method("cis:tau=-1").tau == -1  # type: ignore[attr-defined]


def test_a_configuration_needs_no_reading() -> None:
    with pytest.raises(TypeError, match=r"reads a text such as 'cis:budget=1024'; CIS\(.*needs no reading"):
        parse_method(CIS())  # type: ignore[arg-type]


def test_extra_adds_to_a_text_and_wins_over_a_preset() -> None:
    assert parse_method("cis:budget=64", {"tau": "0.5"}) == CIS(budget=64, tau=0.5)
    assert parse_method("cis-16", {"block_size": "4"}) == CIS(block_size=4, gate="query")
    with pytest.raises(
        ValueError, match="budget is given twice: budget=64 in 'cis:budget=64' and budget=128 beside it; give one"
    ):
        parse_method("cis:budget=64", {"tau": "0.5", "budget": 128})
    with pytest.raises(ValueError, match="unknown key 'budgte' for method 'cis'; did you mean 'budget'"):
        parse_method("cis", {"budgte": 3})


def test_presets() -> None:
    assert set(PRESETS) >= {"cis-8", "cis-16", "cpe-8", "cpe-16", "cis-star", "paper"}
    assert parse_method("cis-8") == CIS(block_size=8, gate="query")
    assert parse_method("cis-16:gate=score") == CIS(block_size=16)
    assert parse_method("cpe-16:budget=512") == CPE(block_size=16, gate="query", budget=512)
    assert parse_method("cis-star:budget=128") == CIS(matched=True, gate="query", budget=128)
    paper = parse_method("paper")
    assert isinstance(paper, CPE)
    assert (paper.granularity, paper.refresh, paper.local_window) == ("query_head", "block", "sliding")
    assert (paper.phi, paper.alpha, paper.psi, paper.gamma, paper.tau, paper.block_size) == (0.7, 1.5, 0.5, 1.0, 0.8, 8)
    assert paper.gate == "query" and CIS().gate == CPE().gate == "score"
    for name in PRESETS:
        parse_method(name)
        parse_method(f"{name}:sink=4")


@pytest.mark.parametrize(
    "text",
    ["dense", "cis", "cis:budget=1024,tau=0.7", "cis-star:budget=128", "paper", "cpe:parts=psaw+etf,start_layer=3",
     "psaw:phi=0.5,start_layer=0.25", "etf:kv=share", "streaming:budget=64", "oracle:mass=0.9", "cis:ratio=0.125"],
)  # fmt: skip
def test_describe_is_read_back(text: str) -> None:
    method = parse_method(text)
    assert parse_method(describe(method)) == method


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("csi", "unknown method 'csi'; did you mean 'cis'"),
        ("", "unknown method ''"),
        ("cis-9", "unknown method 'cis-9'; did you mean 'cis-"),
        ("infllm", r"unknown method 'infllm'.*\(known: .*cis.*streaming\)"),
        ("cis:buget=5", "unknown key 'buget' for method 'cis'; did you mean 'budget'"),
        ("cis:budget", "'budget' is not key=value; write for example budget=1024"),
        ("cis:=5", "'=5' is not key=value"),
        ("cis:budget=64,,tau=1", "'' is not key=value"),
        ("cis:tau=0.5, tau=0.6", "tau is given twice: tau=0.5 and tau=0.6; give one of them"),
        ("cis:budget=many", "budget='many' is not a valid value: expected int"),
        ("cis:budget=47", "budget=47 is too small.*give at least 48"),
        ("cis:budget=-1", "budget=-1 must be at least 1"),
        ("cis:tau=1.1", r"tau=1.1 must lie in \[-1.0, 1.0\]; it is a cosine"),
        ("cis:tau=-1.01", "tau=-1.01 must lie in"),
        ("cis:tau=nan", "tau=nan must lie in"),
        ("cis:block_size=0", "block_size=0 must be at least 1"),
        ("cis:radius=-1", "radius=-1 must be at least 0"),
        ("cis:dilate=-1", "dilate=-1 must be at least 0"),
        ("cis:refresh=roling", "unknown refresh 'roling'; did you mean 'rolling'"),
        ("cis:local_window=frosen", "unknown local_window 'frosen'; did you mean 'frozen'"),
        ("cis:granularity=head", "unknown granularity 'head'.*known: kv_head, query_head"),
        ("cis:matched=maybe", "matched='maybe' is not a valid value: expected bool"),
        ("cis:matched=true,mass=0.9", "matched=true needs a stated total: give budget, ratio or critical"),
        ("cis:matched=true,budget=48,block_size=16", "budget=48 leaves no critical key when matched.*give at least 56"),
        ("cis:budget=64,critical=9", "budget=64 and critical=9 both set the size"),
        ("cis:mass=2", "mass=2.0 must lie in"),
        ("oracle:tau=1", "unknown key 'tau' for method 'oracle'"),
        ("oracle:granularity=x", "unknown granularity 'x'"),
        ("dense:budget=64", "method 'dense' takes no keys, but budget was given"),
        ("streaming:sink=-1", "sink=-1 must be at least 0"),
        ("streaming:budget=4", "budget=4 is too small"),
        ("psaw:phi=0", r"phi=0.0 must lie in \(0.0, 1.0\]; 1 keeps every key"),
        ("psaw:phi=1.2", "phi=1.2 must lie in"),
        ("psaw:alpha=-1", "alpha=-1.0 must lie in"),
        ("psaw:start_layer=-1", "start_layer=-1 must be at least 0"),
        ("psaw:start_layer=1.5", "start_layer=1.5 must lie in"),
        ("psaw:local=0", "local=0 must be at least 1"),
        ("etf:psi=0", r"psi=0.0 must lie in \(0.0, 1.0\]; 1 freezes nothing"),
        ("etf:gamma=-0.5", "gamma=-0.5 must lie in"),
        ("etf:gamma=inf", "gamma=inf"),
        ("psaw:alpha=inf", "alpha=inf"),
        ("etf:kv=copy", "unknown kv 'copy'.*known: project, share"),
        ("cpe:parts=cis+pswa", "unknown parts 'pswa'; did you mean 'psaw'"),
        ("cpe:parts=", "parts=.* selects nothing"),
        ("cpe:phi=0", "phi=0.0 must lie in"),
        ("cpe:etf_start_layer=2.5", "start_layer=2.5 must lie in"),
        ("cpe:psi=3", "psi=3.0 must lie in"),
    ],
)  # fmt: skip
def test_errors_name_the_value_and_the_fix(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_method(text)


def test_errors_in_python_are_the_same() -> None:
    for build, message in (
        (lambda: CIS(tau=2), "tau=2 must lie in"),
        (lambda: CIS(budget=1.5), "budget=1.5 must be an integer"),  # type: ignore[arg-type]
        (lambda: CIS(block_size=True), "block_size=True must be an integer"),
        (lambda: PSAW(start_layer=True), "start_layer=True must be an integer"),
        (lambda: ETF(psi="half"), "psi='half' must be a number"),  # type: ignore[arg-type]
        (lambda: CPE(parts=()), "selects nothing"),
    ):
        with pytest.raises(ValueError, match=message):
            build()
    with pytest.raises(dataclasses.FrozenInstanceError):
        CIS().tau = 0.1  # type: ignore[misc]


def test_parse_pairs() -> None:
    assert parse_pairs(["a=1", " b = x=y "]) == {"a": "1", "b": "x=y"}
    with pytest.raises(ValueError, match="'a' is not key=value"):
        parse_pairs(["a"])


# ------------------------------------------------------------------------------------------- the references: what is read


def step(pad: tuple[int, ...], n: int, masked: tuple[int, ...] | None = None, prompt: int | None = None) -> Step:
    random = torch.Generator().manual_seed(n)
    b = len(pad)
    k = torch.randn(b, 2, n, 8, generator=random)
    rows = Rows(pad, tuple((n if prompt is None else prompt) - p for p in pad))
    return Step(0, torch.randn(b, 4, 8, generator=random), k, k, 0.5, rows, masked or (0,) * b)


def test_dense_asks_for_nothing() -> None:
    assert Dense().plan().dense
    assert not any(parse_method(name).plan().dense for name in METHODS if name != "dense")


@pytest.mark.parametrize("budget", [20, 47, 300])
def test_streaming_reads_sinks_and_the_last_keys(budget: int) -> None:
    pad = (0, 5, 60)
    decision = Streaming(budget=budget, sink=4).decide(step(pad, 100), State())
    assert isinstance(decision.selection, Window) and decision.selection.sink == 4
    for first, start in zip(pad, decision.selection.start, strict=True):
        read = {j for j in range(first, 100) if j < first + 4 or j >= start}
        t = 100 - first
        assert len(read) == min(budget, t)
        assert read == {first + i for i in range(t) if i < 4 or i >= t - (budget - 4)}


def test_streaming_by_ratio_keeps_the_size_it_had_at_the_prompt() -> None:
    streaming = Streaming(ratio=0.25, sink=4)
    for n in (201, 250):
        window = streaming.decide(step((0, 100), n, prompt=200), State()).selection
        assert isinstance(window, Window)
        assert [n - start for start in window.start] == [50 - 4, 25 - 4]


@pytest.mark.parametrize("granularity", ["kv_head", "query_head"])
@pytest.mark.parametrize("masked", [(0, 0, 0), (20, 9, 2)])
def test_oracle_takes_the_best_keys_of_every_query(granularity: Any, masked: tuple[int, ...]) -> None:
    """Best by the group's mean weight: no other set of this size retains more."""
    pad, oracle = (0, 5, 44), Oracle(critical=7, sink=3, local=4, granularity=granularity)
    one = step(pad, 60, masked)
    decision = oracle.decide(one, State())
    assert isinstance(decision.selection, Selection) and decision.retrieved is not None
    hs = decision.selection.indices.shape[1]
    assert hs == (2 if granularity == "kv_head" else 4)
    for row, first in enumerate(pad):
        begin = first + max(3, masked[row])
        middle = list(range(begin, 60 - 4))
        for head in range(hs):
            got = decision.selection.indices[row, head, : int(decision.selection.lengths[row, head])].tolist()
            always = [j for j in range(first, 60) if j < first + 3 or j >= 56]
            if len(middle) <= 7:
                assert got == [j for j in range(first, 60) if j < first + 3 or j >= begin]
                assert not decision.retrieved[row, head]
                continue
            visible = [j for j in range(first, 60) if j < first + 3 or j >= begin]
            weight = torch.zeros(60, dtype=torch.float64)
            for g in range(4 // hs):
                logits = one.k[row, head * 2 // hs].double() @ one.q[row, head * (4 // hs) + g].double() * 0.5
                weight[visible] += torch.softmax(logits[visible], 0)
            best = sorted(middle, key=lambda j: (-weight[j].item(), j))[:7]
            assert got == sorted(always + best)
            assert decision.retrieved[row, head]


def test_oracle_covering_everything_is_dense() -> None:
    decision = Oracle(critical=53, sink=3, local=4).decide(step((0, 10), 60), State())
    assert decision.selection is None and decision.counted == (False, False)


@pytest.mark.parametrize("mass", [0.3, 0.8, 1.0])
def test_oracle_by_mass(mass: float) -> None:
    one = step((0, 7), 60)
    decision = Oracle(mass=mass, sink=3, local=4).decide(one, State())
    assert isinstance(decision.selection, Selection)
    for row, first in enumerate((0, 7)):
        for head in range(2):
            length = int(decision.selection.lengths[row, head])
            used = decision.selection.indices[row, head, :length].long()
            for g in range(2):
                logits = one.k[row, head].double() @ one.q[row, head * 2 + g].double() * 0.5
                kept = torch.softmax(logits[first:], 0)[used - first].sum()
                assert kept >= mass - 1e-5
