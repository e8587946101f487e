"""The custom ops: a compiled graph passes through each, gives what the backend gives, and eager calls never meet them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from prehoc import kernels
from prehoc.kernels import ops, reference

B, H, HKV, D, DV, N = 2, 6, 3, 16, 8, 41
PAD, START = (0, 3), (5, 9)  # a middle of [5, 35) and [9, 35)
SINK, LOCAL = 4, 6
BACKENDS = ("reference", "cpu")


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def inputs(columns: int = N, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, and keys and values as views of larger buffers."""
    made = torch.Generator().manual_seed(columns)
    q, k, v = (torch.randn(s, generator=made) for s in ((B, H, D), (B, HKV, columns + 5, D), (B, HKV, columns + 5, DV)))
    return q.to(dtype), k.to(dtype)[:, :, :columns], v.to(dtype)[:, :, :columns]


def compiled(function: Callable[..., Any], backend: Any = "aot_eager", **options: Any) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, backend=backend, **options)


def same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_decode_dense(backend: str, dtype: torch.dtype) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ops.decode_dense(q * 2, k, v, PAD, SINK, START, 0.25, backend) + 1

    q, k, v = inputs(dtype=dtype)
    wanted = kernels.get(backend, q.device).decode_dense(q * 2, k, v, PAD, SINK, START, 0.25) + 1
    same(compiled(attend)(q, k, v), wanted)
    same(attend(q, k, v), wanted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_decode_selected(backend: str) -> None:
    q, k, v = inputs()
    lists = torch.tensor([[0, 3, 4, 9, 40]] * HKV).expand(B, -1, -1).to(torch.int32).clone()
    lists[1, 0, 3:] = -1
    lengths = (lists >= 0).sum(-1).to(torch.int32)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ops.decode_selected(q, k, v, lists, lengths, 0.25, backend=backend)

    same(compiled(attend)(q, k, v), kernels.get(backend, q.device).decode_selected(q, k, v, lists, lengths, 0.25))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("heads", [None, (0, 2, 5)])
@pytest.mark.parametrize("with_mass", [False, True])
@pytest.mark.parametrize("topk", [7, 100])  # 100: more than the middle holds
def test_retrieve(backend: str, heads: tuple[int, ...] | None, with_mass: bool, topk: int) -> None:
    q, k, _ = inputs()
    chosen = None if heads is None else torch.tensor(heads)
    options = (HKV, PAD, START, SINK, LOCAL, topk, 0.25, with_mass)

    def best(q: Tensor, k: Tensor) -> Any:
        found = ops.retrieve(q, k, chosen, *options, backend=backend)
        return found.order, found.weights, found.base

    wanted = kernels.get(backend, q.device).retrieve(q, k, chosen, *options)
    for got in (compiled(best)(q, k), best(q, k)):
        same(got, (wanted.order, wanted.weights, wanted.base))
    assert (wanted.weights is None) != with_mass


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("limit", [None, 18])
@pytest.mark.parametrize("best", [2, torch.tensor([[1], [2], [3], [0], [1], [2]])], ids=["one", "rows"])
def test_dilate(backend: str, limit: int | None, best: Any) -> None:
    q, k, _ = inputs()
    order = reference.retrieve(q, k, None, HKV, PAD, START, SINK, LOCAL, 8, 0.25).order
    first, start = (torch.tensor(x).repeat_interleave(HKV)[:, None] for x in (PAD, START))
    options = (first, start, N, SINK, LOCAL, 1, best, 8, limit)

    def lists(order: Tensor) -> tuple[Tensor, Tensor]:
        return ops.dilate(order, *options, backend=backend)

    wanted, counts = kernels.get(backend, q.device).dilate(order, *options)
    got, lengths = compiled(lists)(order)
    same(lengths, counts)
    same(got[:, : wanted.shape[1]], wanted)
    assert (got[:, wanted.shape[1] :] == -1).all()
    same(lists(order)[0], wanted)


def state(width: int = 32, compared: int = D) -> dict[str, Tensor]:
    return {
        "indices": torch.full((B, HKV, width), -1, dtype=torch.int32),
        "lengths": torch.zeros((B, HKV), dtype=torch.int32),
        "age": torch.full((B, HKV), -1, dtype=torch.int32),
        "anchor": torch.full((B, H, compared), torch.nan),
    }


@pytest.mark.parametrize("axes", [None, torch.randn(B, HKV, D, 5, generator=torch.Generator().manual_seed(3))])
def test_a_step_of_cis_changes_its_state(axes: Tensor | None) -> None:
    options = (PAD, START, SINK, LOCAL, (8, 8), (2, 2), None, None, 1, 4, True, 0.5, 0.25, axes)
    native = kernels.get("cpu", torch.device("cpu")).cis_step

    def step(q: Tensor, k: Tensor, held: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return ops.cis_step(q, k, held, *options, backend="cpu")

    compared = D if axes is None else axes.shape[3]
    wanted, traced = state(compared=compared), state(compared=compared)
    graph = compiled(step)
    for columns in (N, N + 1):  # it retrieves, and then shares what it kept
        q, k, _ = inputs(N)
        k = torch.cat([k, k[:, :, : columns - N]], 2)
        same(graph(q, k, traced), native(q, k, wanted, *options))
        same(traced, wanted)
    assert wanted["age"].eq(1).all()


def test_a_backend_without_a_step_of_cis_is_named() -> None:
    q, k, _ = inputs()
    with pytest.raises(ValueError, match="backend 'reference' does not do a step of CIS in one operation on cpu; use"):
        ops.cis_step(
            q, k, state(), PAD, START, 4, 6, (8, 8), (2, 2), None, None, 1, 4, True, 0.5, 0.25, None, "reference"
        )


def test_one_graph_serves_all_lengths() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = ops.retrieve(q, k, None, HKV, PAD, START, SINK, LOCAL, 8, 0.25)
        first, start = (torch.tensor(x).repeat_interleave(HKV)[:, None] for x in (PAD, START))
        lists, lengths = ops.dilate(found.order, first, start, k.shape[2], SINK, LOCAL, 1, 2, 8)
        return ops.decode_selected(q, k, v, lists.view(B, HKV, -1), lengths.view(B, HKV), 0.25)

    counter = CompileCounterWithBackend("aot_eager")
    graph = compiled(step, counter, dynamic=True)
    for columns in (N, N + 1, 3 * N, 2000):
        given = inputs(columns)
        torch.testing.assert_close(graph(*given), step(*given))
    assert counter.frame_count == 1


def test_torchs_own_compiler_takes_them() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ops.decode_dense(torch.sin(q), k, v, PAD, 0, PAD, 0.25).mT * 2

    given = inputs()
    torch.testing.assert_close(compiled(step, "inductor")(*given), step(*given))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("decode_dense", lambda q, k, v: (q, k, v, PAD, SINK, START, 0.25, "auto")),
        ("retrieve", lambda q, k, v: (q, k, None, HKV, PAD, START, SINK, LOCAL, 8, 0.25, True, "max", "reference")),
        (
            "cis_step",
            lambda q, k, v: (
                *(
                    q,
                    k,
                    *state().values(),
                    PAD,
                    START,
                    SINK,
                    LOCAL,
                    (8, 8),
                    (2, 2),
                    None,
                    None,
                    1,
                    4,
                    True,
                    0.5,
                    0.25,
                    q.float() * 2,
                    "cpu",
                ),
            ),
        ),
    ],
)
def test_schemas_and_fakes_say_what_the_ops_do(name: str, arguments: Callable[..., tuple[Any, ...]]) -> None:
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(getattr(torch.ops.prehoc, name), arguments(*inputs()), test_utils=checks)


def test_eager_calls_meet_no_op(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_DECODE_DENSE", "_DECODE_SELECTED", "_RETRIEVE", "_DILATE", "_CIS_STEP"):
        monkeypatch.setattr(ops, name, None)
    q, k, v = inputs()
    ops.decode_dense(q, k, v, PAD, SINK, START, 0.25)
    order = ops.retrieve(q, k, None, HKV, PAD, START, SINK, LOCAL, 8, 0.25).order
    lists, lengths = ops.dilate(order, 0, 9, N, SINK, LOCAL, 1, 2, 8)
    ops.decode_selected(q, k, v, lists.view(B, HKV, -1), lengths.view(B, HKV), 0.25)
    ops.cis_step(q, k, state(), PAD, START, SINK, LOCAL, (8, 8), (2, 2), None, None, 1, 4, True, 0.5, 0.25, None, "cpu")


def test_nothing_is_registered_by_importing_the_package() -> None:
    program = "import sys, torch, prehoc; assert 'prehoc.kernels.ops' not in sys.modules; print(dir(torch.ops.prehoc))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "decode" not in done.stdout
