"""Inputs of the attention benchmark: what a traced model scored, a tiled shape scores too, and no length is invented."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from bench_shapes import TINY, record
from prehoc.bench import inputs
from prehoc.bench.inputs import HEAD, RandomInputs, Shape, TracedInputs, open_inputs

PROMPT, STEPS = 90, 6


@pytest.fixture(scope="module")
def folder(tiny_llama: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces")
    record(tiny_llama, PROMPT, STEPS).save(path / "long.npz")
    record(tiny_llama, 70, 3).save(path / "short.npz")
    record(tiny_llama, PROMPT, STEPS, record=("qk",)).save(path / "qk.npz")
    record(tiny_llama, PROMPT, STEPS, "cis:critical=24", observe=False).save(path / "sparse.npz")
    return path


@pytest.mark.parametrize(("kv_heads", "groups", "dim"), [(5, 1, 8), (3, 5, 24), (2, 2, 16), (1, 3, 8)])
def test_every_score_is_one_of_the_traced_model(folder: Path, kv_heads: int, groups: int, dim: int) -> None:
    found = TracedInputs([folder / "long.npz"])
    shape = Shape("wide", 5, kv_heads * groups, kv_heads, dim)
    trace = inputs.Trace.load(folder / "long.npz")
    seen = set()
    for number, source in enumerate((0, 0, 0, 1, 1)):  # five layers over a depth of two
        layer = found.layer(shape, number, PROMPT + STEPS, STEPS)
        assert layer.k.shape == layer.v.shape == (kv_heads, PROMPT + STEPS, dim)
        for head in range(shape.heads):
            kv = head // groups
            scores = layer.q[:, head] @ layer.k[kv].T * dim**-0.5
            own = kv % 2
            wanted = [trace.q[:, source, own * 2 + g] @ trace.k[source, own].T * 8**-0.5 for g in range(2)]
            same = [g for g in range(2) if np.allclose(scores, wanted[g], atol=1e-5)]
            assert same, f"head {head} scores as none of its group"
            seen.add((source, own, same[0]))
            np.testing.assert_array_equal(layer.v[kv, :, :8], trace.v[source, own])
    if kv_heads * groups > 3:
        assert {(own, g) for _, own, g in seen} == {(0, 0), (0, 1), (1, 0), (1, 1)}, "every traced head is used"


def test_a_shorter_cell_keeps_the_first_and_the_last_keys(folder: Path) -> None:
    found = TracedInputs([folder / "long.npz"])
    whole, part = (found.layer(found.shape("traced"), 1, length, 2) for length in (PROMPT + STEPS, 80))
    torch.testing.assert_close(part.k, torch.cat([whole.k[:, :HEAD], whole.k[:, -(80 - HEAD) :]], 1))
    torch.testing.assert_close(part.v, torch.cat([whole.v[:, :HEAD], whole.v[:, -(80 - HEAD) :]], 1))
    torch.testing.assert_close(part.q, found.layer(found.shape("traced"), 1, PROMPT + STEPS, STEPS).q[-2:])


def test_the_shortest_trace_that_covers_a_length_is_used(folder: Path) -> None:
    both = TracedInputs([folder / "long.npz", folder / "short.npz"])
    shape = both.shape("traced")
    assert (shape.layers, shape.heads, shape.kv_heads, shape.dim) == (2, 4, 2, 8)
    short, long = (TracedInputs([folder / name]) for name in ("short.npz", "long.npz"))
    torch.testing.assert_close(both.layer(shape, 0, 73, 3).k, short.layer(shape, 0, 73, 3).k)
    torch.testing.assert_close(both.layer(shape, 0, 74, 3).k, long.layer(shape, 0, 74, 3).k)
    assert [one["tokens"] for one in both.describe()] == [73, 96]


def test_traces_that_cannot_serve_are_refused(folder: Path, tiny_llama: Callable[..., Path], tmp_path: Path) -> None:
    good = TracedInputs([folder / "long.npz", folder / "short.npz"])
    with pytest.raises(ValueError, match="length 97 is above the 96 tokens of the trace 'long.npz'; lengths are never"):
        good.check(97, 2)
    with pytest.raises(ValueError, match="4 steps are more than the 3 of the trace 'short.npz'"):
        good.check(70, 4)
    good.check(74, 4)
    with pytest.raises(ValueError, match="length 65 is below 66"):
        good.check(65, 2)
    with pytest.raises(ValueError, match="'qk.npz' has no queries, keys and values; record it with --record qkv"):
        TracedInputs([folder / "qk.npz"])
    with pytest.raises(ValueError, match="'sparse.npz' was decoded sparsely"):
        TracedInputs([folder / "sparse.npz"])
    with pytest.raises(ValueError, match="there is no trace"):
        open_inputs([str(folder / "none.npz")], 0)
    with pytest.raises(ValueError, match="--inputs random stands alone"):
        open_inputs(["random", str(folder / "long.npz")], 0)
    with pytest.raises(ValueError, match="unknown shape 'smolm2'; did you mean 'smollm2'"):
        good.shape("smolm2")
    other = inputs.Trace.load(folder / "short.npz")
    assert other.k is not None and other.v is not None
    other.k, other.v = other.k[:, :1], other.v[:, :1]
    other.save(tmp_path / "other.npz")
    with pytest.raises(ValueError, match="are of different models"):
        TracedInputs([folder / "long.npz", tmp_path / "other.npz"])


def test_a_head_size_that_repetition_cannot_fill_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(inputs.SHAPES, "odd", Shape("odd", 2, 2, 1, 12))
    with pytest.raises(ValueError, match="shape 'odd' has a head size of 12, which the traced 8 does not divide"):
        TracedInputs([folder / "long.npz"]).shape("odd")


def test_random_queries_stay_near_their_anchor_and_layers_differ() -> None:
    source = RandomInputs(3)
    one, again, other = (source.layer(TINY, number, 50, 17) for number in (0, 0, 1))
    torch.testing.assert_close(one.q, again.q)
    assert not torch.allclose(one.k, other.k) and not torch.allclose(one.k, one.v)
    cosine = torch.cosine_similarity(one.q[:1], one.q, dim=-1)
    assert (cosine > 0.8).all() and (cosine[16] < 0.999).all()
    with pytest.raises(ValueError, match="unknown shape 'llama2-7'; did you mean 'llama2-7b'"):
        source.shape("llama2-7")
    with pytest.raises(ValueError, match="length 17 leaves no prompt before 17 steps"):
        source.check(17, 17)
    assert TINY.kv_bytes(3, 50, torch.bfloat16) == 2 * 3 * 2 * 50 * 8 * 2
