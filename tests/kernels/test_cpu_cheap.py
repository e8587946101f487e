"""Cheap retrieval of both backends: the compact copy, what it finds, and that nearly all of the exact top-k is in it."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from prehoc.kernels import cpu, reference

BACKENDS = pytest.mark.parametrize("ops", [reference, cpu], ids=["reference", "cpu"])
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_compact_rounds_to_a_127th_of_the_largest_and_takes_columns_one_by_one() -> None:
    k = normal(2, 3, 20, 24)
    k[0, 0, 3] = 0
    codes, scales = reference.compact(k)
    assert codes.dtype == torch.int8 and scales.shape == (2, 3, 20)
    error = (codes.float() * scales[..., None] - k).abs()
    assert bool((error <= scales[..., None] * 0.501).all())
    one, scale = reference.compact(k[:, :, 7:8])
    assert torch.equal(one, codes[:, :, 7:8]) and torch.equal(scale, scales[:, :, 7:8])


@BACKENDS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduce", ["max", "mean"])
@pytest.mark.parametrize(("group", "per_query", "d"), [(1, False, 64), (3, False, 40), (3, True, 128), (7, False, 17)])
def test_recall_of_the_exact_best(
    ops: ModuleType, group: int, per_query: bool, d: int, reduce: str, dtype: torch.dtype
) -> None:
    """Rows with padding; the returned keys are ranked exactly, and few of the exact best are missing."""
    n, hkv, first, start, topk = 700, 2, (0, 13), (4, 30), 60
    q, k = normal(2, hkv * group, d, dtype=dtype), normal(2, hkv, n, d, seed=1, dtype=dtype)
    hs = hkv * group if per_query else hkv
    codes, scales = ops.compact(k)
    heads = torch.tensor([hs, 0, 2 * hs - 1])
    call = (heads, hs, first, start, 4, 8, topk, d**-0.5)
    found = ops.retrieve_compact(q, k, codes, scales, *call, reduce=reduce).order
    exact = ops.retrieve(q, k, *call, reduce=reduce).order
    assert found.shape == exact.shape
    for got, wanted, pair in zip(found.tolist(), exact.tolist(), heads.tolist(), strict=True):
        assert len(set(got)) == topk and min(got) >= start[pair // hs] and max(got) < n - 8
        assert len(set(got) & set(wanted)) >= 0.97 * topk
    if group == 1:  # one query a head: no normalisation, so whatever is in both stands in the same order
        for got, wanted in zip(found.tolist(), exact.tolist(), strict=True):
            assert [x for x in got if x in wanted] == [x for x in wanted if x in got]


@BACKENDS
def test_what_the_copy_hides_is_not_found_and_reranking_is_exact(ops: ModuleType) -> None:
    q, k = normal(1, 1, 16), normal(1, 1, 60, 16, seed=1)
    codes, scales = ops.compact(k)
    every = ops.retrieve_compact(q, k, codes, scales, None, 1, (0,), (2,), 2, 4, 20, 1.0, rerank=100).order
    assert torch.equal(every, ops.retrieve(q, k, None, 1, (0,), (2,), 2, 4, 20, 1.0).order)
    scales[0, 0, every[0, 0]] = 0  # its compact score is zero now
    less = ops.retrieve_compact(q, k, codes, scales, None, 1, (0,), (2,), 2, 4, 5, 1.0, rerank=1).order
    assert less[0].tolist() == every[0, 1:6].tolist()


@BACKENDS
def test_a_small_middle_is_padded(ops: ModuleType) -> None:
    q, k = normal(2, 1, 16), normal(2, 1, 30, 16, seed=1)
    found = ops.retrieve_compact(q, k, *ops.compact(k), None, 1, (0, 20), (2, 22), 2, 4, 10, 1.0).order
    assert sorted(found[1, :4].tolist()) == [22, 23, 24, 25] and found[1, 4:].tolist() == [-1] * 6


def test_foreign_codes_are_refused() -> None:
    q, k = normal(1, 1, 16), normal(1, 1, 30, 16)
    with pytest.raises(ValueError, match="codes must be int8 and scales float32"):
        cpu.retrieve_compact(q, k, k, k[..., 0], None, 1, (0,), (2,), 2, 4, 5, 1.0)
