"""The control plane: who we are, and gathers of small objects that all ranks of a group make together.

It is used when a buffer is made or its memory grows, never in its calls. Any `torch.distributed` group will do, or
anything that looks like an mpi4py communicator, or a generation of a buffer over a store (`generation.py`).

What ranks make together is made by all of them or by none, in a *joint step*:

    with control.joint("making the buffer"):
        memory = SharedMemory.create()
        control.undo(memory.close)                       # called if the step fails, on any rank
        addresses = control.gather(address_of(memory), "making shared memory")
        ...

Every gather carries a value or a failure. A rank in which anything raises sends its failure in place of the next
gather, whatever that is for; the peers, which find it there, raise and name the rank. One last gather ends the step, so
code between two gathers may raise wherever it likes, and needs nothing else to stay in step with the other ranks.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from .errors import EPError, EPTimeout, EPTransportError, EPUnsupported, account, named
from .generation import STORE_REMEDY, Generation, Store, StoreError, StoreGather, ThreadedWork

_MOST_CAUSE_CHARS = 2000  # of a failure's text: it goes to every rank


class Comm(Protocol):
    """The part of an mpi4py communicator that is used."""

    def Get_rank(self) -> int:
        """This process's rank."""

    def Get_size(self) -> int:
        """How many ranks there are."""

    def allgather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank."""


class PeerMissing(EPTransportError):
    """This rank failed because a peer did not do its part. If any rank has a cause of its own, that is reported."""


class _Failure(NamedTuple):
    """Why a rank could not go on.

    Attributes:
        cause: The error and its text.
        depth: How many joint steps it was in, one inside the other.
        is_unsupported: It was an `EPUnsupported`.
        is_consequence: It follows from the failure of another rank.
    """

    cause: str
    depth: int
    is_unsupported: bool
    is_consequence: bool

    @classmethod
    def of(cls, error: BaseException, depth: int, is_consequence: bool) -> _Failure:
        """The failure that an error stands for."""
        cause = str(error) if isinstance(error, EPError) else account(error)
        return cls(cause[:_MOST_CAUSE_CHARS], depth, isinstance(error, EPUnsupported), is_consequence)


class _Sent(NamedTuple):
    """What a rank contributes to a gather: a value, or its failure."""

    value: Any
    failure: _Failure | None = None


class _Failed(NamedTuple):
    """A joint step that has failed on all ranks, and that this rank has not yet left.

    Attributes:
        depth: How many steps it is in, itself included. The steps inside have failed with it.
        error: What this rank raises; None: its own error.
    """

    depth: int
    error: EPError | None


class _RollCall:
    """Which ranks of a group live: a collective that fails, or takes too long, does not say who is missing.

    While a rank is in a joint step that takes a while, a thread writes into the group's store, again and again, that it
    lives; and behind it, that the step is done. Where the store cannot be had, or does not answer (its own process may
    be the one that is gone, or another thread waits in it), nobody is named: only threads ask it.

    Args:
        group: The group.
    """

    def __init__(self, group: dist.ProcessGroup):
        self._rank, self._num_ranks = group.rank(), group.size()
        self._name = str(getattr(group, "group_name", ""))
        self._store: Any = None
        with contextlib.suppress(Exception):  # torch has no public name for it
            if self._name not in _deaf_stores:
                self._store = dist.distributed_c10d._get_process_group_store(group)
        self._number = 0
        self._suspects: list[int] | None = None
        self._has_ended, self._until = threading.Event(), math.inf
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """A joint step begins."""
        self._number = _num_steps[self._name] = _num_steps[self._name] + 1
        self._suspects, self._until, self._has_ended = None, math.inf, threading.Event()
        if self._store is not None:
            self._thread = threading.Thread(target=self._tell, name="deep_ep-roll-call", daemon=True)
            self._thread.start()

    def end(self, is_known: bool) -> None:
        """The step is over. If not all ranks know how it ended, they learn for some time that this one lives."""
        if not is_known:
            self._until = time.monotonic() + _OBSERVED_SECS + 2 * _MOST_STORE_SECS
            return
        self._has_ended.set()
        if self._thread is not None:
            self._thread.join(_MOST_STORE_SECS)  # at once: it must not be found running where the interpreter ends
            if self._thread.is_alive():
                self._forget_store()

    @property
    def is_lost(self) -> bool:
        """Whether a rank has said that the step cannot succeed any more."""
        return self._suspects is not None

    def missing(self) -> list[int]:
        """The ranks that do not live. To be asked where a gather has failed."""
        if self._thread is not None:
            ThreadedWork("deep_ep-roll-call", self._look).wait(_OBSERVED_SECS + _MOST_STORE_SECS)
        return list(self._suspects or ())

    def _tell(self) -> None:
        """On a thread: say that this rank lives, and hear whether the step is lost."""
        try:
            beat = 0
            while not self._has_ended.wait(_BEAT_SECS) and time.monotonic() < self._until:
                beat += 1
                self._store.set(self._key("beat", self._rank), f"{self._number} {beat}")
                self._read_suspects()
            if self._has_ended.is_set():
                self._store.set(self._key("done", self._rank), str(self._number))
        except Exception:  # its host is gone
            self._forget_store()

    def _look(self) -> None:
        """On a thread: find out who does not live, unless another rank has done so."""
        with contextlib.suppress(Exception):
            deadline, others = time.monotonic() + _OBSERVED_SECS, set(range(self._num_ranks)) - {self._rank}
            before = {rank: self._read("beat", rank) for rank in others}
            while others and time.monotonic() < deadline and not self._read_suspects():
                time.sleep(_BEAT_SECS / 2)
                others = {
                    rank for rank in others if self._read("beat", rank) == before[rank] and not self._is_done(rank)
                }
            if not self.is_lost and others:
                self._store.set(self._key("lost", self._number), " ".join(map(str, sorted(others))))
                self._read_suspects()

    def _read_suspects(self) -> bool:
        said = self._read("lost", self._number)
        if said is not None and self._suspects is None:
            self._suspects = [int(rank) for rank in said.split()]
        return self._suspects is not None

    def _is_done(self, rank: int) -> bool:
        return int(self._read("done", rank) or 0) >= self._number

    def _read(self, kind: str, number: int) -> str | None:
        key = self._key(kind, number)
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _key(self, kind: str, number: int) -> str:
        return f"deep_ep/{kind}/{number}"

    def _forget_store(self) -> None:
        """Ask it no more, also for other buffers of the group: every further question would take as long, or print."""
        self._store = None
        _deaf_stores.add(self._name)


_num_steps: Counter[str] = Counter()  # of this process, by group: ranks make the same ones
_deaf_stores: set[str] = set()  # of groups, by name
_BEAT_SECS = 0.2
_OBSERVED_SECS = 1.5  # in which every rank that lives is heard of
_MOST_STORE_SECS = 1.0  # that the store may take to answer
_LONGEST_PAUSE_SECS = 1e-3


class _Lost(RuntimeError):
    """Another rank has found that a step cannot succeed any more."""


class _PolledGather:
    """A gather of objects over gloo, without a thread: a collective that never ends leaves nothing behind.

    Args:
        group: The group, whose collectives start without waiting for anybody.
        roll_call: Knows whether another rank has given up.
        sent: What this rank contributes.
    """

    def __init__(self, group: dist.ProcessGroup, roll_call: _RollCall, sent: _Sent):
        self._group, self._roll_call = group, roll_call
        self._data = pickle.dumps(sent)
        self._rows: list[torch.Tensor] = []
        self._sizes: list[int] = []
        self._work = self._start(torch.tensor([len(self._data)], dtype=torch.int64, device="cpu"))

    def wait(self, deadline: float) -> list[_Sent]:
        """What every rank contributed.

        Raises:
            TimeoutError: It is not done at the deadline.
            RuntimeError: The collective has failed.
        """
        pause_secs = 2e-5
        while True:
            if self._work.is_completed():
                self._work.wait()  # raises, if it has failed
                answer = self._advance()
                if answer is not None:
                    return answer
                pause_secs = 2e-5
            _require_hope(self._roll_call, deadline)
            time.sleep(pause_secs)
            pause_secs = min(2 * pause_secs, _LONGEST_PAUSE_SECS)

    def _advance(self) -> list[_Sent] | None:
        """After the sizes the data; after the data: what it says."""
        if not self._sizes:
            self._sizes = [int(row) for row in self._rows]
            data = self._data.ljust(max(self._sizes), b"\0")
            self._work = self._start(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            return None
        pairs = zip(self._rows, self._sizes, strict=True)
        return [pickle.loads(ctypes.string_at(row.data_ptr(), size)) for row, size in pairs]

    def _start(self, row: torch.Tensor) -> Any:
        self._rows = [torch.empty_like(row) for _ in range(self._group.size())]
        return dist.all_gather(self._rows, row, group=self._group, async_op=True)


class _ThreadGather:
    """A gather by a function that blocks: in a thread of its own, which ends with the group's own limit.

    Args:
        allgather: The function.
        roll_call: Knows whether another rank has given up; None: nothing does.
        sent: What this rank contributes.
    """

    def __init__(self, allgather: Callable[[Any], list[Any]], roll_call: _RollCall | None, sent: _Sent):
        self._roll_call = roll_call
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

        def work() -> list[_Sent]:
            if device is not None:
                torch.cuda.set_device(device)  # the current device is a property of the thread
            return allgather(sent)

        self._work = ThreadedWork("deep_ep-gather", work)

    def wait(self, deadline: float) -> list[_Sent]:
        """What every rank contributed; raises as `_PolledGather.wait`."""
        while not self._work.wait(min(_BEAT_SECS, max(0.0, deadline - time.monotonic()))):
            _require_hope(self._roll_call, deadline)
        error = self._work.error
        if error is not None:
            raise RuntimeError(f"{type(error).__name__}: {error}")
        return self._work.result


def _require_hope(roll_call: _RollCall | None, deadline: float) -> None:
    """Raise if there is no use in waiting any longer."""
    if roll_call is not None and roll_call.is_lost:
        raise _Lost("another rank has given up")
    if time.monotonic() > deadline:
        raise TimeoutError


_Gather = _PolledGather | _ThreadGather | StoreGather


def _begin_gather(group: dist.ProcessGroup, roll_call: _RollCall, sent: _Sent) -> _Gather:
    """Begin a gather over a process group. Only gloo's own collectives are known to start without waiting."""
    with contextlib.suppress(Exception):  # torch has no public name for what moves the bytes of a group
        if isinstance(group._get_backend(torch.device("cpu")), dist.ProcessGroupGloo):
            return _PolledGather(group, roll_call, sent)

    def allgather(value: Any) -> list[Any]:
        values: list[Any] = [None] * group.size()
        dist.all_gather_object(values, value, group=group)
        return values

    return _ThreadGather(allgather, roll_call, sent)


