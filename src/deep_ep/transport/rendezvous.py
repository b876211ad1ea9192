"""How the ranks of a rail find each other: one connection for each pair of nodes.

Every rank listens and tells the group where; who is on the higher node connects. A secret that went through the group
says that both ends belong together, since ports are open to everybody and private addresses exist on many hosts.
"""

from __future__ import annotations

import contextlib
import fcntl
import secrets
import socket
import struct
import time
from dataclasses import dataclass

from .. import env
from ..control import Control

_SECRET_BYTES = 16
_HELLO = struct.Struct(f"<{_SECRET_BYTES}sQ")  # the listener's secret, the caller's rank
_SIOCGIFADDR = 0x8915  # the address of an interface
_MOST_CONNECT_SECS = 5.0  # for one of several addresses


@dataclass(frozen=True)
class Listening:
    """Where a rank listens.

    Attributes:
        addresses: IPv4 addresses to try, in this order.
        port: The port.
        secret: What a caller must say.
    """

    addresses: tuple[str, ...]
    port: int
    secret: bytes


def connect_rail(control: Control, rail: list[int]) -> tuple[dict[int, socket.socket], str | None]:
    """Connect to the other ranks of the rail. All ranks of the group call it together.

    Args:
        control: The group.
        rail: The rail's ranks, by node.

    Returns:
        A connection for each of the others, by rank, and what went wrong, if anything.
    """
    connections: dict[int, socket.socket] = {}
    addresses, problem = own_addresses()
    # A network that was asked for is the only one that is listened on.
    host = addresses[0] if env.SOCKET_IFNAME.get() and len(addresses) == 1 else ""
    with socket.create_server((host, 0), backlog=len(rail)) as server:
        secret = secrets.token_bytes(_SECRET_BYTES)
        here = Listening(addresses, server.getsockname()[1], secret)
        places = control.gather_all(here, "finding the rails")
        if not all(place.addresses for place in places):
            return connections, problem
        deadline = time.monotonic() + control.limit_secs
        try:
            for rank in (one for one in rail if one < control.rank):
                connections[rank] = _call(places[rank], control.rank, rank, deadline)
            _answer(server, secret, control.rank, {one for one in rail if one > control.rank}, connections, deadline)
        except OSError as error:
            return connections, str(error)
    return connections, None


def own_addresses() -> tuple[tuple[str, ...], str | None]:
    """This host's IPv4 addresses, and why there are none, if so.

    Of the interfaces that are asked for; else of all, the likely one first and loopback last.
    """
    wished = [name.strip().removeprefix("=") for name in env.SOCKET_IFNAME.get().split(",") if name.strip()]
    names = wished or [name for _, name in socket.if_nameindex()]
    found = [address for name in names if (address := _address_of(name)) is not None]
    if not found:
        return (), f"no interface of {', '.join(names)} has an IPv4 address ({env.SOCKET_IFNAME.name} names them)"
    likely = _address_towards(env.MASTER_ADDR.get()) if not wished else None
    if not wished:
        found.sort(key=lambda address: (address != likely, address.startswith("127.")))
    return tuple(found), None


def _address_of(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("256s", interface.encode()[:15])
        try:
            return socket.inet_ntoa(fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)[20:24])
        except OSError:  # it has none
            return None


def _address_towards(host: str) -> str | None:
    """Our own address on the way to a host. Nothing is sent."""
    if not host:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect((host, 9))
        return probe.getsockname()[0]
    return None


def _call(place: Listening, rank: int, peer: int, deadline: float) -> socket.socket:
    """Connect to a rank: at the first of its addresses where it answers as itself."""
    problems = []
    for address in place.addresses:
        try:
            connection = socket.create_connection((address, place.port), timeout=_left(deadline, _MOST_CONNECT_SECS))
        except OSError as error:
            problems.append(f"{address}: {error}")
            continue
        try:
            connection.settimeout(_left(deadline))  # the peer answers when it is through with its own calls
            connection.sendall(_HELLO.pack(place.secret, rank))
            if _read(connection, _HELLO.size) == _HELLO.pack(place.secret, peer):
                return connection
            problems.append(f"{address}: somebody else answers there")
        except OSError as error:
            problems.append(f"{address}: {error}")
        connection.close()
    raise OSError(
        f"rank {peer} cannot be reached at port {place.port} ({'; '.join(problems) or 'it has no address'}). "
        f"{env.SOCKET_IFNAME.name} says which network to use"
    )


def _answer(
    server: socket.socket,
    secret: bytes,
    own_rank: int,
    expected: set[int],
    connections: dict[int, socket.socket],
    deadline: float,
) -> None:
    """Take the calls of the ranks on higher nodes. Who does not know the secret is sent away."""
    while expected:
        server.settimeout(_left(deadline))
        try:
            connection, _ = server.accept()
            connection.settimeout(_left(deadline, _MOST_CONNECT_SECS))
            said, rank = _HELLO.unpack(_read(connection, _HELLO.size))
        except TimeoutError:
            if time.monotonic() < deadline:
                continue
            raise OSError(
                f"ranks {sorted(expected)} did not connect. {env.SOCKET_IFNAME.name} says which network to use"
            ) from None
        except OSError:
            continue
        if said != secret or rank not in expected:
            connection.close()
            continue
        connection.sendall(_HELLO.pack(secret, own_rank))
        connections[rank] = connection
        expected.discard(rank)


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
