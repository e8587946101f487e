"""KV storage: nothing is copied within the capacity, rows and state move together, and copies are independent."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from prehoc.cache import KVStore
from prehoc.selection import Rows, State


def normal(b: int, t: int, seed: int = 0, h: int = 2, d: int = 4, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(b, h, t, d, generator=torch.Generator().manual_seed(seed)).to(dtype)


def filled(b: int = 3, t: int = 10, capacity: int = 0) -> tuple[KVStore, Tensor, Tensor]:
    store, k, v = KVStore(), normal(b, t, 1), normal(b, t, 2)
    store.append(k, v, capacity)
    store.rows = Rows(tuple(range(b)), tuple(t - i for i in range(b)))
    store.state["indices"] = torch.arange(b * 4).view(b, 4)
    store.state["step"] = 5
    return store, k, v


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(0, 40))
def test_append_equals_concatenation(sizes: list[int], capacity: int) -> None:
    store, ks, vs = KVStore(), [], []
    for i, size in enumerate(sizes):
        ks.append(normal(2, size, 2 * i))
        vs.append(normal(2, size, 2 * i + 1, d=3))
        k, v = store.append(ks[-1], vs[-1], capacity)
        assert torch.equal(k, torch.cat(ks, 2)) and torch.equal(v, torch.cat(vs, 2))
        assert store.length == k.shape[2] == sum(sizes[: i + 1])
        for x in store.views():
            assert x.stride(-1) == 1 and x.stride(2) == x.shape[3]


def test_a_step_within_capacity_copies_nothing() -> None:
    store = KVStore()
    k, v = store.append(normal(2, 10), normal(2, 10, 1), capacity=64)
    where = k.data_ptr(), v.data_ptr()
    for i in range(54):
        k, v = store.append(normal(2, 1, i), normal(2, 1, i), capacity=64)
        assert (k.data_ptr(), v.data_ptr()) == where
    k, v = store.append(normal(2, 1), normal(2, 1), capacity=64)
    assert k.data_ptr() != where[0] and k.shape[2] == 65


def test_growth_doubles() -> None:
    store, moves, last = KVStore(), 0, 0
    for i in range(1000):
        k, _ = store.append(normal(1, 1, i), normal(1, 1, i))
        moves += k.data_ptr() != last
        last = k.data_ptr()
    assert moves <= 12 and store.nbytes <= 2 * 2 * 1024 * 2 * 4 * 4
    assert torch.equal(store.views()[0][:, :, 500:501], normal(1, 1, 500))


def test_bytes_held_count_the_spare_capacity() -> None:
    store = KVStore()
    assert store.nbytes == 0
    store.append(normal(2, 10, dtype=torch.bfloat16), normal(2, 10, d=6, dtype=torch.bfloat16), capacity=32)
    assert store.nbytes == 2 * 2 * 32 * (4 + 6) * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtype_is_kept(dtype: torch.dtype) -> None:
    store = KVStore()
    for _ in range(3):
        k, v = store.append(normal(1, 5, dtype=dtype), normal(1, 5, dtype=dtype))
    assert k.dtype == v.dtype == dtype


@pytest.mark.parametrize("index", [[2, 0, 1], [1, 1], [0], [0, 0, 1, 1, 2, 2]])
def test_take_moves_keys_padding_and_state_together(index: list[int]) -> None:
    store, k, v = filled(capacity=32)
    state = store.state["indices"].clone()
    store.take(torch.tensor(index))
    assert torch.equal(store.views()[0], k[index]) and torch.equal(store.views()[1], v[index])
    assert store.rows == Rows(tuple(index), tuple(10 - i for i in index))
    assert torch.equal(store.state["indices"], state[index]) and store.state["step"] == 5
    store.append(normal(len(index), 1), normal(len(index), 1), 32)
    assert store.length == 11


def test_take_of_rows_that_are_all_alike() -> None:
    rows = Rows((3, 3, 3), (7, 7, 7))
    assert rows.take(torch.tensor([2, 0])) == Rows((3, 3), (7, 7))
    assert Rows((0, 0), (7, 8)).take(torch.tensor([1, 0, 1])) == Rows((0, 0, 0), (8, 7, 8))


@pytest.mark.parametrize("columns", [1, 4, 10, 99])
def test_crop_forgets_columns_and_state(columns: int) -> None:
    store, k, _ = filled()
    store.crop(columns)
    left = max(10 - columns, 0)
    assert store.length == left and store.state == {}
    assert torch.equal(store.views()[0], k[:, :, :left])
    fresh = normal(3, 2, 9)
    got, _ = store.append(fresh, fresh)
    assert torch.equal(got, torch.cat([k[:, :, :left], fresh], 2))


def test_a_crop_of_nothing_changes_nothing() -> None:
    store, k, _ = filled()
    store.notes["columns"] = 10
    store.crop(0)
    assert store.length == 10 and store.state["step"] == 5 and store.notes == {"columns": 10}
    assert torch.equal(store.views()[0], k)


def test_crop_leaves_an_earlier_state_object_alone() -> None:
    """A decision that was recorded before keeps its tensors."""
    store, _, _ = filled()
    before = store.state
    store.crop(1)
    assert "indices" in before and "indices" not in store.state


def test_reset_forgets_everything() -> None:
    store, _, _ = filled(capacity=50)
    store.reset()
    assert (store.length, store.nbytes, store.rows, store.state) == (0, 0, Rows((), ()), {})
    k, _ = store.append(normal(5, 3, h=1), normal(5, 3, h=1))
    assert k.shape == (5, 1, 3, 4)


def test_copies_are_independent() -> None:
    store, k, v = filled(capacity=32)
    twin = store.copy()
    assert twin.length == 10 and twin.rows == store.rows and twin.state["step"] == 5
    assert torch.equal(twin.views()[0], k) and torch.equal(twin.views()[1], v)
    twin.append(normal(3, 1, 7), normal(3, 1, 7), 32)
    twin.state["indices"] += 100
    twin.state["step"] = 9
    twin.views()[0].zero_()
    assert store.length == 10 and torch.equal(store.views()[0], k)
    assert int(store.state["indices"].max()) < 100 and store.state["step"] == 5
    store.views()[1].zero_()
    assert torch.equal(twin.views()[1][:, :, :10], v)


def test_copy_of_an_empty_store() -> None:
    twin = KVStore().copy()
    assert twin.length == 0 and twin.nbytes == 0


def test_state_take_leaves_other_values() -> None:
    state = State({"a": torch.arange(6).view(3, 2), "step": 4})
    taken = state.take(torch.tensor([2, 2, 0]))
    assert taken["a"].tolist() == [[4, 5], [4, 5], [0, 1]] and taken["step"] == 4
    assert isinstance(taken, State)
