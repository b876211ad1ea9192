"""Compile kernels for sm_90 without a GPU, to look at what the compiler made of them. Run as a program: Triton must not
be in its interpreter's mode, which the tests of kernels need.

    python ptx.py  ->  one JSON object: kernel -> its PTX
"""

from __future__ import annotations

import json

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from deep_ep.kernels import counts, exchange, pull, push, put, rail, relay, relay_sums, staging, steer
from deep_ep.kernels.low_latency import combine, dispatch
from deep_ep.kernels.low_latency import words as ll_words

TARGET = GPUTarget("cuda", 90, 32)


def ptx_of(kernel, pointers: dict[str, str], constants: dict[str, object], num_warps: int, aligned=()) -> str:
    """The PTX of a kernel, whose pointers have these types; numbers have theirs written down."""
    return compiled(kernel, pointers, constants, num_warps, aligned)["ptx"]


def compiled(
    kernel, pointers: dict[str, str], constants: dict[str, object], num_warps: int, aligned=(), libraries=None
):
    """All that the compiler makes of a kernel on the way, by stage."""
    signature, attributes = {}, {}
    for index, param in enumerate(kernel.params):
        if param.is_constexpr:
            signature[param.name] = "constexpr"
        else:
            signature[param.name] = pointers.get(param.name) or param.annotation_type or "i32"
        if param.name in aligned:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    options = {"num_warps": num_warps, **({"extern_libs": libraries} if libraries else {})}
    return triton.compile(source, target=TARGET, options=options).asm


def signalling() -> dict[str, str]:
    words = dict.fromkeys(("windows", "homes", "state", "table", "host", "plan"), "*i64")
    lists = dict.fromkeys(
        ("counts", "given", "per_expert", "prefix", "slots", "recv_src_idx", "node_tokens", "node_prefix", "mark"),
        "*i32",
    )
    ptx = {}
    # As `prepare_all` compiles them, for up to 32 ranks.
    for is_new, has_counts, has_prefix, is_pushed in (
        (True, True, True, False),
        (True, False, True, False),
        (True, False, True, True),
        (True, False, False, False),
        (False, False, False, False),
    ):
        constants = {"IS_NEW": is_new, "HAS_COUNTS": has_counts, "HAS_PREFIX": has_prefix, "IS_PUSHED": is_pushed}
        constants |= {"SAYS": True, "HEARS": True, "HAS_NODES": False, "LANES": 32, "CHUNK": 8}
        name = f"meet new={is_new} counts={has_counts} prefix={has_prefix}" + " pushed" * is_pushed
        ptx[name] = ptx_of(exchange._meet_kernel, words | lists, constants, 1)
    ptx["finish dispatch"] = ptx_of(staging._finish_dispatch_kernel, words | lists, {"LANES": 32}, 1)
    ptx["finish combine"] = ptx_of(staging._finish_combine_kernel, words | lists, {"LANES": 32}, 1)
    both = {"HAS_NODES": True, "IS_PUSHED": False, "LANES": 32, "CHUNK": 8}
    for says, hears in ((True, True), (True, False), (False, True)):
        for has_counts in (True, False):
            constants = {"SAYS": says, "HEARS": hears, "IS_NEW": True, "HAS_COUNTS": has_counts, **both}
            constants |= {"HAS_PREFIX": has_counts}
            name = f"meet nodes says={says} hears={hears} counts={has_counts}"
            ptx[name] = ptx_of(exchange._meet_kernel, words | lists, constants, 1)
    bells = words | dict.fromkeys(("bells", "wanted", "seen"), "*i64")
    ptx["ring"] = ptx_of(rail._ring_kernel, bells, {"IS_BACK": False, "LANES": 32}, 1)
    ptx["await landed"] = ptx_of(rail._await_kernel, bells, {"LANES": 32}, 1)
    meets = words | dict.fromkeys(("landed", "rail"), "*i64")
    ptx["meet rail"] = ptx_of(rail._meet_rail_kernel, meets, {"IS_BACK": False, "LANES": 32}, 1)
    ptx["abort"] = ptx_of(exchange._abort_kernel, words, {"LANES": 32}, 1)
    notes = words | dict.fromkeys(("numbers", "note"), "*i64")
    ptx["refuse"] = ptx_of(exchange._refuse_kernel, notes, {"LANES": 32}, 1)
    return ptx