def require_member(where: str, group: Any) -> None:
    """Refuse what `torch.distributed.new_group` returns to processes outside of the group.

    Raises:
        ValueError: This process is outside.
    """
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"{where}: this process is no member of `group`. Only the ranks of a group make a buffer of it; "
            "`torch.distributed.new_group` returns no group to others"
        )


class Control:
    """Rank, number of ranks, `gather` and `joint`, over a group, an MPI-like communicator or a generation.

    Args:
        group: A `torch.distributed` process group, whatever moves its bytes; or None.
        comm: An MPI-like communicator, or a generation; looked at only where `group` is None.
        limit_secs: Seconds that a wait of the buffer may take, and a joint step unless its generation has another
            limit: all its gathers and connections together, unless they begin anew (`renew_deadline`).

    Attributes:
        deadline: When the limit is over, as `time.monotonic` counts. It is set anew when a joint step begins.
    """

    first_rank = 0  # of the group's ranks, the first that this control is about
    generation = 0  # of the buffer; 0: it is made over a group or a communicator
    store: Store | None = None  # over which the ranks of a generation meet

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        comm: Comm | Generation | None,
        limit_secs: float,
    ):
        self._generation_secs = comm.joint_secs if isinstance(comm, Generation) else None
        self.set_limit(limit_secs)
        self._undo: list[contextlib.ExitStack] = []  # of the joint steps that this rank is in, the innermost last
        self._failed: _Failed | None = None  # the outermost step that has failed, until this rank has left it
        self._heard: EPError | None = None  # what this rank last raised of a peer
        self._lost: str | None = None  # why gathers cannot be made any more; None: they can
        self._interrupted: _Gather | None = None  # a gather that this rank did not wait for
        self._num_begun = 0  # gathers that may have been begun
        self._roll_call: _RollCall | Generation | None = None
        self._begin_gather: Callable[[_Sent], _Gather]
        require_member("Buffer", group)
        needs = () if isinstance(comm, Generation) else tuple(Comm.__dict__)
        for name, given, needed in (("group", group, ("rank", "size")), ("comm", comm, needs)):
            missing = [part for part in needed if not part.startswith("_") and not hasattr(given, part)]
            if given is not None and missing:
                raise TypeError(f"Buffer: `{name}` must have {', '.join(missing)}, got {type(given).__name__}")
        if group is not None:
            self.rank, self.num_ranks = group.rank(), group.size()
            self._roll_call = _RollCall(group)
            self._begin_gather = partial(_begin_gather, group, self._roll_call)
        elif isinstance(comm, Generation):
            generation = self._roll_call = comm
            self.rank, self.num_ranks, self.generation = comm.rank, comm.num_ranks, comm.number
            self.store = comm.store
            self._begin_gather = lambda sent: generation.begin_gather(sent, self.deadline)
        elif comm is not None:
            self.rank, self.num_ranks = comm.Get_rank(), comm.Get_size()
            self._begin_gather = partial(_ThreadGather, comm.allgather, None)
        else:
            remedy = "" if dist.is_initialized() else ". Call `torch.distributed.init_process_group` first"
            raise ValueError(
                "Buffer: `group` (a torch.distributed process group) or `comm` (an mpi4py communicator) is needed"
                f"{remedy}"
            )

    def set_limit(self, limit_secs: float) -> None:
        """Set the limit, which begins now.

        A limit that may be wrong is checked and set inside of a joint step: so the peers learn what is wrong with it.
        """
        self.limit_secs = limit_secs
        self.joint_secs = limit_secs if self._generation_secs is None else self._generation_secs
        self._allow(self.joint_secs)

    @property
    def num_all_ranks(self) -> int:
        """Ranks of the group, whichever of them this control is about."""
        return self.num_ranks

    @contextlib.contextmanager
    def joint(self, purpose: str) -> Iterator[None]:
        """What is done inside the block is done by all ranks, or undone by all of them. All ranks enter it together.

        Blocks may be nested. The limit is that of the outermost one.

        Args:
            purpose: What it is for; errors say it.

        Raises:
            EPTransportError: A peer failed inside the block, or this rank did, with one of these or with an `OSError`;
                the message says which rank it was.
            EPUnsupported: A peer raised one.
            EPTimeout: Not all ranks came to the end of the block within the limit.
        """
        undo = contextlib.ExitStack()
        if not self._undo:
            self._allow(self.joint_secs)
            if self._roll_call is not None and self.num_ranks > 1:
                self._roll_call.begin()
        self._undo.append(undo)
        try:
            try:
                yield
            except BaseException as error:
                cause = self._tell(error)
                if cause is not None:
                    raise cause from error
                raise
            num_begun = self._num_begun
            try:
                self.gather(None, purpose)
            except EPError:
                raise
            except BaseException as error:  # Ctrl-C
                # Its part of the last gather is not sent yet: the failure goes in place of it.
                if self._num_begun == num_begun:
                    self._tell(error)
                elif self._interrupted is not None:
                    # Not told: the peers may be through, and then their first call finds this rank closed. But they
                    # need this rank for that.
                    with contextlib.suppress(EPError):
                        self._finish(purpose, None)
                raise
        except BaseException as error:
            undo.close()
            heard = self._failed.error if self._failed is not None and self._failed.depth == len(self._undo) else None
            if heard is not None and not _follows(error, heard):
                raise heard from error  # whatever was made of it on the way
            del heard  # or it would hold this frame, which holds it
            if isinstance(error, (OSError, EPTransportError)) and self._me() not in str(error):
                raise EPTransportError(f"{purpose}: {error} ({self._me()}). {_DOCTOR}") from error
            raise
        else:
            if len(self._undo) > 1:
                self._undo[-2].push(undo.pop_all())  # what encloses this step may still fail
        finally:
            if self._failed is not None and self._failed.depth == len(self._undo):
                self._failed = None  # the steps around it may go on; if they do not, they say so themselves
            self._undo.pop()
            if not self._undo:
                self._heard = None  # it holds the frames that it went through
                if self._roll_call is not None:
                    self._roll_call.end(self._lost is None)

    def renew_deadline(self, purpose: str, least_secs: float) -> None:
        """Give what follows a limit of its own. All ranks call it together.

        It is for work that a rank does alone and that may take long, such as compiling kernels for the first time: a
        rank that works is not one that is missing.

        Args:
            purpose: What follows; errors say it.
            least_secs: What it may take, if the usual limit is shorter.
        """
        self.gather(None, purpose)
        self._allow(max(self.joint_secs, least_secs))

    def _allow(self, secs: float) -> None:
        self._allowed_secs = secs
        self.deadline = time.monotonic() + secs

    def undo(self, work: Callable[..., object], *args: Any) -> None:
        """Have `work(*args)` done if the joint step fails, the last one first. Outside of one: nothing is done.

        Args:
            work: What closes or forgets something. It may be called although that has been closed already.
            args: Passed on.
        """
        if self._undo:
            self._undo[-1].callback(_without_errors, work, *args)

    def gather_all(self, value: Any, purpose: str) -> list[Any]:
        """Every rank's `value` of the whole group, for what all of it must decide alike."""
        return self.gather(value, purpose)

    def gather(self, value: Any, purpose: str) -> list[Any]:
        """Every rank's `value`, by rank. All ranks call it together.

        Args:
            value: Anything that pickles.
            purpose: What it is for; the error says it.

        Raises:
            EPTimeout: Not all ranks came before the deadline.
            EPTransportError: A peer sent its failure instead, or the group does not work any more.
            EPUnsupported: A peer's failure was one.
        """
        if self.num_ranks == 1:
            return [value]
        answer = self._exchange(_Sent(value), purpose)
        self._require_values(answer)
        return [sent.value for sent in answer]

    def _tell(self, error: BaseException) -> EPError | None:
        """Send this rank's failure in place of the next gather, unless all ranks have left, or none can be reached.

        Returns:
            What this rank is to raise instead: the cause of another one, of which its own failure is a consequence.
        """
        if self._failed is not None:
            return None
        depth = len(self._undo)
        mine = _Failure.of(error, depth, isinstance(error, PeerMissing) or error is self._heard)
        sent = _Sent(None, mine)
        try:
            answer = self._exchange(sent, "telling a failure") if self.num_ranks > 1 else [sent]
        except EPError:
            return None  # the caller of this rank gets its own error
        failures = [sent.failure for sent in answer if sent.failure is not None]
        heard, outermost = self._error_of(answer), min(failure.depth for failure in failures)
        self._failed = _Failed(outermost, heard if outermost < depth else None)
        if mine.is_consequence and not all(failure.is_consequence for failure in failures):
            self._heard = heard
            return heard
        return None

    def _exchange(self, sent: _Sent, purpose: str) -> list[_Sent]:
        """What every rank sends, values and failures."""
        if self._lost is not None or self._failed is not None:
            reason = self._lost or "another rank has failed, and makes no gather any more"
            raise EPTransportError(f"{purpose}: {reason} ({self._me()}). Make a new buffer, over a new group")
        if self._interrupted is not None:  # collectives of one group must not overlap: finish that one first
            self._require_values(self._finish(purpose, None))
        return self._finish(purpose, sent)

    def _finish(self, purpose: str, sent: _Sent | None) -> list[_Sent]:
        """Begin a collective, or take up the one that was begun, and wait for it. Ctrl-C leaves it begun."""
        try:
            if sent is not None:
                self._num_begun += 1
                self._interrupted = self._begin_gather(sent)
            assert self._interrupted is not None
            answer = self._interrupted.wait(self.deadline)
        except TimeoutError:
            self._lost = "not all ranks came to an earlier gather"
            raise EPTimeout(
                f"{purpose}: not all ranks came within {self._allowed_secs:g} s{self._missing()} ({self._me()}). "
                "A rank exited, or does not make its buffer; look at its output"
            ) from None
        except StoreError as error:
            self._lost = "the store does not work"
            raise EPTransportError(f"{purpose}: {error} ({self._me()}). {STORE_REMEDY}") from None
        except RuntimeError as error:
            self._lost = "the group has failed before"
            raise EPTransportError(
                f"{purpose}: the group has failed{self._missing()} ({error}) ({self._me()}). "
                "The process of a rank has ended, or the network has failed; look at its output"
            ) from None
        self._interrupted = None
        return answer

    def _missing(self) -> str:
        """Who has not come to the gather, for a sentence."""
        ranks = self._roll_call.missing() if self._roll_call is not None else []
        if self.rank in ranks:
            return f", and the others have given up on rank {self.rank}, which is this one"
        return f", there is no word from {named(ranks)}" if ranks else ""

    def _require_values(self, answer: Sequence[_Sent]) -> None:
        """Raise what peers raise of a rank that has failed."""
        failures = [sent.failure for sent in answer if sent.failure is not None]
        if not failures:
            return
        self._heard = self._error_of(answer)
        if self._undo:
            self._failed = _Failed(min(failure.depth for failure in failures), self._heard)
        raise self._heard

    def _error_of(self, answer: Sequence[_Sent]) -> EPError:
        """What the peers of ranks that have failed raise: the first cause, and its rank."""
        failures = {rank: sent.failure for rank, sent in enumerate(answer) if sent.failure is not None}
        causes = {rank: one for rank, one in failures.items() if not one.is_consequence} or failures
        # The lowest, so that all ranks name the same one.
        rank = min(causes)
        others = sorted(set(failures) - {rank})
        text = f"Buffer: rank {rank} failed: {causes[rank].cause} ({self._me()})."
        if others:
            text += f" So did {named(others)}."
        kind = EPUnsupported if causes[rank].is_unsupported else EPTransportError
        return kind(f"{text} {_DOCTOR}")

    def _me(self) -> str:
        return f"rank {self.rank}/{self.num_ranks}"


