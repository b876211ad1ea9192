"""The control plane: who we are, and a gather of small objects with a limit.

It is used when a buffer is made, never in its calls. Any `torch.distributed` group will do, or anything that looks
like an mpi4py communicator.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist

from .errors import EPTimeout


class Comm(Protocol):
    """The part of an mpi4py communicator that is used."""

    def Get_rank(self) -> int:
        """This process's rank."""

    def Get_size(self) -> int:
        """How many ranks there are."""

    def allgather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank."""


class Control:
    """Rank, number of ranks, and `gather`, over a process group or an MPI-like communicator.

    Args:
        group: A `torch.distributed` process group, whatever moves its bytes; or None.
        comm: An MPI-like communicator, looked at only where `group` is None.
        limit_secs: Seconds that a gather may take.
    """

    first_rank = 0  # of the group's ranks, the first that this control is about

    def __init__(self, group: dist.ProcessGroup | None, comm: Comm | None, limit_secs: float):
        self.limit_secs = limit_secs
        self._allgather: Callable[[Any], list[Any]]
        for name, given, needed in (("group", group, ("rank", "size")), ("comm", comm, Comm.__dict__)):
            missing = [part for part in needed if not part.startswith("_") and not hasattr(given, part)]
            if given is not None and missing:
                raise TypeError(f"Buffer: `{name}` must have {', '.join(missing)}, got {type(given).__name__}")
        if group is not None:
            self.rank, self.num_ranks = group.rank(), group.size()
            self._allgather = lambda value: _gather_over_group(value, group)
        elif comm is not None:
            self.rank, self.num_ranks = comm.Get_rank(), comm.Get_size()
            self._allgather = comm.allgather
        else:
            raise ValueError(
                "Buffer: `group` (a torch.distributed process group) or `comm` (an mpi4py communicator) is needed"
            )

    @property
    def num_all_ranks(self) -> int:
        """Ranks of the group, whichever of them this control is about."""
        return self.num_ranks

    def gather_all(self, value: Any, purpose: str) -> list[Any]:
        """Every rank's `value` of the whole group, for what all of it must decide alike."""
        return self.gather(value, purpose)

    def gather(self, value: Any, purpose: str) -> list[Any]:
        """Every rank's `value`, by rank. All ranks call it together.

        Args:
            value: Anything that pickles.
            purpose: What it is for; the error says it.
        """
        if self.num_ranks == 1:
            return [value]
        answer: queue.SimpleQueue[tuple[list[Any] | None, BaseException | None]] = queue.SimpleQueue()
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

        def work() -> None:
            try:
                if device is not None:
                    torch.cuda.set_device(device)  # the current device is a property of the thread
                answer.put((self._allgather(value), None))
            except BaseException as error:  # it goes to the caller, whatever it is
                answer.put((None, error))

        # A collective cannot be cancelled. A thread lets the caller go on at the limit; it ends with the group's own.
        thread = threading.Thread(target=work, name="deep_ep-gather", daemon=True)
        thread.start()
        try:
            values, error = answer.get(timeout=self.limit_secs)
            thread.join(self.limit_secs)  # at once: it must not be found running where the interpreter ends
        except queue.Empty:
            raise EPTimeout(
                f"{purpose}: not all ranks came within {self.limit_secs:g} s (rank {self.rank}/{self.num_ranks}). "
                "A rank exited, or does not make its buffer; look at its output"
            ) from None
        if error is not None:
            raise error
        assert values is not None
        return values


class NodeControl(Control):
    """The ranks of one node. All nodes make the same gathers at the same time, and each keeps its own part.

    A group of its own for each node would need a collective call over ranks that we know nothing of.

    Args:
        control: The whole group.
        first_rank: The node's first rank.
        num_ranks: How many it has; they are consecutive.
    """

    def __init__(self, control: Control, first_rank: int, num_ranks: int):
        self._whole = control
        self.first_rank = first_rank
        self.rank, self.num_ranks = control.rank - first_rank, num_ranks
        self.limit_secs = control.limit_secs

    @property
    def num_all_ranks(self) -> int:
        """Ranks of the group."""
        return self._whole.num_ranks

    def gather_all(self, value: Any, purpose: str) -> list[Any]:
        """Every rank's `value` of the whole group."""
        return self._whole.gather(value, purpose)

    def gather(self, value: Any, purpose: str) -> list[Any]:
        """Every `value` of this node, by local rank. All ranks of all nodes call it together."""
        return self.gather_all(value, purpose)[self.first_rank : self.first_rank + self.num_ranks]


def _gather_over_group(value: Any, group: dist.ProcessGroup) -> list[Any]:
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values
