"""The kernels of every backend against plain loops: numpy float64 and Python, written from the design."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from prehoc.kernels import cpu, reference

# largest error of an attention output of order one against float64 softmax over the same (rounded) inputs
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DTYPES = list(TOLERANCE)
quick = settings(max_examples=60, deadline=None)


ops: Any = reference


@pytest.fixture(scope="module", params=["reference", "cpu"], autouse=True)
def backend(request: pytest.FixtureRequest) -> None:
    """Run every test with the operations of each backend; what only the reference has stays its own."""
    global ops
    native = {name: getattr(cpu, name) for name in ("retrieve", "dilate", "decode_dense", "decode_selected")}
    ops = SimpleNamespace(**{**vars(reference), **(native if request.param == "cpu" else {})})


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def view(x: Tensor, spare: int = 7, offset: int = 3) -> Tensor:
    """The same values as a cache view: spare capacity behind them, and not at the start of their storage."""
    b, h, n, d = x.shape
    storage = torch.full((offset * d + b * h * (n + spare) * d,), float("nan"), dtype=x.dtype)
    cache = storage[offset * d :].view(b, h, n + spare, d)
    cache[:, :, :n] = x
    return cache[:, :, :n]


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def attend(q: Tensor, k: Tensor, v: Tensor, columns: list[list[list[int]]], scale: float) -> np.ndarray:
    """Plain attention ``[B, H, Dv]`` of each query head to its own list of columns."""
    qn, kn, vn = (x.double().numpy() for x in (q, k, v))
    b, h, _ = qn.shape
    out = np.zeros((b, h, vn.shape[-1]))
    for i, j in itertools.product(range(b), range(h)):
        use, kv = columns[i][j], j * kn.shape[1] // h
        out[i, j] = softmax(kn[i, kv, use] @ qn[i, j] * scale) @ vn[i, kv, use]
    return out


def close(got: Tensor, wanted: np.ndarray, factor: float = 1.0) -> None:
    assert got.isfinite().all()
    error = np.abs(got.double().numpy() - wanted).max()
    assert error <= TOLERANCE[got.dtype] * factor, error


# --------------------------------------------------------------------------------------------------------------- ranked


def test_ranked_takes_the_lower_index_of_equal_scores() -> None:
    score = torch.tensor([[1.0, 3.0, 3.0, -1.0, 3.0, 1.0]])
    assert ops.ranked(score, 6).tolist() == [[1, 2, 4, 0, 5, 3]]
    assert ops.ranked(score, 2).tolist() == [[1, 2]]


def test_ranked_treats_both_zeros_alike() -> None:
    assert ops.ranked(torch.tensor([[-0.0, 0.0, -0.0, 1e-45, -1e-45]]), 5).tolist() == [[3, 0, 1, 2, 4]]


def test_ranked_puts_minus_infinity_last() -> None:
    inf = math.inf
    assert ops.ranked(torch.tensor([[-inf, -3e38, -inf, 0.0]]), 4).tolist() == [[3, 1, 0, 2]]
    assert ops.ranked(torch.tensor([[-inf, -inf, -inf]]), 2).tolist() == [[0, 1]]
    assert ops.ranked(torch.tensor([[-5.0, inf, -4.0]]), 3).tolist() == [[1, 2, 0]]


@quick
@given(
    st.lists(
        st.one_of(st.floats(width=32, allow_nan=False), st.sampled_from([0.0, -0.0, 1.0, -1.0, -math.inf])),
        min_size=1,
        max_size=40,
    ),
    st.integers(1, 40),
)
def test_ranked_equals_a_stable_sort(values: list[float], k: int) -> None:
    k = min(k, len(values))
    wanted = sorted(range(len(values)), key=lambda i: (-values[i], i))[:k]
    score = torch.tensor([values, values[::-1]])
    got = ops.ranked(score, k)
    assert got[0].tolist() == wanted
    back = values[::-1]
    assert got[1].tolist() == sorted(range(len(back)), key=lambda i: (-back[i], i))[:k]


def test_ranked_of_many_equal_scores() -> None:
    """A top-k of the library alone would take any of them."""
    score = torch.zeros(5, 3000)
    score[:, ::7] = 1.0
    assert (
        ops.ranked(score, 500).tolist()
        == [
            (list(range(0, 3000, 7)) + [1, 2, 3, 4, 5, 6] + list(range(8, 3000)))[:429]
            + [i for i in range(3000) if i % 7][:71]
        ]
        * 5
    )


# ------------------------------------------------------------------------------------------------------------- retrieve


def slow_retrieve(
    q: Tensor,
    k: Tensor,
    hs: int,
    row: int,
    head: int,
    first: int,
    start: int,
    sink: int,
    local: int,
    scale: float,
    reduce: str,
) -> tuple[dict[int, float], np.ndarray, list[int], list[int]]:
    """Scores of the middle, weights ``[G, visible]``, the visible columns and those outside the middle."""
    group, n = q.shape[1] // hs, k.shape[2]
    kn = k[row, head * k.shape[1] // hs].double().numpy()
    visible = [j for j in range(first, n) if j < first + sink or j >= start]
    relative = []
    for g in range(group):
        logits = kn[visible] @ q[row, head * group + g].double().numpy() * scale
        relative.append(np.log(softmax(logits)))
    table = np.array(relative)
    merged = table.max(0) if reduce == "max" else np.log(np.exp(table).sum(0))
    middle = [j for j in visible if start <= j < n - local]
    score = {j: float(merged[visible.index(j)]) for j in middle}
    return score, np.exp(table), visible, [j for j in visible if j not in score]


RETRIEVALS: list[dict[str, Any]] = [
    {"group": 1},
    {"group": 3},
    {"group": 7, "hkv": 1},
    {"group": 3, "granularity": "query"},
    {"group": 2, "pad": (0, 5, 14)},
    {"group": 2, "pad": (0, 5, 14), "granularity": "query"},
    {"group": 1, "pad": (3, 3, 3)},
    {"group": 2, "hide": (11, 11, 11)},
    {"group": 2, "pad": (0, 5, 14), "hide": (20, 0, 9)},
    {"group": 1, "pad": (0, 5, 14), "hide": (20, 0, 9)},
    {"group": 2, "sink": 0},
    {"group": 2, "sink": 0, "pad": (0, 5, 14)},
    {"group": 2, "local": 1},
    {"group": 4, "d": 40, "n": 51},
    {"group": 2, "topk": 100},
    {"group": 2, "topk": 100, "pad": (0, 5, 14)},
    {"group": 2, "topk": 1},
    {"group": 3, "reduce": "mean"},
    {"group": 3, "reduce": "mean", "pad": (0, 5, 14)},
    {"group": 1, "reduce": "mean"},
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("subset", [False, True], ids=["all heads", "some heads"])
@pytest.mark.parametrize("with_mass", [False, True], ids=["", "mass"])
@pytest.mark.parametrize("case", RETRIEVALS, ids=str)
def test_retrieve_equals_the_loops(case: dict[str, Any], with_mass: bool, subset: bool, dtype: torch.dtype) -> None:
    hkv, group, d, n = case.get("hkv", 2), case["group"], case.get("d", 24), case.get("n", 47)
    sink, local, topk, reduce = (
        case.get("sink", 3),
        case.get("local", 5),
        case.get("topk", 9),
        case.get("reduce", "max"),
    )
    pad, hide = case.get("pad", (0, 0, 0)), case.get("hide", (0, 0, 0))
    hs = hkv * group if case.get("granularity") == "query" else hkv
    q, k = normal(3, hkv * group, d, seed=1, dtype=dtype), view(normal(3, hkv, n, d, seed=2, dtype=dtype))
    start = tuple(p + max(sink, h) for p, h in zip(pad, hide, strict=True))
    scale = 0.37
    heads = torch.tensor([3 * hs - 1, 0, hs]) if subset else None
    found = ops.retrieve(q, k, heads, hs, pad, start, sink, local, topk, scale, with_mass, reduce)
    pairs = list(range(3 * hs)) if heads is None else heads.tolist()
    assert found.order.shape[0] == len(pairs) and found.order.dtype == torch.int64
    assert (found.weights is not None) == (found.base is not None) == with_mass
    for r, pair in enumerate(pairs):
        row, head = divmod(pair, hs)
        score, weights, visible, outside = slow_retrieve(
            q, k, hs, row, head, pad[row], start[row], sink, local, scale, reduce
        )
        got = found.order[r].tolist()
        used = [j for j in got if j >= 0]
        assert len(used) == min(topk, len(score)) and got[len(used) :] == [-1] * (len(got) - len(used))
        assert len(set(used)) == len(used) and set(used) <= set(score)
        values = [score[j] for j in used]
        assert all(a >= b - 1e-5 for a, b in zip(values, values[1:], strict=False))  # best first
        rest = [score[j] for j in score if j not in used]
        assert not rest or min(values) >= max(rest) - 1e-5
        if with_mass:
            assert found.weights is not None and found.base is not None
            at = [visible.index(j) for j in used]
            np.testing.assert_allclose(found.weights[r, :, : len(used)].numpy(), weights[:, at], atol=1e-6, rtol=1e-4)
            base = weights[:, [visible.index(j) for j in outside]].sum(1)
            np.testing.assert_allclose(found.base[r].numpy(), base, atol=1e-6, rtol=1e-4)


def test_retrieve_breaks_ties_by_column() -> None:
    """Equal keys have bit-equal scores, for a group and for padded rows too."""
    for group, pad in itertools.product((1, 3), ((0, 0), (0, 8))):
        q = normal(2, 2 * group, 16, seed=3)
        k = normal(2, 2, 1, 16, seed=4).expand(2, 2, 40, 16).contiguous()
        start = tuple(p + 2 for p in pad)
        for heads in (None, torch.arange(4)):
            found = ops.retrieve(q, k, heads, 2, pad, start, 2, 4, 6, 0.25)
            assert found.order.tolist() == [list(range(start[i // 2], start[i // 2] + 6)) for i in range(4)]


@pytest.mark.parametrize("group", [1, 3])
def test_all_heads_and_some_heads_agree(group: int) -> None:
    q, k = normal(2, 2 * group, 64, seed=5), view(normal(2, 2, 301, 64, seed=6))
    every = ops.retrieve(q, k, None, 2, (0, 0), (4, 4), 4, 8, 30, 0.125)
    some = ops.retrieve(q, k, torch.tensor([1, 3]), 2, (0, 0), (4, 4), 4, 8, 30, 0.125)
    assert torch.equal(every.order[[1, 3]], some.order)


def test_retrieve_refuses_heads_that_fit_nothing() -> None:
    with pytest.raises(ValueError, match="3 selection heads fit neither 4 query heads nor 2 KV heads"):
        ops.retrieve(normal(1, 4, 8), normal(1, 2, 30, 8), None, 3, (0,), (2,), 2, 4, 5, 1.0)


def test_retrieve_does_not_touch_spare_capacity() -> None:
    """The unused columns of the buffer are NaN in `view`: none may reach a score."""
    q, k = normal(1, 2, 16, seed=7), view(normal(1, 2, 33, 16, seed=8), spare=64)
    found = ops.retrieve(q, k, None, 2, (0,), (2,), 2, 4, 10, 0.25, with_mass=True)
    assert found.weights is not None and bool(found.weights.isfinite().all())
    assert int(found.order.max()) < 29


# --------------------------------------------------------------------------------------------------------------- dilate


def slow_dilate(
    order: list[int],
    first: int,
    start: int,
    columns: int,
    sink: int,
    local: int,
    radius: int,
    best: int,
    critical: int,
    limit: int | None = None,
    per_best: int | None = None,
) -> list[int]:
    keys = [j for j in order[:critical] if j >= 0]
    always = list(range(first, first + sink)) + list(range(columns - local, columns))

    def built(some: int) -> list[int]:
        m = some // per_best if limit is not None and per_best else min(best, some)
        chosen = set(keys[:some])
        for p in keys[:m]:
            chosen |= {j for j in range(p - radius, p + radius + 1) if start <= j < columns - local}
        return sorted(chosen | set(always))

    some = len(keys)
    while limit is not None and some and len(built(some)) > limit:
        some -= 1
    return built(some)


def lists(indices: Tensor, lengths: Tensor) -> list[list[int]]:
    assert indices.dtype == torch.int32 and lengths.dtype == torch.int32
    out = []
    for row, length in zip(indices.tolist(), lengths.tolist(), strict=True):
        assert row[length:] == [-1] * (len(row) - length)
        assert row[:length] == sorted(set(row[:length]))
        out.append(row[:length])
    return out


dilations = st.fixed_dictionaries(
    {
        "columns": st.integers(20, 60),
        "sink": st.integers(0, 4),
        "local": st.integers(1, 6),
        "radius": st.integers(0, 3),
        "k": st.integers(1, 12),
        "seed": st.integers(0, 10**6),
        "first": st.integers(0, 5),
        "hidden": st.integers(0, 5),
    }
)


@settings(max_examples=150, deadline=None)
@given(dilations, st.booleans(), st.booleans(), st.sampled_from([None, 0, 1, 4, 20]))
def test_dilate_equals_the_loops(sizes: dict[str, int], matched: bool, tensors: bool, m: int | None) -> None:
    n, sink, local, k = sizes["columns"], sizes["sink"], sizes["local"], sizes["k"]
    random = np.random.default_rng(sizes["seed"])
    firsts = [sizes["first"], 0, 2]
    starts = [f + sink + h for f, h in zip(firsts, (sizes["hidden"], 0, 1), strict=True)]
    order = []
    for start in starts:
        middle = random.permutation(np.arange(start, n - local)).tolist() if start < n - local else []
        order.append((middle + [-1] * k)[:k])
    criticals = random.integers(0, k + 1, 3).tolist() if tensors else [int(random.integers(0, k + 1))] * 3
    bests = [c // 3 if m is None else m for c in criticals]
    limits = [sink + local + int(x) for x in random.integers(0, 25, 3)] if tensors else [sink + local + k] * 3
    critical = torch.tensor(criticals)[:, None] if tensors else criticals[0]
    best: Any = bests[0] if not tensors or m is not None else torch.tensor(bests)[:, None]
    limit: Any = None if not matched else torch.tensor(limits)[:, None] if tensors else limits[0]
    per_best = 3 if matched and m is None else None
    got = ops.dilate(
        torch.tensor(order),
        torch.tensor(firsts)[:, None],
        torch.tensor(starts)[:, None],
        n,
        sink,
        local,
        sizes["radius"],
        best,
        critical,
        limit,
        per_best,
    )
    wanted = [
        slow_dilate(
            order[i],
            firsts[i],
            starts[i],
            n,
            sink,
            local,
            sizes["radius"],
            bests[i],
            criticals[i],
            limits[i] if matched else None,
            per_best,
        )
        for i in range(3)
    ]
    assert lists(*got) == wanted


def test_neighbours_outside_the_middle_are_dropped_not_shifted() -> None:
    order = torch.tensor([[4, 29, 15]])
    first, start = torch.tensor([[0]]), torch.tensor([[4]])
    got = lists(*ops.dilate(order, first, start, 34, 2, 4, 2, 3, 3))
    assert got == [[0, 1, 4, 5, 6, 13, 14, 15, 16, 17, 27, 28, 29, 30, 31, 32, 33]]


@pytest.mark.parametrize(("radius", "best"), [(0, 5), (3, 0)])
def test_no_dilation(radius: int, best: int) -> None:
    order = torch.tensor([[20, 5, 12]])
    got = ops.dilate(order, torch.tensor([[0]]), torch.tensor([[2]]), 40, 2, 3, radius, best, 3)
    assert lists(*got) == [[0, 1, 5, 12, 20, 37, 38, 39]]


def test_limit_is_met_as_closely_as_possible() -> None:
    """The next larger k' would not fit: the budget is used up."""
    random = np.random.default_rng(3)
    for _ in range(60):
        order = random.permutation(np.arange(4, 90))[:24].tolist()
        limit = int(random.integers(12, 40))
        call = (torch.tensor([order]), torch.tensor([[0]]), torch.tensor([[4]]), 98, 4, 8, 1)
        got = lists(*ops.dilate(*call, 8, 24, limit, 3))[0]
        assert len(got) <= limit
        kept = max([i + 1 for i, j in enumerate(order) if j in got], default=0)
        if kept < 24:
            more = slow_dilate(order, 0, 4, 98, 4, 8, 1, 0, kept + 1, 10**6, 3)
            assert len(more) > limit or set(more) <= set(got)


