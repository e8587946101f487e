"""The torch backend: every operation in plain torch, on any device. Correct first, and the truth other backends meet.

Shapes: B batch rows, H query heads, Hkv KV heads, G = H / Hkv, Hs selection heads (Hkv or H), n cache columns, D head size.
K and V are views ``[B, Hkv, n, D]`` of the preallocated cache; nothing here repeats or copies a whole one.
"""

from prehoc.kernels.host import group_queries
from prehoc.kernels.reference.cheap import compact, retrieve_compact
from prehoc.kernels.reference.decode import decode_compact, decode_dense, decode_selected, gather_rows
from prehoc.kernels.reference.dilate import dilate
from prehoc.kernels.reference.paged import decode_dense_paged, decode_selected_paged, gather_pages, retrieve_paged
from prehoc.kernels.reference.retrieve import Retrieval, ranked, retrieve

READS_IN_PLACE = False  # gathering rows in torch is slow: a shared set is gathered once

__all__ = [
    "READS_IN_PLACE",
    "Retrieval",
    "compact",
    "decode_compact",
    "decode_dense",
    "decode_dense_paged",
    "decode_selected",
    "decode_selected_paged",
    "gather_pages",
    "dilate",
    "gather_rows",
    "group_queries",
    "ranked",
    "retrieve",
    "retrieve_compact",
    "retrieve_paged",
]