def moving() -> dict[str, str]:
    pointers = dict.fromkeys(("slots", "send_head", "prefix", "records", "sources", "ends", "target", "rows"), "*i32")
    pointers |= {
        "x": "*i32",
        "scales": "*i32",
        "topk_idx": "*i64",
        "topk_weights": "*fp32",
        "table": "*i64",
        "state": "*i64",
    }
    constants = {
        "WORD_BYTES": 4,
        "VECTOR": 16,
        "SCALE_BYTES": 4,
        "BLOCK": 4096,
        "HAS_SCALES": True,
        "SCALES": 64,
        "HAS_RECORDS": True,
    }
    constants |= {"HAS_TOPK": True, "TOPK": 8, "LANES": 8, "IS_WHOLE": False}
    ptx = {"put": ptx_of(put._put_kernel, pointers, constants, 16)}
    steered = pointers | {"node_slots": "*i32", "numbers": "*i32", "passed_on": "*i32", "plan": "*i64", "aimed": "*i64"}
    for name, has_records in (("steer", True), ("steer along a handle", False)):
        ptx[name] = ptx_of(steer._steer_kernel, steered, {"HAS_RECORDS": has_records, "TILE": 128, "LANES": 16}, 8)
    landed = {name: value for name, value in constants.items() if name not in ("WORD_BYTES", "SCALE_BYTES")}
    landed |= {"WORD": triton.language.int32, "SCALE_WORD": triton.language.int32}
    words = {"plan": "*i64", "sources": "*i64"}
    for name, is_fetched in (("forward", False), ("forward fetched", True)):
        ptx[name] = ptx_of(relay._forward_kernel, pointers | words, landed | {"IS_FETCHED": is_fetched}, 16)
    taken = {"HAS_TOPK": True, "TOPK": 8, "LANES": 16, "TILE": 512}
    for name, has_ends in (("unpack", False), ("unpack across nodes", True)):
        ptx[name] = ptx_of(put._unpack_kernel, pointers, taken | {"HAS_ENDS": has_ends}, 8)
    rows = pointers | dict.fromkeys(("out", "bias_0", "bias_1"), "*bf16")
    constants = {
        "NUM_BIASES": 0,
        "BLOCK": 2048,
        "AT_ONCE": 8,
        "LANES": 8,
        "VECTOR": 16,
        "WIDE": triton.language.float32,
    }
    ptx["pull"] = ptx_of(pull._pull_kernel, rows, constants, 8)
    relayed = rows | {
        "passed_on": "*i32",
        "node_slots": "*i32",
        "sources": "*i64",
        "plan": "*i64",
    }
    sums = constants | {"AT_ONCE": 4, "NODES_AT_ONCE": 2, "NODES": 2, "IS_FETCHED": True, "IS_WHOLE": False}
    some = {name: sums[name] for name in ("BLOCK", "AT_ONCE", "LANES", "VECTOR", "WIDE", "IS_WHOLE")}
    ptx["sum for rail"] = ptx_of(relay_sums._sum_for_rail_kernel, relayed, some, 8)
    ptx["sum nodes"] = ptx_of(relay_sums._sum_nodes_kernel, relayed, sums, 8)
    inbox = rows | {"inbox": "*u8"}
    ptx["sum_inbox"] = ptx_of(push._sum_inbox_kernel, inbox, constants, 8)
    rows_of = pointers | {"rows": "*i32", "source_idx": "*i32"}
    ptx["push"] = ptx_of(push._push_kernel, rows_of, {"VECTOR": 16, "BLOCK": 2048, "LANES": 8}, 8)
    ptx["copy_in"] = ptx_of(pull._copy_in_kernel, pointers, {"VECTOR": 16, "BLOCK": 4096}, 8)
    marks = {"topk_idx": "*i64", "mask": "*u8", "words": "*i32"}
    marks |= dict.fromkeys(("counts", "numbers", "node_counts", "node_numbers"), "*i32")
    constants = {"TILE": 128, "LANES": 8, "NODES": 1, "BINS": 256}
    ptx["layout"] = ptx_of(counts._layout_kernel, marks, constants, 4)
    ptx["positions"] = ptx_of(counts._positions_kernel, marks, {"TILE": 1024}, 4)
    ptx["node positions"] = ptx_of(counts._node_positions_kernel, marks, {"WORDS": 2, "TILE": 1024}, 4)
    return ptx


