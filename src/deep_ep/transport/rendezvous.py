"""How the ranks of a rail find each other: one connection for each pair of nodes.

Every rank listens, at the addresses that it sends to the group and at no others; the rank on the higher node connects.
A secret that was exchanged in the group proves that both ends belong together, since ports are open to every process
and private addresses exist on many hosts.

A thread takes the connections that come, so no rank waits for another one's turn, and a rank whose own connections are
made waits for the others in a gather, where it finds out if one of them has failed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hmac
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from .. import env
from ..control import Control
from .fds import OUT_OF_RESOURCES

_SECRET_BYTES = 16
_HELLO = struct.Struct(f"<{_SECRET_BYTES}sQ")  # the listener's secret, the caller's rank
_SIOCGIFADDR = 0x8915  # the address of an interface
_MOST_CONNECT_SECS = 5.0  # for one of several addresses
_LOOK_SECS = 0.05  # how often the thread looks whether it is still needed
_MOST_STRANGERS = 64  # connections held that have not sent the secret yet; a rank sends it as soon as it has connected
_MOST_PORTS = 32  # tried until one is free at all addresses


class UnreachedError(OSError):
    """A peer could not be reached, or did not come. It may have a failure of its own, which says more."""


@dataclass(frozen=True)
class Listening:
    """Where a rank listens.

    Attributes:
        addresses: IPv4 addresses to try, in this order.
        port: The port.
        secret: What a caller must send.
    """

    addresses: tuple[str, ...]
    port: int
    secret: bytes


def connect_rail(
    control: Control, rail: list[int], deadline: float | None = None
) -> tuple[dict[int, socket.socket], OSError | None]:
    """Connect to the other ranks of the rail. All ranks of the group call it together.

    Args:
        control: The group.
        rail: The rail's ranks, by node.
        deadline: Until when; None: for the group's limit from now on.

    Returns:
        A connection for each of the others, by rank, and what went wrong, if anything: then there are none.
    """
    deadline = time.monotonic() + control.limit_secs if deadline is None else deadline
    lower, higher = ([one for one in rail if one < control.rank], {one for one in rail if one > control.rank})
    connections: dict[int, socket.socket] = {}
    try:
        with _Reception(control.rank, higher, connections, deadline) as reception:
            listeners = control.gather_all(reception.listening, "finding the rails")
            for rank in lower:
                connections[rank] = _call(listeners[rank], control.rank, rank, deadline)
            # Each rank comes here when its own calls have been answered. So the reception has all calls behind this
            # gather; a rank that could not call reports it there, and no rank waits for that call.
            control.gather_all(reception.listening, "connecting the rails")
            reception.finish()
    except OSError as error:
        _close(connections)
        return {}, error
    except BaseException:
        _close(connections)
        raise
    return connections, None


def _close(connections: dict[int, socket.socket]) -> None:
    for connection in connections.values():
        connection.close()


class _Reception:
    """Listens at the addresses of this rank, in a thread that takes the connections of the ranks on higher nodes.

    Args:
        rank: This rank.
        expected: The ranks that will connect.
        connections: Where they are put, by rank.
        deadline: When to give up.

    Attributes:
        listening: Where it listens.
    """

    def __init__(self, rank: int, expected: set[int], connections: dict[int, socket.socket], deadline: float):
        addresses, problem = own_addresses()
        if not addresses:
            raise OSError(problem)
        self._problem: BaseException | None = None
        self._is_over = threading.Event()
        self._servers = _listen(addresses, _MOST_STRANGERS + len(expected))
        secret = secrets.token_bytes(_SECRET_BYTES)
        told = tuple(server.getsockname()[0] for server in self._servers)
        self.listening = Listening(told, self._servers[0].getsockname()[1], secret)
        work = partial(_answer, self._servers, secret, rank, expected, connections, deadline, self._is_over.is_set)
        self._thread = threading.Thread(target=self._run, args=(work,), name=f"deep_ep-rendezvous-{rank}", daemon=True)

    def __enter__(self) -> _Reception:
        try:
            self._thread.start()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: object) -> None:
        self._is_over.set()
        self._thread.join()
        self._close()
        is_own = self._problem is not None and not isinstance(self._problem, UnreachedError)
        if is_own and error is not None and error is not self._problem:
            assert self._problem is not None
            raise self._problem from error  # of which `error`, a failure of peers, is a consequence

    def finish(self) -> None:
        """Wait until all expected ranks have connected.

        Raises:
            OSError: A rank has not, or a connection could not be accepted.
        """
        self._thread.join()
        if self._problem is not None:
            raise self._problem

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # it goes to the caller, whatever it is
            self._problem = error
            self._close()  # so that no caller waits here for an answer

    def _close(self) -> None:
        for server in self._servers:
            server.close()


def _listen(addresses: Sequence[str], backlog: int) -> list[socket.socket]:
    """Return a listening socket for each address, all with one port.

    Raises:
        OSError: There is none: no address can be listened at, or no port was free at all of them.
    """
    problem: OSError | None = None
    for _ in range(_MOST_PORTS):
        with contextlib.ExitStack() as stack:
            servers: list[socket.socket] = []
            try:
                for address in addresses:
                    port = servers[0].getsockname()[1] if servers else 0
                    servers.append(stack.enter_context(socket.create_server((address, port), backlog=backlog)))
            except OSError as error:
                problem = error
                if error.errno == errno.EADDRINUSE:
                    continue  # another program has this port at one of the addresses
                raise
            stack.pop_all()
            return servers
    assert problem is not None
    raise problem


def own_addresses() -> tuple[tuple[str, ...], str | None]:
    """Return this host's IPv4 addresses, and why there are none, if so.

    Of the interfaces that are asked for; else of all, the likely one first and loopback last.
    """
    wished = [name.strip().removeprefix("=") for name in env.SOCKET_IFNAME.get().split(",") if name.strip()]
    names = wished or [name for _, name in socket.if_nameindex()]
    found = list(dict.fromkeys(address for name in names if (address := _address_of(name)) is not None))
    if not found:
        return (), f"no interface of {', '.join(names)} has an IPv4 address ({env.SOCKET_IFNAME.name} names them)"
    likely = _address_towards(env.MASTER_ADDR.get()) if not wished else None
    if not wished:
        found.sort(key=lambda address: (address != likely, address.startswith("127.")))
    return tuple(found), None


def _address_of(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("256s", interface.encode()[:15])  # `struct ifreq`, with 15 bytes and a zero for the name
        try:
            # Behind 16 bytes of name comes a `struct sockaddr_in`: family and port (4 bytes), then the address.
            return socket.inet_ntoa(fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)[20:24])
        except OSError:  # it has none
            return None


def _address_towards(host: str) -> str | None:
    """Return this host's own address on the way to a host. Nothing is sent."""
    if not host:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect((host, 9))  # UDP: it only chooses the route, and the port does not matter
        return probe.getsockname()[0]
    return None


