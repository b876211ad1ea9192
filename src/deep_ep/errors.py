"""The errors of the world: a peer, the memory, the machine.

A caller's mistake raises `ValueError` or `TypeError` at the public method. Everything that can go wrong although the
call was right is an `EPError`. Messages are one sentence of the form

    where: what must hold, what was seen (rank i/n). What to do.
"""

from collections.abc import Sequence


def named(ranks: Sequence[int]) -> str:
    """Ranks, as a message names them: `rank 3`, or `ranks 3, 5`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(str(rank) for rank in ranks)}"


class EPError(RuntimeError):
    """Something outside this call went wrong: a peer failed, peers disagree, memory is short."""


class EPTimeout(EPError):
    """A peer did not do its part within the limit."""


class EPTransportError(EPError):
    """The window could not be made, mapped or grown."""


class EPUnsupported(EPError):
    """What was asked for does not exist here (this machine, this version)."""


class EPClosed(EPError):
    """The buffer was destroyed, or closed by an earlier failure."""


class EPPeerFailed(EPError):
    """Another rank failed, or refused the call, first.

    Attributes:
        rank: The rank that had the first cause, whichever rank this one heard of it from.
        cause: What happened there, by its own account, as it follows the rank in a sentence.
    """

    def __init__(self, rank: int, cause: str, where: str, me: str):
        super().__init__(f"{where}: rank {rank} {cause} ({me})")
        self.rank = rank
        self.cause = cause


class EPOverflow(EPError):
    """More rows come to a rank than it made room for. All ranks raise, and nothing was sent.

    On the CPU the buffer stays usable; the handle of the refused dispatch does not. On a GPU the buffer is closed: the
    ranks' hosts have queued calls behind this one, and do not know of it.
    """
