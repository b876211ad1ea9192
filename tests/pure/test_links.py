"""Frames over a pair of sockets, chunks, and the bits of a mask."""

from __future__ import annotations

import contextlib
import resource
import socket
import struct
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch

from deep_ep import EPError, layout
from deep_ep.config import Config
from deep_ep.engine.cpu.nodes.announce import receive_announcements
from deep_ep.engine.cpu.nodes.traffic import ChunkForm, Chunks, Traffic
from deep_ep.engine.protocol import Agreement, Header
from deep_ep.errors import MOST_TEXT_BYTES, EPTransportError
from deep_ep.topology import Topology
from deep_ep.transport.link_set import LinkSet, Waker
from deep_ep.transport.links import (
    ANNOUNCE,
    BYE,
    FAILED,
    MOST_PAYLOAD_BYTES,
    ROWS,
    VERDICT,
    Link,
    Page,
    Pool,
)
from deep_ep.transport.message import Rail, Wait
from deep_ep.transport.window import Failure


@pytest.fixture
def links() -> Iterator[tuple[Link, Link]]:
    pool = Pool()
    one, other = (Link(end, pool) for end in socket.socketpair())
    yield one, other
    for link in (one, other):
        if link.fileno() >= 0:
            link.close()


def test_frames_arrive_in_order_and_whole(links: tuple[Link, Link]) -> None:
    one, other = links
    pool = Pool()
    sizes = [0, 1, 5_000_000, 17]  # the third is more than a socket takes at once
    for index, size in enumerate(sizes):
        page = pool.take(size)
        page.tensor().fill_(index)
        one.send(ROWS, 7, index, page)
    assert one.num_queued > 0
    while one.num_queued or len(other.inbox) < len(sizes):
        one.flush()
        other.fill()
    for index, (size, frame) in enumerate(zip(sizes, other.inbox, strict=True)):
        assert (frame.topic, frame.epoch, frame.tag) == (ROWS, 7, index)
        assert frame.page.tensor().tolist() == [index] * size
    assert one.bytes_sent == other.bytes_received == sum(sizes) + 4 * 32


class InterruptAt:
    """Inside the block KeyboardInterrupt is raised at the n-th place where Python delivers signals: as a function
    begins, and as a function in C returns.
    """

    def __init__(self, num_before: int):
        self._num_left = num_before

    def __enter__(self) -> InterruptAt:
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)

    @property
    def has_come(self) -> bool:
        return self._num_left < 0

    def _profile(self, _frame: FrameType, event: str, _arg: object) -> None:
        if event in ("call", "c_return") and not self.has_come:
            self._num_left -= 1
            if self.has_come:
                raise KeyboardInterrupt


@pytest.mark.parametrize("is_dropped", [False, True])
def test_an_interrupt_sends_no_byte_twice(is_dropped: bool) -> None:
    """It comes while frames are handed to the system; afterwards the rest is sent, or dropped for last words."""
    for num_before in range(1000):
        one, other = (Link(end, Pool()) for end in socket.socketpair())
        one.send(ROWS, 1, 0, Pool().take(300_000))  # more than the socket takes at once
        for tag in range(1, 4):
            one.send(ROWS, 1, tag, Pool().filled(bytes([tag]) * 100))
        assert one.num_queued == 4
        other.fill()
        interrupt = InterruptAt(num_before)
        with contextlib.suppress(KeyboardInterrupt):
            while one.num_queued:
                with interrupt:
                    one.flush()
                other.fill()
        if is_dropped:
            one.drop_queued()
        one.send(FAILED, 0, 5, Pool().filled(b"an accident"))
        while one.num_queued or other.failure is None:
            one.flush()
            other.fill()
            assert other.ending is None
        assert other.failure == (5, "an accident")
        tags = [frame.tag for frame in other.inbox]
        assert tags == [0, 1, 2, 3][: len(tags)]
        assert is_dropped or len(tags) == 4
        assert all(frame.page.tensor().tolist() == [frame.tag] * 100 for frame in list(other.inbox)[1:])
        assert one.bytes_sent == other.bytes_received
        for link in (one, other):
            link.close()
        if not interrupt.has_come:
            return
    raise AssertionError("it never ends")


