"""Compile every Triton kernel for the GPU named on the command line (80, 90), without one; print what each one needs.

Tensors on the meta device have shapes, strides and dtypes, which is all that compiling takes. `test_triton.py` runs this
file in a process of its own: it tells Triton of a GPU that is not there.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from prehoc.kernels import triton as ops

capability = int(sys.argv[1])


class NoDevice:
    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


driver.set_active(NoDevice())
launched = JITFunction.run


def compiled(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
    kernel = launched(self, *args, grid=grid, warmup=True, **kwargs)
    ptx = kernel.asm["ptx"]
    print(json.dumps({"name": self.__name__, "shared": kernel.metadata.shared, "tensor_cores": "mma" in ptx}))
    return kernel


JITFunction.run = compiled


def meta(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


lists, lengths, table = meta(2, 2, 300), meta(2, 2), meta(2, 40)
order, column = meta(4, 20, dtype=torch.int64), meta(4, 1, dtype=torch.int64)
ops.dilate(order, 0, 8, 8001, 8, 32, 1, 33, 20, 60, 3)
ops.dilate(order, column, column, 8001, 8, 32, 1, column, column)
state = {"indices": meta(2, 2, 90), "lengths": meta(2, 2), "age": meta(2, 2)}
state["anchor"] = meta(2, 8, 128, dtype=torch.float32)
q, k = meta(2, 8, 128, dtype=torch.bfloat16), meta(2, 2, 9000, 128, dtype=torch.bfloat16)[:, :, :8001]
for frozen, limit in ((True, (60, 60)), (False, None)):
    sizes = (8, 32, (20, 20), (6, 6), limit, 3, 1, 8, frozen, 0.8, 0.1)
    ops.cis_step(q, k, state, (0, 3), (8, 90), *sizes)
    along = {**state, "anchor": meta(2, 8, 16, dtype=torch.float32)}
    ops.cis_step(q, k, along, (0, 3), (8, 90), *sizes, meta(2, 2, 128, 16, dtype=torch.float32))
# head size, group, dtype: every form of the first, and on the newest GPU every kernel of the others
shapes = ((128, 4, torch.bfloat16), (80, 1, torch.float16), (256, 2, torch.float32))
for d, group, dtype in shapes if capability >= 90 else shapes[:1]:
    q, k = meta(2, 2 * group, d, dtype=dtype), meta(2, 2, 9000, d, dtype=dtype)[:, :, :8001]
    blocks, many = meta(64, 2, 16, d, dtype=dtype), meta(2, 2 * group, 500, d, dtype=dtype)
    ops.decode_selected_paged(q, blocks, blocks, table, lists, lengths, 0.1)
    ops.retrieve(q, k, None, 2, (0, 3), (8, 90), 8, 32, 20, 0.1)
    ops.prefill_window(many, k[:, :, :600], k[:, :, :600], (0, 3), 0.1, lambda t: t // 2, 8)
    if group == 4:
        ops.decode_dense(q, k, k, (0, 3), 8, (0, 90), 0.1)
        ops.decode_selected(q, k, k, lists, lengths, 0.1)
        ops.decode_dense_paged(q, blocks, blocks, table, meta(2), 0.1)
        ops.retrieve_paged(q, blocks, table, meta(2), None, 2, 8, 32, 20, 0.1)
        ops.retrieve(q, k, meta(3, dtype=torch.int64), 2, (0, 3), (8, 90), 8, 32, 20, 0.1, True, "mean")
        ops.prefill_window(many, k[:, :, :600], k[:, :, :600], (0, 3), 0.1)
