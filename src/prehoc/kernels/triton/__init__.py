"""The Triton backend, for CUDA devices from Ampere on. Same operations, shapes and meaning as the reference backend.

No operation waits for the device or reads one of its values, and every grid follows from shapes: all of them but
`prefill_window` can be captured in a CUDA graph. Results are compared with the reference through Triton's interpreter, and
every kernel is compiled for Ampere and Hopper; nothing has run on a GPU yet, and the sizes of tiles are untuned.
"""

from prehoc.kernels.reference import decode_compact
from prehoc.kernels.triton.cis import cis_step
from prehoc.kernels.triton.decode import decode_dense, decode_selected
from prehoc.kernels.triton.dilate import dilate
from prehoc.kernels.triton.paged import decode_dense_paged, decode_selected_paged
from prehoc.kernels.triton.prefill import prefill_window
from prehoc.kernels.triton.retrieve import retrieve, retrieve_paged

READS_IN_PLACE = True

__all__ = [
    "READS_IN_PLACE",
    "cis_step",
    "decode_compact",
    "decode_dense",
    "decode_dense_paged",
    "decode_selected",
    "decode_selected_paged",
    "dilate",
    "prefill_window",
    "retrieve",
    "retrieve_paged",
]
