"""Random calls that go wrong, and what must come of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...errors import EPError
from .checks import Mismatch
from .normal import dispatch
from .program import LEFT, OVERFLOW, REFUSED, ProgramCall
from .state import State


def overflow(state: State, call: ProgramCall) -> None:
    """A dispatch for which one rank has made too little room: all ranks raise, and go on."""
    data = state.data(call)
    victim = data.draw.randrange(state.num_ranks)
    spare = [-1 if rank == victim else 0 for rank in range(state.num_ranks)]
    dispatch(state, call, data, spare)


def refused(state: State, call: ProgramCall) -> None:
    """The same mistake on all ranks: it is refused, nothing is sent, and the buffer goes on."""
    draw, buffer = state.data(call).draw, state.buffer
    ids = torch.zeros(2, 1, dtype=torch.int64, device=buffer.device)
    per_rank, per_node, per_expert, mask, _ = buffer.get_dispatch_layout(ids, state.num_ranks)
    layout: dict[str, Any] = {
        "num_tokens_per_rank": per_rank,
        "num_tokens_per_rdma_rank": per_node,
        "is_token_in_rank": mask,
        "num_tokens_per_expert": per_expert,
    }
    x = torch.zeros(2, 4, device=buffer.device)
    mistakes: list[Callable[[], object]] = [
        lambda: buffer.dispatch(x[0], **layout),
        lambda: buffer.dispatch(x.t(), **layout),
        lambda: buffer.dispatch(x[:1], **layout),
        lambda: buffer.dispatch(x, **layout, num_worst_tokens=-1),
        lambda: buffer.dispatch(x, **layout, topk_idx=ids),
        lambda: buffer.dispatch(x, **{**layout, "num_tokens_per_rank": per_rank.long()}),
        lambda: buffer.combine(x.int(), (1, 2, 3)),
        lambda: buffer.dispatch(x, handle=()),
    ]
    try:
        draw.choice(mistakes)()
    except (ValueError, TypeError):
        return
    raise Mismatch("a wrong argument was accepted")


class _Left(KeyboardInterrupt):
    """What a caller leaves a call by: as with Ctrl-C, nobody catches it on the way."""


def left(state: State, call: ProgramCall) -> None:
    """An exception comes out of one rank's call, at one of its signals: all ranks fail, and name that rank."""
    draw = state.data(call).draw
    leaver, num_points = draw.randrange(state.num_ranks), draw.randint(0, 1)
    state.settle()
    state.barrier()  # a rank that is still in an earlier call would fail there
    state.report.past_stats.append(state.buffer.stats())
    points: list[str] = []

    def leave(point: str) -> None:
        points.append(point)
        if len(points) > num_points:
            raise _Left

    if state.rank == leaver:
        state.buffer.set_fault_hook(leave)
    ids = torch.zeros(1, 1, dtype=torch.int64, device=state.buffer.device)
    try:
        for _ in range(2):  # who has left the first call, and those behind it, must not be able to make another
            per_rank, per_node, per_expert, mask, _ = state.buffer.get_dispatch_layout(ids, state.num_ranks)
            state.buffer.dispatch(
                torch.zeros(1, 4, device=state.buffer.device), None, per_rank, per_node, mask, per_expert
            )
    except _Left:
        if state.rank != leaver:
            raise
    except EPError as error:
        if state.rank == leaver or f"rank {leaver}" not in str(error):
            raise Mismatch(f"rank {leaver} left a call by an exception, and this one was told: {error}") from None
    else:
        raise Mismatch(f"rank {leaver} left a call by an exception, and two calls went well")
    state.barrier()  # a rank that closes its buffer must not be what another one hears of
    state.renew()


PLAYERS: dict[str, Callable[[State, ProgramCall], None]] = {OVERFLOW: overflow, REFUSED: refused, LEFT: left}
