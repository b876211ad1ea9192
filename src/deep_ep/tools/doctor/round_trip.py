"""The round trip: two ranks dispatch and combine, and compare bit by bit with the oracle."""

from __future__ import annotations

import time
import warnings
from typing import Any

import torch
import torch.distributed as dist

from ... import env, reference
from ...buffers.legacy import Buffer
from ...launch import run_ranks
from .checks import settings
from .report import RoundTrip

# Small, and odd enough that a mistake in rows, ids or weights shows.
_NUM_RANKS, _NUM_TOKENS, _HIDDEN, _NUM_EXPERTS, _NUM_TOPK, _NUM_REPEATS = 2, 33, 72, 6, 3, 5


def try_round_trip() -> RoundTrip:
    """Run it. Whatever goes wrong is in the result."""
    start = time.perf_counter()
    try:
        # A forkserver that runs already has older settings: hand these over.
        wishes = settings()
        if _NUM_RANKS % (env.RANKS_PER_NODE.get() or 1):
            wishes[env.RANKS_PER_NODE.name] = "0"  # it is meant for more ranks than are tried here
        results = run_ranks(_run_rank, _NUM_RANKS, limit_secs=60.0, env=wishes)
    except Exception as error:  # whatever it is, it is what the user came to see
        problem = next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), repr(error))
        return RoundTrip(False, _NUM_RANKS, time.perf_counter() - start, problem=problem, advice=_advice())
    total_secs = time.perf_counter() - start
    wrong = [f"rank {rank}: {result['wrong']}" for rank, result in enumerate(results) if result["wrong"]]
    dispatch_ms, combine_ms = (max(result[name] for result in results) for name in ("dispatch_ms", "combine_ms"))
    if wrong:
        advice = "This is a bug in deep_ep: please report it with the output of `python -m deep_ep doctor --json`"
        return RoundTrip(False, _NUM_RANKS, total_secs, dispatch_ms, combine_ms, "; ".join(wrong), advice)
    return RoundTrip(True, _NUM_RANKS, total_secs, dispatch_ms, combine_ms)


def _advice() -> str:
    if names := list(settings()):
        return f"Try without your settings: env {' '.join(f'-u {name}' for name in names)} python -m deep_ep doctor"
    return "See the other problems; where there are none, please report this with `python -m deep_ep doctor --json`"


def _run_rank(rank: int, num_ranks: int) -> dict[str, Any]:
    """One rank's part: what is wrong, and the times of the last of a few round trips."""
    xs, idxs, weights = zip(*(_inputs(peer) for peer in range(num_ranks)), strict=True)
    warnings.filterwarnings("ignore", "DEEP_EP_.*: there is no such variable")  # doctor itself says it, once
    buffer = Buffer(dist.group.WORLD, 1 << 20, explicitly_destroy=True)
    try:
        per_rank, per_node, per_expert, mask, _ = buffer.get_dispatch_layout(idxs[rank], _NUM_EXPERTS)
        for _ in range(_NUM_REPEATS):  # the last counts: the first ones also set memory aside
            start = time.perf_counter()
            recv_x, recv_idx, recv_weights, _, handle, _ = buffer.dispatch(
                xs[rank],
                num_tokens_per_rank=per_rank,
                num_tokens_per_rdma_rank=per_node,
                num_tokens_per_expert=per_expert,
                is_token_in_rank=mask,
                topk_idx=idxs[rank],
                topk_weights=weights[rank],
            )
            middle = time.perf_counter()
            assert isinstance(recv_x, torch.Tensor)
            assert handle is not None
            output, _, _ = buffer.combine(recv_x, handle)
            end = time.perf_counter()
    finally:
        buffer.destroy()
    seen = (recv_x, recv_idx, recv_weights, output)
    wrong = [
        f"{name} are wrong"
        for one, (name, expected) in zip(seen, _expected(rank, xs, idxs, weights).items(), strict=True)
        if not _is_same(one, expected)
    ]
    return {"wrong": ", ".join(wrong), "dispatch_ms": (middle - start) * 1e3, "combine_ms": (end - middle) * 1e3}


def _inputs(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens [T, H] BF16, expert ids [T, K] int64 and weights [T, K] float32 of a rank, the same in every process."""
    random = torch.Generator().manual_seed(rank)
    x = torch.randn(_NUM_TOKENS, _HIDDEN, generator=random).bfloat16()
    topk_weights, topk_idx = torch.rand(_NUM_TOKENS, _NUM_EXPERTS, generator=random).topk(_NUM_TOPK)
    return x, topk_idx, topk_weights


def _expected(
    rank: int, xs: tuple[torch.Tensor, ...], idxs: tuple[torch.Tensor, ...], weights: tuple[torch.Tensor, ...]
) -> dict[str, torch.Tensor | None]:
    """What a rank must see, by the oracle, which gets all ranks' inputs and needs no communication."""
    masks = [reference.layout(idx, _NUM_EXPERTS, len(xs)).is_token_in_rank for idx in idxs]
    dispatched = reference.dispatch(xs, masks, topk_idx=idxs, topk_weights=weights, num_experts=_NUM_EXPERTS)
    combined = reference.combine([part.recv_x for part in dispatched], masks)
    return {
        "received rows": dispatched[rank].recv_x,
        "received expert ids": dispatched[rank].recv_topk_idx,
        "received weights": dispatched[rank].recv_topk_weights,
        "combined rows": combined[rank].combined_x,
    }


def _is_same(seen: object, expected: object) -> bool:
    return isinstance(seen, torch.Tensor) and isinstance(expected, torch.Tensor) and torch.equal(seen, expected)
