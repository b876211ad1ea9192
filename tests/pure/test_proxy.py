"""Proxies over pairs of sockets: words are written by hand, and carried to where the remote rank's kernels would
look.
"""

from __future__ import annotations

import gc
import itertools
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from deep_ep.topology import Topology
from deep_ep.transport.links import DOORBELL, HEADER, RECORD, ROWS, SENT, Frame, Link, Pieces, Pool
from deep_ep.transport.proxy import MessageProxy
from deep_ep.transport.remote import (
    DOORBELL_LEFT,
    DOORBELL_SECTIONS,
    DOORBELL_WORDS,
    GONE,
    LINE_WORDS,
    MOST_CHUNKS,
    RemoteLayout,
)
from deep_ep.transport.remote_memory import RemoteWords

pytestmark = pytest.mark.cpu_only

PATIENCE_SECS = 20.0
HEADER_WORDS = 24
ROWS_BYTES = 1 << 16
LARGE_BYTES = 1 << 23  # more than a socket takes at once
ANNOUNCED, OFFERED = 1, 2


def wait_until(is_done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECS
    while not is_done():
        assert time.monotonic() < deadline
        time.sleep(1e-4)


class DeafLink(Link):
    """A link from which nothing is read while it is deaf."""

    is_deaf = False

    def fill(self) -> None:
        if self.is_deaf:
            time.sleep(1e-3)
        else:
            super().fill()


class Rank:
    """A rank whose kernels are this test: remote memory, and a proxy once `start` is called."""

    def __init__(self, rank: int, num_ranks: int, ranks_per_node: int = 1):
        self.topology = Topology(rank, num_ranks, ranks_per_node)
        self.layout = RemoteLayout(num_ranks, self.topology.num_nodes, HEADER_WORDS)
        self.words = torch.zeros(self.layout.num_words, dtype=torch.int64)
        self.pieces: list[torch.Tensor] = []
        self.links: dict[int, DeafLink] = {}
        self._courier: MessageProxy | None = None

    @property
    def proxy(self) -> MessageProxy:
        assert self._courier is not None
        return self._courier

    def start(self) -> None:
        self._courier = MessageProxy(self.links, self.topology, self.layout, self.words)
        for piece in self.pieces:
            self._courier.add_rows(piece)

    def close(self) -> None:
        if self._courier is not None:
            self._courier.close()
        for link in self.links.values():
            link.close()

    def add_piece(self, num_bytes: int = ROWS_BYTES) -> torch.Tensor:
        """A piece of bytes that differ by rank and piece, in the outbox, and nothing in the receive buffer."""
        generator = torch.Generator().manual_seed(100 * self.topology.rank + len(self.pieces))
        piece = torch.zeros(2 * num_bytes, dtype=torch.uint8)
        piece[:num_bytes] = torch.randint(256, (num_bytes,), dtype=torch.uint8, generator=generator)
        self.pieces.append(piece)
        if self._courier is not None:
            self._courier.add_rows(piece)
        return piece

    # What kernels write.

    def post(self, remote: int, epoch: int, first_word: int = 0) -> list[int]:
        """Write the header of a call for a remote rank, from a word on. Returns it."""
        start = self.layout.shadow_board(remote) + self.layout.header(epoch, self.topology.rank)
        base = 1_000_000 * self.topology.rank + 10_000 * remote + 100 * epoch
        for word in range(first_word, HEADER_WORDS):
            self.words[start + word] = base + word
        return self.words[start : start + HEADER_WORDS].tolist()

    def step(self, remote: int, epoch: int, step: int) -> None:
        self.words[self.layout.shadow_board(remote) + self.layout.progress(self.topology.rank)] = epoch << 24 | step

    def fail(self, remote: int, record: list[int]) -> None:
        line = self.layout.shadow_board(remote) + self.layout.failure(self.topology.rank)
        self.words[line + 1 : line + LINE_WORDS] = torch.tensor(record)
        self.words[line] = 1

    def ring(self, node: int, chunk: int, epoch: int, sections: list[tuple[int, int, int]], piece: int = 0) -> None:
        doorbell = self.layout.doorbell(node, chunk)
        numbers = [number for section in sections for number in section]
        self.words[doorbell + 1 : doorbell + DOORBELL_LEFT] = 0
        self.words[doorbell + 1] = piece
        self.words[doorbell + DOORBELL_SECTIONS : doorbell + DOORBELL_SECTIONS + len(numbers)] = torch.tensor(numbers)
        self.words[doorbell] = epoch

    # What kernels see.

    def progress(self, remote: int) -> int:
        return int(self.words[self.layout.progress(remote)])

    def header(self, remote: int, epoch: int) -> list[int]:
        start = self.layout.header(epoch, remote)
        return self.words[start : start + HEADER_WORDS].tolist()

    def failure(self, remote: int) -> list[int]:
        line = self.layout.failure(remote)
        return self.words[line : line + LINE_WORDS].tolist()

    def arrived(self, node: int, chunk: int) -> int:
        return int(self.words[self.layout.arrival_word(node, chunk)])

    def left(self, node: int, chunk: int) -> int:
        return int(self.words[self.layout.doorbell(node, chunk) + DOORBELL_LEFT])


def joined(num_ranks: int, ranks_per_node: int = 1) -> list[Rank]:
    """Ranks with links between all that are of different nodes."""
    ranks = [Rank(rank, num_ranks, ranks_per_node) for rank in range(num_ranks)]
    for one, other in itertools.combinations(ranks, 2):
        if one.topology.node != other.topology.node:
            here, there = socket.socketpair()
            one.links[other.topology.rank] = DeafLink(here, Pool())
            other.links[one.topology.rank] = DeafLink(there, Pool())
    return ranks


@pytest.fixture
def pair() -> Iterator[tuple[Rank, Rank]]:
    """Two ranks, whose proxies are not yet started."""
    one, other = joined(2)
    yield one, other
    one.close()
    other.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("deep_ep-proxy")]