def _call(listening: Listening, rank: int, peer: int, deadline: float) -> socket.socket:
    """Connect to a rank: at the first of its addresses where it answers as itself."""
    problems = []
    for address in listening.addresses:
        try:
            connection = socket.create_connection(
                (address, listening.port), timeout=_left(deadline, _MOST_CONNECT_SECS)
            )
        except OSError as error:
            if error.errno in OUT_OF_RESOURCES:
                raise
            problems.append(f"{address}: {error}")
            continue
        try:
            connection.settimeout(_left(deadline))  # the peer may be slow; where it has failed, it closes its ports
            connection.sendall(_HELLO.pack(listening.secret, rank))
            if hmac.compare_digest(_read(connection, _HELLO.size), _HELLO.pack(listening.secret, peer)):
                return connection
            problems.append(f"{address}: somebody else answers there")
        except OSError as error:
            problems.append(f"{address}: {error}")
        except BaseException:
            connection.close()
            raise
        connection.close()
    raise UnreachedError(
        f"rank {peer} cannot be reached at port {listening.port} ({'; '.join(problems) or 'it has no address'}). "
        f"{env.SOCKET_IFNAME.name} says which network to use"
    )


def _answer(
    servers: Sequence[socket.socket],
    secret: bytes,
    own_rank: int,
    expected: set[int],
    connections: dict[int, socket.socket],
    deadline: float,
    is_over: Callable[[], bool] = lambda: False,
) -> None:
    """Accept the connections of the ranks on higher nodes. A connection without the secret is closed.

    All connections are polled together, so that a silent one does not block the others. At most `_MOST_STRANGERS` are
    held: a further one takes the place of the one that has been silent for longest.

    Args:
        servers: Listening sockets.
        secret: What a caller must send.
        own_rank: What is sent in reply.
        expected: The ranks that will call. Ranks that have called are removed from it.
        connections: Where its connection is put.
        deadline: When to give up.
        is_over: Whether to leave although not all have called.

    Raises:
        UnreachedError: Not all have called before the deadline.
        OSError: This process may not have another connection.
    """
    with contextlib.closing(_Callers(secret, own_rank, expected, connections)) as callers:
        for server in servers:
            callers.listen(server)
        while expected and not is_over():
            left = deadline - time.monotonic()
            if left <= 0:
                raise UnreachedError(
                    f"ranks {sorted(expected)} did not connect. {env.SOCKET_IFNAME.name} says which network to use"
                )
            callers.turn(min(left, _LOOK_SECS))


