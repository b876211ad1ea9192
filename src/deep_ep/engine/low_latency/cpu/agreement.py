"""How the ranks of a node agree on which ranks are lost in a low-latency call, so that all of them sum the same sets.

A rank that is stopped may send just as the limit of one peer passes, before that of another. So a rank that misses
others does not go on at once. It posts the ranks that it considers lost on its board (its *verdict*), and then every
other rank of its node either

- has received the call: with those ranks, which then have sent it, so their rows are there for all ranks. The verdict
  is dropped, and they are waited for again; or
- has not, and finds the verdict in its own wait. It considers the same ranks lost and posts that. When all verdicts are
  alike, no rank can have received the call with those ranks, and none will; or
- is silent itself, and is considered lost, too.

A verdict only grows. `docs/low-latency.md` has the state table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ....transport.window import Waiting
from .shared import Done, Shared


class Verdict:
    """The verdict of this rank on the ranks that it misses.

    Args:
        shared: The state that the calls of the buffer share.
        number: The call that it waits for.
        look: Raises if this rank has given the call up, or a peer has failed.
    """

    def __init__(self, shared: Shared, number: int, look: Callable[[], None]):
        self._shared = shared
        self._number = number
        self._look = look

    def told_lost(self) -> dict[int, str]:
        """Return the ranks that other ranks of the node consider lost in a call that this rank has not received,
        each with a reason.
        """
        shared, told = self._shared, {}
        for rank in shared.local:
            if rank == shared.rank or rank in shared.masks:
                continue
            # The call before may be in flight on this rank, too, and others wait there for its verdict.
            for number in (self._number - 1, self._number):
                if not shared.is_done(number):
                    lost = self._said(rank, number) - {shared.rank}
                    lost -= {one for one in lost if shared.is_masked(one, number)}
                    told.update({one: self._why_missed(one, rank) for one in lost})
        return told

    def excludes_this_rank(self, rank: int) -> bool:
        """Return whether another rank of the node has received the call without this rank, which it took for lost."""
        # Received first: until then it may drop its verdict.
        return self._has_done(rank, self._number) and self._shared.rank in self._said(rank, self._number)

    def _why_missed(self, rank: int, by_rank: int) -> str:
        """Return the reason that another rank misses a rank, for a message: this rank's own reason, if it has one."""
        shared = self._shared
        reason = shared.senders[rank].why_not(self._number, looks_at_process=True)
        # A verdict has no reasons, and this rank may be the last to learn that one has failed or has closed its links.
        or_gone = "" if rank in shared.local else ", or word that it has gone,"
        return reason or f" after {shared.window.limit_secs:g} s{or_gone} at rank {by_rank}"

    def agree(self, lost: dict[int, str]) -> tuple[dict[int, str], int]:
        """Agree with the other ranks of this node on the ranks that are lost.

        Args:
            lost: The ranks that this rank misses, each with a reason.

        Returns:
            The ranks that all of them consider lost (none, if a rank has received the call with them), and from which
            call on.
        """
        shared, lost, number = self._shared, dict(lost), self._first_missed()
        waiting = Waiting()
        self._say(number, lost)
        while True:
            if number == self._number and self._first_missed() < number:
                # Others miss ranks in the call before: verdicts on two calls would wait for each other.
                number -= 1
                self._say(number, lost)
            voters = [rank for rank in shared.local if rank not in shared.masks and rank not in lost]
            verdicts = {rank: self._said(rank, number) for rank in voters if rank != shared.rank}
            more = self._more(verdicts, set(lost), number)
            if not more:
                undecided = [rank for rank, said in verdicts.items() if said != set(lost)]
                have_done = [rank for rank in undecided if not verdicts[rank] and self._has_done(rank, number)]
                # A rank has received the call, and they have sent it after all: their rows are there for all.
                if have_done and all(shared.senders[rank].has_sent(number) for rank in lost):
                    self._say(number, ())
                    return {}, number
                # A rank that has received the call without them agrees.
                undecided = [rank for rank in undecided if rank not in have_done]
                if not undecided:
                    return lost, number
                secs = waiting.sleep()
                self._look()
                looks_at_process = waiting.begin_liveness_check()
                reasons = {rank: self._why_silent(rank, number, secs, looks_at_process) for rank in undecided}
                more = {rank: reason for rank, reason in reasons.items() if reason is not None}
            if more:
                lost.update(more)
                self._say(number, lost)

    def _more(self, verdicts: dict[int, set[int]], lost: set[int], number: int) -> dict[int, str]:
        """Return the ranks that others consider lost beyond this rank's verdict, and those that consider this rank
        lost.
        """
        shared, more = self._shared, {}
        for by_rank, said in verdicts.items():
            if shared.rank in said:
                more[by_rank] = ", which takes this rank for lost: they are out of step"
                continue
            for rank in said - lost:
                if not shared.is_masked(rank, number):
                    more[rank] = self._why_missed(rank, by_rank)
        return more

    def _why_silent(self, rank: int, number: int, secs: float, looks_at_process: bool) -> str | None:
        """Return why a rank that has still to agree never will; None: it may."""
        shared = self._shared
        sender, limit_secs = shared.senders[rank], shared.window.limit_secs
        reason = sender.why_not(number, looks_at_process)
        if reason is None and sender.is_silent(secs, limit_secs):
            reason = f" after {limit_secs:g} s"
        # Behind the look at why: it may have agreed and left.
        has_agreed = bool(self._said(rank, number)) or self._has_done(rank, number)
        return reason if not has_agreed or secs > 2 * limit_secs else None

    def _say(self, number: int, lost: Iterable[int]) -> None:
        self._shared.window.board.post_verdict(number, self._shared.bits_of(lost))

    def _first_missed(self) -> int:
        """Return the call that the verdict is about: an earlier one that is in flight, if others miss ranks there."""
        earlier = self._number - 1
        if not self._shared.is_done(earlier):
            for rank in self._shared.local:
                if rank != self._shared.rank and rank not in self._shared.masks and self._said(rank, earlier):
                    return earlier
        return self._number

    def _said(self, rank: int, number: int) -> set[int]:
        words = self._shared.peer(rank).board.read_verdict(number, self._shared.num_mask_words)
        return set() if words is None else self._shared.ranks_of(words)

    def _has_done(self, rank: int, number: int) -> bool:
        return Done.of(self._shared.peer(rank).board.done.load_acquire()).has(number)
