"""A selection as a BlockMask: FlexAttention over it is attention over the selected keys, block by block."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from prehoc.kernels import flex, reference
from prehoc.kernels.flex import Pattern, decode_flex
from prehoc.selection import Rows, Selection, Step, Window, attend

COLUMNS, SEEN = 384, 301
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def make_step(
    dtype: torch.dtype, heads: int = 6, kv_heads: int = 2, dim: int = 16
) -> tuple[Step, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    q = torch.randn(2, heads, dim).to(dtype)
    whole = tuple(torch.randn(2, kv_heads, COLUMNS, dim).to(dtype) for _ in range(2))
    k, v = (x[:, :, :SEEN] for x in whole)
    return Step(0, q, k, v, 0.3, Rows((0, 5), (200, 195)), (0, 0)), whole


def lists(heads: int, low: int = 5) -> Selection:
    """Lists of different lengths, the second batch row's behind its padding."""
    lengths = torch.randint(20, 70, (2, heads), generator=torch.Generator().manual_seed(1)).int()
    indices = torch.full((2, heads, 70), -1, dtype=torch.int32)
    for row in range(2):
        for head in range(heads):
            chosen = torch.randperm(SEEN - low, generator=torch.Generator().manual_seed(row * 9 + head)) + low
            indices[row, head, : lengths[row, head]] = chosen[: lengths[row, head]].sort().values.int()
    return Selection(indices, lengths)


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "_compiled", lambda: flex_attention)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_flex_attends_to_what_is_selected(dtype: torch.dtype) -> None:
    step, (k, v) = make_step(dtype)
    pattern = Pattern(2, 6, COLUMNS, torch.device("cpu"))
    # one object serves all: nothing of a mask may stay behind
    for chosen in (None, lists(2), Window(4, (160, 90)), lists(6), None):
        expected = attend(reference, step, chosen)
        out = decode_flex(step.q, k, v, pattern.build(step, chosen), step.scale)
        torch.testing.assert_close(out, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_only_blocks_with_a_selected_key_are_read() -> None:
    step, _ = make_step(torch.float32)
    pattern = Pattern(2, 6, COLUMNS, torch.device("cpu"))
    pattern.build(step, Window(0, (260, 130)))
    assert pattern.blocks() == 6 * (1 + 2)
    pattern.build(step, None)
    assert pattern.blocks() == 6 * 2 * 3
    indices = torch.full((2, 2, 3), -1, dtype=torch.int32)
    indices[:, :, 0], indices[0, 1, 1] = 7, 200
    pattern.build(step, Selection(indices, (indices >= 0).sum(-1).int()))
    assert pattern.blocks() == 3 * (4 + 1)


def test_a_block_that_is_selected_whole_needs_no_mask() -> None:
    step, _ = make_step(torch.float32)
    mask = Pattern(2, 6, COLUMNS, torch.device("cpu")).build(step, Window(0, (128, 128)))
    assert mask.full_kv_num_blocks is not None
    assert mask.full_kv_num_blocks.unique().tolist() == [1] and mask.kv_num_blocks.unique().tolist() == [1]


def test_columns_are_a_multiple_of_the_block() -> None:
    with pytest.raises(ValueError, match="300 columns are no multiple of 128"):
        Pattern(1, 1, 300, torch.device("cpu"))


@pytest.mark.slow
def test_the_compiled_kernel_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    step, (k, v) = make_step(torch.float32)
    pattern = Pattern(2, 6, COLUMNS, torch.device("cpu"))
    try:
        for chosen in (lists(2), Window(4, (160, 90)), lists(6)):
            out = decode_flex(step.q, k, v, pattern.build(step, chosen), step.scale)
            torch.testing.assert_close(out, attend(reference, step, chosen), atol=1e-5, rtol=1e-5)
    except torch._inductor.exc.InductorError as error:
        pytest.skip(f"torch cannot compile here: {str(error).splitlines()[0]}")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
