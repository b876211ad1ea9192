"""Several hosts on one machine: network namespaces, each with one interface, and a switch between them.

What they send to each other goes through real sockets, routes and queues; a link can be slow, and can be unplugged.
For tests and benchmarks: making namespaces needs root, and the `ip` and `tc` programs.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .. import env
from ..errors import EPError, EPUnsupported

INTERFACE = "ep0"  # of every host
_NETWORK = "10.231.7"
_MOST_HOSTS = 200
_CLONE_NEWNET = 0x40000000
_COMMAND_SECS = 20.0
_NAMES = Path("/run/netns")
# A burst of a few full-sized pieces: with a smaller one the system cuts them before they are sent, and each piece then
# has a header of its own. The queue holds what a sender may have on its way.
_SHAPE = ("burst", "256kb", "latency", "50ms")
_numbers = itertools.count()


@dataclass(frozen=True)
class Hosts:
    """Namespaces that are there.

    Attributes:
        names: Of the namespaces, by host.
        switch: Of the namespace where all cables end.
        ranks_per_host: Ranks of a host; they are consecutive.
    """

    names: tuple[str, ...]
    switch: str
    ranks_per_host: int

    def enter(self, rank: int) -> None:
        """Move the calling thread, and what it starts, to the host of a rank. `run_ranks` does it first of all."""
        host = rank // self.ranks_per_host
        _enter(self.names[host])
        os.environ |= {env.HOST.name: self.names[host], env.SOCKET_IFNAME.name: INTERFACE}

    def address(self, host: int) -> str:
        """Of a host's interface."""
        return f"{_NETWORK}.{host + 1}"

    def plug(self, host: int) -> None:
        """Put a host's cable back."""
        _run("ip", "-n", self.names[host], "link", "set", INTERFACE, "up")

    def unplug(self, host: int) -> None:
        """Take a host's interface down: what is sent to it, and by it, is lost. Its address stays."""
        _run("ip", "-n", self.names[host], "link", "set", INTERFACE, "down")


@contextlib.contextmanager
def making_hosts(num_hosts: int, ranks_per_host: int, rate: str = "") -> Iterator[Hosts]:
    """Make hosts, and remove them at the end.

    Args:
        num_hosts: How many.
        ranks_per_host: Ranks of each.
        rate: Most that an interface sends, as `tc` has it: `1gbit`; empty: no limit.

    Raises:
        EPUnsupported: This process may not make them.
        ValueError: The rate is none, or there are too many hosts.
    """
    if not 1 <= num_hosts <= _MOST_HOSTS:
        raise ValueError(f"namespaces: there can be 1 to {_MOST_HOSTS} hosts, got {num_hosts}")
    prefix = f"deep-ep-{os.getpid()}-{next(_numbers)}"
    hosts = Hosts(tuple(f"{prefix}-{host}" for host in range(num_hosts)), f"{prefix}-switch", ranks_per_host)
    try:
        _make(hosts)
        for name in hosts.names if rate else ():
            _limit(name, rate)
        yield hosts
    finally:
        for name in (*hosts.names, hosts.switch):  # interfaces go with them
            with contextlib.suppress(EPError, OSError):
                _run("ip", "netns", "del", name)


def sent_bytes() -> int:
    """Bytes that have left the host of this process's main thread, as its interface counts them."""
    # Not /sys: that shows the interfaces of whoever mounted it.
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == INTERFACE:
            return int(numbers.split()[8])
    raise EPError(f"namespaces: there is no interface {INTERFACE} here. Read its counter on a host of `making_hosts`")


def _make(hosts: Hosts) -> None:
    try:
        for name in (*hosts.names, hosts.switch):
            _run("ip", "netns", "add", name)
        _run("ip", "-n", hosts.switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", hosts.switch, "link", "set", "bridge", "up")
        for host, name in enumerate(hosts.names):
            # Made where both ends stay: no name of ours is ever seen on the real host.
            end = ("peer", "name", INTERFACE, "netns", name)
            _run("ip", "-n", hosts.switch, "link", "add", f"port{host}", "type", "veth", *end)
            _run("ip", "-n", hosts.switch, "link", "set", f"port{host}", "master", "bridge", "up")
            _run("ip", "-n", name, "addr", "add", f"{hosts.address(host)}/24", "dev", INTERFACE)
            _run("ip", "-n", name, "link", "set", INTERFACE, "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
        _run("ip", "netns", "exec", hosts.names[0], "true")
    except FileNotFoundError as error:
        raise EPUnsupported(f"namespaces: the program `{error.filename}` is missing. Install iproute2") from None
    except EPError as error:
        who = "" if os.geteuid() == 0 else f", this process has user id {os.geteuid()}"
        raise EPUnsupported(f"namespaces: the system refuses them: {error}. They need root{who}") from None


def _limit(name: str, rate: str) -> None:
    try:
        _run("tc", "-n", name, "qdisc", "add", "dev", INTERFACE, "root", "tbf", "rate", rate, *_SHAPE)
    except EPError as error:
        raise ValueError(
            f"namespaces: the rate must be one that tc knows, like 1gbit, got {rate!r} ({error})"
        ) from None
    except FileNotFoundError:
        raise EPUnsupported("namespaces: a rate needs the program `tc`. Install iproute2") from None


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=_COMMAND_SECS, check=False)
    if done.returncode:
        raise EPError(f"`{' '.join(words)}` says {_first_line([done.stderr, done.stdout]) or done.returncode}")


def _first_line(texts: Sequence[str]) -> str:
    return next((line.strip() for text in texts for line in text.splitlines() if line.strip()), "")


def _enter(name: str) -> None:
    setns = ctypes.CDLL(None, use_errno=True).setns  # `os.setns` is newer than the Pythons that we run on
    with (_NAMES / name).open() as file:
        if setns(file.fileno(), _CLONE_NEWNET):
            number = ctypes.get_errno()
            raise EPUnsupported(f"namespaces: cannot enter {name} ({os.strerror(number)}). That needs root")
