"""The Triton kernels against the reference: on a CUDA device, or on the CPU with TRITON_INTERPRET=1.

`test_triton.py` runs this file in a process of its own, as Triton reads that variable when it is imported; hence the name,
which pytest does not collect by itself. Tiles and splits are made small, so that small shapes meet every border.
"""

from __future__ import annotations

import importlib
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from prehoc.kernels import host, prefill, reference, resolve
from prehoc.kernels import triton as ops
from prehoc.kernels.triton import decode as decode_module
from prehoc.kernels.triton import launch
from prehoc.kernels.triton import prefill as prefill_module
from prehoc.kernels.triton import score as score_module
from prehoc.kernels.triton import topk as topk_module
from prehoc.methods.cis import CIS
from prehoc.selection import Rows, Selection, State, Step

# the package has a function of this name
dilate_module = importlib.import_module("prehoc.kernels.triton.dilate")


DEVICE = torch.device("cpu" if launch.INTERPRETED else "cuda")
# largest error of an attention output of order one against float64 softmax over the same (rounded) inputs
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "SPLIT_KEYS", 40)
    monkeypatch.setattr(decode_module, "MOST_KEYS", 32)
    monkeypatch.setattr(score_module, "RELATE_KEYS", 32)
    monkeypatch.setattr(topk_module, "SELECT_KEYS", 32)
    monkeypatch.setattr(dilate_module, "KEYS", 32)
    small = {key: prefill_module.Tile(32, 16, 4, 2) for key in prefill_module.TILES}
    monkeypatch.setattr(prefill_module, "TILES", small)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def view(x: Tensor, spare: int = 7) -> Tensor:
    """The same values as a cache view: NaN behind them and in front."""
    b, h, n, d = x.shape
    cache = torch.full((b + 1, h, n + spare, d), math.nan, dtype=x.dtype, device=x.device)
    cache[1:, :, :n] = x
    return cache[1:, :, :n]


def attend(q: Tensor, k: Tensor, v: Tensor, columns: list[list[list[int]]], scale: float) -> tuple[Tensor, Tensor]:
    """Plain attention in float64 of each query head to its own list of columns, and its LSE."""
    (b, h, _), hkv = q.shape, k.shape[1]
    q, k, v = q.double().cpu(), k.double().cpu(), v.double().cpu()
    out, lse = torch.zeros(b, h, v.shape[-1], dtype=torch.float64), torch.full((b, h), -math.inf, dtype=torch.float64)
    for i, j in itertools.product(range(b), range(h)):
        use, kv = columns[i][j], j * hkv // h
        if use:
            logits = k[i, kv, use] @ q[i, j] * scale
            out[i, j], lse[i, j] = torch.softmax(logits, 0) @ v[i, kv, use], torch.logsumexp(logits, 0)
    return out, lse


def close(got: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor], dtype: torch.dtype) -> None:
    assert got[0].dtype == dtype and got[1].dtype == torch.float32
    torch.testing.assert_close(got[0].double().cpu(), wanted[0], atol=TOLERANCE[dtype], rtol=0)
    torch.testing.assert_close(got[1].double().cpu(), wanted[1], atol=1e-5, rtol=0)


# ------------------------------------------------------------------------------------------------------------- decode

# rows, KV heads, group, head size, head size of the values, dtype
SHAPES = [
    (2, 2, 1, 64, 64, torch.float32),
    (2, 1, 3, 40, 24, torch.float32),
    (1, 1, 17, 80, 80, torch.bfloat16),
    (2, 2, 1, 96, 96, torch.bfloat16),
    (1, 2, 4, 128, 128, torch.float16),
    (1, 1, 2, 256, 256, torch.float16),
    (2, 1, 2, 17, 9, torch.float32),
]


def tensors(b: int, hkv: int, group: int, d: int, dv: int, dtype: torch.dtype, n: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k = normal(b, hkv * group, d, seed=1, dtype=dtype), view(normal(b, hkv, n, d, seed=2, dtype=dtype))
    return q, k, view(normal(b, hkv, n, dv, seed=3, dtype=dtype), spare=2)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("first", "sink", "hide"),
    [((0, 0), 0, (0, 0)), ((7, 40), 4, (60, 30)), ((0, 99), 4, (3, 0)), ((13, 0), 0, (20, 90))],
    ids=str,
)
def test_decode_dense(shape: tuple[Any, ...], first: tuple[int, ...], sink: int, hide: tuple[int, ...]) -> None:
    b, hkv, group, d, _, dtype = shape
    n = 101
    q, k, v = tensors(*shape, n)
    first, start = first[:b], tuple(f + h for f, h in zip(first[:b], hide, strict=False))
    columns = [
        [[j for j in range(f, n) if j < f + sink or j >= s]] * (hkv * group) for f, s in zip(first, start, strict=True)
    ]
    got = ops.decode_dense(q, k, v, first, sink, start, d**-0.5, with_lse=True)
    close(got, attend(q, k, v, columns, d**-0.5), dtype)