def group_ranks(group: dist.ProcessGroup | None) -> tuple[int, ...] | None:
    """Return the global ranks of a group in its order; None where torch does not know them."""
    if group is None:
        return None
    try:
        return tuple(dist.get_process_group_ranks(group))
    except (KeyError, ValueError, RuntimeError, TypeError, AttributeError):  # a group that torch has not registered
        return None


_DOCTOR = "`python -m deep_ep doctor` shows what this host allows"


def _follows(error: BaseException, cause: BaseException) -> bool:
    """Whether an error is a cause, or was raised from it."""
    one: BaseException | None = error
    while one is not None and one is not cause:
        one = one.__cause__
    return one is not None


def _without_errors(work: Callable[..., object], *args: Any) -> None:
    # Undoing goes on whatever happens: the error that is reported is the one that made it necessary.
    with contextlib.suppress(Exception):
        work(*args)


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
        self.generation = control.generation

    @property
    def num_all_ranks(self) -> int:
        """Ranks of the group."""
        return self._whole.num_ranks

    @property
    def deadline(self) -> float:  # type: ignore[override]
        """When the limit is over."""
        return self._whole.deadline

    def joint(self, purpose: str) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        """A joint step of all nodes."""
        return self._whole.joint(purpose)

    def undo(self, work: Callable[..., object], *args: Any) -> None:
        """Have something done if the joint step fails."""
        self._whole.undo(work, *args)

    def gather_all(self, value: Any, purpose: str) -> list[Any]:
        """Every rank's `value` of the whole group."""
        return self._whole.gather(value, purpose)

    def gather(self, value: Any, purpose: str) -> list[Any]:
        """Every `value` of this node, by local rank. All ranks of all nodes call it together."""
        return self.gather_all(value, purpose)[self.first_rank : self.first_rank + self.num_ranks]
