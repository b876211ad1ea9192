"""Proxies between processes, over TCP: the meetings and rows of calls, with the kernels' part played by Python."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from common import run_ranks
from deep_ep.control import Control
from deep_ep.topology import Topology
from deep_ep.transport.proxy import MessageProxy, make_proxy
from deep_ep.transport.remote import DOORBELL_LEFT, DOORBELL_SECTIONS, MOST_CHUNKS, RemoteLayout

pytestmark = pytest.mark.cpu_only

HEADER_WORDS, ROWS_BYTES = 40, 1 << 20
ANNOUNCED, OFFERED = 1, 2
SECOND_OFFER = 12
NUM_CALLS, GROWS_AT = 40, 20
LIMIT_SECS = 60.0


def wait_until(is_done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_SECS
    while not is_done():
        assert time.monotonic() < deadline
        time.sleep(1e-4)


def pause(chance: random.Random) -> None:
    time.sleep(chance.choice([0, 0, 1e-5, 1e-4, 3e-3]))


def header_of(rank: int, remote: int, epoch: int) -> list[int]:
    return [rank << 40 | remote << 20 | epoch << 8 | word for word in range(HEADER_WORDS)]


def second_offer_of(rank: int, epoch: int) -> int:
    return -(rank << 20 | epoch)


def is_held(epoch: int) -> bool:
    return epoch % 3 == 0


def chunks_of(rank: int, node: int, epoch: int) -> list[tuple[list[tuple[int, int, int]], torch.Tensor]]:
    """What a rank sends to a node in a call: for each chunk its sections, and their bytes. Everybody knows it."""
    chance = random.Random(f"{rank} {node} {epoch}")
    room = ROWS_BYTES // (4 * MOST_CHUNKS) // 3
    numbers = torch.Generator().manual_seed(chance.randrange(1 << 30))
    chunks = []
    for chunk in range(MOST_CHUNKS):
        sizes = [chance.choice([0, 1, room // 2 + 3, room]) for _ in range(3)]
        firsts = [((node * MOST_CHUNKS + chunk) * 3 + section) * room for section in range(3)]
        lands = [ROWS_BYTES + ((rank % 4 * MOST_CHUNKS + chunk) * 3 + section) * room for section in range(3)]
        data = torch.randint(256, (sum(sizes),), dtype=torch.uint8, generator=numbers)
        chunks.append((list(zip(firsts, lands, sizes, strict=True)), data))
    return chunks


class Kernels:
    """What the kernels of a rank do, on its remote memory."""

    def __init__(self, topology: Topology, proxy: MessageProxy, layout: RemoteLayout, words: torch.Tensor):
        self.topology = topology
        self.proxy = proxy
        self.layout = layout
        self.words = words
        self.pieces: list[torch.Tensor] = []
        size = topology.ranks_per_node
        self.remote = [rank for rank in range(topology.num_ranks) if rank // size != topology.node]
        self.nodes = [node for node in range(topology.num_nodes) if node != topology.node]
        self.chance = random.Random(topology.rank)
        self.grow()

    def grow(self) -> None:
        self.pieces.append(torch.zeros(2 * ROWS_BYTES, dtype=torch.uint8))
        self.proxy.add_rows(self.pieces[-1])

    def handshake(self, epoch: int, step: int) -> None:
        me = self.topology.rank
        for remote in self.remote:
            header = self.layout.shadow_board(remote) + self.layout.header(epoch, me)
            if step == ANNOUNCED:
                self.words[header : header + HEADER_WORDS] = torch.tensor(header_of(me, remote, epoch))
            else:
                self.words[header + SECOND_OFFER] = second_offer_of(me, epoch)
            self.words[self.layout.shadow_board(remote) + self.layout.progress(me)] = epoch << 24 | step
        for remote in self.remote:
            wait_until(lambda remote=remote: int(self.words[self.layout.progress(remote)]) >= epoch << 24 | step)
            assert int(self.words[self.layout.progress(remote)]) < epoch + 2 << 24
            seen = self.words[self.layout.header(epoch, remote) :][:HEADER_WORDS].tolist()
            expected = header_of(remote, me, epoch)
            if step == OFFERED:
                assert seen[SECOND_OFFER] == second_offer_of(remote, epoch)
            seen[SECOND_OFFER] = expected[SECOND_OFFER]
            assert seen == expected

    def send(self, epoch: int) -> None:
        me, piece = self.topology.rank, len(self.pieces) - 1
        doorbells = [(node, chunk) for node in self.nodes for chunk in range(MOST_CHUNKS)]
        self.chance.shuffle(doorbells)
        for node, chunk in doorbells:
            doorbell = self.layout.doorbell(node, chunk)
            wait_until(lambda doorbell=doorbell: int(self.words[doorbell + DOORBELL_LEFT]) == epoch - 1)
            sections, data = chunks_of(me, node, epoch)[chunk]
            sizes = [size for _, _, size in sections]
            for (first, _, size), part in zip(sections, data.split(sizes), strict=True):
                self.pieces[piece][first : first + size] = part
            numbers = [piece, *(number for section in sections for number in section)]
            self.words[doorbell + 1 : doorbell + DOORBELL_SECTIONS + 9] = torch.tensor(numbers)
            pause(self.chance)
            self.words[doorbell] = epoch

    def receive(self, epoch: int) -> None:
        size = self.topology.ranks_per_node
        for node in self.nodes:
            sent = chunks_of(node * size + self.topology.local_rank, self.topology.node, epoch)
            for chunk, (sections, data) in enumerate(sent):
                word = self.layout.arrival_word(node, chunk)
                wait_until(lambda word=word: int(self.words[word]) == epoch)
                came = [self.pieces[-1][target : target + size_] for _, target, size_ in sections]
                assert torch.equal(torch.cat(came), data)


def calls(rank: int, num_ranks: int, ranks_per_node: int) -> dict[str, int]:
    control, topology = Control(dist.group.WORLD, None, LIMIT_SECS), Topology(rank, num_ranks, ranks_per_node)
    layout = RemoteLayout(num_ranks, topology.num_nodes, HEADER_WORDS)
    words = torch.zeros(layout.num_words, dtype=torch.int64)
    proxy = make_proxy(control, topology, layout, words)
    kernels = Kernels(topology, proxy, layout, words)
    for epoch in range(1, NUM_CALLS + 1):
        pause(kernels.chance)
        kernels.handshake(epoch, ANNOUNCED)
        if epoch == GROWS_AT:
            kernels.grow()
        if is_held(epoch) or epoch == GROWS_AT:
            kernels.handshake(epoch, OFFERED)
        kernels.send(epoch)
        kernels.receive(epoch)
    proxy.close()
    assert proxy.failure is None
    failures = words[layout.failure(0) : layout.failure(num_ranks)]
    assert not failures.any()
    return proxy.stats()


@pytest.mark.parametrize(("num_ranks", "ranks_per_node"), [(4, 2), (3, 1)])
def test_headers_and_rows_of_many_calls(num_ranks: int, ranks_per_node: int) -> None:
    numbers = run_ranks(calls, num_ranks, ranks_per_node, limit_secs=120)
    num_nodes = num_ranks // ranks_per_node
    for rank, seen in enumerate(numbers):
        nodes = [node for node in range(num_nodes) if node != rank // ranks_per_node]
        sent = [chunk for e in range(1, NUM_CALLS + 1) for node in nodes for chunk in chunks_of(rank, node, e)]
        assert seen["rows_bytes_sent"] == sum(data.numel() for _, data in sent)
    for unit in ("messages", "bytes"):
        assert sum(seen[f"{unit}_sent"] for seen in numbers) >= sum(seen[f"{unit}_received"] for seen in numbers) > 0


def dies(rank: int, num_ranks: int) -> list[int]:
    control, topology = Control(dist.group.WORLD, None, LIMIT_SECS), Topology(rank, num_ranks, 1)
    layout = RemoteLayout(num_ranks, num_ranks, HEADER_WORDS)
    words = torch.zeros(layout.num_words, dtype=torch.int64)
    proxy = make_proxy(control, topology, layout, words)
    if rank == 1:
        os._exit(1)
    line = layout.failure(1)
    wait_until(lambda: int(words[line]) == 1)
    proxy.close()
    return words[line : line + 8].tolist()


def test_a_rank_that_dies_is_noticed_by_all() -> None:
    seen = run_ranks(dies, 3, limit_secs=60, may_die=[1])
    assert seen == [[1, 7, 0, 0, 2, 0, 0, 0], None, [1, 7, 0, 0, 2, 0, 0, 2]]
