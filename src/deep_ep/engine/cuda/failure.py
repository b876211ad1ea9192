"""Failures that a kernel has recorded, as errors with a message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...errors import EPError, EPOverflow, EPPeerFailed, EPTimeout, named
from ...kernels import exchange
from ..protocol import (
    LEAVE,
    OPERATIONS,
    Agreement,
    clashes_among,
    disagreement,
    expanded_overflow,
    overflow,
    step_name,
)


@dataclass(frozen=True)
class Record:
    """A failure, as `kernels/exchange.py` records it.

    Attributes:
        code: What happened.
        epoch: The call.
        operation: Index into `OPERATIONS`.
        subject: The ranks, as bits, or the rank it is about.
        seen: A number, by code.
        expected: A number, by code.
        origin: The rank where it happened.
    """

    code: int
    epoch: int
    operation: int
    subject: int
    seen: int
    expected: int
    origin: int

    def error(
        self,
        rank: int,
        num_ranks: int,
        limit_secs: float,
        header: Callable[[int], Agreement],
        reason: Callable[[], str],
    ) -> Exception:
        """Return the error to raise.

        Args:
            rank: This rank.
            num_ranks: R.
            limit_secs: The limit of a wait.
            header: Returns the header that a rank has posted for the call.
            reason: Returns why the rank has refused the call, if that is known here.
        """
        operation = OPERATIONS[self.operation]
        where, me = f"{operation} (call {self.epoch})", f"rank {rank}/{num_ranks}"
        if self.code == exchange.COUNTS:
            return ValueError(
                "dispatch: `num_tokens_per_rank` must be the column sums of `is_token_in_rank`: "
                f"for rank {self.subject} it says {self.expected}, the sum is {self.seen}"
            )
        if self.code == exchange.OVERFLOW:
            return overflow(self.subject, self.seen, self.expected, me, is_closed=True)
        if self.code == exchange.EXPANDED_OVERFLOW:
            return expanded_overflow(self.subject, self.seen, self.expected, me, is_closed=True)
        if self.code == exchange.DISAGREE:
            differing, theirs = _ranks_of(self.subject, num_ranks), header(self.origin)
            said = {one: (header(one) if one in differing else theirs).words() for one in range(num_ranks)}
            clashes = clashes_among(said, theirs.words())
            if not clashes:  # what differs is not in the headers
                clashes = [(f"rank {one}", theirs, header(one)) for one in differing]
            return disagreement(where, f"{_by(self.origin, rank)}{me}", clashes)
        if self.code == exchange.TIMEOUT:
            silent = named(_ranks_of(self.subject, num_ranks))
            step = f" ({step_name(self.seen)})" if self.seen else ""  # low-latency calls have no steps
            return EPTimeout(
                f"{where}: no signal{step} from {silent} after {limit_secs:g} s "
                f"({_by(self.origin, rank)}{me}). It exited, hangs, or called in another order; look at its output"
            )
        if self.code == exchange.DESYNC:
            return EPError(
                f"{where}: {named(_ranks_of(self.subject, num_ranks))} went on without the others "
                f"({_by(self.origin, rank)}{me}). This is a bug: report it"
            )
        if self.code == exchange.REFUSED:
            cause = f"refused this call, of which nothing was sent: {reason() or 'look at its output'}"
            return EPPeerFailed(self.origin, cause, where, me)
        if self.code == exchange.GONE:
            gone = named(_ranks_of(self.subject, num_ranks))
            return EPError(
                f"{gone} closed the connection: the process has ended, or the network has failed "
                f"({_by(self.origin, rank)}{me}). Look at its output, and make a new buffer"
            )
        if self.code == exchange.REMOTE_OVERFLOW:
            return EPOverflow(
                f"{where}: rank {self.subject} has {self.seen} rows that cross between nodes, and room for "
                f"{self.expected} ({me}). Make the buffer with a larger num_rdma_bytes, or begin with a dispatch "
                "without handle or num_worst_tokens, of rows as wide as these, in which it grows; or raise "
                "num_worst_tokens, from which the room follows. The buffer is closed: make a new one"
            )
        if operation == LEAVE:
            left = "left its `with` block by an exception, as its output will say"
            return EPPeerFailed(self.origin, left, f"call {self.epoch}", me)
        return EPPeerFailed(self.origin, "failed, as its output will say", where, me)


def _ranks_of(mask: int, num_ranks: int) -> list[int]:
    """Return the ranks that a mask of `exchange.mask_of` may stand for: those from 62 on share a bit."""
    return [rank for rank in range(num_ranks) if mask >> min(rank, 62) & 1]


def _by(origin: int, rank: int) -> str:
    return "" if origin == rank else f"seen by rank {origin}, "
