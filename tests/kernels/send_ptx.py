"""Compile the kernels that call NVSHMEM, against its device library, for sm_90. Run as a program, as `ptx.py` is.

python send_ptx.py  ->  one JSON object: kernel -> its Triton IR and its PTX
"""

from __future__ import annotations

import json

from ptx import compiled

from deep_ep.kernels import send
from deep_ep.kernels._nvshmem import DEVICE_LIBRARY
from deep_ep.kernels.low_latency import remote_copy as ll_copy

if __name__ == "__main__":
    pointers = {"state": "*i64", "pes": "*i32", "ll": "*i64", "ranks_mask": "*i32", "layout_range": "*i64"}
    libraries = {DEVICE_LIBRARY.name: DEVICE_LIBRARY.find()}
    made = {
        "words": compiled(send._send_words_kernel, pointers, {"IS_FAILURE_ONLY": False}, 1, libraries=libraries),
        "failure": compiled(send._send_words_kernel, pointers, {"IS_FAILURE_ONLY": True}, 1, libraries=libraries),
        "rows": compiled(send._send_rows_kernel, pointers, {}, 16, libraries=libraries),
        "signal": compiled(send._signal_rows_kernel, pointers, {"LANES": 32}, 1, libraries=libraries),
        "dispatch": compiled(ll_copy._copy_rows_kernel, pointers, {"TOPK": 32}, 8, libraries=libraries),
        "combine": compiled(ll_copy._copy_back_kernel, pointers, {"LOCAL": 32}, 8, libraries=libraries),
        "posts": compiled(ll_copy._copy_posts_kernel, pointers, {"LOCAL": 32}, 1, libraries=libraries),
    }
    print(json.dumps({name: {"ttir": one["ttir"], "ptx": one["ptx"]} for name, one in made.items()}))