def low_latency() -> tuple[dict[str, str], dict[str, str]]:
    """Kernels that signal or wait, and those that do neither."""
    words = dict.fromkeys(("windows", "ll", "seen", "ll_host", "stats", "boards", "homes", "state", "host"), "*i64")
    words |= {"ranks_mask": "*i32", "topk_idx": "*i64", "topk_weights": "*fp32", "earlier": "*i32"}
    rows = {"x": "*bf16", "out": "*bf16", "layout_range": "*i64", "src_info": "*i32", "count": "*i32"}
    signal, move = {}, {}
    for name in ("dispatch", "combine"):
        kernel = getattr(ll_words, f"_{name}_wait_kernel")
        signal[f"{name} wait"] = ptx_of(kernel, words, {"HAS_STATS": True, "LANES": 32}, 1)
    signal["barrier"] = ptx_of(ll_words._signal_kernel, words, {"LANES": 8}, 1)
    tile = {"WAITS": True, "HAS_STATS": True, "TOPK": 8, "TOKENS": 128, "LANES": 32}
    for use_fp8, is_rounded in ((True, False), (True, True), (False, False)):
        constants = {"USE_FP8": use_fp8, "ROUND": is_rounded, "VECTOR": 16, "WHOLE": 8, "GROUPS": 64} | tile
        name = f"dispatch send fp8={use_fp8} rounded={is_rounded}"
        signal[name] = ptx_of(dispatch._dispatch_send_kernel, words | rows, constants, 8)
    for is_copied, use_logfmt in ((True, False), (True, True), (False, False)):
        pointers = words | rows | ({} if use_logfmt or not is_copied else {"x": "*i32"})
        constants = {"IS_COPIED": is_copied, "USE_LOGFMT": use_logfmt, "UNIT": 1024, "VECTOR": 16, "BLOCK": 2048}
        name = f"combine send copied={is_copied} logfmt={use_logfmt}"
        signal[name] = ptx_of(combine._combine_send_kernel, pointers, constants | tile, 4)
    for scales, has_far in (("*fp32", False), ("*i32", False), ("*fp32", True)):
        pointers = words | rows | {"x": "*i32", "scales": scales, "stats": "*i32"}
        constants = {"HAS_SCALES": True, "HAS_STATS": True, "HAS_FAR": has_far, "VECTOR": 16, "BLOCK": 2048}
        constants |= {"GROUPS": 64, "TOPK": 8, "LANES": 8}
        name = f"dispatch receive {scales}" + " far" * has_far
        move[name] = ptx_of(dispatch._dispatch_receive_kernel, pointers, constants, 4)
    for use_logfmt, block in ((False, 2048), (True, 1024)):
        constants = {
            "USE_LOGFMT": use_logfmt,
            "WHOLE": 8,
            "VECTOR": 16,
            "BLOCK": block,
            "AT_ONCE": 8,
            "TOPK": 8,
            "LANES": 8,
        }
        move[f"combine receive logfmt={use_logfmt}"] = ptx_of(
            combine._combine_receive_kernel, words | rows, constants, 8
        )
    return signal, move


if __name__ == "__main__":
    low_latency_signal, low_latency_move = low_latency()
    print(json.dumps(signalling() | moving() | low_latency_signal | low_latency_move))