def test_a_link_that_nobody_empties_is_not_read_for_ever(links: tuple[Link, Link]) -> None:
    one, other = links
    for index in range(200):
        one.send(ANNOUNCE, 1, index, Pool().filled(b"word"))
    for count in range(1, 65):
        other.fill()
        assert len(other.inbox) == count  # one at a time: it is handed on before the next is read
    other.fill()
    assert len(other.inbox) == 64
    assert not other.may_read
    other.inbox.clear()
    other.fill()
    assert other.inbox[0].tag == 64


def test_last_words_come_before_what_was_queued(links: tuple[Link, Link]) -> None:
    one, other = links
    for index in range(3):
        one.send(ROWS, 1, index, Pool().take(1_000_000))
    one.drop_queued()
    one.send(FAILED, 0, 5, Pool().filled(b"an accident"))
    while one.num_queued or other.failure is None:
        one.flush()
        other.fill()
    assert other.failure == (5, "an accident")
    assert len(other.inbox) <= 1


def test_leaving_and_breaking_off_are_told_apart(links: tuple[Link, Link]) -> None:
    one, other = links
    one.close()
    other.fill()
    assert other.has_left
    assert other.ending is not None
    here, there = socket.socketpair()
    link = Link(here, Pool())
    there.close()
    link.send(ROWS, 1, 0, Pool().filled(b"x"))
    link.fill()
    assert not link.has_left
    assert link.ending is not None
    link.close()


def test_chunks_follow_the_config() -> None:
    assert Chunks.of(Config(20, 6, 256, 8, 128), 1000) == (8, 16)
    assert Chunks.of(None, 1 << 16) == (16, 4)
    assert Chunks.of(None, 1 << 16, unit=6) == (12, 4)  # whole tiles of sums
    assert Chunks.of(None, 1 << 22, unit=6) == (1, 4)
    assert Chunks.of(None, 1 << 30).num_rows == 1


def test_sections_of_a_chunk_are_aligned_and_apart() -> None:
    form = ChunkForm([(3, torch.uint8), (1, torch.int64), (2, torch.float32)])
    assert form.row_bytes == 3 + 8 + 8
    page = Pool().take(form.num_bytes(5))
    views = form.views(page.tensor(), 5)
    assert [(tuple(view.shape), view.dtype) for view in views] == [
        ((5, 3), torch.uint8),
        ((5, 1), torch.int64),
        ((5, 2), torch.float32),
    ]
    assert all(view.data_ptr() % 16 == 0 for view in views)
    for value, view in enumerate(views):
        view.fill_(value)
    assert [view.unique().tolist() for view in views] == [[0], [1], [2]]


