"""Attach a method to a model and keep its session: three hooks, no copied forward, everything undone at detach."""

from __future__ import annotations

import contextlib
import functools
import time
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from prehoc import kernels
from prehoc.audit import Auditor
from prehoc.books import Books, Stopwatch
from prehoc.config import check_bool, check_int, check_range, default_backend
from prehoc.integrations.transformers import freezing
from prehoc.integrations.transformers.attention import NAME, hand_hidden, prehoc_attention, prehoc_mask
from prehoc.integrations.transformers.breakeven import break_even
from prehoc.integrations.transformers.compat import cache_key, check_version
from prehoc.integrations.transformers.forward import Forward, Phase, Recorder, declared, left_padding
from prehoc.integrations.transformers.generation import generate
from prehoc.integrations.transformers.layers import KVLayer, adopt, new_cache
from prehoc.integrations.transformers.support import find_base, supports
from prehoc.methods import describe, parse_method
from prehoc.methods.psaw import resolve_start_layer
from prehoc.report import Report, make_report
from prehoc.selection import Method, Plan, Rows, attend

DENSE = Plan()
_ATTACHED = "_prehoc_attached"  # on the base model: a head's model and its base are one


class Session:
    """A method at work on a model; made by `attach` or `sparsify`.

    Attributes
    ----------
    model : Module
        The model.
    method : Method
        The configuration.
    observe : bool
        Select and record, but attend (and prefill) densely.
    recorder : Recorder or None
        Sees every decode step (used by ``prehoc trace``).
    stopwatch : Stopwatch or None
        Times the parts of a step when set (used by ``prehoc bench``).
    attend : callable
        Turns a decode step's selection into its output (`prehoc.selection.attend`).
    """

    def __init__(self, model: Any, method: Method, backend: str, audit: float, seed: int, observe: bool) -> None:
        self.model, self.method, self.backend = model, method, backend
        self.observe = observe
        self.recorder: Recorder | None = None
        self.stopwatch: Stopwatch | None = None
        self.attend: Callable[..., Tensor] = attend
        self.plan: Plan = method.plan()
        self._dense_below = break_even(method, model, backend)
        self.books = Books()
        self._seed = seed
        self._auditor = Auditor(audit, seed) if audit and not self.plan.dense else None
        self._prompt = 0
        self._cache: Any = None
        self._undo: list[functools.partial[Any]] = []  # no closures: a deep copy of the model undoes its own
        self._weights: tuple[tuple[int, int], ...] = ()
        self.own_generate: Any = None

    def report(self) -> Report:
        """Return what was read and what was missed since the session began (or since `reset`)."""
        size = getattr(self.method, "size", None)
        budget = size().describe(self._prompt) if size and self.plan.selector else ""
        held = (
            sum(x.store.nbytes for x in self._cache.layers if isinstance(x, KVLayer)) if self._cache is not None else 0
        )
        return make_report(describe(self.method), budget, self.books, self._seed, held)

    def reset(self) -> None:
        """Start the books anew."""
        self.books = Books()

    def new_cache(self, max_length: int = 0) -> Any:
        """Return an empty cache with room for `max_length` tokens, for loops of your own."""
        return new_cache(self.model.config, max_length)

    def detach(self) -> None:
        """Give the model back exactly as it was."""
        while self._undo:
            self._undo.pop()()

    def _attach(self) -> None:
        found = find_base(self.model)
        assert found is not None  # `attach` asked `supports`
        base, layers = found
        self._weights = tuple((_matrices(layer), _matrices(layer.self_attn)) for layer in layers)
        AttentionInterface.register(NAME, prehoc_attention)
        AttentionMaskInterface.register(NAME, prehoc_mask)
        self._later(delattr, base, _ATTACHED)
        setattr(base, _ATTACHED, self)
        before = self.model.config._attn_implementation
        self._later(self.model.set_attn_implementation, before)
        self.model.set_attn_implementation(NAME)
        self._later(base.register_forward_pre_hook(self._before, with_kwargs=True).remove)
        self._later(base.register_forward_hook(_after, with_kwargs=True).remove)
        if self.plan.reads_hidden:
            for layer in layers:
                self._later(layer.register_forward_pre_hook(hand_hidden, with_kwargs=True).remove)
        if self.plan.freeze is not None:
            for layer in list(layers)[resolve_start_layer(self.plan.freeze.start_layer, len(layers)) :]:
                freezing.wrap(layer)
                self._later(freezing.unwrap, layer)
        if hasattr(self.model, "generate"):
            own = self.model.__dict__.get("generate")
            self.own_generate = self.model.generate
            self.model._prehoc_session = self
            self.model.generate = types.MethodType(generate, self.model)
            self._later(_restore_generate, self.model, own)

    def _later(self, undo: Any, *args: Any) -> None:
        self._undo.append(functools.partial(undo, *args))

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Adopt the cache and tell the attention functions what this forward is."""
        if module.config._attn_implementation != NAME:  # type: ignore[union-attr]
            raise ValueError(
                f"the attention implementation was changed to {module.config._attn_implementation!r} while prehoc is attached; "  # type: ignore[union-attr]
                "call prehoc.detach(model) first"
            )
        if module.training and torch.is_grad_enabled():
            raise ValueError("prehoc is for inference only: call model.eval() and use torch.no_grad()")
        if kwargs.get("output_attentions"):
            raise ValueError("output_attentions=True is not available: prehoc never materialises attention weights")
        inputs = kwargs.get("input_ids", args[0] if args else None)
        inputs = kwargs.get("inputs_embeds") if inputs is None else inputs
        if inputs is None:
            raise ValueError("give input_ids or inputs_embeds")
        tokens = int(inputs.shape[1])
        fwd = self._forward(module, kwargs, int(inputs.shape[0]), tokens)
        kwargs["prehoc"] = fwd
        return args, kwargs

    def _forward(self, module: nn.Module, kwargs: dict[str, Any], rows: int, tokens: int) -> Forward:
        config: Any = module.config
        use_cache = kwargs.get("use_cache")
        use_cache = getattr(config, "use_cache", False) if use_cache is None else use_cache
        key = cache_key(kwargs, module)
        cache, call = kwargs.get(key), declared.get()
        needs = self.plan.freeze is not None  # frozen rows leave their keys and values in a cache
        if cache is not None or use_cache or needs:
            capacity = call.capacity if call else 0
            cache = new_cache(config, capacity) if cache is None else adopt(cache, config, capacity)
            kwargs[key] = cache
        past = 0 if cache is None else int(cache.get_seq_length())
        info = _rows(cache, past, tokens, rows, kwargs.get("attention_mask"), call)
        phase = _phase(cache, past, tokens, call)
        short = max(info.prompt, default=0) < self._dense_below
        fwd = Forward(
            DENSE if short else self.plan,
            self._weights,
            cache,
            past,
            tokens,
            info,
            phase,
            self.books,
            self.backend,
            self.observe,
            self.recorder,
            self._auditor,
            self.stopwatch,
            attend=self.attend,
        )
        for store in fwd.stores():
            store.rows = info
            if phase != "decode":
                store.state.clear()
        self._cache, self._prompt = cache, max(info.prompt, default=0)
        self._enter(fwd)
        return fwd

    def _enter(self, fwd: Forward) -> None:
        if fwd.phase == "decode":
            self.books.traffic.steps += 1
        else:
            self.books.prompt(fwd.rows, fwd.past, fwd.tokens, fwd.weights)
        fwd.started = time.perf_counter()
        if self.stopwatch:
            self.stopwatch.start()


def _rows(cache: Any, past: int, tokens: int, rows: int, mask: Any, call: Any) -> Rows:
    """Return padding and prompt length of each row, from the mask at a prompt and from the cache afterwards."""
    stored = next((x.store.rows for x in getattr(cache, "layers", []) if isinstance(x, KVLayer)), None)
    known = past > 0 and stored is not None and len(stored.pad) == rows
    total = call.tokens if call is not None and past + tokens <= call.tokens else past + tokens
    in_prompt = past == 0 or (call is not None and past + tokens <= call.tokens)
    if known and not in_prompt:
        assert stored is not None
        # a later turn, or a chunk of a prompt read by a loop of the caller's own: the prompt ends where it ends
        return stored if tokens == 1 else Rows(stored.pad, tuple(past + tokens - pad for pad in stored.pad))
    pad = left_padding(mask[:, : past + tokens], rows) if isinstance(mask, Tensor) and mask.dim() == 2 else (0,) * rows
    if call is not None and call.pad is not None:
        repeat = max(rows // len(call.pad), 1)
        pad = tuple(p for p in call.pad for _ in range(repeat))
    return Rows(pad, tuple(max(total - p, 0) for p in pad))


def _phase(cache: Any, past: int, tokens: int, call: Any) -> Phase:
    if past == 0:
        return "prefill"
    if call is not None and past + tokens <= call.tokens:
        return "prefill" if call.first_turn else "extend"
    return "decode" if tokens == 1 else "extend"


def _after(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    fwd: Forward = kwargs["prehoc"]
    seconds = time.perf_counter() - fwd.started
    if fwd.phase == "decode":
        fwd.books.decode_seconds.append(seconds)
    else:
        fwd.books.prefill.seconds += seconds
    if fwd.stopwatch:
        fwd.stopwatch.lap("rest")


def _restore_generate(model: Any, own: Any) -> None:
    del model._prehoc_session
    if own is None:
        del model.generate
    else:
        model.generate = own


def _matrices(module: Any) -> int:
    return sum(p.numel() for p in module.parameters() if p.dim() >= 2)


def attach(
    model: nn.Module,
    method: Method | str = "cpe",
    *,
    backend: str | None = None,
    audit: float = 0.01,
    seed: int = 0,
    observe: bool = False,
    compile: bool = False,
    extra: Mapping[str, Any] | None = None,
) -> Session:
    """Attach a method to a transformers model until ``session.detach()``.

    Parameters
    ----------
    model : Module
        A decoder-only transformers model, in eval mode.
    method : Method or str
        A configuration such as ``CPE(budget=1024)``, or ``name:key=value,...``.
    backend : str, optional
        Kernel backend (default: ``PREHOC_BACKEND``, else ``auto``).
    audit : float
        Share of decode triples whose retained mass is measured exactly, in [0, 1].
    seed : int
        Seed of that draw.
    observe : bool
        Select and record, but attend densely.
    compile : bool
        Run the decode steps through ``torch.compile``: the first one compiles the model, which takes long (docs/compile.md).
    extra : mapping, optional
        More keys for a method given as text.

    Returns
    -------
    Session

    Raises
    ------
    ValueError
        For an unsupported model (with the reason), a model that is attached already, or a bad configuration.
    """
    check_version()
    chosen = parse_method(method, extra) if isinstance(method, str) else method
    if isinstance(chosen, type) or not hasattr(chosen, "plan"):
        raise ValueError(
            f"method={method!r} is not a prehoc method; give for example prehoc.CPE(budget=1024) or 'cpe:budget=1024'"
        )
    check_bool("compile", compile)
    check_int("seed", seed, 0)
    check_range("audit", audit, 0.0, 1.0, fix="0.01 audits one triple in a hundred")
    plan = chosen.plan()
    support = supports(model, plan)
    if not support:
        raise ValueError(f"unsupported model: {support.reason}")
    if attached(model) is not None:
        raise ValueError("the model is attached already: leave its sparsify block or call prehoc.detach(model) first")
    device, dtype = next(model.parameters()).device, getattr(model, "dtype", torch.float32)
    name = kernels.resolve(default_backend() if backend is None else backend, device, dtype)
    for part in (plan.window, plan.freeze):
        if part is not None:
            resolve_start_layer(part.start_layer, len(find_base(model)[1]))  # type: ignore[index]
    session = Session(model, chosen, name, audit, seed, observe)
    try:
        session._attach()
        if compile:
            from prehoc.integrations.transformers import compiled  # registers ops: only for those who ask

            session._later(compiled.install(find_base(model)[0], device))  # type: ignore[index]
    except BaseException:
        session.detach()
        raise
    return session


@contextlib.contextmanager
def sparsify(model: nn.Module, method: Method | str = "cpe", **options: Any) -> Iterator[Session]:
    """Attach a method for the length of a ``with`` block; options as in `attach`."""
    session = attach(model, method, **options)
    try:
        yield session
    finally:
        session.detach()


def attached(model: nn.Module) -> Session | None:
    """Return the session at work on a model (or on a deep copy of one), None without."""
    found = find_base(model)
    return getattr(found[0], _ATTACHED, None) if found else None


def detach(target: Session | nn.Module) -> None:
    """Give a session's model back exactly as it was; a model without a session is left alone."""
    session = target if isinstance(target, Session) else attached(target)
    if session is not None:
        session.detach()