# ----------------------------------------------------------------------------------------------------------- gather_rows


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hs", [2, 6])
def test_gather_rows(hs: int, dtype: torch.dtype) -> None:
    plain = normal(3, 2, 23, 40, dtype=dtype)
    indices = torch.randint(0, 23, (3, hs, 11), generator=torch.Generator().manual_seed(1)).to(torch.int32)
    for x in (plain, view(plain), view(plain, spare=0, offset=9), view(plain)[1:], view(plain)[:, 1:], view(plain)[:1]):
        if hs % x.shape[1]:
            continue
        got = ops.gather_rows(x, indices[: x.shape[0]])
        for b, h in itertools.product(range(x.shape[0]), range(hs)):
            assert torch.equal(got[b, h], x[b, h * x.shape[1] // hs][indices[b, h].long()])


def test_gather_rows_reads_column_zero_for_padding() -> None:
    x = view(normal(1, 1, 5, 8))
    got = ops.gather_rows(x, torch.tensor([[[2, -1]]], dtype=torch.int32))
    assert torch.equal(got[0, 0], x[0, 0, [2, 0]])


# ------------------------------------------------------------------------------------------------------------ attention

SHAPES = [(2, 2, 1, 64), (1, 3, 3, 40), (2, 1, 7, 80), (3, 2, 2, 96), (2, 2, 4, 128), (1, 1, 4, 256), (2, 2, 2, 17)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("granularity", ["kv", "query"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decode_selected(shape: tuple[int, ...], granularity: str, dtype: torch.dtype) -> None:
    b, hkv, group, d = shape
    n, hs = 101, hkv * (group if granularity == "query" else 1)
    q, k, v = (
        normal(b, hkv * group, d, seed=1, dtype=dtype),
        view(normal(b, hkv, n, d, seed=2, dtype=dtype)),
        view(normal(b, hkv, n, d, seed=3, dtype=dtype), spare=2, offset=1),
    )
    random = np.random.default_rng(4)
    for ragged in (False, True):
        chosen = [
            [
                sorted(random.choice(n, size=int(random.integers(1, 30)) if ragged else 21, replace=False).tolist())
                for _ in range(hs)
            ]
            for _ in range(b)
        ]
        longest = max(len(x) for row in chosen for x in row)
        indices = torch.tensor([[x + [-1] * (longest - len(x)) for x in row] for row in chosen], dtype=torch.int32)
        lengths = torch.tensor([[len(x) for x in row] for row in chosen], dtype=torch.int32)
        columns = [[row[h * hs // (hkv * group)] for h in range(hkv * group)] for row in chosen]
        got = ops.decode_selected(q, k, v, indices, lengths, d**-0.5, full=not ragged)
        assert got.shape == (b, hkv * group, d) and got.dtype == dtype
        close(got, attend(q, k, v, columns, d**-0.5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("first", "sink", "hide"),
    [
        ((0, 0, 0), 0, (0, 0, 0)),
        ((7, 7, 7), 0, (0, 0, 0)),
        ((0, 13, 98), 0, (0, 0, 0)),
        ((0, 0, 0), 4, (60, 60, 60)),
        ((0, 13, 40), 4, (60, 30, 20)),
        ((0, 13, 40), 4, (3, 4, 5)),
        ((0, 13, 40), 0, (60, 0, 20)),
        ((5, 5, 5), 4, (60, 4, 0)),
        ((0, 13, 98), 4, (60, 3, 0)),
        ((0, 0, 0), 4, (4, 4, 4)),
        ((0, 0, 0), 4, (100, 100, 100)),
    ],
)
def test_decode_dense(
    first: tuple[int, ...], sink: int, hide: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    b, hkv, group, d = shape
    n = 101
    q, k, v = (
        normal(b, hkv * group, d, seed=1, dtype=dtype),
        view(normal(b, hkv, n, d, seed=2, dtype=dtype)),
        view(normal(b, hkv, n, d, seed=3, dtype=dtype)),
    )
    first, hide = first[:b], hide[:b]
    start = tuple(f + h for f, h in zip(first, hide, strict=True))
    columns = [
        [[j for j in range(f, n) if j < f + sink or j >= s]] * (hkv * group) for f, s in zip(first, start, strict=True)
    ]
    got = ops.decode_dense(q, k, v, first, sink, start, d**-0.5)
    assert got.dtype == dtype
    close(got, attend(q, k, v, columns, d**-0.5))


def test_values_may_have_another_size_than_keys() -> None:
    q, k, v = normal(2, 4, 24), view(normal(2, 2, 31, 24, seed=1)), view(normal(2, 2, 31, 16, seed=2))
    columns = [[list(range(31))] * 4] * 2
    close(ops.decode_dense(q, k, v, (0, 0), 0, (0, 0), 0.2), attend(q, k, v, columns, 0.2))
    indices = torch.arange(31, dtype=torch.int32).expand(2, 2, 31)
    got = ops.decode_selected(q, k, v, indices, torch.full((2, 2), 31, dtype=torch.int32), 0.2, full=True)
    close(got, attend(q, k, v, columns, 0.2))


def test_selecting_everything_is_dense() -> None:
    q, k, v = normal(2, 6, 64), view(normal(2, 2, 77, 64, seed=1)), view(normal(2, 2, 77, 64, seed=2))
    indices = torch.arange(77, dtype=torch.int32).expand(2, 2, 77)
    chosen = ops.decode_selected(q, k, v, indices, torch.full((2, 2), 77, dtype=torch.int32), 0.125)
    torch.testing.assert_close(chosen, ops.decode_dense(q, k, v, (0, 0), 0, (0, 0), 0.125), atol=1e-6, rtol=0)


def test_unselected_keys_are_never_read() -> None:
    """NaN in every other column changes no bit."""
    q, k, v = normal(1, 4, 32), normal(1, 2, 50, 32, seed=1), normal(1, 2, 50, 32, seed=2)
    use = torch.tensor([0, 3, 17, 49], dtype=torch.int32).expand(1, 2, 4)
    lengths = torch.full((1, 2), 4, dtype=torch.int32)
    clean = ops.decode_selected(q, k, v, use, lengths, 0.2, full=True)
    hidden = torch.ones(50, dtype=torch.bool)
    hidden[use[0, 0].long()] = False
    k[:, :, hidden], v[:, :, hidden] = math.nan, math.nan
    assert torch.equal(ops.decode_selected(q, k, v, use, lengths, 0.2, full=True), clean)


def test_extreme_logits_stay_finite() -> None:
    q, k, v = 200 * normal(1, 2, 64), 200 * normal(1, 2, 40, 64, seed=1), normal(1, 2, 40, 64, seed=2)
    assert bool(ops.decode_dense(q, k, v, (0,), 2, (20,), 1.0).isfinite().all())
    found = ops.retrieve(q, k, None, 2, (0,), (2,), 2, 4, 9, 1.0, with_mass=True)
    assert found.weights is not None and bool(found.weights.isfinite().all())