@pytest.mark.parametrize("num_columns", [1, 3, 8, 9, 20])
def test_bits_of_a_mask(num_columns: int) -> None:
    assert layout.pack_bits(torch.tensor([[True, False, True]])).tolist() == [[5]]
    mask = torch.rand(11, num_columns, generator=torch.Generator().manual_seed(num_columns)) < 0.5
    bits = layout.pack_bits(mask)
    assert bits.shape == (11, -(-num_columns // 8))
    assert torch.equal(layout.unpack_bits(bits, num_columns), mask)
    assert layout.unpack_bits(layout.pack_bits(mask[:0]), num_columns).shape == (0, num_columns)


def test_pages_are_used_again_the_last_one_first() -> None:
    pool = Pool()
    large, small = pool.take(1 << 20), pool.take(100)
    pool.give(small)
    pool.give(large)
    assert pool.take(50).memory is small.memory  # a large one is kept for rows
    again = pool.take((1 << 20) - 5)
    assert again.memory is large.memory
    assert again.view().nbytes == (1 << 20) - 5
    pages = [pool.take(1 << 16) for _ in range(20)]
    for page in pages:
        pool.give(page)
    assert pool.take(1 << 16).memory is pages[-1].memory


# What a peer sends that no rank can have meant -----------------------------------------------------------------------


def test_a_message_that_cannot_be_ends_the_link_before_memory_is_taken() -> None:
    heads = {
        "as many bytes as there can be": (ROWS, 1, 0, (1 << 64) - 1),
        "an absurd number of bytes": (ROWS, 1, 0, 1 << 60),
        "just too many": (ANNOUNCE, 1, 0, MOST_PAYLOAD_BYTES + 1),
        "no topic": (0, 1, 0, 0),
        "a topic that there is not": (99, 1, 0, 8),
        "a long farewell": (BYE, 0, 0, 1),
        "an endless complaint": (FAILED, 0, 0, 1 << 20),
        "too many numbers": (VERDICT, 1, 0, 1 << 20),
    }
    for kind, head in heads.items():
        here, there = socket.socketpair()
        link = Link(here, Pool())
        there.sendall(struct.pack("<QQQQ", *head))
        before = tracemalloc_peak(link.fill)
        assert before < 1 << 20, kind
        assert link.ending is not None, kind
        assert f"sent a message that cannot be (topic {head[0]}, call {head[1]}, {head[3]} bytes)" in link.ending, kind
        assert not link.inbox
        assert link.failure is None
        assert there.recv(1) == b"", "it is told"
        link.fill()
        link.close()
        there.close()


def tracemalloc_peak(work: Callable[[], None]) -> int:
    """Bytes that Python has at most while something is done."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_long_message_takes_memory_as_it_comes(links: tuple[Link, Link]) -> None:
    """A length that is damaged, but could be one, must not cost what it says."""
    one, other = links
    assert tracemalloc_peak(lambda: other._pool.take(MOST_PAYLOAD_BYTES)) < 1 << 20
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    page = Pool().take(1 << 30)
    page.view()[-1] = 7
    assert page.tensor()[-1] == 7
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # KiB
    with pytest.raises(EPTransportError, match="too many for one message"):
        one.send(VERDICT, 1, 0, Pool().take(1 << 20))


def test_where_there_is_no_memory_for_a_message_the_link_ends(links: tuple[Link, Link]) -> None:
    one, other = links

    class Full:
        def take(self, num_bytes: int) -> Page:
            raise MemoryError(f"no room for {num_bytes}")

    other.allocator = Full()
    one.send(ROWS, 1, 0, Pool().take(100))
    other.fill()
    assert other.ending is not None
    assert other.ending.startswith("sent a message of 100 bytes, for which there is no memory (no room for 100)")


@pytest.fixture
def rails() -> Iterator[tuple[Rail, Rail]]:
    """Two nodes of one rank."""
    pool = Pool()
    made = [
        Rail({1 - rank: Link(end, pool)}, Topology(rank, 2, 1), 10.0, pool)
        for rank, end in enumerate(socket.socketpair())
    ]
    yield made[0], made[1]
    for rail in made:
        rail.close()


def test_who_waits_for_its_node_is_not_silent_on_the_rail() -> None:
    """Rank 1 waits inside its node for longer than the limit of rank 0, which waits for rank 1."""
    pool, limit_secs = Pool(), 1.5
    ends = enumerate(socket.socketpair())
    first, second = (Rail({1 - rank: Link(end, pool)}, Topology(rank, 2, 1), limit_secs, pool) for rank, end in ends)
    begin = time.monotonic()

    def wait_for_the_node() -> None:
        while (waited_secs := time.monotonic() - begin) < 1.5 * limit_secs:
            second.look("dispatch (call 3)", waited_secs)
            time.sleep(0.02)
        second.send(0, ANNOUNCE, 3, pool.filled(b"x"))

    thread = threading.Thread(target=wait_for_the_node)
    thread.start()
    frame = first.receive(1, Wait(first, "dispatch (call 3)", 3, lambda: None, lambda _: None))
    thread.join()
    assert (frame.topic, bytes(frame.page.view())) == (ANNOUNCE, b"x")
    assert first.num_received == 1, "that it is there is no message"
    for rail in (first, second):
        rail.close()


def make_call(epoch: int = 3) -> Any:
    agreement = Agreement("dispatch", num_experts=4, num_topk=2, hidden=8, dtype=torch.float32)
    window = SimpleNamespace(me=lambda: "rank 0/2", tag=SimpleNamespace(first_rank=0, num_ranks=2))

    class Call:
        header = Header(agreement, 5)

        def __str__(self) -> str:
            return f"dispatch (call {epoch})"

    call = Call()
    call.epoch, call.window = epoch, window
    return call


def said_of(rails: tuple[Rail, Rail], what: Callable[[], object]) -> str:
    with pytest.raises(EPError) as raised:
        what()
    assert "rank 1 (node 1)" in str(raised.value)
    assert type(raised.value) is EPError
    return str(raised.value)


def announced(num_rows: int = 3, tokens: int = 3, selected: int = 3, bits: bytes = b"\1\1\1") -> bytes:
    words = [*make_call().header.agreement.words(), num_rows]
    return struct.pack(f"<{len(words)}q", *words) + struct.pack("<3i", tokens, selected, 0) + bits


BAD_ANNOUNCEMENTS = {
    "nothing": b"",
    "a part of its words": announced()[:40],
    "no counts": announced()[:-15],
    "a row too few": announced()[:-1],
    "a row too many": announced() + b"\1",
    "rows below zero": announced(num_rows=-1, bits=b""),
    "rows without end": announced(num_rows=1 << 60),
    "more tokens than rows": announced(tokens=4),
    "fewer tokens than rows": announced(tokens=2),
    "tokens below zero": announced(tokens=-3),
    "selections below zero": announced(selected=-1),
    "a row that goes nowhere": announced(tokens=2, bits=b"\1\0\1"),
    "another operation": struct.pack("<q", 1 << 40) + announced()[8:],
    "another type": announced()[:32] + struct.pack("<q", 1 << 50) + announced()[40:],
}


def test_announcements_of_a_peer_that_cannot_be(rails: tuple[Rail, Rail]) -> None:
    one, other = rails
    wait = Wait(one, "dispatch (call 3)", 3, lambda: None, lambda _: None)
    other.send(0, ANNOUNCE, 3, Pool().filled(announced()))
    heard = receive_announcements(one, wait, make_call(), 1, 2)
    assert heard[1].num_rows == 3
    for kind, data in BAD_ANNOUNCEMENTS.items():
        other.send(0, ANNOUNCE, 3, Pool().filled(data))
        text = said_of(rails, lambda: receive_announcements(one, wait, make_call(), 1, 2))
        assert "sent an announcement" in text or "must make the same call" in text, kind
    other.send(0, ROWS, 3, Pool().filled(announced()))
    text = said_of(rails, lambda: receive_announcements(one, wait, make_call(), 1, 2))
    assert "sent a message of topic 3, expected topic 1" in text
    other.send(0, ANNOUNCE, 4, Pool().filled(announced()))
    assert "is in call 4" in said_of(rails, lambda: receive_announcements(one, wait, make_call(), 1, 2))
    # Without routing there is nothing behind the words.
    other.send(0, ANNOUNCE, 3, Pool().filled(announced()))
    assert "sent an announcement" in said_of(rails, lambda: receive_announcements(one, wait, make_call(), 1))


def test_rows_of_a_peer_that_cannot_be(rails: tuple[Rail, Rail]) -> None:
    one, other = rails
    form, taken = ChunkForm([(2, torch.float32)]), []

    def take(node: int, first: int, last: int, views: list[torch.Tensor]) -> None:
        taken.append((first, last))

    def traffic() -> Traffic:
        wait = Wait(one, "dispatch (call 3)", 3, lambda: None, lambda _: None)
        return Traffic(one, wait, 3, form, Chunks(4, 4), [0, 0], [0, 3], lambda *_: one.pool.take(0), take)

    frames = {
        "none": (ROWS, 3, 0, 0),
        "not the next": (ROWS, 3, 1 << 24 | 1, 16),
        "more than come": (ROWS, 3, 4, 32),
        "far more than come": (ROWS, 3, (1 << 64) - 1, 16),
        "another length": (ROWS, 3, 1, 24),
        "of another call": (ROWS, 4, 1, 16),
        "not rows": (ANNOUNCE, 3, 1, 16),
    }
    for kind, (topic, epoch, tag, num_bytes) in frames.items():
        other.links[0].send(topic, epoch, tag, Pool().take(num_bytes))
        assert "expected rows from 0 on of 3 of call 3" in said_of(rails, traffic().finish), kind
    assert taken == []
    other.links[0]._socket.send(struct.pack("<QQQQ", ROWS, 3, 1, 1 << 60))
    assert "sent a message that cannot be" in said_of(rails, traffic().finish)


def test_last_words_are_cut_and_may_be_anything(rails: tuple[Rail, Rail]) -> None:
    one, other = rails
    other.fail(Failure(5, "\udcff" + "x" * (1 << 20)))
    one.turn(1)
    said = one.last_words()
    assert said is not None
    escaped = "\\udcff"
    assert said == (5, escaped + "x" * (MOST_TEXT_BYTES - len(escaped)))


def test_chunks_are_never_longer_than_a_message() -> None:
    assert Chunks.of(Config(20, 6, 256, 1 << 23, 1 << 24), 1 << 20).num_rows == MOST_PAYLOAD_BYTES >> 21
    assert Chunks.of(Config(20, 6, 256, 8, 128), 1 << 40).num_rows == 1


# Several links -------------------------------------------------------------------------------------------------------


@pytest.fixture
def star() -> Iterator[tuple[LinkSet, dict[int, Link]]]:
    """A rank with links to ranks 1, 4 and 7, and their ends of these links."""
    pairs = {rank: socket.socketpair() for rank in (1, 4, 7)}
    own, others = ({rank: Link(pair[side], Pool()) for rank, pair in pairs.items()} for side in (0, 1))
    yield LinkSet(own), others
    for link in (*own.values(), *others.values()):
        if link.fileno() >= 0:
            link.close()


def test_a_turn_serves_the_links_that_are_ready(star: tuple[LinkSet, dict[int, Link]]) -> None:
    links, others = star
    assert not links.turn(0)
    others[4].send(ROWS, 3, 0, Pool().take(8))
    assert links.turn(10)
    assert [len(links.links[rank].inbox) for rank in (1, 4, 7)] == [0, 1, 0]
    links.links[7].send(ROWS, 3, 0, Pool().take(5_000_000))  # more than a socket takes at once
    assert links.has_queued
    while links.has_queued:
        others[7].fill()
        links.turn(0.1)
    assert links.stats()["bytes_sent"] > 5_000_000


def test_links_that_have_ended_are_left_alone(star: tuple[LinkSet, dict[int, Link]]) -> None:
    links, others = star
    links.links[1].send(ROWS, 3, 0, Pool().take(5_000_000))
    others[1]._socket.close()
    while links.links[1].ending is None:
        assert links.turn(10)
    assert not links.has_queued, "what is queued for a rank that has gone is no reason to wait"
    assert not links.turn(0), "a socket that is closed is readable for ever"
    for rank in (4, 7):
        others[rank].close()
        while links.links[rank].ending is None:
            assert links.turn(10)
    assert not links.turn(0.01), "and without any, a turn is a pause"


def test_a_rank_that_reads_nothing_is_given_up_on(star: tuple[LinkSet, dict[int, Link]]) -> None:
    links, _ = star
    links.links[1].send(ROWS, 3, 0, Pool().take(5_000_000))
    turns: list[bool] = []
    links.drain(0.05, lambda: turns.append(links.turn(0.01)))
    assert links.has_queued
    assert turns


def test_another_thread_ends_a_wait() -> None:
    waker, one_end = Waker(), socket.socketpair()
    links = LinkSet({0: Link(one_end[0], Pool())}, waker=waker)
    waker.wake()
    waker.wake()
    assert links.turn(10)
    assert not links.turn(0), "a wake-up ends one wait"
    timer = threading.Timer(0.05, waker.wake)
    timer.start()
    assert links.turn(None)
    timer.join()
    links.close()
    one_end[1].close()
    waker.close()
    waker.wake()  # of a thread that does not know yet
