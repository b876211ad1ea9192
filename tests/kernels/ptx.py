"""Compile kernels for sm_90 without a GPU, to look at what the compiler made of them. Run as a program: Triton must not
be in its interpreter's mode, which the tests of kernels need.

    python ptx.py  ->  one JSON object: kernel -> its PTX
"""

from __future__ import annotations

import json
from dataclasses import replace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from windows import make_context

from deep_ep.engine.cuda.shapes import Shapes
from deep_ep.kernels import counts, exchange, pull, put, rail, relay, relay_sums, route
from deep_ep.kernels._triton import OPTIONS, Launch
from deep_ep.kernels.finish import Finish
from deep_ep.kernels.low_latency import combine, dispatch
from deep_ep.kernels.low_latency import words as ll_words
from deep_ep.kernels.notify import CopyingHandshake, Handshake, HandshakeForm, SelectionHandshake, Terms
from deep_ep.kernels.pull import Pull
from deep_ep.kernels.put import End, Put, RowSpec, Unpack
from deep_ep.kernels.selections import Arrange, Describe, Place, PullSelections, PutSelections

TARGET = GPUTarget("cuda", 90, 32)
POINTERS = {torch.uint8: "*u8", torch.int8: "*i8", torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64"}
POINTERS |= {torch.bfloat16: "*bf16", torch.float32: "*fp32"}
TERMS, END = Terms(1, 0, (0, 0)), End(3, 0)


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
    options = OPTIONS | {"num_warps": num_warps} | ({"extern_libs": libraries} if libraries else {})
    return triton.compile(source, target=TARGET, options=options).asm


def launched(launch: Launch) -> str:
    """The PTX of a kernel as it is launched: with the constants, the warps and the types that a call has."""
    variant, args = launch._variant, (*launch._types, *launch._fixed)
    params = [param for param in variant._kernel.params if not param.is_constexpr]
    pointers = {}
    for param, arg in zip(params, args, strict=True):
        if arg is not None and not isinstance(arg, int):
            pointers[param.name] = POINTERS[arg if isinstance(arg, torch.dtype) else arg.dtype]
    assert variant._constants.get("NUM_WARPS") in (None, variant._options["num_warps"])
    return ptx_of(variant._kernel, pointers, variant._constants, variant._options["num_warps"])


def notifying() -> dict[str, str]:
    """As `prepare_all` and `prepare_nodes` compile them, and those that copy first. Those of several warps also for
    more ranks than a warp has threads.
    """
    numbered = HandshakeForm(has_counts=True, has_prefix=True, is_numbered=True)
    forms = {
        "numbered": numbered,
        "handle": HandshakeForm(has_prefix=True),
        "bare": HandshakeForm(),
        "again": HandshakeForm(is_new=False),
    }
    remote_forms = {"handle": HandshakeForm(has_nodes=True), "again": HandshakeForm(has_nodes=True, is_new=False)}
    ptx = {}
    for num_ranks, num_nodes, more in ((8, 2, ""), (64, 8, " of 64 ranks")):
        context = make_context(0, num_ranks, "cpu")
        remote_context = replace(context, num_nodes=num_nodes)
        remote_numbered = numbered._replace(has_nodes=True, word=put.widest_word(remote_context.ranks_per_node)[0])
        for name, form in forms.items():
            if form.is_numbered or not more:
                ptx[f"notify {name}{more}"] = launched(Handshake(context, TERMS, form).launch)
        for name, form in {"numbered": remote_numbered, **remote_forms}.items():
            if form.is_numbered or not more:
                ptx[f"notify nodes {name}{more}"] = launched(Handshake(remote_context, TERMS, form).launch)
                if not more:
                    sends = form._replace(receives=False)
                    ptx[f"send nodes {name}"] = launched(Handshake(remote_context, TERMS, sends).launch)
        for name, word, is_aligned in (("copied", torch.int32, True), ("copied odd bytes", torch.int8, False)):
            copying = CopyingHandshake(context, TERMS, Shapes().copy, 14336, word, is_aligned)
            ptx[f"notify {name}{more}"] = launched(copying.launch)
    for name, form in {
        "counts": HandshakeForm(has_counts=True, has_prefix=True, has_nodes=True),
        **remote_forms,
    }.items():
        remote_context = replace(make_context(0, 8, "cpu"), num_nodes=2)
        ptx[f"receive nodes {name}"] = launched(Handshake(remote_context, TERMS, form._replace(sends=False)).launch)
    return ptx


def of_selections() -> dict[str, str]:
    """Calls of selections: top-8 of 256 experts, BF16, with and without records."""
    ptx = {}
    selected = HandshakeForm(has_counts=True, has_prefix=True)
    for num_ranks, more in ((8, ""), (64, " of 64 ranks")):
        context, terms = make_context(0, num_ranks, "cpu"), TERMS._replace(num_local=256 // num_ranks)
        launch = SelectionHandshake(context, terms, selected, 128, True, 8, torch.int64).launch
        ptx[f"notify selections{more}"] = launched(launch)
    context = make_context(0, 8, "cpu")
    for name, form in (("handle", HandshakeForm(has_prefix=True)), ("again", HandshakeForm(is_new=False))):
        ptx[f"notify selections {name}"] = launched(SelectionHandshake(context, TERMS, form, 128, True, 8).launch)
    shapes, bare = Shapes(), RowSpec(14336, torch.int32, True)
    rows = bare._replace(has_records=True, num_topk=8, idx_dtype=torch.int64, keeps_weights=True)
    pull = (context, shapes.pull, 7168, torch.bfloat16, 8)
    made = {
        "place": Place(context, rows, 8, 32, torch.int64, True),
        "put selections": PutSelections(context, shapes.put, bare, 8, END),
        "unfold selections": PutSelections(context, shapes.put, bare, 8, None),
        "describe": Describe(context, 16, 8, 32, torch.int64, True),
        "describe compact": Describe(context, 16, 8, 32, torch.int64, False),
        "arrange": Arrange(context, 8, 14336, True, True),
        "pull selections": PullSelections(*pull, is_grouped=True, num_weights=8, end=END),
        "fold selections": PullSelections(*pull),
    }
    return ptx | {name: launched(kernel._launch) for name, kernel in made.items()}


def signalling() -> dict[str, str]:
    words = dict.fromkeys(("context_words", "plan"), "*i64")
    ptx = notifying()
    ptx["finish"] = launched(Finish(make_context(0, 8, "cpu"), 3, 0).launch)
    doorbells = words | dict.fromkeys(("doorbells", "wanted", "seen"), "*i64")
    ptx["ring doorbell"] = ptx_of(rail._ring_doorbell_kernel, doorbells, {"IS_BACK": False, "LANES": 32}, 1)
    ptx["await arrived"] = ptx_of(rail._await_kernel, doorbells, {"LANES": 32}, 1)
    handshakes = words | dict.fromkeys(("arrived", "rail"), "*i64")
    ptx["rail handshake"] = ptx_of(rail._rail_handshake_kernel, handshakes, {"IS_BACK": False, "LANES": 32}, 1)
    ptx["abort"] = ptx_of(exchange._abort_kernel, words, {"LANES": 32}, 1)
    notes = words | dict.fromkeys(("numbers", "note"), "*i64")
    ptx["refuse"] = ptx_of(exchange._refuse_kernel, notes, {"LANES": 32}, 1)
    return ptx


def moving() -> dict[str, str]:
    """Rows of 7168 BF16 numbers with scales, top-8 of 256 experts."""
    ptx, shapes = {}, Shapes()
    bare = RowSpec(14336, torch.int32, True)
    rows = bare._replace(num_scales=56, scale_bytes=4, has_records=True, num_topk=8, idx_dtype=torch.int64)
    for num_ranks, more in ((8, ""), (64, " of 64 ranks")):
        context = make_context(0, num_ranks, "cpu")
        ptx[f"put{more}"] = launched(Put(context, shapes.put, rows, 256 // num_ranks, END)._launch)
        given = (7168, torch.bfloat16, 2, True, 8, END)
        ptx[f"pull{more}"] = launched(Pull(context, shapes.pull, *given)._launch)
    context = make_context(0, 8, "cpu")
    ptx["put along a handle"] = launched(Put(context, shapes.for_put(16), bare, 0, END)._launch)
    ptx["put aimed"] = launched(Put(context, shapes.put, bare._replace(num_scales=56, scale_bytes=4))._launch)
    for name, has_ends in (("unpack", False), ("unpack across nodes", True)):
        ptx[name] = launched(Unpack(context, 16, 8, torch.int64, has_ends)._launch)
    pointers = dict.fromkeys(("slots", "prefix", "records", "sources", "ends", "target", "rows"), "*i32")
    pointers |= {"topk_idx": "*i64", "topk_weights": "*fp32", "table": "*i64", "state": "*i64", "context_words": "*i64"}
    routed = pointers | {"node_slots": "*i32", "numbers": "*i32", "forwarded": "*i32", "plan": "*i64", "aimed": "*i64"}
    for name, has_records in (("route", True), ("route along a handle", False)):
        ptx[name] = ptx_of(
            route._route_tokens_kernel, routed, {"HAS_RECORDS": has_records, "TILE": 128, "LANES": 16}, 8
        )
    arrived = {"WORD": triton.language.int32, "VECTOR": 16, "SCALE_WORD": triton.language.int32, "BLOCK": 4096}
    arrived |= {"HAS_SCALES": True, "SCALES": 64, "HAS_RECORDS": True, "HAS_TOPK": True, "TOPK": 8, "LANES": 8}
    arrived |= {"IS_WHOLE": False}
    words = {"plan": "*i64", "sources": "*i64"}
    for name, is_fetched in (("forward", False), ("forward fetched", True)):
        ptx[name] = ptx_of(relay._forward_kernel, pointers | words, arrived | {"IS_FETCHED": is_fetched}, 16)
    relayed = pointers | dict.fromkeys(("out", "bias_0", "bias_1"), "*bf16")
    relayed |= {"forwarded": "*i32", "node_slots": "*i32", "sources": "*i64", "plan": "*i64"}
    some = {"BLOCK": 2048, "AT_ONCE": 4, "LANES": 8, "VECTOR": 16, "WIDE": triton.language.float32, "IS_WHOLE": False}
    sums = some | {"NUM_BIASES": 0, "NODES_AT_ONCE": 2, "NODES": 2, "IS_FETCHED": True}
    ptx["sum for rail"] = ptx_of(relay_sums._sum_for_rail_kernel, relayed, some, 8)
    ptx["sum nodes"] = ptx_of(relay_sums._sum_nodes_kernel, relayed, sums, 8)
    ptx["copy_in"] = ptx_of(pull._copy_in_kernel, pointers, {"VECTOR": 16, "BLOCK": 4096}, 8)
    marks = {"topk_idx": "*i64", "mask": "*u8", "counts": "*i32"}
    ptx["layout"] = ptx_of(counts._layout_kernel, marks, {"TILE": 128, "LANES": 8, "NODES": 1, "BINS": 256}, 4)
    return ptx


def low_latency() -> tuple[dict[str, str], dict[str, str]]:
    """Kernels that signal or wait, and those that do neither."""
    words = dict.fromkeys(
        ("windows", "ll", "seen", "ll_host", "stats", "boards", "own_boards", "state", "host"), "*i64"
    )
    words |= {"ranks_mask": "*i32", "topk_idx": "*i64", "topk_weights": "*fp32", "earlier": "*i32"}
    rows = {"x": "*bf16", "out": "*bf16", "layout_range": "*i64", "src_info": "*i32", "count": "*i32"}
    signal, move = {}, {}
    signal["wait"] = ptx_of(ll_words._wait_kernel, words, {"HAS_STATS": True, "LANES": 32}, 1)
    signal["barrier"] = ptx_of(ll_words._signal_all_kernel, words, {"LANES": 8}, 1)
    signal["join"] = ptx_of(ll_words._join_kernel, words, {"LANES": 32}, 1)
    tile = {"WAITS": True, "HAS_STATS": True, "TOPK": 8, "TOKENS": 128, "LANES": 32}
    for use_fp8, is_rounded, is_wide in ((True, False, False), (True, True, False), (False, False, True)):
        constants = {"USE_FP8": use_fp8, "ROUND": is_rounded, "VECTOR": 16, "WHOLE": 8, "GROUPS": 64} | tile
        constants["IS_WIDE"] = is_wide
        name = f"dispatch send fp8={use_fp8} rounded={is_rounded}"
        signal[name] = ptx_of(dispatch._send_kernel, words | rows, constants, 8)
    for is_copied, use_logfmt in ((True, False), (True, True), (False, False)):
        pointers = words | rows | ({"x": "*i64" if use_logfmt else "*i32"} if is_copied else {})
        constants = {"IS_COPIED": is_copied, "USE_LOGFMT": use_logfmt, "UNIT": 1024, "VECTOR": 16, "BLOCK": 2048}
        name = f"combine send copied={is_copied} logfmt={use_logfmt}"
        signal[name] = ptx_of(combine._send_kernel, pointers, constants | tile, 4)
    for scales, has_remote in (("*fp32", False), ("*i32", False), ("*fp32", True)):
        pointers = words | rows | {"x": "*i32", "scales": scales, "stats": "*i32"}
        constants = {"HAS_SCALES": True, "HAS_STATS": True, "HAS_REMOTE": has_remote, "VECTOR": 16, "BLOCK": 2048}
        constants |= {"GROUPS": 64, "TOPK": 8, "LANES": 8, "IS_WIDE": scales == "*i32"}
        name = f"dispatch receive {scales}" + " remote" * has_remote
        move[name] = ptx_of(dispatch._receive_kernel, pointers, constants, 4)
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
        num_warps = 1 if use_logfmt else 8
        name = f"combine receive logfmt={use_logfmt}"
        move[name] = ptx_of(combine._receive_kernel, words | rows, constants, num_warps)
    return signal, move


if __name__ == "__main__":
    low_latency_signal, low_latency_move = low_latency()
    print(json.dumps(signalling() | moving() | of_selections() | low_latency_signal | low_latency_move))
