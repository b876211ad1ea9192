"""Frames over a pair of sockets, chunks, and the bits of a mask."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import torch

from deep_ep import layout
from deep_ep.config import Config
from deep_ep.engine.rails.traffic import ChunkForm, Chunks
from deep_ep.transport.links import ANNOUNCE, FAILED, ROWS, Link, Pool


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
        assert (frame.topic, frame.epoch, frame.place) == (ROWS, 7, index)
        assert frame.page.tensor().tolist() == [index] * size
    assert one.bytes_sent == other.bytes_received == sum(sizes) + 4 * 32


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
    assert other.inbox[0].place == 64


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
