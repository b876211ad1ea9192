"""The board: the words by which a rank publishes its progress to its peers. `docs/protocol.md` has the state table.

A board is the first part of a rank's memory. Only its owner writes it. All values are absolute, and none is ever
cleared but `waiting` and `joining`, which are 1 while their owner does so, and the call of a verdict that is replaced.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..errors import EPTransportError, encoded
from .arena import Base
from .memory import Mapping
from .spans import Span, whole_units
from .words import LINE_BYTES, word_type

STEP_BITS = 24  # of `progress`; the other 40 bits are the epoch's, enough for 35 years of calls at 1 kHz
MAX_EXPERTS = 1 << 14  # most counts per expert in a header

POSTED_BYTES = 1 << 18  # of rows that a call may post; beyond twice that their copies cost more than waits (measured)

HEADER, OFFER = 0, 1  # the kinds of posts
NORMAL, LOW_LATENCY = 0, 1  # the kinds of calls that a rank may refuse: each kind is numbered by itself
NUM_SENT_POSTS = 8  # of low-latency calls, by their number

_NUM_POST_WORDS = 32  # a header has an agreement and 4 more; an offer has 3, and 3 for each section
_POST_BYTES = 8 * _NUM_POST_WORDS
_REFUSED = 5  # the line of the first word of refusals; one for each kind
_TEXT = Span(8 * LINE_BYTES, 2048)  # why the rank has failed: between eight lines of words and the posts
_POSTS = 2048  # 2 kinds x 2 parities of `_POST_BYTES` each
_SENT_POSTS = 3072  # `NUM_SENT_POSTS` of `_SENT_POST_BYTES` each
_SENT_POST_BYTES = 1024
_REFUSAL_TEXTS = _SENT_POSTS + NUM_SENT_POSTS * _SENT_POST_BYTES  # one for each kind
_REFUSAL_TEXT_BYTES = 512
_MEETING = _REFUSAL_TEXTS + 2 * _REFUSAL_TEXT_BYTES  # lines of words: `attempt`, `following`, `done`, `joining`
_VERDICTS = _MEETING + 4 * LINE_BYTES  # `NUM_SENT_POSTS` of `_VERDICT_BYTES` each
_VERDICT_BYTES = 512  # the number of the call, and a bit for each of `MOST_LOW_LATENCY_RANKS`
_ECHOES = _VERDICTS + NUM_SENT_POSTS * _VERDICT_BYTES  # a word for each rank
MOST_WORDS_BEFORE_MASKS = 19  # of such a post
MOST_LOW_LATENCY_RANKS = (_SENT_POST_BYTES // 8 - MOST_WORDS_BEFORE_MASKS) // 2 * 32  # two bits for each, 32 to a word
_TIMES_BITS = 16  # of a word of refusals; the others are the call's number
MOST_TIMES = (1 << _TIMES_BITS) - 1


def progress_of(epoch: int, step: int) -> int:
    """Return the value of `progress` when call `epoch` has completed `step`."""
    assert step < 1 << STEP_BITS, f"a call of {step} steps"
    return epoch << STEP_BITS | step


class Refusal(NamedTuple):
    """A call that a rank has refused to make, because its arguments are wrong: nothing of it was sent.

    Attributes:
        number: The number of the call.
        times: How often the rank has refused it so far, at most `MOST_TIMES`. It may correct the mistake and make the
            call after all.
        reason: The reason, for the error of a rank that waits for the call.
    """

    number: int
    times: int
    reason: str

    def follows(self, number: int, own: Refusal) -> bool:
        """Return whether a rank that waits in call `number` must raise because of this refusal.

        If the waiting rank has refused the same call as often, it has made and corrected the same mistake, and the
        other rank is expected to correct it, too.

        Args:
            number: The number of the call.
            own: The last refusal of the rank that waits.
        """
        return self.times_of(number) > own.times_of(number)

    def times_of(self, number: int) -> int:
        """Return how often the rank has refused call `number`, if it has refused no other one since."""
        return self.times if self.number == number else 0

    def falls_behind(self, number: int, own: Refusal) -> bool:
        """Return whether this is the last refusal of a rank that makes call `number` after fewer refusals of it than
        the rank that asks, which has corrected a mistake of its own alone.

        A rank that has refused a later call may have refused this one before.
        """
        return own.times_of(number) > self.times_of(number) and self.number <= number


NO_REFUSAL = Refusal(0, 0, "")


class Meeting(NamedTuple):
    """What a rank sends to another to get into step with it again, in low-latency calls.

    Attributes:
        attempt: The number of its attempt.
        following: The number that its next call would have.
        echo: The last attempt of the other one that it has seen.
    """

    attempt: int = 0
    following: int = 0
    echo: int = 0


class Board:
    """The board of one rank, mapped by its owner or by a peer.

    Args:
        mapping: The mapping of the board's span.
        num_ranks: R, which fixes the layout.
    """

    def __init__(self, mapping: Mapping, num_ranks: int):
        self.mapping = mapping
        word = word_type()
        self.progress = word(mapping.memory, 0)
        self.failed = word(mapping.memory, LINE_BYTES)
        self.closed = word(mapping.memory, 2 * LINE_BYTES)
        self.sent = word(mapping.memory, 3 * LINE_BYTES)
        self.waiting = word(mapping.memory, 4 * LINE_BYTES)
        self.spent = word(mapping.memory, 7 * LINE_BYTES)
        self.attempt, self.following, self.done, self.joining = (
            word(mapping.memory, _MEETING + index * LINE_BYTES) for index in range(4)
        )
        self.echoes = [word(mapping.memory, _ECHOES + 8 * rank) for rank in range(num_ranks)]
        self._verdicts = [
            (word(mapping.memory, _VERDICTS + slot * _VERDICT_BYTES), part[8:].cast("q"))
            for slot, part in enumerate(_parts(mapping, _VERDICTS, _VERDICT_BYTES, NUM_SENT_POSTS))
        ]
        self._refused = [word(mapping.memory, (_REFUSED + kind) * LINE_BYTES) for kind in (NORMAL, LOW_LATENCY)]
        self._text = mapping.view(_TEXT)
        self._refusal_texts = _parts(mapping, _REFUSAL_TEXTS, _REFUSAL_TEXT_BYTES, 2)
        posts = [part.cast("q") for part in _parts(mapping, _POSTS, _POST_BYTES, 4)]
        self._posts = [posts[:2], posts[2:]]  # by kind and parity
        self._sent_posts = [part.cast("q") for part in _parts(mapping, _SENT_POSTS, _SENT_POST_BYTES, NUM_SENT_POSTS)]
        num_bytes, first = _values_bytes(num_ranks), _first_value(num_ranks)
        self._values = [part.cast("i") for part in _parts(mapping, first, num_bytes, 2)]
        self._rows = [first + 2 * num_bytes + parity * POSTED_BYTES for parity in (0, 1)]

    @staticmethod
    def num_bytes(num_ranks: int) -> int:
        """Return the bytes of a board in a group of `num_ranks`."""
        return _first_value(num_ranks) + 2 * _values_bytes(num_ranks) + 2 * POSTED_BYTES

    def post(self, kind: int, epoch: int, words: Sequence[int]) -> None:
        """Write the words of a header or an offer. Peers see them with the next release of `progress`."""
        self._posts[kind][epoch & 1][: len(words)] = memoryview(array("q", words))

    def read(self, kind: int, epoch: int) -> list[int]:
        """Return the words of a header or an offer, followed by the rest of the slot."""
        return self._posts[kind][epoch & 1].tolist()

    def post_values(self, epoch: int, *values: torch.Tensor) -> None:
        """Write the int32 values that go with a header, one tensor after the other."""
        num_values = sum(part.numel() for part in values)
        torch.cat(values, out=torch.frombuffer(self._values[epoch & 1], dtype=torch.int32, count=num_values))

    def read_values(self, epoch: int, start: int, stop: int) -> list[int]:
        """Return values `[start, stop)` of a header."""
        return self._values[epoch & 1][start:stop].tolist()

    def write_rows(self, epoch: int, start: int, address: int, num_bytes: int) -> None:
        """Write bytes from an address of this process to byte `start` of the rows that go with a header."""
        ctypes.memmove(self._rows_address(epoch, start, num_bytes), address, num_bytes)

    def read_rows(self, epoch: int, start: int, address: int, num_bytes: int) -> None:
        """Copy bytes of the rows that go with a header, from byte `start` on, to an address of this process."""
        ctypes.memmove(address, self._rows_address(epoch, start, num_bytes), num_bytes)

    def _rows_address(self, epoch: int, start: int, num_bytes: int) -> int:
        if not 0 <= start <= start + num_bytes <= POSTED_BYTES:
            raise EPTransportError(f"window: bytes {start} to {start + num_bytes} are not among those of posted rows")
        return self.mapping.address + self._rows[epoch & 1] + start

    def base_of_rows(self, epoch: int, start: int) -> Base:
        """Return where byte `start` of these rows lies, as an offer has it."""
        return Base(self.mapping.span, self._rows[epoch & 1] + start)

    def post_sent(self, number: int, words: Sequence[int]) -> None:
        """Write the words of a low-latency call. Peers see them with the next release of `sent`."""
        self._sent_posts[number % NUM_SENT_POSTS][: len(words)] = memoryview(array("q", words))

    def read_sent(self, number: int, num_words: int) -> list[int]:
        """Return the first words of a low-latency call."""
        return self._sent_posts[number % NUM_SENT_POSTS][:num_words].tolist()

    def post_verdict(self, number: int, words: Sequence[int]) -> None:
        """Publish which ranks this rank considers lost in a low-latency call.

        For the same call, ranks are only added; or the verdict is dropped, and then has no ranks any more.
        """
        call, words_there = self._verdicts[number % NUM_SENT_POSTS]
        if call.load_acquire() != number:
            # A reader that began with the old number must not take the new words for the old ones.
            call.store_before_writes(0)
        words_there[: len(words)] = memoryview(array("q", words))
        call.store_release(number)

    def read_verdict(self, number: int, num_words: int) -> list[int] | None:
        """Return the words of `post_verdict`; None: the rank has no verdict on this call.

        Ranks that are being added at the same time may or may not be among them.
        """
        call, words_there = self._verdicts[number % NUM_SENT_POSTS]
        if call.load_acquire() != number:
            return None
        words = words_there[:num_words].tolist()
        return words if call.load_behind_reads() == number else None  # otherwise it was replaced meanwhile

    def write_text(self, text: str) -> None:
        """Write why this rank failed, truncated to the space on the board."""
        _write_text(self._text, text)

    def read_text(self) -> str:
        """Return why the rank failed."""
        return _read_text(self._text)

    def post_refusal(self, kind: int, refusal: Refusal) -> None:
        """Publish that this rank does not make a call."""
        _write_text(self._refusal_texts[kind], refusal.reason)
        self._refused[kind].store_release(refusal.number << _TIMES_BITS | refusal.times)

    def read_refusal(self, kind: int, number: int) -> Refusal:
        """Return the last refusal of the rank; without its reason if it is not of call `number`, as most often."""
        # The word first: its owner has stored it behind the text.
        word = self._refused[kind].load_acquire()
        reason = _read_text(self._refusal_texts[kind]) if word >> _TIMES_BITS == number else ""
        return Refusal(word >> _TIMES_BITS, word % (1 << _TIMES_BITS), reason)


def _write_text(memory: memoryview, text: str) -> None:
    data = encoded(text, memory.nbytes - 8)
    memory[:8] = len(data).to_bytes(8, "little")
    memory[8 : 8 + len(data)] = data


def _read_text(memory: memoryview) -> str:
    length = int.from_bytes(memory[:8], "little")
    return bytes(memory[8 : 8 + length]).decode(errors="replace")


def _parts(mapping: Mapping, start: int, num_bytes: int, count: int) -> list[memoryview]:
    """Return parts of so many bytes each, one behind the other."""
    spans = [Span(start + index * num_bytes, start + (index + 1) * num_bytes) for index in range(count)]
    return [mapping.view(span) for span in spans]


def _first_value(num_ranks: int) -> int:
    return -(-(_ECHOES + 8 * num_ranks) // LINE_BYTES) * LINE_BYTES


def _values_bytes(num_ranks: int) -> int:
    return whole_units(4 * (num_ranks + MAX_EXPERTS))
