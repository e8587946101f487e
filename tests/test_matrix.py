"""One matrix: every method with every check, on every family and dtype. A method joins with one line in METHODS.

The fast part holds each (method, check), (family, check) and (dtype, check) pair at least once; ``-m slow`` holds the rest.
Checks that follow a pruned computation twice run in float64 where they can: rounding then decides no top-k and no gate.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import families
import prehoc
from families import FAMILIES, SLIDING, cache_name, forced, generated, padded, sparsify, tokens
from prehoc import methods

PROMPT, NEW = 52, 9  # a middle larger than the budget below, blocks that end and begin
PAD = (0, 9, 31)
SMALL = "sink=2,local=6,critical=10"
COVER = "sink=2,local=6,critical=400"
CIS = f"{SMALL},block_size=4"
COVER_CIS = f"{COVER},block_size=4"
DEPTH = "phi=0.4,alpha=1.0,psi=0.4,gamma=1.0,start_layer=1"
WINDOW = "phi=0.3,alpha=1.0,start_layer=1,sink=2,local=6"
OPEN = "phi=1,psi=1,start_layer=1"

# name: (pruned, the same method so that it is dense)
METHODS: dict[str, tuple[str, str]] = {
    "dense": ("dense", "dense"),
    "streaming": ("streaming:sink=2,budget=18", "streaming:sink=2,budget=400"),
    "oracle": (f"oracle:{SMALL}", f"oracle:{COVER}"),
    "oracle-query-head": (f"oracle:{SMALL},granularity=query_head", f"oracle:{COVER},granularity=query_head"),
    "cis": (f"cis:{CIS}", f"cis:{COVER_CIS}"),
    "cis-block": (f"cis:{CIS},refresh=block", f"cis:{COVER_CIS},refresh=block"),
    "cis-sliding": (f"cis:{CIS},local_window=sliding", f"cis:{COVER_CIS},local_window=sliding"),
    "cis-query-head": (f"cis:{CIS},granularity=query_head", f"cis:{COVER_CIS},granularity=query_head"),
    "cis-star": (f"cis-star:{CIS}", f"cis-star:{COVER_CIS}"),
    "cis-mass": ("cis:sink=2,local=6,mass=0.5,block_size=4", "cis:sink=2,local=6,mass=1.0,block_size=4,tau=1"),
    "cis-compact": (f"cis:{CIS},retrieval=compact", f"cis:{COVER_CIS},retrieval=compact"),
    "cis-ratio": ("cis:sink=2,local=6,ratio=0.4,block_size=4", "cis:sink=0,local=90,ratio=1.0,block_size=4"),
    "psaw": ("psaw:phi=0.3,alpha=1.0,start_layer=1,sink=2,local=6", "psaw:phi=1,start_layer=1"),
    "etf": ("etf:psi=0.4,start_layer=1", "etf:psi=1,start_layer=1"),
    "etf-share": ("etf:psi=0.4,start_layer=1,kv=share", "etf:psi=1,start_layer=1,kv=share"),
    "cpe": (f"cpe:{CIS},{DEPTH}", f"cpe:{COVER_CIS},{OPEN}"),
    "cpe-paper": (f"paper:{CIS},phi=0.4", f"paper:{COVER_CIS},{OPEN}"),
    "h2o": (f"h2o:{SMALL}", f"h2o:{COVER}"),
    "h2o-ratio": ("h2o:sink=2,local=6,ratio=0.4", "h2o:sink=0,local=90,ratio=1.0"),
    "snapkv": (f"snapkv:{SMALL},kernel=3", f"snapkv:{COVER}"),
    "static-window": (f"static_window:{WINDOW}", "static_window:phi=1,start_layer=1"),
    "linear-window": (f"linear_window:{WINDOW}", "linear_window:phi=1,start_layer=1"),
    "hshare": (f"hshare-2:{SMALL}", f"hshare-2:{COVER}"),
    "hshare-ratio": (
        "hshare:sink=2,local=6,ratio=0.4,layers=3/4,heads=1/2,queries=1/3,granularity=query_head",
        "hshare:sink=0,local=90,ratio=1.0",
    ),
    "double-sparsity": (f"double_sparsity:{SMALL},channels=3", f"double_sparsity:{COVER}"),
    "random-expansion": (f"random_expansion:{CIS}", f"random_expansion:{COVER_CIS}"),
    "random-expansion-block": (
        f"random_expansion:{CIS},refresh=block,granularity=query_head",
        f"random_expansion:{COVER_CIS},refresh=block",
    ),
    "oracle-topp": ("oracle_topp:mass=0.5,local=6", "oracle_topp:local=90"),
    "quest": (f"quest:{SMALL},page_size=2,dense_layers=1", f"quest:{COVER},page_size=2,dense_layers=1"),
    "cis-query": (f"cis:{CIS},gate=query", f"cis:{COVER_CIS},gate=query"),
    "cis-key": (f"cis_key:{CIS},tau=0.1", f"cis_key:{COVER_CIS}"),  # random models: larger cosines are rare
    "cis-hidden": (f"cis_hidden:{CIS},tau=0.1", f"cis_hidden:{COVER_CIS}"),
}
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
# largest logit error against stock, for logits of standard deviation 1.8: rounding of another order of summation
ROUNDING = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 0.08, torch.bfloat16: 0.4}
# mean logit error of a pruned run against the same run elsewhere: 16-bit rounding flips near-ties of the top-k
FLIPS = {torch.float64: 1e-5, torch.float32: 5e-3, torch.float16: 0.1, torch.bfloat16: 0.35}
EXACT = {torch.float64, torch.float32}  # greedy tokens are compared too


class Case:
    """One cell of the matrix."""

    def __init__(self, method: str, family: str, dtype: str) -> None:
        self.pruned, self.covering = METHODS[method]
        self.method, self.family, self.dtype = method, family, DTYPES[dtype]
        self.net = families.model(family, self.dtype)
        self.exact = self.dtype in EXACT

    def same(self, got: Tensor, wanted: Tensor) -> None:
        """Compare logits of runs that compute the same thing."""
        assert got.shape == wanted.shape
        assert bool(got.isfinite().all())
        error = (got.float() - wanted.float()).abs().max().item()
        assert error <= ROUNDING[self.dtype], f"largest logit error {error}"

    def follows(self, got: Tensor, wanted: Tensor) -> None:
        """Compare logits of pruned runs: rounding may flip a near-tie, unless float64."""
        if self.dtype == torch.float64:
            return self.same(got, wanted)
        assert got.shape == wanted.shape and bool(got.isfinite().all())
        error = (got.float() - wanted.float()).abs().mean().item()
        assert error <= FLIPS[self.dtype], f"mean logit error {error}"
        return None


# ---------------------------------------------------------------------------------------------------------- the checks


def check_universal(c: Case) -> None:
    """A budget that covers the context, phi = 1, psi = 1: the stock model's logits and greedy tokens, padded and not."""
    for ids, mask in (padded(PAD, PROMPT, seed=1), padded((0,), 40, seed=2)):
        sequences, wanted = generated(c.net, ids, mask, NEW)
        longer = torch.cat([mask, torch.ones_like(sequences[:, mask.shape[1] :])], 1)
        stock = forced(c.net, sequences, ids.shape[1], longer)
        with sparsify(c.net, c.covering) as session:
            own = forced(c.net, sequences, ids.shape[1], longer)
            got, logits = generated(c.net, ids, mask, NEW)
            report = session.report()
        c.same(own, stock)
        if c.exact:
            assert torch.equal(got, sequences)
            c.same(logits, wanted)
        assert report.decode.retrievals == 0 or "mass" in c.covering