class _Callers:
    """Connections that have been accepted, until they have sent secret and rank.

    Args:
        secret: What a caller must send.
        own_rank: What is sent in reply.
        expected: The ranks that will call. Ranks that have called are removed from it.
        connections: Where its connection is put.
    """

    def __init__(self, secret: bytes, own_rank: int, expected: set[int], connections: dict[int, socket.socket]):
        self._secret = secret
        self._own_rank = own_rank
        self._expected = expected
        self._connections = connections
        self._said: dict[socket.socket, bytearray] = {}  # by connection, the oldest first
        self._selector = selectors.PollSelector()  # which needs no descriptor of its own

    def listen(self, server: socket.socket) -> None:
        """Accept connections at a listening socket."""
        server.setblocking(False)
        self._selector.register(server, selectors.EVENT_READ)

    def turn(self, secs: float) -> None:
        """Accept and read what is there, after waiting at most so many seconds.

        Raises:
            OSError: This process may not have another connection.
        """
        for key, _ in self._selector.select(secs):
            ready = key.fileobj
            assert isinstance(ready, socket.socket)
            if ready in self._said:
                self._hear(ready)
            elif ready.fileno() >= 0:  # not one that was sent away in this turn
                self._accept(ready)

    def close(self) -> None:
        """Close all connections that have not sent the secret."""
        for stranger in list(self._said):
            self._send_away(stranger)
        self._selector.close()

    def _accept(self, server: socket.socket) -> None:
        try:
            stranger, _ = server.accept()
        except OSError as error:
            if error.errno not in OUT_OF_RESOURCES:
                return  # it has left again
            if not self._said:
                raise
            self._send_away(next(iter(self._said)))  # its descriptor is for the next
            return
        if len(self._said) >= _MOST_STRANGERS:
            self._send_away(next(iter(self._said)))
        stranger.setblocking(False)
        self._said[stranger] = bytearray()
        self._selector.register(stranger, selectors.EVENT_READ)
        self._hear(stranger)

    def _hear(self, stranger: socket.socket) -> None:
        """Read what a connection sends, and decide once it is enough."""
        said = self._said[stranger]
        try:
            piece = stranger.recv(_HELLO.size - len(said))
            said += piece
            if piece and len(said) < _HELLO.size:
                return
            theirs, rank = _HELLO.unpack(said) if len(said) == _HELLO.size else (b"", -1)
            if not hmac.compare_digest(theirs, self._secret) or rank not in self._expected:
                self._send_away(stranger)
                return
            stranger.sendall(_HELLO.pack(self._secret, self._own_rank))  # a new connection has room for it
        except BlockingIOError:
            return
        except OSError:
            self._send_away(stranger)
            return
        del self._said[stranger]
        self._selector.unregister(stranger)
        self._connections[rank] = stranger
        self._expected.discard(rank)

    def _send_away(self, stranger: socket.socket) -> None:
        del self._said[stranger]
        self._selector.unregister(stranger)
        stranger.close()


def _left(deadline: float, most: float = float("inf")) -> float:
    return max(0.01, min(most, deadline - time.monotonic()))


def _read(connection: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        piece = connection.recv(num_bytes - len(data))
        if not piece:
            raise OSError("closed the connection")
        data += piece
    return data
