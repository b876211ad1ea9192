"""Plays a program of random calls on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from ...buffers.legacy import Buffer
from . import elastic, low_latency, mistakes, normal
from .checks import Mismatch
from .data import Limits, Palette
from .program import FOLLOWERS, Features, ProgramCall, draw_program
from .state import SoakReport, State, is_direct

_PLAYERS: dict[str, Callable[[State, ProgramCall], None]] = {
    **normal.PLAYERS,
    **elastic.PLAYERS,
    **mistakes.PLAYERS,
    **low_latency.PLAYERS,
}


def features_of(buffer: Buffer, has_exceptions: bool = False) -> Features:
    """What calls of a buffer may do.

    Args:
        buffer: The buffer.
        has_exceptions: Leave calls by exceptions, each of which costs a buffer.
    """
    num_nodes = buffer.runtime.get_num_rdma_ranks() if buffer.runtime is not None else 1
    return Features(
        has_low_latency=buffer.low_latency_mode,
        has_masks=buffer.enable_shrink,
        survives_mistakes=is_direct(buffer),
        has_exceptions=has_exceptions and is_direct(buffer),
        # Kernels cannot stage the sums of an ElasticBuffer: with too little memory they raise.
        has_elastic=is_direct(buffer) and num_nodes == 1,
    )


def play_calls(state: State, calls: list[ProgramCall]) -> Iterator[ProgramCall]:
    """Make calls, and check them; all but the last checks are done. Yields each call before it is made.

    Raises:
        Mismatch: A result is wrong.
    """
    last_uses = {call.source: call.number for call in calls if call.source is not None}
    for call in calls:
        yield call
        needed = {source for source, last in last_uses.items() if last >= call.number}
        try:
            state.go_on(call, needed)
            if call.kind in FOLLOWERS and call.source not in state.known and call.source not in state.known_elastic:
                continue  # its dispatch overflowed, or was left
            _PLAYERS[call.kind](state, call)
        except Mismatch:
            state.buffer.check()  # where kernels have failed, results are garbage, and this says why
            raise
        state.report.calls[call.kind] += 1


def play(buffer: Buffer, seed: int, num_calls: int, limits: Limits = Limits()) -> SoakReport:  # noqa: B008 - it is frozen
    """Make `num_calls` calls of one buffer, check them all, drop everything.

    Args:
        buffer: This rank's buffer.
        seed: The program; the same on all ranks.
        num_calls: How many.
        limits: How large they are.

    Raises:
        Mismatch: A result is wrong.
    """
    if buffer.device.type == "cuda":
        limits = replace(limits, palette=Palette.draw(seed))
    state = State(buffer, seed, limits)
    for _ in play_calls(state, draw_program(seed, num_calls, buffer.group_size, features_of(buffer))):
        pass
    state.finish()
    return state.report
