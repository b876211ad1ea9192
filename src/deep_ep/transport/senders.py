"""The ranks that send low-latency calls, and waiting for all of them: local ranks signal on their boards, remote
ranks by message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from ..errors import EPPeerFailed, EPTimeout
from .board import LOW_LATENCY, Meeting, Refusal
from .window import Failure, Peer, Waiting, Where, refused_by


class Sender(Protocol):
    """Another rank that sends low-latency calls.

    Attributes:
        rank: Its rank in the group.
    """

    rank: int

    def has_sent(self, number: int) -> bool:
        """Return whether call `number` has been sent."""
        ...

    def failure(self) -> Failure | None:
        """Return why it has failed; None: it has not."""
        ...

    def refusal(self, number: int) -> Refusal:
        """Return its last refusal to make a call; its reason counts only if it is of call `number`."""
        ...

    def why_not(self, number: int, looks_at_process: bool) -> str | None:
        """Return why call `number` will not come, phrased to follow the rank in a sentence; None: it may.

        Args:
            number: The number of the call.
            looks_at_process: Also check whether its process is alive, which costs more.
        """
        ...

    def why_gone(self, looks_at_process: bool) -> str | None:
        """Return why no call will come any more, phrased to follow the rank in a sentence; None: one may."""
        ...

    def is_silent(self, waited_secs: float, limit_secs: float) -> bool:
        """Return whether it has been silent for the limit."""
        ...

    def count_wait(self, secs: float) -> None:
        """Add to the time that this rank has waited for it."""
        ...

    def meeting(self) -> Meeting:
        """Return what it has published in an attempt to rejoin. The echo was not written after the rest."""
        ...


class LocalSender:
    """A rank of this node.

    Args:
        peer: The peer of the window.
        rank: Its rank in the group.
        own: This rank, as a peer of the window.
    """

    def __init__(self, peer: Peer, rank: int, own: Peer):
        self.rank = rank
        self._peer = peer
        self._own_index = own.rank
        self._own_echo = own.board.echoes[peer.rank]

    def has_sent(self, number: int) -> bool:
        """Return whether call `number` has been sent."""
        return self._peer.board.sent.load_acquire() >= number

    def failure(self) -> Failure | None:
        """Return why it has failed; None: it has not."""
        return self._peer.failure()

    def refusal(self, number: int) -> Refusal:
        """Return its last refusal to make a call."""
        return self._peer.board.read_refusal(LOW_LATENCY, number)

    def why_not(self, number: int, looks_at_process: bool) -> str | None:
        """Return why call `number` will not come; None: it may."""
        del number
        board = self._peer.board
        # It rejoins all ranks before it makes another call, and this rank has not answered its attempt.
        if board.joining.load_acquire() and board.attempt.load_acquire() != self._own_echo.load_acquire():
            return ", which is in clean_low_latency_buffer: they are out of step"
        return self.why_gone(looks_at_process)

    def why_gone(self, looks_at_process: bool) -> str | None:
        """Return why no call will come any more; None: one may."""
        failure = self.failure()
        if failure is not None and not failure.is_departure:
            return f", which has failed ({failure})"
        if self._peer.board.closed.load_acquire():
            return ", which has destroyed its buffer"
        if looks_at_process and not self._peer.is_alive():
            return ", whose process has ended"
        return None

    def is_silent(self, waited_secs: float, limit_secs: float) -> bool:
        """Return whether it has been silent for the limit."""
        return waited_secs > limit_secs

    def count_wait(self, secs: float) -> None:
        """Add to the time that this rank has waited for it."""
        self._peer.wait_secs += secs

    def meeting(self) -> Meeting:
        """Return what it has published in an attempt to rejoin."""
        board = self._peer.board
        # A rank that has echoed an attempt of this rank has written its own before.
        echo = board.echoes[self._own_index].load_acquire()
        attempt = board.attempt.load_acquire()
        return Meeting(attempt, board.following.load_acquire(), echo)


class Arrivals(NamedTuple):
    """How a wait for low-latency calls went.

    Attributes:
        waited_ns: By rank, the nanoseconds waited for it.
        lost: The ranks that did not come, or came with another call than this rank, and why.
    """

    waited_ns: dict[int, int]
    lost: dict[int, str]


def told(reasons: dict[int, str]) -> str:
    """Format ranks that did not come, for a message."""
    return "; ".join(f"no signal from rank {rank}{reason}" for rank, reason in reasons.items())


def wait_sent(
    senders: Sequence[Sender],
    number: int,
    operation: str,
    me: str,
    limit_secs: float,
    own_refusal: Refusal,
    look: Callable[[object], None],
    *,
    may_lose: bool,
    told_lost: Callable[[], dict[int, str]] = dict,
) -> Arrivals:
    """Wait until every one of these ranks has sent low-latency call `number`.

    Args:
        senders: To wait for.
        number: The number of the call.
        operation: The call, for errors.
        me: This rank, for errors.
        limit_secs: Seconds that a rank may be silent.
        own_refusal: The last refusal of this rank.
        look: Called with the call that waits; raises if this rank has given the call up.
        may_lose: Go on without a rank that is silent past the limit, dead or closed, or that has failed or refused the
            call, and return it as lost; else raise.
        told_lost: Called while this rank waits: returns the ranks that others consider lost in this call, each with a
            reason. This rank then considers them lost, too, even if they have sent.

    Raises:
        EPTimeout: A rank will not send.
        EPPeerFailed: A peer failed, or has refused the call.
    """
    where, waited_ns, lost = Where(operation, number), {}, {}
    pending = [sender for sender in senders if not sender.has_sent(number)]
    waiting = Waiting()
    while pending:
        secs = waiting.sleep()
        for sender in pending:
            waited_ns[sender.rank] = int(secs * 1e9)
        look(where)
        raise_if_failed(senders, where, me, may_lose=may_lose)
        # Reasons first, words second: a peer may have sent and then left.
        looks_at_process = waiting.begin_liveness_check()
        reasons = {sender.rank: sender.why_not(number, looks_at_process) for sender in pending}
        refusals = {sender.rank: sender.refusal(number) for sender in pending}
        pending = [sender for sender in pending if not sender.has_sent(number)]
        gone = {}
        for sender in pending:
            reason, refusal = reasons[sender.rank], refusals[sender.rank]
            if refusal.follows(number, own_refusal):
                if not may_lose:
                    raise refused_by(sender.rank, refusal, str(where), me)
                reason = f", which refused the call: {refusal.reason}"
            if reason is None and sender.is_silent(secs, limit_secs):
                reason = f" after {limit_secs:g} s"
            if reason is not None:
                gone[sender.rank] = reason
        if gone and not may_lose:
            raise_if_failed(senders, where, me, may_lose=False)  # which may be the reason
            raise EPTimeout(f"{where}: {told(gone)} ({me}). Look at its output, and make a new buffer")
        lost.update(told_lost())
        # Last: this rank's own reason says more than that another rank misses the peer.
        lost.update(gone)
        pending = [sender for sender in pending if sender.rank not in lost]
    for sender in senders:
        sender.count_wait(waited_ns.get(sender.rank, 0) * 1e-9)
    # As in `Window.wait`: that a rank has sent proves nothing if it has failed since.
    raise_if_failed(senders, where, me, may_lose=may_lose)
    return Arrivals(waited_ns, lost)


def raise_if_failed(senders: Iterable[Sender], where: Where, me: str, *, may_lose: bool) -> None:
    """Raise if a rank has failed.

    Args:
        senders: The ranks.
        where: The call that waits, for the error.
        me: This rank, for the error.
        may_lose: A rank that has failed is lost, and what it has sent before is used, since all ranks of its node find
            it. Raise only if it is in a later generation, in which this rank is not.

    Raises:
        EPPeerFailed: A rank has.
    """
    for sender in senders:
        failure = sender.failure()
        if failure is not None and (failure.is_departure or not may_lose):
            raise EPPeerFailed(*failure, str(where), me)
