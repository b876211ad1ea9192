"""The errors of the world: a peer, the memory, the machine.

A caller's mistake raises `ValueError` or `TypeError` at the public method. Everything that can go wrong although the
call was right is an `EPError`. Messages are one sentence of the form

    where: what must hold, what was seen (rank i/n). What to do.
"""

from collections.abc import Sequence


def named(ranks: Sequence[int]) -> str:
    """Ranks, as a message names them: `rank 3`, or `ranks 3, 5`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(str(rank) for rank in ranks)}"


MOST_TEXT_BYTES = 1 << 14  # of the text of a failure: peers reserve memory for it


def account(error: BaseException) -> str:
    """The text of an error, as it is sent to peers. It never raises: a failure without a text is reported, too."""
    try:
        text = str(error)
        return f"{type(error).__name__}: {text}" if text else type(error).__name__
    except Exception as trouble:
        return f"{type(error).__name__} (its text could not be made: {type(trouble).__name__})"


def encoded(text: str, most_bytes: int = MOST_TEXT_BYTES) -> bytes:
    """A text for peers, cut to the room there is. What UTF-8 has no bytes for (a lone surrogate) is written out."""
    return text.encode(errors="backslashreplace")[:most_bytes]


class EPError(RuntimeError):
    """Something outside this call went wrong: a peer failed, peers disagree, memory is short."""


class EPTimeout(EPError):
    """A peer did not do its part within the limit."""


class EPTransportError(EPError):
    """Memory that ranks share, or a connection between them, could not be made, or rows do not fit into it."""


class EPUnsupported(EPError):
    """What was asked for does not exist here (this machine, this version)."""


class EPClosed(EPError):
    """The buffer was destroyed, or closed by an earlier failure."""


class EPPeerFailed(EPError):
    """Another rank failed, or refused the call, first.

    Attributes:
        rank: The rank that failed, whichever rank this one heard of it from. What a rank noticed of another one (its
            process has ended, it is silent) counts as the failure of the rank that noticed it; `cause` names the other.
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