def check_padded(c: Case) -> None:
    """Rows of a ragged, left-padded batch are pruned exactly as each row alone."""
    ids, mask = padded(PAD, PROMPT, seed=3)
    with sparsify(c.net, c.pruned):
        sequences, logits = generated(c.net, ids, mask, NEW)
        for row, pad in enumerate(PAD):
            alone = forced(c.net, sequences[row : row + 1, pad:], PROMPT - pad)
            c.follows(logits[row : row + 1], alone[:, :-1])


def check_fresh(c: Case) -> None:
    """Two generates of one session equal two fresh sessions, bit for bit: nothing is left behind but the books."""
    prompts = [tokens(2, PROMPT, seed=4), tokens(1, 44, seed=5)]
    with sparsify(c.net, c.pruned):
        together = [generated(c.net, ids, new=NEW)[1] for ids in (*prompts, *prompts)]
    alone = []
    for ids in prompts:
        with sparsify(c.net, c.pruned):
            alone.append(generated(c.net, ids, new=NEW)[1])
    for got, wanted in zip(together, (*alone, *alone), strict=True):
        assert torch.equal(got, wanted)


def check_detach(c: Case) -> None:
    """A detached model is bit for bit the original, in what it computes and in what it holds."""
    ids, mask = padded(PAD, PROMPT, seed=6)
    before, held = generated(c.net, ids, mask, NEW), _attributes(c.net)
    with sparsify(c.net, c.pruned):
        generated(c.net, ids, mask, NEW)
        assert _attributes(c.net) != held
    after = generated(c.net, ids, mask, NEW)
    assert torch.equal(before[0], after[0]) and torch.equal(before[1], after[1])
    assert _attributes(c.net) == held
    with pytest.raises(RuntimeError, match="stop"), sparsify(c.net, c.pruned):
        raise RuntimeError("stop")
    assert _attributes(c.net) == held


