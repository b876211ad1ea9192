"""How ranks that have made different numbers of low-latency calls come into step again: `clean_low_latency_buffer`.

A rank that was masked has missed calls, or has made some alone. Its next call would have another number than those of
its peers, and would read what they sent long ago. So before the barrier all ranks agree on its number: the largest that
any of them would give it. Words never go back. A rank that has refused its next call gives the barrier the number after
it: peers that have not refused that call would take this rank for out of step.

A rank's attempts are numbered. It sends every peer its attempt and the number that its next call would have, and echoes
the attempts of the peers. A peer that has echoed this attempt is in one of its own, whose words it has written before:
what is left on a board of an earlier attempt is not taken for an answer. `docs/low-latency.md` has the state table.
"""

from __future__ import annotations

from collections.abc import Callable

from ....transport import LOW_LATENCY as LOW_LATENCY_CALLS
from ....transport.board import Meeting
from ....transport.senders import Sender, raise_if_failed
from ....transport.window import Waiting, Where
from ..calls import BARRIER, JoinResult
from .shared import Shared


def meet(shared: Shared, following: int, look: Callable[[object], None]) -> JoinResult:
    """Agree with all ranks that are not masked on the number of the next call, whatever calls they have made.

    Runs on the comm stream.

    Args:
        shared: The state that the calls of the buffer share.
        following: The number that this rank's next call would have.
        look: Told where the wait is; raises if this rank has given up.

    Raises:
        EPPeerFailed: The peers are in a later generation.
    """
    shared.num_attempts += 1
    attempt = shared.num_attempts
    if shared.window.refusals[LOW_LATENCY_CALLS].times_of(following):
        following += 1
    # Calls in flight are given up. No rank waits any longer for this rank to complete them.
    shared.end_all(following - 1)
    shared.window.board.joining.store_release(1)
    try:
        return _meet(shared, attempt, following, look)
    finally:
        shared.window.board.joining.store_release(0)


def _meet(shared: Shared, attempt: int, following: int, look: Callable[[object], None]) -> JoinResult:
    where, limit_secs, number = Where(BARRIER, following), shared.window.limit_secs, following
    pending = {rank: sender for rank, sender in shared.senders.items() if rank not in shared.masks}
    echoes = {rank: sender.meeting().attempt for rank, sender in pending.items()}
    for rank in pending:
        _say(shared, rank, Meeting(attempt, following, echoes[rank]))
    waiting = Waiting()
    lost: dict[int, str] = {}
    while True:
        raise_if_failed(pending.values(), where, shared.window.me(), may_lose=True)
        # Reasons first, words second: a peer may have answered and then left.
        secs, looks_at_process = waiting.secs, waiting.begin_liveness_check()
        for rank, sender in list(pending.items()):
            reason = _why_not(sender, secs, limit_secs, looks_at_process)
            theirs = sender.meeting()
            if theirs.attempt != echoes[rank]:
                echoes[rank] = theirs.attempt
                _say(shared, rank, Meeting(attempt, following, theirs.attempt))
            # Behind the echo, so that the peer completes the handshake, too, when this rank leaves it here.
            if theirs.echo == attempt:
                number = max(number, theirs.following)
                del pending[rank]
            elif reason is not None:
                lost[rank] = reason
                del pending[rank]
        if not pending:
            return JoinResult(number, lost)
        waiting.sleep()
        look(where)


def _say(shared: Shared, rank: int, meeting: Meeting) -> None:
    if shared.mesh is not None and rank in shared.mesh.senders:
        shared.mesh.meet(rank, meeting)
        return
    board = shared.window.board
    # In this order: a peer that sees the attempt has its number, and one that finds its own echoed has both.
    board.following.store_release(meeting.following)
    board.attempt.store_release(meeting.attempt)
    board.echoes[rank - shared.local.start].store_release(meeting.echo)


def _why_not(sender: Sender, secs: float, limit_secs: float, looks_at_process: bool) -> str | None:
    """Return why a rank will not come; None: it may."""
    reason = sender.why_gone(looks_at_process)
    if reason is None and sender.is_silent(secs, limit_secs):
        reason = f" after {limit_secs:g} s"
    return reason