def some_lists(b: int, hs: int, n: int, width: int) -> tuple[Tensor, Tensor, list[list[list[int]]]]:
    """Ascending lists of unequal lengths, the last one empty; what lies behind them names columns that must not be read."""
    random = torch.Generator().manual_seed(4)
    indices, lengths = torch.full((b, hs, width), n - 1), torch.zeros(b, hs)
    for i, j in itertools.product(range(b), range(hs)):
        length = 0 if (i, j) == (b - 1, hs - 1) else int(torch.randint(1, width + 1, (1,), generator=random))
        indices[i, j, :length] = torch.randperm(n - 1, generator=random)[:length].sort().values
        lengths[i, j] = length
    listed = [[indices[i, j, : int(lengths[i, j])].tolist() for j in range(hs)] for i in range(b)]
    return indices.int().to(DEVICE), lengths.int().to(DEVICE), listed


def per_query_head(listed: list[list[list[int]]], heads: int) -> list[list[list[int]]]:
    return [[row[h * len(row) // heads] for h in range(heads)] for row in listed]


@pytest.mark.parametrize("shape", SHAPES[:2] + SHAPES[3:], ids=str)
@pytest.mark.parametrize("granularity", ["kv", "query"])
def test_decode_selected(shape: tuple[Any, ...], granularity: str) -> None:
    b, hkv, group, d, _, dtype = shape
    q, k, v = tensors(*shape, 101)
    indices, lengths, listed = some_lists(b, hkv * (group if granularity == "query" else 1), 101, 47)
    k[:, :, 100], v[:, :, 100] = math.nan, math.nan
    got = ops.decode_selected(q, k, v, indices, lengths, d**-0.5, with_lse=True)
    close(got, attend(q, k, v, per_query_head(listed, hkv * group), d**-0.5), dtype)
    alone = ops.decode_selected(q, k, v, indices, lengths, d**-0.5)
    assert torch.equal(alone, got[0])


def test_parts_merge_by_their_lse_into_the_whole() -> None:
    q, k, v = tensors(1, 2, 3, 64, 64, torch.float32, 90)
    whole = ops.decode_dense(q, k, v, (0,), 0, (0,), 0.125)
    lists = [torch.arange(*ends, dtype=torch.int32, device=DEVICE).expand(1, 2, -1) for ends in ((0, 35), (35, 90))]
    parts = [
        ops.decode_selected(
            q, k, v, x, torch.full((1, 2), x.shape[2], dtype=torch.int32, device=DEVICE), 0.125, True, True
        )
        for x in lists
    ]
    shares = torch.softmax(torch.stack([lse for _, lse in parts]), 0)[..., None]
    torch.testing.assert_close(
        sum(w * out for w, (out, _) in zip(shares, parts, strict=True)), whole, atol=1e-6, rtol=0
    )


@pytest.mark.parametrize(("block", "shape"), [(16, SHAPES[1]), (32, SHAPES[3]), (16, SHAPES[4])], ids=str)
def test_paged(block: int, shape: tuple[Any, ...]) -> None:
    """Blocks in any order, of one buffer ``[NB, block, Hkv, D + Dv]``: no dimension but the last is where it was."""
    b, hkv, group, d, dv, dtype = shape
    lengths = [70, 31][:b]
    q, k, v = tensors(*shape, 80)
    blocks = torch.full((9 * b, block, hkv, d + dv), math.nan, dtype=dtype, device=DEVICE)
    order = torch.randperm(9 * b, generator=torch.Generator().manual_seed(5))
    table = torch.full((b, 6), 2**30, dtype=torch.int32)
    for i, length in enumerate(lengths):
        for j in range(-(-length // block)):
            table[i, j] = place = int(order[i * 6 + j])
            size = min(block, length - j * block)
            both = torch.cat([k, v], -1)[i, :, j * block : j * block + size].transpose(0, 1)
            blocks[place, :size] = both
    k_blocks, v_blocks = blocks.transpose(1, 2).split([d, dv], -1)
    columns = [[list(range(length))] * (hkv * group) for length in lengths]
    counts = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    got = ops.decode_dense_paged(q, k_blocks, v_blocks, table.to(DEVICE), counts, d**-0.5, with_lse=True)
    close(got, attend(q, k, v, columns, d**-0.5), dtype)
    indices, chosen, listed = some_lists(b, hkv, min(lengths), 25)
    got = ops.decode_selected_paged(q, k_blocks, v_blocks, table.to(DEVICE), indices, chosen, d**-0.5, with_lse=True)
    close(got, attend(q, k, v, per_query_head(listed, hkv * group), d**-0.5), dtype)
    found = ops.retrieve_paged(q, k_blocks, table.to(DEVICE), counts, None, hkv, 2, 4, 30, d**-0.5).order
    for pair, order in enumerate(found.tolist()):
        i, head = pair // hkv, torch.tensor([pair % hkv])
        one = q[i : i + 1].cpu(), k[i : i + 1, :, : lengths[i]].cpu()
        wanted = reference.retrieve(*one, head, hkv, (0,), (2,), 2, 4, 30, d**-0.5).order[0].tolist()
        assert order == wanted + [-1] * (30 - len(wanted))


# ----------------------------------------------------------------------------------------------------------- retrieve

RETRIEVALS: list[dict[str, Any]] = [
    {"group": 1},
    {"group": 1, "pad": (0, 5, 14), "hide": (20, 0, 9), "reduce": "mean"},
    {"group": 3, "dtype": torch.bfloat16, "n": 110},
    {"group": 3, "granularity": "query", "pad": (0, 5, 14)},
    {"group": 2, "pad": (0, 5, 14), "hide": (20, 0, 9), "sink": 0},
    {"group": 2, "topk": 100, "pad": (0, 5, 14), "dtype": torch.float16},
    {"group": 5, "reduce": "mean", "local": 1, "n": 110},
    {"group": 2, "pad": (0, 0, 46), "topk": 30},
]


@pytest.mark.parametrize("with_mass", [False, True], ids=["", "mass"])
@pytest.mark.parametrize("case", RETRIEVALS, ids=str)
def test_retrieve(case: dict[str, Any], with_mass: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    group, dtype, n, d = case["group"], case.get("dtype", torch.float32), case.get("n", 47), 24
    sink, local, topk = case.get("sink", 3), case.get("local", 5), case.get("topk", 9)
    reduce, pad, hide = case.get("reduce", "max"), case.get("pad", (0, 0, 0)), case.get("hide", (0, 0, 0))
    hs = 2 * group if case.get("granularity") == "query" else 2
    q, k = normal(3, 2 * group, d, seed=1, dtype=dtype), view(normal(3, 2, n, d, seed=2, dtype=dtype))
    start = tuple(p + max(sink, h) for p, h in zip(pad, hide, strict=True))
    heads = torch.tensor([3 * hs - 1, 0, hs], device=DEVICE) if with_mass else None
    if with_mass:
        monkeypatch.setattr(topk_module, "SORT_KEYS", 2)  # the path of long lists
    call = (hs, pad, start, sink, local, topk, 0.37, with_mass, reduce)
    got = ops.retrieve(q, k, heads, *call)
    wanted = reference.retrieve(q.cpu(), k.cpu(), None if heads is None else heads.cpu(), *call)
    # float32 scores of random keys lie far enough apart for the order to be the only one
    assert got.order.tolist() == wanted.order.tolist()
    assert (got.weights is not None) == (got.base is not None) == with_mass
    if with_mass:
        assert got.weights is not None and got.base is not None and wanted.weights is not None
        weights = torch.where((wanted.order >= 0)[:, None], wanted.weights, 0.0)
        torch.testing.assert_close(got.weights.cpu(), weights, atol=1e-6, rtol=1e-4)
        torch.testing.assert_close(got.base.cpu(), wanted.base, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("group", [1, 3])
def test_the_lower_of_equal_columns_wins(group: int) -> None:
    """Of 90 keys with three values, at k that cut through a run of equal scores; small integers have exact products."""
    keys = (2 * normal(1, 1, 3, 16, seed=4)).round()[:, :, torch.arange(90) * 7 % 11 % 3]
    q = (2 * normal(1, group, 16, seed=3)).round()
    for topk in (1, 31, 61):
        found = ops.retrieve(q, keys, None, 1, (0,), (2,), 2, 4, topk, 0.25).order[0].tolist()
        score = (keys[0, 0] @ q[0].T * 0.25).cpu()
        relative = (score - torch.logsumexp(score, 0)).amax(1)[2:86]
        kind = torch.unique(relative.round(decimals=5), return_inverse=True)[1].tolist()
        assert found == [c + 2 for c in sorted(range(84), key=lambda c: (-kind[c], c))[:topk]]


def test_both_zeros_are_alike_and_signs_are_ordered() -> None:
    """-1e-30 times the scale is -0.0 in float32, 1e-30 times the scale 0.0."""
    scores = [0.0, -1e-30, 1e-30, 3e38, -3e38, 0.0, -1e-30, math.inf, -1.0, 1.0]
    keys = torch.tensor(scores, device=DEVICE)[None, None, :, None]
    found = ops.retrieve(torch.ones(1, 1, 1, device=DEVICE), keys, None, 1, (0,), (0,), 0, 0, 10, 1e-20)
    assert found.order[0].tolist() == [7, 3, 9, 0, 1, 2, 5, 6, 8, 4]


def test_an_empty_middle() -> None:
    q, k = normal(1, 2, 16), view(normal(1, 2, 12, 16, seed=1))
    found = ops.retrieve(q, k, None, 2, (0,), (8,), 8, 4, 5, 0.25)
    assert found.order.shape == (2, 0)


# ------------------------------------------------------------------------------------------------------------- dilate


@pytest.mark.parametrize("seed", range(30))
def test_dilate(seed: int) -> None:
    random = torch.Generator().manual_seed(seed)

    def some(low: int, high: int, *shape: int) -> Any:
        found = torch.randint(low, high, shape or (1,), generator=random)
        return found.to(DEVICE) if shape else int(found)

    n, sink, local, radius, k = some(20, 90), some(0, 5), some(1, 7), some(0, 4), some(1, 13)
    first = some(0, 6, 3, 1)
    start = first + sink + some(0, 6, 3, 1)
    order = torch.full((3, k), -1)
    for line, begin in zip(order, start[:, 0].tolist(), strict=True):
        middle = begin + torch.randperm(max(n - local - begin, 0), generator=random)[:k]
        line[: len(middle)] = middle
    tensors = bool(seed % 2)
    critical = some(0, k + 1, 3, 1) if tensors else some(0, k + 1)
    m = (None, 0, None, 4, 20)[seed % 5]
    best = critical // 3 if m is None else m
    limit = (sink + local + some(0, 25, 3, 1) if tensors else sink + local + k) if seed % 3 else None
    call = (n, sink, local, radius, best, critical, limit, 3 if limit is not None and m is None else None)
    lists, lengths = ops.dilate(order.to(DEVICE), first, start, *call)
    on_cpu = tuple(x.cpu() if isinstance(x, Tensor) else x for x in (first, start, *call))
    wanted = reference.dilate(order, *on_cpu)
    width = wanted[0].shape[1]
    assert lists.dtype == lengths.dtype == torch.int32
    assert lengths.tolist() == wanted[1].tolist()
    assert lists[:, :width].tolist() == wanted[0].tolist() and bool((lists[:, width:] == -1).all())


def test_dilate_takes_numbers_for_rows_that_agree() -> None:
    order = torch.tensor([[4, 29, 15]], device=DEVICE)
    lists, lengths = ops.dilate(order, 0, 4, 34, 2, 4, 2, 3, 3)
    assert lists[0, : int(lengths)].tolist() == [0, 1, 4, 5, 6, 13, 14, 15, 16, 17, 27, 28, 29, 30, 31, 32, 33]


# ------------------------------------------------------------------------------------------------------------ prefill

WINDOWS: list[tuple[Any, int]] = [
    (None, 0),
    (lambda t: max(0, min(math.floor(0.6 * t), t - 9)), 4),
    (lambda t: max(0, min(math.floor(0.3 * t), t - 5)), 40),
    (lambda t: max(0, t - 3), 0),
]


@pytest.mark.parametrize("window", WINDOWS, ids=["causal", "depth", "many sinks", "sliding"])
@pytest.mark.parametrize(
    ("tokens", "past", "first", "dtype"),
    [
        (70, 0, (0, 0), torch.float32),
        (33, 41, (0, 20), torch.bfloat16),
        (70, 0, (0, 50), torch.float16),
        (1, 60, (9, 9), torch.float32),
    ],
    ids=str,
)
def test_prefill_window(
    window: tuple[Any, int], tokens: int, past: int, first: tuple[int, ...], dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    n = tokens + past
    q, k, v = normal(2, 4, tokens, 40, dtype=dtype), *(normal(2, 2, n, x, seed=x, dtype=dtype) for x in (40, 24))
    got, pairs = ops.prefill_window(q, view(k), view(v), first, 0.3, *window)
    monkeypatch.setattr(prefill, "BLOCK", 32)
    exact = (x.double().cpu() for x in (q, k, v))
    wanted, wanted_pairs = prefill.prefill_window(*exact, first, 0.3, *window)
    assert got.dtype == dtype and bool(got.isfinite().all())
    torch.testing.assert_close(got.double().cpu(), wanted, atol=2 * TOLERANCE[dtype], rtol=0)
    if len(set(first)) == 1:  # else the blocks begin elsewhere
        assert pairs == wanted_pairs


def test_hidden_tiles_are_not_read() -> None:
    """Keys that no query of a tile sees may hold NaN."""
    q, k, v = normal(1, 1, 40, 8), normal(1, 1, 200, 8, seed=1), normal(1, 1, 200, 8, seed=2)
    k[:, :, 4:80], v[:, :, 4:80] = math.nan, math.nan
    got, _ = ops.prefill_window(q, k, v, (0,), 0.3, lambda t: t // 2, 4)
    assert bool(got.isfinite().all())


# ---------------------------------------------------------------------------------------------------------- all at once


METHODS: list[dict[str, Any]] = [
    {"critical": 12, "block_size": 3, "tau": 0.0, "matched": True},
    {"critical": 9, "block_size": 2, "tau": 0.5, "local_window": "sliding", "granularity": "query_head", "sink": 0},
    {"critical": 7, "tau": 0.9, "radius": 2, "dilate": 5},
    {"critical": 20, "mass": 0.7, "tau": 0.5},
    {"critical": 12, "block_size": 3, "tau": 0.3, "gate": "query"},
    {"critical": 9, "block_size": 3, "tau": 0.3, "granularity": "query_head", "d": 32},  # 16 axes of 32
]


@pytest.mark.parametrize("keys", METHODS, ids=str)
def test_steps_of_cis(keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ragged rows, as on an accelerator: the host never looks, and a mask decides which heads retrieve."""
    assert resolve("triton", DEVICE) == "triton"
    d = keys.get("d", 16)
    keys = {key: value for key, value in keys.items() if key != "d"}
    method, rows = CIS(**{"sink": 2, "local": 4, **keys}), Rows((0, 9), (60, 51))
    k, v = normal(2, 2, 70, d, seed=1), normal(2, 2, 70, d, seed=2)
    monkeypatch.setattr(host, "may_look", lambda device: False)
    states = {"triton": State(), "reference": State()}
    seen = set()
    for at in range(4):
        # the second row's queries stay, those of the first change at every second step, and one of them is zero
        q, n = torch.stack([normal(4, d, seed=at // 2), normal(4, d, seed=9)]), 61 + at
        q[0, 3] *= at != 1
        found = []
        for name, state in states.items():
            decision = method.decide(Step(0, q, k[:, :, :n], v[:, :, :n], 0.25, rows, (0, 0), name), state)
            chosen = decision.selection
            assert isinstance(chosen, Selection) and decision.retrieved is not None and decision.cosine is not None
            both = zip(chosen.indices.flatten(0, 1).tolist(), chosen.lengths.flatten().tolist(), strict=True)
            found.append(([row[:length] for row, length in both], decision.retrieved.tolist()))
            seen.update(decision.retrieved.flatten().tolist())
        assert found[0] == found[1]
        for name in ("anchor", "age"):
            torch.testing.assert_close(states["triton"][name], states["reference"][name], equal_nan=True)
    assert seen == {False, True}


def test_what_cannot_run_is_refused() -> None:
    q, k = normal(1, 2, 16), normal(1, 2, 9, 16)

    def dense(q: Tensor, k: Tensor, v: Tensor) -> None:
        ops.decode_dense(q, k, v, (0,), 0, (0,), 1.0)

    with pytest.raises(ValueError, match="q has dtype torch.float64, which the triton backend does not take"):
        dense(q.double(), k.double(), k.double())
    with pytest.raises(ValueError, match="q is torch.float32 but v is torch.bfloat16"):
        dense(q, k, k.bfloat16())
    with pytest.raises(ValueError, match="k has head size 300; the triton backend takes at most 256"):
        ops.retrieve(q, normal(1, 2, 9, 300), None, 2, (0,), (2,), 2, 1, 3, 1.0)
    with pytest.raises(ValueError, match="3 selection heads fit neither 2 query heads nor 2 KV heads"):
        ops.decode_selected(q, k, k, *some_lists(1, 3, 9, 4)[:2], 1.0)