def check_turns(c: Case) -> None:
    """Several turns over one cache: dense when covered; pruned turns leave a cache that a later dense turn can read."""
    first, second = tokens(1, PROMPT, seed=7), tokens(1, 15, seed=8)

    def conversation() -> tuple[Tensor, Tensor, Tensor]:
        cache = DynamicCache(config=c.net.config)
        one, logits = generated(c.net, first, new=NEW, **{cache_name(c.net): cache})
        two, more = generated(c.net, torch.cat([one, second], 1), new=NEW, **{cache_name(c.net): cache})
        return two, logits, more

    stock = conversation()
    with sparsify(c.net, c.covering):
        own = conversation()
    if c.exact:
        assert torch.equal(own[0], stock[0])
        c.same(own[1], stock[1])
        c.same(own[2], stock[2])
    with sparsify(c.net, c.pruned):
        one, again = conversation(), conversation()
    assert all(torch.equal(a, b) for a, b in zip(one, again, strict=True))
    # the second prompt is read densely, over the keys that the pruned first turn left
    with sparsify(c.net, c.pruned) as session:
        cache = session.new_cache()
        text, _ = generated(c.net, first, new=NEW, **{cache_name(c.net): cache})
        copy = DynamicCache(config=c.net.config)
        for i, layer in enumerate(cache.layers):
            copy.update(layer.keys.clone(), layer.values.clone(), i)
        text = torch.cat([text, second], 1)
        start = PROMPT + NEW - 1
        # positions are stated: of an evicted cache stock does not know how long the text was
        window = {"attention_mask": None, "position_ids": torch.arange(start, text.shape[1])[None]}
        assert cache.get_seq_length() == start
        if c.family in SLIDING:
            return  # a copied sliding layer does not know how many columns it dropped
        got = c.net(text[:, start:], use_cache=True, **window, **{cache_name(c.net): cache}).logits
    wanted = c.net(text[:, start:], use_cache=True, **window, **{cache_name(c.net): copy}).logits
    c.same(got, wanted)


