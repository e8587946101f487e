"""Paged and partial attention of both backends: caches in blocks of any layout, partial results that merge."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from prehoc.kernels import cpu, reference

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
BACKENDS = pytest.mark.parametrize("ops", [reference, cpu], ids=["reference", "cpu"])
LAYOUTS = ("rows", "heads last", "packed", "columns")
quick = settings(max_examples=40, deadline=None)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def laid_out(layout: str, keys: Tensor, values: Tensor, block: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values ``[B, Hkv, n, D]`` in shuffled blocks of a layout, NaN in the unused, and the block table."""
    b, hkv, n, d = keys.shape
    per_row = -(-n // block)
    total = b * per_row + 2
    shape = {"heads last": (total, block, hkv, d), "packed": (total, hkv, 2 * block * d)}.get(layout)
    if layout == "heads last":
        assert shape is not None
        k, v = (torch.full(shape, float("nan"), dtype=keys.dtype).transpose(1, 2) for _ in range(2))
    elif layout == "packed":
        assert shape is not None
        both = torch.full(shape, float("nan"), dtype=keys.dtype)
        k, v = both.view(total, hkv, 2, block, d).unbind(2)
    elif layout == "columns":  # keys [D, block] before values [block, D], as on vLLM's CPU
        both = torch.full((total, hkv, 2 * block * d), float("nan"), dtype=keys.dtype)
        k = both[..., : block * d].view(total, hkv, d, block).transpose(2, 3)
        v = both[..., block * d :].view(total, hkv, block, d)
    else:
        k, v = (torch.full((total, hkv, block, d), float("nan"), dtype=keys.dtype) for _ in range(2))
    places = np.random.default_rng(seed).permutation(total)[: b * per_row].reshape(b, per_row)
    for row in range(b):
        for i, place in enumerate(places[row]):
            part = slice(i * block, min((i + 1) * block, n))
            k[place, :, : part.stop - part.start] = keys[row, :, part]
            v[place, :, : part.stop - part.start] = values[row, :, part]
    return k, v, torch.from_numpy(places).to(torch.int32)


cases = st.fixed_dictionaries(
    {
        "layout": st.sampled_from(LAYOUTS),
        "block": st.sampled_from([16, 32, 128]),
        "n": st.integers(1, 150),
        "hkv": st.integers(1, 3),
        "group": st.integers(1, 7),
        "d": st.sampled_from([8, 17, 40, 64, 128]),
        "dtype": st.sampled_from(list(TOLERANCE)),
        "seed": st.integers(0, 10**6),
        "per_query": st.booleans(),
    }
)


def setup(case: dict[str, int], b: int = 2) -> tuple[Tensor, Tensor, Tensor, list[int], tuple[Tensor, Tensor, Tensor]]:
    dtype, seed = case["dtype"], case["seed"]
    q = normal(b, case["hkv"] * case["group"], case["d"], seed=seed, dtype=dtype)
    k, v = (normal(b, case["hkv"], case["n"], case["d"], seed=seed + i, dtype=dtype) for i in (1, 2))
    lengths = np.random.default_rng(seed).integers(1, case["n"] + 1, b).tolist()
    paged = laid_out(case["layout"], k, v, case["block"], seed)
    return q, k, v, lengths, paged


def attend(q: Tensor, k: Tensor, v: Tensor, columns: list[int], scale: float) -> tuple[Tensor, float]:
    """One query ``[D]`` against keys ``[n, D]`` in float64: output and logarithm of the sum of exponentials."""
    logits = k[columns].double() @ q.double() * scale
    return torch.softmax(logits, 0) @ v[columns].double(), float(torch.logsumexp(logits, 0))


@BACKENDS
@quick
@given(cases)
def test_dense_paged(ops: ModuleType, case: dict[str, int]) -> None:
    q, k, v, lengths, (kb, vb, table) = setup(case)
    out, lse = ops.decode_dense_paged(q, kb, vb, table, torch.tensor(lengths, dtype=torch.int32), 0.2, with_lse=True)
    assert out.dtype == q.dtype and lse.dtype == torch.float32
    for row, head in np.ndindex(*out.shape[:2]):
        kv = head // case["group"]
        wanted, mass = attend(q[row, head], k[row, kv], v[row, kv], list(range(lengths[row])), 0.2)
        assert (out[row, head].double() - wanted).abs().max() <= 2 * TOLERANCE[q.dtype]
        assert abs(float(lse[row, head]) - mass) < 1e-5 * (1 + abs(mass))


@BACKENDS
@quick
@given(cases)
def test_selected_paged(ops: ModuleType, case: dict[str, int]) -> None:
    q, k, v, lengths, (kb, vb, table) = setup(case)
    hs = q.shape[1] if case["per_query"] else case["hkv"]
    random = np.random.default_rng(case["seed"])
    chosen = [[sorted(random.permutation(n)[: random.integers(1, n + 1)].tolist()) for _ in range(hs)] for n in lengths]
    width = max(len(x) for row in chosen for x in row)
    lists = torch.tensor([[x + [-1] * (width - len(x)) for x in row] for row in chosen], dtype=torch.int32)
    counts = torch.tensor([[len(x) for x in row] for row in chosen], dtype=torch.int32)
    out = ops.decode_selected_paged(q, kb, vb, table, lists, counts, 0.2)
    for row, head in np.ndindex(*out.shape[:2]):
        kv = head // case["group"]
        wanted, _ = attend(q[row, head], k[row, kv], v[row, kv], chosen[row][head * hs // q.shape[1]], 0.2)
        assert (out[row, head].double() - wanted).abs().max() <= 2 * TOLERANCE[q.dtype]


@quick
@given(cases, st.integers(0, 4), st.integers(1, 6), st.integers(1, 40), st.sampled_from(["max", "mean"]))
def test_retrieve_paged(case: dict[str, int], sink: int, local: int, topk: int, reduce: str) -> None:
    """What the plain retrieval of the same keys finds, row by row, in both backends."""
    q, k, v, lengths, (kb, _, table) = setup(case)
    hs = q.shape[1] if case["per_query"] else case["hkv"]
    rows = torch.tensor(lengths, dtype=torch.int32)
    got = [
        ops.retrieve_paged(q, kb, table, rows, None, hs, sink, local, topk, 0.2, reduce).order
        for ops in (reference, cpu)
    ]
    for order, ops in zip(got, (reference, cpu), strict=True):
        assert order.shape == (2 * hs, topk)
        for row, length in enumerate(lengths):
            mine = order[row * hs : (row + 1) * hs]
            if length <= sink + local:
                assert bool((mine == -1).all())
                continue
            one = slice(row, row + 1)
            plain = cpu.retrieve(
                q[one], k[one, :, :length], None, hs, (0,), (sink,), sink, local, topk, 0.2, reduce=reduce
            ).order
            # in other arithmetic, keys whose scores agree to rounding may change places
            if ops is cpu and case["layout"] != "columns":
                assert torch.equal(mine[:, : plain.shape[1]], plain)
            assert bool((mine[:, plain.shape[1] :] == -1).all())
            for a, b in zip(mine.tolist(), plain.tolist(), strict=True):
                assert len(set(a[: len(b)]) - set(b)) <= max(1, len(b) // 8)


@BACKENDS
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("hkv", "group"), [(3, 1), (2, 3), (1, 7)])
def test_two_partial_selections_merge_into_the_dense_result(
    ops: ModuleType, hkv: int, group: int, dtype: torch.dtype
) -> None:
    n, d = 333, 64
    q = normal(2, hkv * group, d, dtype=dtype)
    k, v = (normal(2, hkv, n, d, seed=s, dtype=dtype) for s in (1, 2))
    wanted, mass = ops.decode_dense(q, k, v, (0, 0), 0, (0, 0), 0.125, with_lse=True)
    assert torch.equal(wanted, ops.decode_dense(q, k, v, (0, 0), 0, (0, 0), 0.125)) or ops is reference
    parts = []
    for begin in (0, 1):
        lists = torch.arange(begin, n, 2, dtype=torch.int32).expand(2, hkv, -1)
        counts = torch.full((2, hkv), lists.shape[2], dtype=torch.int32)
        parts.append(ops.decode_selected(q, k, v, lists, counts, 0.125, with_lse=True))
    together = torch.logaddexp(parts[0][1], parts[1][1])
    torch.testing.assert_close(together, mass, atol=2e-6, rtol=1e-6)
    merged = sum(out.float() * torch.exp(lse - together)[..., None] for out, lse in parts)
    torch.testing.assert_close(merged, wanted.float(), atol=2 * TOLERANCE[dtype], rtol=0)


@BACKENDS
def test_lse_of_sinks_and_window(ops: ModuleType) -> None:
    q, k, v = normal(2, 4, 24), normal(2, 2, 50, 24, seed=1), normal(2, 2, 50, 24, seed=2)
    _, lse = ops.decode_dense(q, k, v, (0, 7), 3, (30, 9), 0.2, with_lse=True)
    for row, columns in enumerate(([0, 1, 2, *range(30, 50)], list(range(7, 50)))):
        for head in range(4):
            _, wanted = attend(q[row, head], k[row, head // 2], v[row, head // 2], columns, 0.2)
            assert abs(float(lse[row, head]) - wanted) < 1e-5


def test_rows_of_keys_must_be_contiguous() -> None:
    blocks = torch.zeros(2, 1, 8, 16).transpose(2, 3)  # [D, block] in blocks of 16 keys is allowed, 8 of 8 is not
    q, table, one = torch.zeros(1, 1, 8), torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    cpu.decode_dense_paged(q, blocks, torch.zeros(2, 1, 16, 8), table, one, 1.0)
    with pytest.raises(ValueError, match="contiguous along the head dimension"):
        cpu.decode_dense_paged(q, torch.zeros(2, 1, 8, 8).transpose(2, 3), torch.zeros(2, 1, 8, 8), table, one, 1.0)
    with pytest.raises(ValueError, match="contiguous along the head dimension"):
        cpu.decode_dense(q, torch.zeros(1, 1, 8, 16).transpose(2, 3), torch.zeros(1, 1, 16, 8), (0,), 0, (0,), 1.0)


def test_stream() -> None:
    assert 0 < cpu.stream(torch.ones(1 << 20), 3) < 1e13
    with pytest.raises(ValueError, match="reads float32, not torch.float16"):
        cpu.stream(torch.ones(64, dtype=torch.float16), 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gather_reads_every_selected_word_once(dtype: torch.dtype) -> None:
    k, v = (torch.randn(2, 40, 2, 64).to(dtype).transpose(1, 2) for _ in range(2))
    lists = torch.stack([torch.randperm(40)[:37] for _ in range(8)]).view(2, 4, 37).int()
    lengths = torch.tensor([[37, 0, 5, 33], [1, 36, 37, 2]], dtype=torch.int32)
    expected = 0
    for row in range(2):
        for head in range(4):
            for column in lists[row, head, : lengths[row, head]]:
                for words in (k[row, head // 2, column].view(torch.int32), v[row, head // 2, column].view(torch.int32)):
                    for word in words.tolist():
                        expected ^= word & 0xFFFFFFFF
    assert cpu.gather(k, v, lists, lengths) == expected


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
def test_weights_are_those_of_the_softmax_summed_over_a_group(dtype: torch.dtype, tolerance: float) -> None:
    q, first = torch.randn(3, 6, 24).to(dtype), (0, 5, 699)
    k, v = torch.randn(3, 2, 700, 24).to(dtype), torch.randn(3, 2, 700, 40).to(dtype)
    out, weights = cpu.decode_weights(q, k, v, first, 0.3)
    logits = q.float().view(3, 2, 3, 24) @ k.float().mT * 0.3
    hidden = torch.arange(700) < torch.tensor(first)[:, None, None, None]
    expected = logits.masked_fill(hidden, -torch.inf).softmax(-1)  # [B, Hkv, G, n]
    assert out.dtype == dtype and weights.dtype == torch.float32
    torch.testing.assert_close(weights, expected.sum(2), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(out.float(), (expected @ v.float()).flatten(1, 2), rtol=tolerance, atol=tolerance)