@pytest.fixture
def slow_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written behind its word is seen to be missing."""
    write = RemoteWords.write

    def write_late(words: RemoteWords, index: int, data: Any) -> None:
        time.sleep(0.02)
        write(words, index, data)

    monkeypatch.setattr(RemoteWords, "write", write_late)


def gone(rank: int, origin: int) -> list[int]:
    return [1, GONE, 0, 0, 1 << rank, 0, 0, origin]


# Headers -------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("slow_writes")
def test_a_header_is_there_when_its_progress_is(pair: tuple[Rank, Rank]) -> None:
    one, other = pair
    one.start()
    other.start()
    before: dict[int, list[int]] = {}
    for epoch in range(1, 6):
        for rank, remote in ((one, 1), (other, 0)):
            header = rank.post(remote, epoch)
            rank.step(remote, epoch, ANNOUNCED)
            seer, me = pair[remote], rank.topology.rank
            wait_until(lambda seer=seer, me=me, epoch=epoch: seer.progress(me) > epoch << 24)
            assert seer.header(me, epoch) == header
            assert seer.header(me, epoch - 1) == (before[me] if me in before else [0] * HEADER_WORDS)
            assert seer.progress(me) == epoch << 24 | ANNOUNCED
            before[me] = header
    assert one.failure(1) == other.failure(0) == [0] * LINE_WORDS


@pytest.mark.usefixtures("slow_writes")
def test_a_second_offer_is_there_when_its_step_is(pair: tuple[Rank, Rank]) -> None:
    one, other = pair
    one.start()
    other.start()
    one.post(1, 1)
    one.step(1, 1, ANNOUNCED)
    wait_until(lambda: other.progress(0) == 1 << 24 | ANNOUNCED)
    one.words[one.layout.shadow_board(1) + one.layout.header(1, 0) + 12] = -77
    one.step(1, 1, OFFERED)
    wait_until(lambda: other.progress(0) == 1 << 24 | OFFERED)
    assert other.header(0, 1)[12] == -77


def test_a_courier_that_overslept_a_call_tells_both(pair: tuple[Rank, Rank]) -> None:
    one, other = pair
    headers = {epoch: one.post(1, epoch) for epoch in (1, 2)}
    one.step(1, 2, ANNOUNCED)  # before it looks for the first time
    one.start()
    frames = read_frames(other.links[0], 2)
    assert [(frame.topic, frame.epoch, frame.tag) for frame in frames] == [
        (HEADER, 1, (2 << 24) - 1),
        (HEADER, 2, 2 << 24 | ANNOUNCED),
    ]
    assert [list(struct.unpack(f"<{HEADER_WORDS}q", frame.page.view())) for frame in frames] == list(headers.values())


def test_a_courier_that_overslept_a_step_tells_the_second_offer_first(pair: tuple[Rank, Rank]) -> None:
    one, other = pair
    one.start()
    one.post(1, 1)
    one.step(1, 1, ANNOUNCED)
    (frame,) = read_frames(other.links[0], 1)
    assert frame.tag == 1 << 24 | ANNOUNCED
    one.words[one.layout.shadow_board(1) + one.layout.header(1, 0) + 12] = -77
    one.post(1, 2)
    one.step(1, 2, ANNOUNCED)  # and (1, OFFERED) was never seen
    late, frame = read_frames(other.links[0], 2)
    assert (late.epoch, late.tag) == (1, (2 << 24) - 1)
    assert struct.unpack(f"<{HEADER_WORDS}q", late.page.view())[12] == -77
    assert (frame.epoch, frame.tag) == (2, 2 << 24 | ANNOUNCED)
    one.post(1, 3)
    one.step(1, 3, ANNOUNCED)  # nothing was missed: nothing is said twice
    (frame,) = read_frames(other.links[0], 1)
    assert frame.epoch == 3


@pytest.mark.parametrize("steps", [[3], [2, 1]])
def test_a_call_that_cannot_follow_ends_it_for_all(pair: tuple[Rank, Rank], steps: list[int]) -> None:
    one, other = pair
    one.start()
    other.start()
    for epoch in steps:
        one.step(1, epoch, ANNOUNCED)
        wait_until(lambda epoch=epoch: other.progress(0) >> 24 == epoch or one.failure(1)[0] == 1)
    wait_until(lambda: one.failure(1)[0] == other.failure(0)[0] == 1)
    assert one.failure(1) == gone(1, 0)
    assert other.failure(0) == gone(0, 1)
    assert f"seen {steps[-1]}" in (one.proxy.failure or "")


def read_frames(link: Link, num_frames: int) -> list[Frame]:
    wait_until(lambda: link.fill() or len(link.inbox) >= num_frames or link.ending is not None)
    return [link.inbox.popleft() for _ in range(num_frames)]


# Rows ----------------------------------------------------------------------------------------------------------------


def test_sections_lie_where_they_should_when_a_chunk_has_landed(pair: tuple[Rank, Rank]) -> None:
    one, other = pair
    sent, came = one.add_piece(), other.add_piece()
    one.start()
    other.start()
    outbox = came[:ROWS_BYTES].clone()
    sections = [(0, ROWS_BYTES + 512, 20_000), (20_480, ROWS_BYTES + 30_000, 77), (30_000, ROWS_BYTES + 40_000, 1)]
    one.ring(1, 2, 5, sections)
    wait_until(lambda: other.arrived(0, 2) == 5)
    expected = torch.zeros_like(came)
    expected[:ROWS_BYTES] = outbox
    for source, target, size in sections:
        expected[target : target + size] = sent[source : source + size]
    assert torch.equal(came, expected)
    wait_until(lambda: one.left(1, 2) == 5)
    assert [other.arrived(0, chunk) for chunk in range(MOST_CHUNKS)] == [0, 0, 5, 0]
    assert [one.left(1, chunk) for chunk in range(MOST_CHUNKS)] == [0, 0, 5, 0]
    assert one.proxy.stats()["rows_bytes_sent"] == 20_078
    assert other.proxy.stats()["messages_received"] == one.proxy.stats()["messages_sent"] == 4
    head_bytes, bell_bytes = 32, 56
    assert other.proxy.stats()["bytes_received"] == 4 * head_bytes + bell_bytes + 20_078


def test_large_chunks_of_both_ranks_pass_each_other_in_any_order(pair: tuple[Rank, Rank]) -> None:
    for rank in pair:
        rank.add_piece(4 * LARGE_BYTES)
        rank.start()
    for order, epoch in (((3, 0, 2, 1), 1), ((1, 2, 3, 0), 2)):
        pass_each_other(pair, order, epoch)
        for rank in pair:
            rank.pieces[0].copy_(rank.pieces[0].flip(0))  # what has left may be overwritten
            rank.pieces[0][4 * LARGE_BYTES :] = 0
            rank.pieces[0][: 4 * LARGE_BYTES] += 1
    assert all(rank.proxy.failure is None for rank in pair)


def pass_each_other(pair: tuple[Rank, Rank], order: tuple[int, ...], epoch: int) -> None:
    for chunk in order:
        start = chunk * LARGE_BYTES
        for rank in pair:
            rank.ring(1 - rank.topology.node, chunk, epoch, [(start, 4 * LARGE_BYTES + start, LARGE_BYTES)])
    for chunk, (rank, remote) in itertools.product(order, (pair, pair[::-1])):
        wait_until(lambda rank=rank, remote=remote, chunk=chunk: rank.arrived(remote.topology.node, chunk) == epoch)
        start = chunk * LARGE_BYTES
        came = rank.pieces[0][4 * LARGE_BYTES + start :][:LARGE_BYTES]
        assert torch.equal(came, remote.pieces[0][start : start + LARGE_BYTES])
    for rank in pair:
        wait_until(lambda rank=rank: all(rank.left(1 - rank.topology.node, chunk) == epoch for chunk in order))


def test_pieces_are_numbered_as_they_are_added(pair: tuple[Rank, Rank]) -> None:
    one, other = pair
    for rank in pair:
        rank.add_piece()
        rank.start()
        rank.add_piece(2 * ROWS_BYTES)
        rank.add_piece()
    for piece, chunk in ((2, 0), (0, 1), (1, 2)):
        one.ring(1, chunk, 1, [(100 * piece, ROWS_BYTES, 50)], piece)
        wait_until(lambda chunk=chunk: other.arrived(0, chunk) == 1)
        assert torch.equal(
            other.pieces[piece][ROWS_BYTES : ROWS_BYTES + 50], one.pieces[piece][100 * piece : 100 * piece + 50]
        )


def test_a_doorbell_without_bytes_lands_and_leaves(pair: tuple[Rank, Rank]) -> None:
    one, other = pair
    one.start()
    other.start()
    for epoch in (1, 2):
        for chunk in range(MOST_CHUNKS):
            one.ring(1, chunk, epoch, [])
        wait_until(lambda epoch=epoch: all(other.arrived(0, chunk) == epoch for chunk in range(MOST_CHUNKS)))
        wait_until(lambda epoch=epoch: all(one.left(1, chunk) == epoch for chunk in range(MOST_CHUNKS)))
    assert one.proxy.stats()["rows_bytes_sent"] == 0


def test_rows_have_left_only_when_the_system_has_all_of_them(pair: tuple[Rank, Rank]) -> None:
    one, other = pair
    sent = one.add_piece(LARGE_BYTES)
    other.add_piece(LARGE_BYTES)
    other.links[0].is_deaf = True
    one.start()
    other.start()
    one.ring(1, 0, 1, [(0, LARGE_BYTES, LARGE_BYTES)])
    one.ring(1, 1, 1, [])
    wait_until(lambda: one.proxy.stats()["bytes_sent"] > 0)
    time.sleep(0.05)
    assert (one.left(1, 0), one.left(1, 1)) == (0, 0)
    other.links[0].is_deaf = False
    wait_until(lambda: one.left(1, 1) == 1)
    assert one.left(1, 0) == 1
    expected = sent[:LARGE_BYTES].clone()
    sent.zero_()
    wait_until(lambda: other.arrived(0, 0) == 1)
    assert torch.equal(other.pieces[0][LARGE_BYTES:], expected)


def test_three_nodes_of_two_ranks() -> None:
    ranks = joined(6, 2)
    for rank in ranks:
        rank.add_piece()
        rank.start()
    for rank in ranks:
        for remote in rank.links:
            rank.post(remote, 1)
            rank.step(remote, 1, ANNOUNCED)
        for node in {remote // 2 for remote in rank.links}:
            tag = ROWS_BYTES + 1000 * rank.topology.node
            rank.ring(node, 3, 1, [(10 * node, tag, 10), (100, tag + 10, 5)])
    for rank in ranks:
        me = rank.topology.rank
        for remote in rank.links:
            wait_until(lambda rank=rank, remote=remote: rank.progress(remote) == 1 << 24 | ANNOUNCED)
            assert rank.header(remote, 1) == [
                1_000_000 * remote + 10_000 * me + 100 + word for word in range(HEADER_WORDS)
            ]
        for node in {remote // 2 for remote in rank.links}:
            wait_until(lambda rank=rank, node=node: rank.arrived(node, 3) == 1)
            sent = ranks[2 * node + rank.topology.local_rank].pieces[0]
            first = 10 * rank.topology.node
            came = rank.pieces[0][ROWS_BYTES + 1000 * node :][:15]
            assert torch.equal(came, torch.cat([sent[first : first + 10], sent[100:105]]))
    for rank in ranks:
        rank.close()
    assert all(sum(rank.failure(remote)) == 0 for rank in ranks for remote in range(6))


# Failures ------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("slow_writes")
def test_a_failure_is_told_with_its_record_and_stays_the_cause(pair: tuple[Rank, Rank]) -> None:
    one, other = pair
    one.start()
    other.start()
    one.fail(1, [1, 9, 2, 1 << 3, 4, 5, 3])
    wait_until(lambda: other.failure(0)[0] == 1)
    assert other.failure(0) == [1, 1, 9, 2, 1 << 3, 4, 5, 3]
    break_off(one, 1)
    wait_until(lambda: one.failure(1)[0] == 1)
    assert other.failure(0) == [1, 1, 9, 2, 1 << 3, 4, 5, 3]
    assert one.failure(1) == gone(1, 0)


def test_a_failure_brings_the_header_of_its_call(pair: tuple[Rank, Rank]) -> None:
    one, other = pair
    header = one.post(1, 9)  # written, signalled and failed before the proxy looks: only the failure is sent
    one.step(1, 9, ANNOUNCED)
    one.fail(1, [2, 9, 2, 1 << 1, 0, 0, 0])
    one.start()
    other.start()
    wait_until(lambda: other.failure(0)[0] == 1)
    assert other.header(0, 9) == header
    assert other.progress(0) == 0


def break_off(rank: Rank, remote: int) -> None:
    """As a network that fails: both ends see the end."""
    rank.links[remote]._socket.shutdown(socket.SHUT_RDWR)


def test_a_failure_does_not_wait_for_rows(pair: tuple[Rank, Rank]) -> None:
    one, other = pair
    one.add_piece(LARGE_BYTES)
    other.add_piece(LARGE_BYTES)
    half = LARGE_BYTES // 2
    other.links[0].is_deaf = True
    one.start()
    other.start()
    for chunk in range(MOST_CHUNKS):  # the first section is half sent
        one.ring(1, chunk, 1, [(0, LARGE_BYTES, half), (half, LARGE_BYTES + half, half)])
    wait_until(lambda: one.links[1].num_queued >= 11)
    one.fail(1, [1, 1, 0, 2, 0, 0, 0])
    wait_until(lambda: one.links[1].num_queued == 2)
    wait_until(lambda: one.left(1, 3) == 1)
    other.links[0].is_deaf = False
    wait_until(lambda: other.failure(0)[0] == 1)
    assert other.failure(0) == [1, 1, 1, 0, 2, 0, 0, 0]  # and not that something came that must not
    assert [other.arrived(0, chunk) for chunk in range(MOST_CHUNKS)] == [0] * MOST_CHUNKS


def test_a_link_that_ends_without_a_word_is_a_failure(pair: tuple[Rank, Rank]) -> None:
    one, other = pair
    one.add_piece(LARGE_BYTES)
    one.start()
    one.ring(1, 0, 1, [(0, LARGE_BYTES, LARGE_BYTES)])
    wait_until(lambda: one.proxy.stats()["bytes_sent"] > 0)
    other.links[0]._socket.close()
    wait_until(lambda: one.failure(1)[0] == 1)
    assert one.failure(1) == gone(1, 0)
    wait_until(lambda: one.left(1, 0) == 1)  # nobody waits for what will never leave
    one.ring(1, 1, 2, [(0, LARGE_BYTES, 1)])
    wait_until(lambda: one.left(1, 1) == 2)
    one.step(1, 1, ANNOUNCED)  # to nobody
    assert one.proxy.failure is None


def test_a_rank_that_leaves_has_not_failed(pair: tuple[Rank, Rank]) -> None:
    one, other = pair
    other.add_piece()
    one.add_piece()
    one.start()
    other.start()
    header = one.post(1, 1)
    one.step(1, 1, ANNOUNCED)
    one.ring(1, 0, 1, [(0, ROWS_BYTES, 10)])
    one.proxy.close()  # perhaps before it has looked
    wait_until(lambda: other.links[0].ending is not None)
    assert other.links[0].has_left
    assert other.progress(0) == 1 << 24 | ANNOUNCED
    assert other.header(0, 1) == header
    assert other.arrived(0, 0) == 1
    assert torch.equal(other.pieces[0][ROWS_BYTES : ROWS_BYTES + 10], one.pieces[0][:10])
    other.ring(0, 0, 1, [(0, ROWS_BYTES, 10)])
    wait_until(lambda: other.left(0, 0) == 1)
    assert other.failure(0) == one.failure(1) == [0] * LINE_WORDS
    one.proxy.close()
    one.proxy.close()


def bad_frames() -> dict[str, list[tuple[int, int, int, bytes]]]:
    header, end = bytes(8 * HEADER_WORDS), 2 * ROWS_BYTES

    def doorbell(piece: int, *sections: tuple[int, int]) -> bytes:
        fields = [number for section in (*sections, *[(0, 0)] * (3 - len(sections))) for number in section]
        return struct.pack("<7Q", piece, *fields)

    return {
        "a short header": [(HEADER, 1, 1 << 24, header[8:])],
        "a header of another call": [(HEADER, 1, 2 << 24, header)],
        "a header of a step before": [(HEADER, 0, 0, header)],
        "a header without end": [(HEADER, 1, 1 << 24, bytes(1 << 22))],
        "a short line": [(RECORD, 0, 0, bytes(8))],
        "a topic of others": [(SENT, 1, 0, b"")],
        "rows that nobody rang for": [(ROWS, 1, 0, bytes(10))],
        "rows of another length": [(DOORBELL, 1, 0, doorbell(0, (0, 10))), (ROWS, 1, 0, bytes(11))],
        "rows of another chunk": [(DOORBELL, 1, 0, doorbell(0, (0, 10))), (ROWS, 1, 1, bytes(10))],
        "a header among rows": [(DOORBELL, 1, 0, doorbell(0, (0, 10))), (HEADER, 1, 1 << 24, header)],
        "no such piece": [(DOORBELL, 1, 0, doorbell(1, (0, 10)))],
        "past the end of a piece": [(DOORBELL, 1, 0, doorbell(0, (end - 9, 10)))],
        "the third section past the end": [(DOORBELL, 1, 0, doorbell(0, (0, 10), (0, 10), (1 << 63, 10)))],
        "no such chunk": [(DOORBELL, 1, MOST_CHUNKS, doorbell(0))],
        "a short bell": [(DOORBELL, 1, 0, bytes(48))],
    }


@pytest.mark.parametrize("kind", bad_frames())
def test_a_bad_frame_is_the_failure_of_who_sent_it(pair: tuple[Rank, Rank], kind: str) -> None:
    one, other = pair
    other.add_piece()
    other.start()
    for topic, epoch, tag, payload in bad_frames()[kind]:
        one.links[1].send(topic, epoch, tag, Pieces([memoryview(payload)]))
    wait_until(lambda: other.failure(0)[0] == 1)
    assert other.failure(0) == gone(0, 1)
    assert other.progress(0) == 0
    assert [other.arrived(0, chunk) for chunk in range(MOST_CHUNKS)] == [0] * MOST_CHUNKS
    wait_until(lambda: one.links[1].fill() or one.links[1].ending is not None)  # it is told, too
    assert not one.links[1].has_left
    assert other.proxy.failure is None  # others are still served


def test_rows_of_another_rail_are_refused() -> None:
    ranks = joined(4, 2)
    ranks[2].start()
    ranks[1].links[2].send(DOORBELL, 1, 0, Pieces([memoryview(bytes(56))]))
    wait_until(lambda: ranks[2].failure(1)[0] == 1)
    assert ranks[2].arrived(0, 0) == 0
    assert ranks[2].failure(0)[0] == 0
    for rank in ranks:
        rank.close()


def test_a_doorbell_of_bytes_that_are_not_there_ends_it_for_all(pair: tuple[Rank, Rank]) -> None:
    one, other = pair
    one.add_piece()
    one.start()
    other.start()
    one.ring(1, 0, 1, [(2 * ROWS_BYTES - 5, 0, 6)])
    wait_until(lambda: one.failure(1)[0] == other.failure(0)[0] == 1)
    assert one.failure(1) == gone(1, 0)
    assert "rows must lie in a piece" in (one.proxy.failure or "")


# Leaving -------------------------------------------------------------------------------------------------------------


def test_closing_delivers_what_is_queued(pair: tuple[Rank, Rank]) -> None:
    one, other = pair
    one.add_piece(LARGE_BYTES)
    other.add_piece(LARGE_BYTES)
    other.links[0].is_deaf = True
    one.start()
    other.start()
    one.ring(1, 0, 1, [(0, LARGE_BYTES, LARGE_BYTES)])
    closing = threading.Thread(target=one.proxy.close)
    closing.start()
    time.sleep(0.05)
    assert closing.is_alive()
    one.ring(1, 1, 1, [])  # a kernel that still ran is heard, too
    wait_until(lambda: one.links[1].num_queued == 2)
    other.links[0].is_deaf = False
    closing.join()
    wait_until(lambda: other.links[0].ending is not None)
    assert other.arrived(0, 0) == 1
    assert other.arrived(0, 1) == 1
    assert torch.equal(other.pieces[0][LARGE_BYTES:], one.pieces[0][:LARGE_BYTES])
    assert other.links[0].has_left


def test_who_does_not_read_is_given_up(pair: tuple[Rank, Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deep_ep.transport.proxy._FAREWELL_SECS", 0.2)
    one, other = pair
    one.add_piece(LARGE_BYTES)
    one.start()
    one.ring(1, 0, 1, [(0, LARGE_BYTES, LARGE_BYTES)])
    one.proxy.close()
    wait_until(lambda: other.links[0].fill() or other.links[0].ending is not None)
    assert not other.links[0].has_left  # a frame is missing its end


def test_a_forked_child_closes_nothing(pair: tuple[Rank, Rank]) -> None:
    one, other = pair
    one.start()
    other.start()
    child = os.fork()
    if not child:
        one.proxy.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    one.post(1, 1)
    one.step(1, 1, ANNOUNCED)
    wait_until(lambda: other.progress(0) == 1 << 24 | ANNOUNCED)


def test_closing_on_its_own_thread_does_not_wait_for_itself(pair: tuple[Rank, Rank]) -> None:
    one, other = pair
    one.start()
    other.start()
    one.proxy._looks.append(lambda: one.proxy.close() or 0)  # as a finalizer that runs there
    one.proxy._tells.append(lambda _: None)
    one.proxy._seen.append(0)
    wait_until(lambda: not one.proxy._thread.is_alive())
    assert one.proxy.failure is None
    wait_until(lambda: other.links[0].has_left)


def test_words_and_rows_are_checked_and_held() -> None:
    rank = Rank(0, 2)
    with pytest.raises(ValueError, match="words must be"):
        MessageProxy({}, rank.topology, rank.layout, rank.words[1:])
    rank.start()
    for memory in (torch.zeros(4), torch.zeros(0, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)[::2]):
        with pytest.raises(ValueError, match="rows must be"):
            rank.proxy.add_rows(memory)
    rank.add_piece()
    rank.pieces.clear()
    gc.collect()
    assert len(rank.proxy._rows.view(0, 0, ROWS_BYTES)) == ROWS_BYTES
    rank.close()


def test_words_of_a_doorbell_are_apart() -> None:
    assert DOORBELL_SECTIONS + 3 * 3 <= DOORBELL_LEFT < DOORBELL_WORDS
