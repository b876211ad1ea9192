"""How ranks of different nodes connect: where they listen, and what strangers at the port can do."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from deep_ep import env, reaper
from deep_ep.transport import rendezvous
from deep_ep.transport.rendezvous import Listening, UnreachedError, connect_rail

pytestmark = pytest.mark.cpu_only

SECRET = b"s" * 16
LIMIT_SECS = 20.0  # that nothing here may come near
SOON_SECS = 3.0


class ThreadControl:
    """The gathers of ranks that are threads of this process.

    Args:
        rank: This rank.
        met: Where all of them meet.
        values: What they contribute, shared by all.
        on_gather: Told of each gather's number and of what this rank contributes, before it meets the others.
    """

    limit_secs = LIMIT_SECS

    def __init__(self, rank: int, met: threading.Barrier, values: dict, on_gather: Callable[[int, Any], None]):
        self.rank = rank
        self._met, self._values, self._on_gather, self._number = met, values, on_gather, 0

    def gather_all(self, value: Any, purpose: str) -> list[Any]:
        assert purpose
        self._number += 1
        self._values[self._number, self.rank] = value
        self._on_gather(self._number, value)
        self._met.wait(LIMIT_SECS)
        return [self._values[self._number, rank] for rank in range(self._met.parties)]


def connect_all(num_ranks: int, on_gather: Callable[[int, int, Any], None]) -> tuple[list[Any], float]:
    """Have ranks connect, each in a thread. What each gets, and how long it takes."""
    met, values, results = threading.Barrier(num_ranks), {}, [None] * num_ranks

    def work(rank: int) -> None:
        control = ThreadControl(rank, met, values, lambda number, value: on_gather(rank, number, value))
        results[rank] = connect_rail(control, list(range(num_ranks)))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(num_ranks)]
    begin = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results, time.monotonic() - begin


def check_connected(results: list[Any]) -> None:
    for rank, (connections, problem) in enumerate(results):
        assert problem is None
        assert sorted(connections) == [one for one in range(len(results)) if one != rank]
    for rank, (connections, _) in enumerate(results):
        for peer, connection in connections.items():
            if rank < peer:
                connection.setblocking(True)
                connection.sendall(bytes([rank, peer]))
                other = results[peer][0][rank]
                other.setblocking(True)
                assert other.recv(2) == bytes([rank, peer])
    for connections, _ in results:
        for connection in connections.values():
            connection.close()


def connect_to(listening: Listening) -> socket.socket:
    return socket.create_connection((listening.addresses[-1], listening.port), timeout=5)


def test_strangers_cost_nothing() -> None:
    """Those that say nothing, half of it, something else, or leave; more of them than are held."""
    strangers: list[socket.socket] = []

    def come(rank: int, number: int, value: Any) -> None:
        if number != 1 or rank == 2:
            return
        for index in range(2 * rendezvous._MOST_STRANGERS):
            stranger = connect_to(value)
            strangers.append(stranger)
            with contextlib.suppress(OSError):
                if index % 4 == 1:
                    stranger.send(b"GET / HT")
                elif index % 4 == 2:
                    stranger.send(b"x" * 24)
                elif index % 4 == 3:
                    stranger.close()

    try:
        results, secs = connect_all(3, come)
    finally:
        for stranger in strangers:
            stranger.close()
    check_connected(results)
    assert secs < SOON_SECS
    names = [one.name for one in threading.enumerate() if one.name != reaper.THREAD]  # which other tests have started
    assert not [name for name in names if name.startswith("deep_ep")]


def test_only_the_addresses_that_are_told_are_listened_at(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Listening] = []

    def look(rank: int, number: int, value: Any) -> None:
        told.append(value)
        listening = listening_sockets()
        assert {(address, value.port) for address in value.addresses} <= listening
        assert ("0.0.0.0", value.port) not in listening

    monkeypatch.delenv(env.SOCKET_IFNAME.name, raising=False)
    check_connected(connect_all(2, look)[0])
    assert all("127.0.0.1" in listening.addresses for listening in told)
    told.clear()
    monkeypatch.setenv(env.SOCKET_IFNAME.name, "lo")
    check_connected(connect_all(2, look)[0])
    assert {listening.addresses for listening in told} == {("127.0.0.1",)}


def listening_sockets() -> set[tuple[str, int]]:
    """Where this host listens for TCP over IPv4."""
    with open("/proc/net/tcp") as table:
        rows = [line.split() for line in table.readlines()[1:]]
    found = set()
    for row in rows:
        address, port = row[1].split(":")
        if row[3] == "0A":
            found.add((socket.inet_ntoa(int(address, 16).to_bytes(4, "little")), int(port, 16)))
    return found


def test_a_port_is_looked_for_that_is_free_at_all_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    create, tried = socket.create_server, []

    def taken(address: tuple[str, int], **options: Any) -> socket.socket:
        tried.append(address)
        if len(tried) in (2, 4):
            raise OSError(errno.EADDRINUSE, "taken")
        return create(address, **options)

    monkeypatch.setattr(socket, "create_server", taken)
    servers = rendezvous._listen(["127.0.0.1", "127.0.0.2"], 4)
    assert len(tried) == 6
    assert [one.getsockname()[0] for one in servers] == ["127.0.0.1", "127.0.0.2"]
    assert len({one.getsockname()[1] for one in servers}) == 1
    for server in servers:
        server.close()


@contextlib.contextmanager
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=8) as made:
        yield made


def test_where_no_descriptor_is_left_it_ends_at_once() -> None:
    with server() as here, socket.create_connection(here.getsockname()):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest = os.open(os.devnull, os.O_RDONLY)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
        begin, begin_cpu = time.monotonic(), time.thread_time()
        try:
            with pytest.raises(OSError, match="Too many open files"):
                rendezvous._answer([here], SECRET, 0, {1}, {}, time.monotonic() + LIMIT_SECS)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert time.monotonic() - begin < SOON_SECS
        assert time.thread_time() - begin_cpu < 1


def test_a_stranger_gives_its_descriptor_to_a_rank() -> None:
    """Where no more can be opened, the connection that has been silent for longest makes room."""
    with server() as here:
        stranger = socket.create_connection(here.getsockname())
        rank = socket.create_connection(here.getsockname())
        rank.send(rendezvous._HELLO.pack(SECRET, 1))
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest = os.open(os.devnull, os.O_RDONLY)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 1, hard))
        connections: dict[int, socket.socket] = {}
        try:
            rendezvous._answer([here], SECRET, 0, {1}, connections, time.monotonic() + LIMIT_SECS)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert rank.recv(24) == rendezvous._HELLO.pack(SECRET, 0)
        assert stranger.recv(1) == b""
        for one in (stranger, rank, connections[1]):
            one.close()


def test_strangers_that_come_and_go_do_not_keep_it_beyond_its_deadline() -> None:
    is_over = threading.Event()

    def knock(address: tuple[str, int]) -> None:
        while not is_over.is_set():
            with contextlib.suppress(OSError):
                socket.create_connection(address, timeout=1).close()

    with server() as here:
        threads = [threading.Thread(target=knock, args=(here.getsockname(),)) for _ in range(2)]
        for thread in threads:
            thread.start()
        begin = time.monotonic()
        with pytest.raises(UnreachedError, match=r"ranks \[1\] did not connect"):
            rendezvous._answer([here], SECRET, 0, {1}, {}, begin + 0.5)
        secs = time.monotonic() - begin
        is_over.set()
        for thread in threads:
            thread.join()
    assert 0.5 <= secs < SOON_SECS


def test_who_does_not_know_the_secret_or_is_not_expected_is_sent_away() -> None:
    with server() as here:
        hellos = [(b"t" * 16, 1), (SECRET, 2), (SECRET, 1 << 60), (SECRET, 1), (SECRET, 1)]
        callers = []
        for secret, rank in hellos:
            callers.append(socket.create_connection(here.getsockname(), timeout=5))
            callers[-1].send(rendezvous._HELLO.pack(secret, rank))
        connections: dict[int, socket.socket] = {}
        rendezvous._answer([here], SECRET, 0, {1}, connections, time.monotonic() + LIMIT_SECS)
        assert list(connections) == [1]
        assert [caller.recv(24) for caller in callers[:4]] == [b"", b"", b"", rendezvous._HELLO.pack(SECRET, 0)]
    with contextlib.suppress(ConnectionResetError):
        assert callers[4].recv(24) == b""
    for one in (*callers, *connections.values()):
        one.close()


def test_a_rank_that_gives_up_is_noticed_by_those_that_call_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ports close at once: nobody waits there for the limit."""
    listening = None

    def lose(rank: int, number: int, value: Any) -> None:
        nonlocal listening
        if rank == 0 and number == 1:
            listening = value

    accept = rendezvous._Callers._accept

    def fail(self: Any, one: socket.socket) -> None:
        assert listening is not None
        if one.getsockname()[1] == listening.port:
            raise OSError(errno.EMFILE, "an accident")
        accept(self, one)

    monkeypatch.setattr(rendezvous._Callers, "_accept", fail)
    met, values, results = threading.Barrier(2), {}, [None] * 2

    def work(rank: int) -> None:
        control = ThreadControl(rank, met, values, lambda number, value: lose(rank, number, value))
        results[rank] = connect_rail(control, [0, 1])
        met.abort()  # what a joint step does with a failure

    def broken(rank: int) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            work(rank)

    threads = [threading.Thread(target=broken, args=(rank,)) for rank in range(2)]
    begin = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - begin < SOON_SECS
    assert results[0] is not None
    assert "an accident" in str(results[0][1])
    connections, problem = results[1]
    assert connections == {}
    assert isinstance(problem, UnreachedError)
    assert "rank 0 cannot be reached" in str(problem)
