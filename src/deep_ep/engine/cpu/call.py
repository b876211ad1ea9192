"""The calls of a buffer on the CPU, one after the other, as the protocol sees them (`docs/protocol.md`).

Everything here runs on the comm stream.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ... import env
from ...errors import EPClosed, EPError, EPOverflow, EPPeerFailed, EPTransportError, EPUnsupported, account
from ...kernels.reduce import Scratch
from ...trace import NO_SLICE, WAIT, Slice
from ...transport import (
    HEADER,
    NORMAL,
    OFFER,
    POSTED_BYTES,
    Arena,
    PrivateMemory,
    Refusal,
    Window,
    ordinary_tensor,
)
from ..ops import OpenCall
from ..protocol import Header, Offer, clashes_among, disagreement, step_name, warn_staged
from ..stats import Stats

_LEAST_RECYCLED_BYTES = 1 << 20  # below, torch's own allocation is as good


class Call:
    """One call of this rank, from its header to its last step.

    Args:
        window: The window.
        epoch: The number of the call.
        header: What to announce.
    """

    def __init__(self, window: Window, epoch: int, header: Header):
        self.window = window
        self.epoch = epoch
        self.header = header
        self.operation = header.agreement.operation
        self._words = header.words()

    def __str__(self) -> str:
        return f"{self.operation} (call {self.epoch})"

    def post_header(self, *counts: torch.Tensor) -> None:
        """Write the header, with [R] and [E] int32 counts if there are any.

        Peers see it only after the next `signal`.
        """
        self.window.board.post(HEADER, self.epoch, self._words)
        if counts:
            self.window.board.post_values(self.epoch, *counts)

    def post_offer(self, offer: Offer) -> None:
        """Write this rank's offer to its board. Peers see it only after the next `signal`."""
        self.window.board.post(OFFER, self.epoch, offer.words())

    def signal(self, step: int) -> None:
        """Signal to all peers that this rank has completed `step`.

        There is a fault point before and after the signal.
        """
        self._reach_fault("before", step)
        self.window.signal(self.epoch, step)
        self._reach_fault("after", step)

    def _reach_fault(self, side: str, step: int) -> None:
        if self.window.fault is not None:
            self.window.fault(f"{self.operation}: {side} {step_name(step)}")

    def wait(self, step: int) -> None:
        """Wait until all peers have completed `step`."""
        window = self.window
        if window.trace is None:
            window.wait(self.epoch, step, self.operation)
            return
        with window.trace.slice(f"wait: {step_name(step)}", WAIT) as waiting:
            waiting.waited(window.wait(self.epoch, step, self.operation), window.group_ranks.first_rank)

    def slice(self, name: str, kind: str, **args: Any) -> Slice:
        """Return a context manager that records its block as a slice of the call in a trace."""
        trace = self.window.trace
        return trace.slice(name, kind, **args) if trace is not None else NO_SLICE

    def note(self, **args: Any) -> None:
        """Attach facts to the call in a trace."""
        if self.window.trace is not None:
            self.window.trace.note(**args)

    def headers(self) -> list[Header]:
        """Return the headers of all ranks, after checking that they agree.

        Raises:
            EPError: They do not agree. The message names the rank that differs, and the items in which it does.
        """
        posts = [peer.board.read(HEADER, self.epoch) for peer in self.window.peers]
        mine, first = self.header.agreement, self.window.group_ranks.first_rank
        expected = self._words[: len(mine)]
        if any(words[: len(expected)] != expected for words in posts):
            said = {first + rank: words[: len(expected)] for rank, words in enumerate(posts)}
            raise disagreement(str(self), self.window.me(), clashes_among(said, expected))
        # Behind that a slot has what was left there by earlier calls.
        own = slice(len(expected), len(expected) + len(Header._fields) - 1)
        return [Header(mine, *words[own]) for words in posts]

    def offers(self) -> list[Offer]:
        """Return the offers of all ranks."""
        return [Offer.from_words(peer.board.read(OFFER, self.epoch)) for peer in self.window.peers]

    def peer_rows(self, offers: list[Offer], section: int, num_columns: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Every rank's rows of one section: R tensors [rows offered, num_columns]."""
        rows = []
        for peer, offer in zip(self.window.peers, offers, strict=True):
            base = offer.bases[section]
            if base is None:  # a section without bytes: there are no rows, or they have no columns
                rows.append(ordinary_tensor((0 if num_columns else offer.num_rows, num_columns), dtype))
            else:
                rows.append(peer.rows(base, offer.num_rows, num_columns, dtype))
        return rows


def recycled(results: Arena, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialised tensor: in an arena of results if it is large, else in ordinary memory."""
    is_large = math.prod(shape) * dtype.itemsize >= _LEAST_RECYCLED_BYTES
    region = results.allocate(shape, dtype) if is_large else None
    return region if region is not None else ordinary_tensor(shape, dtype)


class Chain(OpenCall):
    """The calls of a buffer, one after the other. Only the comm stream advances it.

    Args:
        window: The window they all use.

    Attributes:
        results: Private memory for large results that need not lie in the window. It is used again when they are gone:
            memory fresh from the system costs more to touch for the first time than a sum costs to write.
        scratch: Memory of the sums.
        posted_bytes: Most bytes of rows that a small call posts.
        stats: What was counted so far.
        is_told_late: There are ranks that cannot read the window; a failure reaches them only after everything that was
            sent before it.
    """

    is_told_late = False

    def __init__(self, window: Window):
        self.window = window
        self.results = Arena(PrivateMemory())
        self.scratch = Scratch()
        self.posted_bytes = min(env.POSTED_BYTES.get(), POSTED_BYTES)
        self.stats = Stats(window.group_ranks.num_ranks)
        self._epoch = 0
        self._has_warned = False

    def begin(self, header: Header) -> Call:
        """Enter the next call.

        Raises:
            EPClosed: An earlier call failed; the message has the reason.
        """
        self.require_working()
        self._epoch += 1
        if self.window.trace is not None:
            agreement = header.agreement
            facts = {"tokens": header.num_tokens, "hidden": agreement.hidden, "dtype": str(agreement.dtype)}
            self.window.trace.begin_call(agreement.operation, call=self._epoch, **facts)
        return Call(self.window, self._epoch, header)

    def require_working(self) -> None:
        """Raise if an earlier call has failed.

        Raises:
            EPClosed: A call has failed; the message has the reason.
        """
        if self.window.failure is not None:
            raise EPClosed(f"Buffer: closed by an earlier failure ({self.window.failure}). Make a new buffer")

    def refuse(self, reason: str) -> Refusal:
        """Report to the peers that this rank does not make the next call. Runs on the comm stream."""
        return self.window.refuse(NORMAL, self._epoch + 1, reason)

    def fail(self, error: BaseException, call: Call | None, *, is_foreign: bool = False) -> None:
        """Report a failed call to the peers and close the buffer: a call that fails on one rank fails on all ranks.

        Args:
            error: What went wrong.
            call: The call; None: it was not yet announced.
            is_foreign: The error is not of this call, but of something that the caller made it wait for.
        """
        if self.window.trace is not None:
            self.window.trace.end_call(error)
        if is_foreign:
            self.window.fail(f"failed: {account(error)}")  # whichever rank it names is one of another group
        elif isinstance(error, EPOverflow):
            return  # all ranks refuse the call alike
        elif isinstance(error, EPPeerFailed):
            self.window.fail(error.cause, error.rank)
        elif isinstance(error, EPError) and not isinstance(error, (EPTransportError, EPUnsupported)):
            self.window.fail(f"reported: {error}")  # what this rank noticed of others
        else:
            where = f"{call}: " if call is not None else ""
            self.window.fail(f"failed: {where}{account(error)}")

    def give_up(self, error: BaseException, call: Call | None) -> None:
        """Do what `fail` does while the comm stream may be in the middle of the call.

        `tell_failure` must follow on that stream.
        """
        # Not the method of a subclass: it uses the links of other nodes, which are the comm stream's alone.
        Chain.fail(self, error, call)

    def tell_failure(self) -> None:
        """Report the failure of this rank, if it has failed, to all ranks that an interrupt has left without it.

        Across nodes also to those that cannot read this window.
        """
        if self.window.failure is not None:
            # The first cause stays: this only stores the word again, in case an interrupt came before it.
            self.window.fail("")

    def result(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor in private memory. Memory of large tensors is recycled."""
        return recycled(self.results, shape, dtype)

    def warn_staged(self, operation: str) -> None:
        """Warn, once for each buffer, that rows go through staging, which is slower."""
        if not self._has_warned:
            self._has_warned = True
            used_bytes = self.window.arena.num_bytes()["used"]
            group_ranks = self.window.group_ranks
            warn_staged(operation, used_bytes, group_ranks.first_rank + self.window.rank, group_ranks.num_ranks)
