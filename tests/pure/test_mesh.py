"""The links of low-latency calls between nodes, over pairs of sockets: what lands, what is dropped, and last words."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from deep_ep.topology import Topology
from deep_ep.transport.links import ROWS, SENT, Link, Pool
from deep_ep.transport.mesh import Mesh, ReceiveArena
from deep_ep.transport.sparse import GRAIN_BYTES
from deep_ep.transport.window import Failure

pytestmark = pytest.mark.cpu_only

PATIENCE_SECS = 20.0


def make_mesh(rank: int, connection: socket.socket) -> Mesh:
    pool, receive_arena = Pool(), ReceiveArena()
    return Mesh({1 - rank: Link(connection, pool, receive_arena)}, Topology(rank, 2, 1), pool, receive_arena)


@pytest.fixture
def pair() -> Iterator[tuple[Mesh, Mesh]]:
    here, there = socket.socketpair()
    one, other = make_mesh(0, here), make_mesh(1, there)
    yield one, other
    one.close()
    other.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("deep_ep-mesh")]


def wait_until(is_done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECS
    while not is_done():
        assert time.monotonic() < deadline
        time.sleep(1e-3)


def send(mesh: Mesh, number: int, num_bytes: int) -> None:
    page = mesh.page(num_bytes)
    page.view()[:] = bytes([number % 256]) * num_bytes
    (rank,) = mesh.senders
    mesh.send(rank, number, page)


def test_calls_land_by_number_and_stay_while_they_are_held(pair: tuple[Mesh, Mesh]) -> None:
    one, other = pair
    sender = other.senders[0]
    sizes = {1: 0, 2: 17, 3: 4_000_000, 4: 1}  # the third is more than a socket takes at once
    for number, size in sizes.items():
        send(one, number, size)
    wait_until(lambda: sender.has_sent(4))
    for number, size in sizes.items():
        assert sender.has_sent(number)
        page = sender.arrived(number)
        assert page is not None
        assert bytes(page.view()) == bytes([number]) * size
        if size:
            address = page.tensor().data_ptr()
            assert address % GRAIN_BYTES == 0
            assert any(mapping.offset_of(address) is not None for mapping in other.receive_arena.mappings)
    held = sender.arrived(2)
    assert held is not None
    for number in range(5, 11):  # call 10 takes the slot of call 2
        send(one, number, 17)
    wait_until(lambda: sender.has_sent(10))
    assert not sender.has_sent(2)
    assert sender.arrived(2) is None
    assert bytes(held.view()) == bytes([2]) * 17
    assert sender.why_not(2, True) == ", which has gone on without this rank (it is at call 10)"
    assert sender.why_not(11, True) is None
    sender.forget(10)
    assert not sender.has_sent(10)


def test_landings_are_used_again(pair: tuple[Mesh, Mesh]) -> None:
    one, other = pair
    sender = other.senders[0]
    for number in range(1, 60):
        send(one, number, 1_000_000)
        wait_until(lambda number=number: sender.has_sent(number))
        sender.forget(number)
    assert sum(mapping.span.num_bytes for mapping in other.receive_arena.mappings) < 8_000_000


def test_what_is_queued_for_a_lost_rank_is_dropped_and_frames_stay_whole() -> None:
    here, there = socket.socketpair()
    one = make_mesh(0, here)
    for number in (1, 2, 3):  # nobody reads yet: the first is half sent
        send(one, number, 4_000_000)
    one.drop(1)
    send(one, 4, 5)
    other = make_mesh(1, there)
    sender = other.senders[0]
    wait_until(lambda: sender.has_sent(4))
    assert [number for number in (1, 2, 3) if sender.has_sent(number)] == [1]
    assert sender.arrived(1).tensor().eq(1).all()
    assert bytes(sender.arrived(4).view()) == bytes([4]) * 5
    one.close()
    other.close()


def test_failing_leaving_and_breaking_off_are_told_apart(pair: tuple[Mesh, Mesh]) -> None:
    one, other = pair
    one.fail(Failure(5, "an accident"))
    one.fail(Failure(6, "another"))
    wait_until(lambda: other.senders[0].failure() is not None)
    assert other.senders[0].failure() == (5, "an accident")
    send(one, 1, 4_000_000)
    one.close()  # behind everything queued
    wait_until(lambda: other.senders[0].link.ending is not None)
    assert other.senders[0].has_sent(1)
    assert other.senders[0].why_not(2, True) == ", which has failed (rank 5 an accident)"
    assert other.senders[0].link.has_left
    here, there = socket.socketpair()
    mesh = make_mesh(0, here)
    there.close()
    wait_until(lambda: mesh.senders[1].link.ending is not None)
    assert "its process has ended, or the network has failed" in (mesh.senders[1].why_not(1, False) or "")
    send(mesh, 1, 100)  # to nobody
    mesh.close()


def test_who_does_not_read_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deep_ep.transport.mesh._FAREWELL_SECS", 0.2)
    here, there = socket.socketpair()
    mesh = make_mesh(0, here)
    send(mesh, 1, 4_000_000)
    mesh.close()
    there.close()


@pytest.mark.parametrize(
    ("numbers", "head"),
    [
        ([5], (SENT, 5, 0, 4)),  # the same call again
        ([5], (SENT, 4, 0, 4)),
        ([], (ROWS, 1, 0, 4)),
        ([], (SENT, 1, 0, 1 << 60)),
    ],
)
def test_what_no_rank_can_have_sent_is_the_end_of_its_link(numbers: list[int], head: tuple[int, ...]) -> None:
    here, there = socket.socketpair()
    mesh = make_mesh(0, here)
    sender = mesh.senders[1]
    for number in numbers:
        there.sendall(struct.pack("<QQQQ", SENT, number, 0, 4) + b"true")
    wait_until(lambda: all(sender.has_sent(number) for number in numbers))
    there.sendall(struct.pack("<QQQQ", *head) + b"fake")
    wait_until(lambda: sender.link.ending is not None)
    assert "sent a message that cannot be" in (sender.why_not(9, False) or "")
    for number in numbers:
        assert bytes(sender.arrived(number).view()) == b"true"
    wait_until(lambda: there.recv(1) == b"")  # it is told
    mesh.close()
    there.close()
