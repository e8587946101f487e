"""The Triton kernels on a CUDA device, at sizes that fill one, and inside a CUDA graph. Skipped where there is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from prehoc import kernels
from prehoc.kernels import prefill, reference

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DTYPES = list(TOLERANCE)
CUDA = torch.device("cuda")
# rows, KV heads, group, head size, columns
SHAPES = [(2, 8, 1, 128, 5003), (1, 4, 7, 128, 16000), (2, 3, 3, 64, 4096), (1, 2, 2, 256, 3001), (1, 2, 4, 80, 2047)]


@pytest.fixture(scope="module")
def ops() -> Any:
    return kernels.get(kernels.resolve("triton", CUDA), CUDA)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(CUDA)


def tensors(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    b, hkv, group, d, n = shape
    q = normal(b, hkv * group, d, seed=1, dtype=dtype)
    return q, *(normal(b, hkv, n + 37, d, seed=x, dtype=dtype)[:, :, :n] for x in (2, 3))


def close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got.double(), wanted, atol=TOLERANCE[got.dtype], rtol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decode(ops: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    (b, hkv, _, d, n), (q, k, v) = shape, tensors(shape, dtype)
    exact = q.double(), k.double(), v.double()
    first, start = (0, 11)[:b], (900, 700)[:b]
    for call in (((0,) * b, 0, (0,) * b), (first, 8, start)):
        close(ops.decode_dense(q, k, v, *call, d**-0.5), reference.decode_dense(*exact, *call, d**-0.5))
    indices = torch.rand(b, hkv, n, device=CUDA).argsort(-1)[..., : n // 8].sort(-1).values.int()
    lengths = torch.randint(1, n // 8, (b, hkv), device=CUDA).int()
    wanted = reference.decode_selected(*exact, indices, lengths, d**-0.5)
    close(ops.decode_selected(q, k, v, indices, lengths, d**-0.5), wanted)
    blocks = [
        x.unflatten(2, (-1, 16)).transpose(1, 2).flatten(0, 1)
        for x in (k[:, :, : n // 16 * 16], v[:, :, : n // 16 * 16])
    ]
    table = torch.arange(b * (n // 16), device=CUDA).int().view(b, -1)
    kept = (indices < n // 16 * 16).sum(-1).int().minimum(lengths)
    got = ops.decode_selected_paged(q, *blocks, table, indices, kept, d**-0.5)
    close(got, reference.decode_selected(*exact, indices, kept, d**-0.5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("topk", [100, 3000])
def test_retrieve_and_dilate(ops: Any, topk: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Sets may differ in keys whose scores lie within rounding of the k-th; dilation of the same order may not."""
    (b, hkv, _, d, n), (q, k, _) = shape, tensors(shape, dtype)
    first, start = (0, 11)[:b], (8, 700)[:b]
    call = (None, hkv, first, start, 8, 32, topk, d**-0.5, True)
    got, wanted = ops.retrieve(q, k, *call), reference.retrieve(q, k, *call)
    assert got.weights is not None and wanted.weights is not None and got.base is not None and wanted.base is not None
    real = wanted.order >= 0
    assert torch.equal(got.order >= 0, real)
    torch.testing.assert_close(got.base, wanted.base, atol=1e-6, rtol=1e-4)
    best = (x.weights.amax(1)[real] for x in (got, wanted))
    torch.testing.assert_close(*best, atol=1e-7, rtol=1e-4)
    columns = [torch.tensor(x, device=CUDA).repeat_interleave(hkv)[:, None] for x in (first, start)]
    for limit in (None, topk // 2 + 40):
        sizes = (n, 8, 32, 1, topk // 3, topk, limit, 3)
        lists = [x.dilate(got.order, *columns, *sizes) for x in (ops, reference)]
        assert torch.equal(lists[0][0], lists[1][0]) and torch.equal(lists[0][1], lists[1][1].int())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prefill_window(ops: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    b, hkv, group, d, _ = shape
    q, (_, k, v) = normal(b, hkv * group, 700, d, dtype=dtype), tensors((*shape[:4], 1100), dtype)
    for window in ((None, 0), (lambda t: max(0, min(int(0.7 * t), t - 32)), 8)):
        got, _ = ops.prefill_window(q, k, v, (0, 500)[:b], d**-0.5, *window)
        wanted, _ = prefill.prefill_window(q.double(), k.double(), v.double(), (0, 500)[:b], d**-0.5, *window)
        close(got, wanted)


def test_a_step_inside_a_cuda_graph(ops: Any) -> None:
    """Nothing waits for the device, so a whole step can be captured; its replay follows new queries and new keys."""
    shape = (2, 4, 3, 128, 4001)
    q, k, v = tensors(shape, torch.bfloat16)
    first, start = (0, 11), (8, 700)
    columns = [torch.tensor(x, device=CUDA).repeat_interleave(4)[:, None] for x in (first, start)]

    def step() -> tuple[Tensor, Tensor]:
        order = ops.retrieve(q, k, None, 4, first, start, 8, 32, 300, 0.1).order
        indices, lengths = ops.dilate(order, *columns, 4001, 8, 32, 1, 100, 300, 330, 3)
        out = ops.decode_selected(q, k, v, indices.view(2, 4, -1), lengths.view(2, 4), 0.1)
        return out, ops.decode_dense(q, k, v, first, 8, start, 0.1)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in (7, 8):
        q.copy_(normal(*q.shape, seed=seed, dtype=q.dtype))
        k.copy_(normal(*k.shape, seed=seed, dtype=k.dtype))
        graph.replay()
        for got, wanted in zip(captured, step(), strict=True):
            assert torch.equal(got, wanted)


def test_the_host_never_waits(ops: Any) -> None:
    q, k, v = tensors((2, 4, 3, 128, 4001), torch.bfloat16)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = ops.retrieve(q, k, None, 4, (0, 5), (8, 90), 8, 32, 300, 0.1, with_mass=True)
        indices, lengths = ops.dilate(found.order, 0, 8, 4001, 8, 32, 1, 100, 300)
        ops.decode_selected(q, k, v, indices.view(2, 4, -1), lengths.view(2, 4), 0.1)
        ops.decode_dense(q, k, v, (0, 5), 8, (300, 400), 0.1)
        state = {name: torch.full((2, 4), -1, dtype=torch.int32, device=CUDA) for name in ("lengths", "age")}
        state["indices"] = torch.full((2, 4, 400), -1, dtype=torch.int32, device=CUDA)
        state["anchor"] = torch.full((2, 12, 128), torch.nan, device=CUDA)
        sizes = (8, 32, (200, 200), (66, 66), (240, 240), 3, 1, 8, True, 0.5, 0.1)
        done = [ops.cis_step(q, k[:, :, :n], state, (0, 5), (8, 90), *sizes)[0] for n in (3999, 4000)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert bool(done[0].all()) and not bool(done[1].any())
