"""Packed linear layers: the same outputs within rounding, in every dtype and shape, and nothing left behind."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

import prehoc
from families import FAMILIES, fresh, generated, padded


class Changed(nn.Linear):
    """A layer of another library."""


def model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(19, 33), nn.Linear(33, 64, bias=False), Changed(64, 5)).to(dtype)


@pytest.mark.parametrize("shape", [(19,), (1, 19), (3, 1, 19), (2, 7, 19), (70, 19)])
@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_outputs_are_the_same_within_rounding(shape: tuple[int, ...], dtype: torch.dtype, near: float) -> None:
    net, x = model(dtype), torch.randn(shape).to(dtype)
    with torch.inference_mode():
        wanted = net(x)
        with prehoc.packed(net) as copies:
            found = net(x)
        assert found.shape == wanted.shape and found.dtype == dtype
        torch.testing.assert_close(found, wanted, atol=near, rtol=near)
        assert torch.equal(net(x), wanted), "the model is what it was"
    assert copies == (19 * 33 + 33 * 64) * dtype.itemsize and "forward" not in net[0].__dict__


def test_the_packed_weight_is_what_runs() -> None:
    net, x = model(), torch.randn(2, 19)
    with torch.inference_mode(), prehoc.packed(net):
        before = net(x)
        net[0].weight.mul_(2.0)  # which the documentation forbids
        assert torch.equal(net(x), before)


def test_a_deep_copy_has_weights_of_its_own() -> None:
    net, x = model(), torch.randn(2, 19)
    with torch.inference_mode(), prehoc.packed(net):
        twin = copy.deepcopy(net)
        twin[0].weight.mul_(2.0)
        assert not torch.allclose(twin(x), net(x))
    with torch.inference_mode():
        before = net(x)
        twin[0].weight.div_(2.0)
        torch.testing.assert_close(twin(x), before)


def test_gradients_and_autocast_run_the_layer_as_it_was() -> None:
    net, x = model(), torch.randn(2, 19)
    with prehoc.packed(net):
        net(x).sum().backward()
        assert net[0].weight.grad is not None
        with torch.inference_mode():
            assert torch.autocast("cpu", torch.bfloat16)(net)(x).dtype == torch.bfloat16


def test_a_graph_runs_the_packed_weight_and_the_layer_again_behind_it() -> None:
    net, x, counter = model(), torch.randn(2, 19), CompileCounter()
    compiled = torch.compile(net, backend=counter, fullgraph=True)
    for _ in range(3):  # packed again it is not compiled again
        with torch.inference_mode():
            before = net(x)
            torch.testing.assert_close(compiled(x), before)
            with prehoc.packed(net):
                net[0].weight.mul_(2.0)  # which the documentation forbids
                torch.testing.assert_close(compiled(x), before)
            torch.testing.assert_close(compiled(x), net(x))
            assert not torch.allclose(compiled(x), before)
    assert counter.frame_count == 2


def test_what_cannot_be_packed_is_said() -> None:
    for net in (nn.Sequential(Changed(4, 4)), nn.Linear(4, 4).double(), nn.Linear(4, 4, device="meta")):
        with (
            pytest.raises(ValueError, match="has no linear layer to pack: layers on the CPU, in float32"),
            prehoc.packed(net),
        ):
            pass
    net = model()
    with prehoc.packed(net), pytest.raises(ValueError, match="that no other library has changed"), prehoc.packed(net):
        pass
    assert "forward" not in net[0].__dict__


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_answers_the_same_with_selection_and_padding(family: str) -> None:
    net = fresh(family)
    ids, mask = padded((0, 7), 40)
    logits = []
    for packing in (contextlib.nullcontext(), prehoc.packed(net)):
        with packing, prehoc.sparsify(net, "cis:budget=24,sink=2,local=8"):
            logits.append(generated(net, ids, mask, 6)[1])
    torch.testing.assert_close(logits[1], logits[0], atol=1e-4, rtol=1e-4)