def check_chunked(c: Case) -> None:
    """A prompt in chunks (the last of one token) is pruned as in one shot, padding included."""
    ids, mask = padded(PAD, PROMPT, seed=9)
    with sparsify(c.net, c.pruned):
        sequences, logits = generated(c.net, ids, mask, NEW)
        for size in (17, 51):
            chunked, got = generated(c.net, ids, mask, NEW, prefill_chunk_size=size)
            if c.dtype == torch.float64:
                assert torch.equal(chunked, sequences)
            if torch.equal(chunked, sequences):  # another token sends 16-bit runs elsewhere
                c.follows(got, logits)
            c.follows(got[:, :1], logits[:, :1])


def check_beams(c: Case) -> None:
    """Covered beams are stock beams; pruned beams score as their sequence decoded alone: state follows the beams."""
    ids, mask = padded(PAD[1:], PROMPT, seed=10)
    options = {"num_beams": 3, "length_penalty": 0.0, "num_return_sequences": 2}
    stock = _scored(c.net, ids, mask, **options)
    with sparsify(c.net, c.covering):
        own = _scored(c.net, ids, mask, **options)
    if c.exact:
        assert torch.equal(stock[0], own[0])
        torch.testing.assert_close(stock[1], own[1], atol=1e-3, rtol=0)
    with sparsify(c.net, c.pruned):
        sequences, scores = _scored(c.net, ids, mask, **options)
        assert bool(scores.isfinite().all())
        for i, sequence in enumerate(sequences):
            pad = PAD[1:][i // 2]
            logits = forced(c.net, sequence[None, pad:], PROMPT - pad)[0, :-1]
            likely = torch.log_softmax(logits.double(), -1)
            total = likely.gather(1, sequence[PROMPT:, None]).sum().item()
            tolerance = {torch.float64: 1e-5, torch.float32: 1e-2}.get(c.dtype)
            assert tolerance is None or abs(total - scores[i].item()) < tolerance


def check_sampling(c: Case) -> None:
    """A seed decides the samples; covered ones are stock's, pruned ones are decoded as alone (num_return_sequences)."""
    ids, mask = padded(PAD[:2], PROMPT, seed=11)

    def sample() -> tuple[Tensor, Tensor]:
        torch.manual_seed(5)
        return generated(c.net, ids, mask, NEW, do_sample=True, num_return_sequences=2, top_k=20)

    stock = sample()
    with sparsify(c.net, c.covering):
        own = sample()
    if c.exact:
        assert torch.equal(own[0], stock[0])
        c.same(own[1], stock[1])
    with sparsify(c.net, c.pruned):
        one, two = sample(), sample()
        assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1])
        for i, sequence in enumerate(one[0]):
            pad = PAD[i // 2]
            alone = forced(c.net, sequence[None, pad:], PROMPT - pad)
            c.follows(one[1][i : i + 1], alone[:, :-1])


def check_short(c: Case) -> None:
    """Prompts shorter than budget, sinks and window: dense, and no method stumbles over one token."""
    for length in (1, 3):
        ids = tokens(2, length, seed=12)
        sequences, _ = generated(c.net, ids, new=3)
        stock = forced(c.net, sequences, length)
        with sparsify(c.net, c.pruned):
            got, logits = generated(c.net, ids, new=3)
            own = forced(c.net, sequences, length)
        assert bool(logits.isfinite().all())
        if length == 1 or not {"etf", "etf-share", "cpe", "cpe-paper"} & {c.method}:  # freezing begins at two tokens
            c.same(own, stock)
            assert not c.exact or torch.equal(got, sequences)


def check_finite(c: Case) -> None:
    """No NaN or infinity, whatever the padding; and the pruned run is not the dense one in disguise."""
    ids, mask = padded((0, PROMPT - 1, PROMPT - 4, 20), PROMPT, seed=13)
    _, dense = generated(c.net, ids, mask, NEW)
    with sparsify(c.net, c.pruned, audit=0.5) as session:
        _, logits = generated(c.net, ids, mask, 24)
        report = session.report()
    assert bool(logits.isfinite().all())
    pruned = (logits[0, 1:NEW].float() - dense[0, 1:].float()).abs().max().item()
    if c.method != "dense" and c.family != "mistral-sliding":
        assert pruned > ROUNDING[c.dtype], pruned
    elif c.exact:  # in 16 bit another token may have been taken
        assert pruned <= ROUNDING[c.dtype], pruned
    numbers = report.to_dict()
    assert numbers["decode"]["steps"] == 23
    mean, low, high = report.retained_mass
    if report.audited:
        assert 0 < low <= mean <= high <= 1 + 1e-5


def _scored(net: Any, ids: Tensor, mask: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    out = net.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=NEW,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    return out.sequences, out.sequences_scores


def _attributes(net: Any) -> dict[str, Any]:
    """Everything that attaching could leave behind: instance attributes, hooks and the attention of every module."""
    out: dict[str, Any] = {"attention": net.config._attn_implementation}
    for name, module in net.named_modules():
        plain = {k for k in module.__dict__ if not k.startswith("_") or "prehoc" in k}
        hooks = len(module._forward_pre_hooks), len(module._forward_hooks), len(module._forward_hooks_with_kwargs)
        out[name] = (plain, hooks, module.__dict__.get("forward"))
    return out


CHECKS: dict[str, Callable[[Case], None]] = {
    name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")
}


def cells() -> Iterator[tuple[str, str, str, str, bool]]:
    """All (check, method, family, dtype), and whether the fast part holds it."""
    names, dtypes = list(FAMILIES), list(DTYPES)
    for a, check in enumerate(CHECKS):
        fast = set()
        for b, method in enumerate(METHODS):
            family = names[(a + b) % len(names)]
            if method == "etf-share" and family in SLIDING:
                family = "llama"
            dtype = dtypes[(a + b) % 4] if (a + b) % 3 else dtypes[1]
            fast.add((method, family, dtype))
        for family in set(names) - {cell[1] for cell in fast}:
            fast.add(("cis", family, "float64"))
        for dtype in set(dtypes) - {cell[2] for cell in fast}:
            fast.add(("cpe", "llama", dtype))
        for method in METHODS:
            for family in names:
                if method == "etf-share" and family in SLIDING:
                    continue
                for dtype in dtypes:
                    yield check, method, family, dtype, (method, family, dtype) in fast


@pytest.mark.parametrize(
    ("check", "method", "family", "dtype"),
    [pytest.param(*cell, id="-".join(cell), marks=() if fast else (pytest.mark.slow,)) for *cell, fast in cells()],
)
def test_matrix(check: str, method: str, family: str, dtype: str) -> None:
    CHECKS[check](Case(method, family, dtype))


def test_the_fast_part_holds_every_pair() -> None:
    fast = [cell[:4] for cell in cells() if cell[4]]
    for at, names in ((1, METHODS), (2, FAMILIES), (3, DTYPES)):
        assert {(cell[0], cell[at]) for cell in fast} == {(check, name) for check in CHECKS for name in names}


def test_every_registered_method_is_in_the_matrix() -> None:
    written = {text.partition(":")[0] for pair in METHODS.values() for text in pair}
    assert set(methods.METHODS) - {"auto"} <= written  # auto is one of these or dense: tests/methods/test_auto.py
    assert all(prehoc.parse_method(text) for pair in METHODS.values() for text in pair)


def test_families_are_built_alike_every_time() -> None:
    ids = tokens(1, 12)
    for family in FAMILIES:
        one, two = (families.fresh(family)(ids).logits for _ in range(2))
        assert torch.equal(one, two)
        assert "attention_mask" in inspect.signature(families.model(family).forward).parameters
