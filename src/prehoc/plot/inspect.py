"""An interactive page of one trace: what became of every key at every step, for the layer and head that the reader picks."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prehoc.plot.page import template
from prehoc.plot.recorded import Layer, full_layers
from prehoc.report import without_nan
from prehoc.trace import Trace


def inspect(
    found: Trace, title: str, progress: Callable[[str, int, int], None] = lambda stage, done, total: None
) -> str:
    """Return the HTML page of a trace; it needs nothing from outside.

    Parameters
    ----------
    found : Trace
        Recorded with ``selections`` and ``qk``.
    title : str
        Heading of the page.
    progress : callable
        Called with (stage, done, total).

    Returns
    -------
    str
        The page, with the trace packed and the drawing library inside.

    Raises
    ------
    ValueError
        When the trace lacks its selections, or queries and keys, or plotly is missing.
    """
    if found.indices is None or found.q is None or found.k is None:
        raise ValueError(
            "the trace has no selections, or no queries and keys; record it with --record selections --record qk"
        )
    library = _library()
    layers, packed = full_layers(found), {}
    for done, layer in enumerate(layers):
        progress("packing layers", done, len(layers))
        packed[layer] = [_pack(kinds) for kinds in Layer(found, layer).kinds()]
    meta = found.meta
    numbers = {name: without_nan(_rounded(getattr(found, name))) for name in ("retained", "oracle", "cosine")}
    data = {
        "prompt": meta["prompt_tokens"],
        "steps": meta["steps"],
        "heads": found.keys.shape[2],
        "layers": layers,
        "kinds": packed,
        "keys": found.keys.tolist(),
        "retrieved": found.retrieved.astype(int).tolist(),
        "tokens": None if found.tokens is None else found.tokens.tolist(),
        **numbers,
    }
    facts = {
        "method": meta["method"] + (" (observed: attention was dense)" if meta["observe"] else ""),
        "tokens": f"{meta['prompt_tokens']} prefilled, {meta['steps']} decoded",
        "text": meta.get("text", {}).get("file"),
        "model": meta["model"].get("name", meta["model"]["class"]),
        "command": meta.get("command"),
    }
    # "<" only occurs in strings, where its escape means the same and cannot end the script
    document = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    page = template("inspect.html")
    return page.render(title=title, facts={k: v for k, v in facts.items() if v}, data=document, library=library)


def _library() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ValueError("prehoc inspect needs plotly: pip install 'prehoc[plot]'") from error
    return str(get_plotlyjs()).replace("</script", "<\\/script")


def _pack(kinds: NDArray[np.uint8]) -> str:
    """Return uint8 ``[S, n]`` compressed, as text; shared sets repeat from step to step, so that little remains."""
    return base64.b64encode(gzip.compress(kinds.tobytes(), 6, mtime=0)).decode()


def _rounded(values: NDArray[np.float32]) -> list[Any]:
    return np.round(values.astype(np.float64), 4).tolist()  # type: ignore[no-any-return]
