"""What transport `shm` stands on: atomic words, memfds, and what a rank may do to a peer."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator

from ... import env
from ...errors import EPError
from ...transport.words import word_type
from .report import NOTE, PROBLEM, Finding

# A process like a peer: it makes a memfd, says which, and lives until its input ends.
_PEER = "import os, sys; print(os.memfd_create('deep_ep'), flush=True); sys.stdin.read()"


def look_at_shared_memory() -> Iterator[Finding]:
    """Try each of them; a peer is tried only where there are memfds."""
    yield _words()
    memfd = _memfd()
    yield memfd
    if memfd.status != PROBLEM:
        yield from _peer_access()


def _words() -> Finding:
    try:
        word_type()
    except EPError as error:
        return Finding("atomic words", str(error), PROBLEM, "More than one rank needs it. Install libatomic1")
    return Finding("atomic words", f"available on {platform.machine()}")


def _memfd() -> Finding:
    if not hasattr(os, "memfd_create"):
        advice = "More than one rank needs it: Linux, and a Python built against glibc 2.27 or musl 1.2 or later"
        return Finding("memfd", "this Python has no os.memfd_create", PROBLEM, advice)
    try:
        os.close(os.memfd_create("deep_ep"))
    except OSError as error:
        advice = "More than one rank needs it. Allow memfd_create in the container's seccomp profile"
        return Finding("memfd", f"refused: {error.strerror}", PROBLEM, advice)
    return Finding("memfd", "available")


def _peer_access() -> Iterator[Finding]:
    """What a rank may do to a peer: open its memory through /proc, and notice its end by a pidfd."""
    with subprocess.Popen([sys.executable, "-c", _PEER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as peer:
        try:
            assert peer.stdout is not None
            yield _proc_access(peer.pid, int(peer.stdout.readline()))
            yield _pidfd(peer.pid)
        except ValueError:
            value, advice = "could not be tried: a second Python did not start", "Run it by hand: python -c 'print(1)'"
            yield Finding("/proc/<pid>/fd", value, PROBLEM, advice)
        finally:
            peer.kill()


def _proc_access(pid: int, fd: int) -> Finding:
    try:
        os.close(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC))
        return Finding("/proc/<pid>/fd", "a peer's memory can be opened")
    except OSError as error:
        advice = (
            "Ranks map each other's memory through it. Mount /proc without hidepid, run all ranks as one user, "
            "and in one process namespace (docker: --pid=host or one container)"
        )
        return Finding("/proc/<pid>/fd", f"refused: {error.strerror}", PROBLEM, advice)


def _pidfd(pid: int) -> Finding:
    try:
        os.close(os.pidfd_open(pid))
        return Finding("pidfd", "available: a killed rank is noticed at once")
    except (OSError, AttributeError) as error:
        advice = f"A killed rank is noticed only after {env.TIMEOUT_SECS.name}. Linux 5.3 or later has pidfds"
        return Finding("pidfd", f"not available ({error})", NOTE, advice)
