"""The words of a rank whose kernels do the waiting, as the host sees them: handshakes, tickets, failures."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from functools import partial

import torch

from ...errors import EPClosed, EPTimeout, account
from ...kernels import exchange
from ...kernels.exchange import Context
from ...kernels.low_latency import words
from ...kernels.notify import Counted, Handshake, HandshakeForm, Nodes, Numbered, Post, Terms, num_words_sent
from ...stream import LaunchStream
from ...transport.device import DeviceWindow
from ..ops import Counts, OpenCall
from ..protocol import LOW_LATENCY, OPERATIONS, Agreement, is_refusal
from ..stats import Stats
from .digest import unpack
from .failure import Record
from .trace_marks import TraceMarks

_NUM_LOOKS = 4000  # how often the host looks for the counts before it pauses: even the shortest pause takes 60 us
_PAUSE_SECS, _MOST_PAUSE_SECS = 2e-5, 5e-4
_RECORD, _FAILED, _HELD, _SAID = exchange.STATE_RECORD, exchange.STATE_FAILED, exchange.STATE_HELD, exchange.STATE_WORDS
_COUNTS = exchange.COUNTS
_make_counts: Callable[[tuple], Counts] = partial(tuple.__new__, Counts)  # see `notify.make_post`


Handshaking = Callable[..., None]
"""Launches a handshake, as `notify.Handshake` does."""


class Signals(OpenCall):
    """Handshakes of a rank with its peers.

    Args:
        window: The window whose board they use.
        stream: Where calls are launched.
        limit_secs: Seconds that a wait may take.
        max_experts: Most experts of a call.
        num_nodes: N.

    Attributes:
        remote_board: [n] int64, which begins with the board that ranks of other nodes write; None: there are none.
        send_words: Launches the kernel that sends so many words to remote ranks; None: there is none, or a thread polls
            for them.
        handshake_context: What handshakes know of the buffer.
        tell_failure: Has this rank's failure sent to remote ranks; None: there are none.
        is_announced: Peers may have seen the call that is being made, so an error in it is an error of all ranks.
        marks: Where calls are marked for a trace; None: nowhere.
        stats: Where calls are counted.
        low_latency_words: [R, 2] int64, what the ranks posted in a low-latency call in which they disagree.
        low_latency_state: int64, private words of low-latency calls; None: there are none.
    """

    remote_board: torch.Tensor | None = None
    send_words: Callable[[int], None] | None = None
    tell_failure: Callable[[], None] | None = None
    marks: TraceMarks | None = None
    low_latency_words: torch.Tensor | None = None
    low_latency_state: torch.Tensor | None = None

    def __init__(
        self, window: DeviceWindow, stream: LaunchStream, limit_secs: float, max_experts: int, num_nodes: int = 1
    ):
        num_ranks, device = window.num_ranks, window.device
        self.window = window
        self._stream = stream
        self._limit_secs = limit_secs
        self._board = window.board
        self.stats = Stats(num_ranks)
        self._ticket = 0
        self._failure: str | None = None
        self._is_capturing = window.is_capturing
        self.is_announced = False
        self._host = torch.zeros(
            Context.num_host_words(num_ranks, max_experts),
            dtype=torch.int64,
            device="cpu",
            pin_memory=device.type == "cuda",
        )
        self._words = (ctypes.c_int64 * self._host.numel()).from_address(self._host.data_ptr())
        self._view = memoryview(self._words).cast("B").cast("q")  # makes lists of them in half the time
        self._ticket_word = ctypes.c_int64.from_address(self._host.data_ptr())
        self._failed_word = ctypes.c_int64.from_address(self._host.data_ptr() + 8 * exchange.STATE_FAILED)
        self.context = Context(
            rank=window.rank,
            num_ranks=num_ranks,
            windows=window.windows,
            own_boards=window.windows[0, window.rank].repeat(num_ranks),
            state=torch.zeros(Context.num_state_words(num_ranks), dtype=torch.int64, device=device),
            table=torch.zeros(exchange.TABLE_ROWS, num_ranks, dtype=torch.int64, device=device),
            host=self._host,
            header_words=Context.num_header_words(num_ranks, max_experts, num_nodes),
            limit_ns=int(limit_secs * 1e9),
            num_nodes=num_nodes,
        )
        self.handshake_context = self.context

    @staticmethod
    def board_bytes(num_ranks: int, max_experts: int, num_nodes: int = 1) -> int:
        """The bytes of the window that the words need."""
        return Context.board_bytes(num_ranks, Context.num_header_words(num_ranks, max_experts, num_nodes))

    def next_ticket(self) -> int:
        """Return the ticket of a full dispatch, which `wait_for_counts` waits for."""
        self._ticket += 1
        return self._ticket

    def handshake(self, terms: Terms, form: HandshakeForm) -> Handshaking:
        """Make the handshakes of calls with one signature.

        From the first launch on, an error of one rank is an error of all ranks.

        If a kernel sends words to remote ranks, it is launched between the send half and the receive half.
        """
        context = self.handshake_context
        if self.send_words is None:
            return Handshake(context, terms, form)
        sends = Handshake(context, terms, form._replace(receives=False))
        receives = Handshake(context, terms, form._replace(sends=False, is_numbered=False, word=torch.uint8))
        num_words, send_words = num_words_sent(self.context, terms, form.has_counts), self.send_words

        def both(
            post: Post,
            counted: Counted | tuple | None = None,
            prefix: torch.Tensor | None = None,
            nodes: Nodes | None = None,
            numbered: Numbered | tuple | None = None,
        ) -> None:
            sends(post, counted, prefix, nodes, numbered)
            send_words(num_words)
            receives(post, counted, prefix, nodes)

        return both

    def wait_for_counts(self, num_experts: int) -> Counts:
        """Wait on the host until the ranks have exchanged their counts.

        Raises:
            ValueError: The caller's counts are wrong; nothing was announced.
            EPError: A peer failed, was silent, or makes another call.
        """
        if self.marks is not None:
            with self.marks.host_wait("wait: counts"):
                self._wait_for_ticket()
        else:
            self._wait_for_ticket()
        num_ranks, words = self.context.num_ranks, self._view
        if words[_RECORD] == _COUNTS and not words[_FAILED]:
            record = self._record()
            if record.origin == self.context.rank:
                words[exchange.STATE_RECORD] = 0
                self.is_announced = False  # the kernel has announced nothing
                raise self._error(record)
        # What each rank says of itself; prefix sums, of which the last row is of use; and selections of experts.
        behind = _SAID + 3 * num_ranks
        last = behind + num_ranks * num_ranks
        said = words[_SAID:behind].tolist()
        counted = words[last - num_ranks : last + num_experts // num_ranks].tolist()
        return _make_counts(
            (
                counted[:num_ranks],
                counted[num_ranks:],
                not words[_HELD],
                0,
                said[num_ranks : 2 * num_ranks],
                said[:num_ranks],
                said[2 * num_ranks :],
            )
        )

    def _wait_for_ticket(self) -> None:
        """Poll until the kernel has echoed the ticket.

        The kernel waits for peers with its own time limit; the limit here is longer.
        """
        word, ticket, failed = self._ticket_word, self._ticket, self._failed_word
        for _ in range(_NUM_LOOKS):  # some hundred microseconds, within which counts come as a rule
            if word.value == ticket:
                return
            if failed.value:
                break
        begin = time.monotonic()
        while word.value != ticket:
            self.raise_if_failed()
            elapsed = time.monotonic() - begin
            time.sleep(min(_MOST_PAUSE_SECS, _PAUSE_SECS + elapsed / 50))  # hands the core, and the GIL, to others
            if elapsed > 2 * self._limit_secs + 10:
                raise EPTimeout(
                    f"dispatch: the GPU did not come to this call within {elapsed:.0f} s "
                    f"(rank {self.context.rank}/{self.context.num_ranks}). Something that this process launched before "
                    "does not end: look for a kernel that hangs"
                )

    def num_more_rounds(self) -> int:
        """Rounds beyond the first of all calls so far, replays of graphs included, as far as the device has come."""
        return self._words[exchange.STATE_ROUNDS]

    def propagate_failure(self, operation: str, error: BaseException) -> None:
        """Report to the peers what went wrong in a call.

        A call that was not announced may be corrected and made after all.
        """
        if self.has_failed():
            return
        if self.is_announced or not is_refusal(error):
            self.give_up(operation, f"{operation}: {account(error)}")
        elif not self._is_capturing():  # else no call is made now
            self._refuse(operation, account(error))

    def give_up(self, operation: str, cause: str) -> None:
        """Fail, and report it to the peers, unless the buffer has failed already.

        Args:
            operation: The operation that fails.
            cause: Why it fails. Peers get the operation only.
        """
        if self._failure is None and not self._failed_word.value:
            self._failure = cause
            with self._stream.side_stream():
                exchange.abort(self.context, OPERATIONS.index(operation))
                if self.tell_failure is not None:
                    self.tell_failure()

    def _refuse(self, operation: str, reason: str) -> None:
        """Report to the peers, after earlier calls, that this rank does not make this one."""
        kind, numbers, refused = exchange.NORMAL, self.context.state, exchange.REFUSALS
        if operation.startswith(LOW_LATENCY) and self.low_latency_state is not None:
            kind, numbers, refused = exchange.LOW_LATENCY, self.low_latency_state, words.REFUSALS
        with self._stream.entered(None, False):
            note = exchange.note_words(reason, numbers.device)
            exchange.refuse(self.context, OPERATIONS.index(operation), kind, numbers, refused, note)
        self._stream.leave(False)

    @property
    def noting(self) -> TraceMarks | None:
        """Return where to note facts of the call that is being made; None: no trace is recorded."""
        return self.marks if self.marks is not None and self.marks.is_open else None

    def mark(self, step: str) -> None:
        """Mark in the trace that a step of the call is launched from here on."""
        if self.marks is not None:
            self.marks.step(step)

    def reach(self, operation: str, step: str) -> None:
        """Reach the fault point of a step before it is launched, and mark its beginning in the trace."""
        if self.marks is not None:
            self.marks.step(step)
        if self.window.fault is not None:
            self.window.fault(f"{operation}: before {step}")

    def has_failed(self) -> bool:
        """Return whether a call has failed. Reads two words, and changes nothing."""
        return self._failure is not None or bool(self._failed_word.value)

    def require_working(self) -> None:
        """Raise if an earlier call has failed.

        Raises:
            EPError: A kernel has failed since the last check; the message has the reason. Later checks raise
                `EPClosed`.
        """
        if self._failure is not None:
            raise EPClosed(f"Buffer: closed by an earlier failure ({self._failure}). Make a new buffer")
        if self._failed_word.value:
            self.raise_if_failed()

    def raise_if_failed(self) -> None:
        """Raise the failure that a kernel has recorded, once."""
        if self._failed_word.value and self._failure is None:
            error = self._error(self._record())
            self._failure = str(error)
            if self.tell_failure is not None:  # remote ranks that wait should not have to do so up to the limit
                with self._stream.side_stream():
                    self.tell_failure()
            raise error

    def _record(self) -> Record:
        return Record(*self._words[exchange.STATE_RECORD : exchange.STATE_RECORD + 7])

    def _error(self, record: Record) -> Exception:
        header, reason = partial(self._header, record), partial(self._reason, record)
        return record.error(self.context.rank, self.context.num_ranks, self._limit_secs, header, reason)

    def _reason(self, record: Record) -> str:
        """Return why the rank of a record has refused a call; empty: it is on another node, from which only the
        record comes, or it has refused another call since.
        """
        if self._is_remote(record.origin) or not record.expected:
            return ""
        with self._stream.side_stream():
            return self.context.note(self._board, record.expected, record.origin)

    def _is_remote(self, rank: int) -> bool:
        """Return whether a rank's words do not come straight to this rank's board."""
        is_other_node = rank // self.context.ranks_per_node != self.context.rank // self.context.ranks_per_node
        return is_other_node and self.remote_board is not None

    def _header(self, record: Record, rank: int) -> Agreement:
        """Return the header that a rank has posted for the call of a record."""
        if OPERATIONS[record.operation].startswith(LOW_LATENCY) and self.low_latency_words is not None:
            with self._stream.side_stream():
                first, second = self.low_latency_words[rank].tolist()
            return unpack(first, second, 0)
        board = self.remote_board if self._is_remote(rank) and self.remote_board is not None else self._board
        with self._stream.side_stream():
            return unpack(*self.context.posted_agreement(board, record.epoch, rank))
