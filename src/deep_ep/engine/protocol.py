"""The words of the protocol: steps, operations, what must agree, header and offer (`docs/protocol.md`)."""

from __future__ import annotations

import zlib
from array import array
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch

from .. import env
from ..errors import EPError, EPOverflow
from ..log import warn
from ..transport import Base

# Steps of a call, in order. Those of round j are `READY + 2j` and `TAKEN + 2j`.
ANNOUNCED, OFFERED, READY, TAKEN = 1, 2, 3, 4

_STEP_NAMES = {ANNOUNCED: "announced", OFFERED: "offered", READY: "ready", TAKEN: "taken"}

LOW_LATENCY = "low-latency"
COMPACT = -1  # for the alignment of a V2 dispatch whose result is compact, where 0 stands for a call of V1
LEAVE = "leave"  # no call: what a rank posts when an exception makes it leave its buffer
OPERATIONS = (
    "dispatch",
    "worst-case dispatch",
    "cached dispatch",
    "combine",
    "barrier",
    f"{LOW_LATENCY} dispatch",
    f"{LOW_LATENCY} combine",
    f"{LOW_LATENCY} barrier",
    LEAVE,
)

# By name: an agreement has the index of a dtype, so all ranks must number them alike.
_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
_WORDS: dict[Any, int] = {None: 0, **{name: word for word, name in enumerate(OPERATIONS)}}
_WORDS.update({dtype: word for word, dtype in enumerate(_DTYPES, 1)})  # numbers stand for themselves
_NO_BASE = [0, 0, 0]
_CLOSED = ". The buffer is closed: make a new one"


def step_name(step: int) -> str:
    """Return the name of a step, whatever its round."""
    return _STEP_NAMES[step if step < READY else READY + (step - READY) % 2]


def warn_staged(operation: str, used_bytes: int, rank: int, num_ranks: int) -> None:
    """Warn that rows go through staging, which is slower."""
    warn(
        f"{operation}: the arena has no room for the rows ({used_bytes} bytes are in use), they go through staging "
        f"in rounds (rank {rank}/{num_ranks}). Drop received tensors, make the buffer with a larger "
        f"num_nvl_bytes, or raise {env.ARENA_BYTES.name} if it is set. "
        "This is said once",
        stacklevel=3,
    )


class Agreement(NamedTuple):
    """What must be the same on all ranks in a call. 0 or None: the call has no such item.

    Attributes:
        operation: One of `OPERATIONS`.
        num_experts: E.
        num_topk: K, of ids and weights.
        hidden: Elements of a row.
        dtype: Their type.
        num_scales: Scales of a row.
        scale_dtype: Their type.
        idx_dtype: Type of the expert ids.
        max_tokens: Most tokens of a rank (low latency, and V2's worst-case dispatches).
        handle: Checksum of the handle's counts, so that a handle of another dispatch is noticed.
        alignment: To which the rows of an expert are rounded up, if the result of a dispatch is expanded. On a GPU
            `COMPACT` in a V2 dispatch whose result is not.
        is_reduced_once: 1: rows of an expanded result are summed once, at the token's rank; 0: a rank sums its own ones
            first.
        has_weights: 1: a dispatch of V2 has weights, also a cached one.
    """

    operation: str
    num_experts: int = 0
    num_topk: int = 0
    hidden: int = 0
    dtype: torch.dtype | None = None
    num_scales: int = 0
    scale_dtype: torch.dtype | None = None
    idx_dtype: torch.dtype | None = None
    max_tokens: int = 0
    handle: int = 0
    alignment: int = 0
    is_reduced_once: int = 0
    has_weights: int = 0

    def words(self) -> list[int]:
        """Encode the agreement as words of a header."""
        return [value if isinstance(value, int) else _WORDS[value] for value in self]

    @classmethod
    def from_words(cls, words: Sequence[int]) -> Agreement:
        """Decode words of a header. A value that no rank can have written, because it is damaged, stays a number."""
        values: dict[str, Any] = dict(zip(cls._fields, words, strict=False))
        for name, word in values.items():
            if name.endswith("dtype"):
                values[name] = _DTYPES[word - 1] if 0 < word <= len(_DTYPES) else word or None
        operation = OPERATIONS[words[0]] if 0 <= words[0] < len(OPERATIONS) else f"operation {words[0]}"
        return cls(**{**values, "operation": operation})

    def differing(self, other: Agreement) -> list[str]:
        """Return the names of the items that differ in another agreement."""
        return [name for name, mine, theirs in zip(self._fields, self, other, strict=True) if mine != theirs]


_ARGUMENTS = {  # where the items of an agreement come from, as the caller knows it
    "num_experts": "`num_experts`",
    "num_topk": "number of columns of `topk_idx` and `topk_weights`",
    "hidden": "hidden size of `x`",
    "dtype": "dtype of `x`",
    "num_scales": "number of columns of the scales",
    "scale_dtype": "dtype of the scales",
    "idx_dtype": "dtype of `topk_idx`",
    "max_tokens": "`num_max_tokens_per_rank`",
    "is_reduced_once": "`allow_multiple_reduction` of the buffer",
}
_LOW_LATENCY_ARGUMENTS = {  # likewise, where a low-latency call has the item from another argument
    "dtype": "`use_fp8`",
    "num_scales": "`round_scale`",
    "scale_dtype": "`use_ue8m0`",
    "max_tokens": "`num_max_dispatch_tokens_per_rank`",
}
_LOW_LATENCY_COMBINE_ARGUMENTS = {"num_scales": "`use_logfmt`"}
_SCALES, _IDS, _WEIGHTS = "scales of `x`", "`topk_idx` and `topk_weights`", "`topk_weights`"
_OPTIONAL = {  # what a call may leave out, and the items that are 0 or None then
    "num_scales": _SCALES,
    "scale_dtype": _SCALES,
    "num_topk": _IDS,
    "idx_dtype": _IDS,
    "has_weights": _WEIGHTS,
}
_DISPATCHES = ("dispatch", "worst-case dispatch", "cached dispatch")


def _arguments(operation: str) -> dict[str, str]:
    """Return the arguments that items of an agreement come from, as the caller of a method knows them."""
    names = dict(_ARGUMENTS)
    if operation.startswith(LOW_LATENCY):
        names.update(_LOW_LATENCY_ARGUMENTS)
        if operation.endswith("combine"):
            names.update(_LOW_LATENCY_COMBINE_ARGUMENTS)
    return names


def _independent_differences(mine: Agreement, theirs: Agreement) -> list[str]:
    """Return the items in which two agreements differ, without those that follow from others."""
    items = mine.differing(theirs)
    if "operation" in items:
        return ["operation"]
    if "is_reduced_once" in items:  # what ranks then send differs in number and dtype, too
        return ["is_reduced_once"]
    following: tuple[str, ...] = ()
    if mine.operation.startswith(LOW_LATENCY) and "dtype" in items:  # rows of another dtype have other scales
        following = ("num_scales", "scale_dtype")
    elif mine.operation == "cached dispatch" and "has_weights" in items:  # they travel as scales, or beside the rows
        following = ("num_scales", "scale_dtype", "num_topk")
    return [item for item in items if item not in following]


def _is_elastic(agreement: Agreement) -> bool:
    """Whether an agreement has an item that only calls of `ElasticBuffer` have. Not all of them do."""
    return bool(agreement.max_tokens or agreement.alignment or agreement.has_weights)


def _remedies(mine: Agreement, theirs: Agreement) -> list[str]:
    """Return what to pass so that two ranks make the same call; empty: it is another call."""
    operations, items = (mine.operation, theirs.operation), _independent_differences(mine, theirs)
    if "operation" in items:
        if not all(operation in _DISPATCHES for operation in operations):
            return []
        worst_case = "`do_cpu_sync=False`" if _is_elastic(mine) or _is_elastic(theirs) else "`num_worst_tokens`"
        names = {"cached dispatch": "`handle`", "worst-case dispatch": worst_case}
        return [f"{name} on all ranks, or on none" for operation, name in names.items() if operation in operations]
    is_low_latency, arguments, remedies = mine.operation.startswith(LOW_LATENCY), _arguments(mine.operation), []
    for item in items:
        optional = None if is_low_latency else _OPTIONAL.get(item)
        if item == "alignment":
            remedies += _alignment_remedies(mine, theirs)
        elif optional is not None and not (getattr(mine, item) and getattr(theirs, item)):
            optional = _WEIGHTS if optional is _IDS and mine.operation == "combine" else optional
            remedies.append(f"{optional} on all ranks, or on none")
        elif item in arguments:
            remedies.append(f"the same {arguments[item]} on all ranks")
    return remedies


def _alignment_remedies(mine: Agreement, theirs: Agreement) -> list[str]:
    if mine.operation in ("cached dispatch", "combine"):  # which have both from their handles
        return ["handles of one and the same dispatch on all ranks"]
    values = {mine.alignment, theirs.alignment}
    if values == {0, COMPACT}:
        return []
    return [f"the same {'`do_expand`' if min(values) <= 0 else '`expert_alignment`'} on all ranks"]


def _difference(item: str, mine: Any, theirs: Any, operation: str) -> str:
    """Describe in what a rank differs in one item, by the argument that it comes from where its own name is none."""
    if item == "alignment":
        if {mine, theirs} == {0, COMPACT}:
            return "a call of Buffer, not of ElasticBuffer" if theirs == 0 else "a call of ElasticBuffer, not of Buffer"
        if min(mine, theirs) <= 0:
            return f"do_expand {theirs > 0} not {mine > 0}"
        return f"expert_alignment {theirs} not {mine}"
    if item == "has_weights":
        return "topk_weights, not none" if theirs else "no topk_weights"
    if item == "is_reduced_once":
        return f"allow_multiple_reduction {not theirs} not {not mine}"
    name = item
    if item == "max_tokens" or (item == "num_scales" and operation.startswith(LOW_LATENCY)):
        name = _arguments(operation)[item].strip("`")
    return f"{name} {theirs} not {mine}"


def _differences(mine: Agreement, theirs: Agreement) -> str:
    """Describe in what a rank differs, for a message."""
    if mine.operation != theirs.operation:
        return f"{theirs.operation}, not {mine.operation}"
    items, operation = _independent_differences(mine, theirs), mine.operation
    named = [_difference(item, getattr(mine, item), getattr(theirs, item), operation) for item in items]
    return ", ".join(named) or "another call (what differs is in the output of the rank that saw it)"


def disagreement(where: str, me: str, clashes: Sequence[tuple[str, Agreement, Agreement]]) -> EPError:
    """Return the error for ranks that do not make the same call.

    Args:
        where: The call.
        me: This rank, as messages name it.
        clashes: The name of each rank that differs, what it is compared with, and what it has sent.
    """
    said = "; ".join(f"{name} has {_differences(mine, theirs)}" for name, mine, theirs in clashes)
    found = [_remedies(mine, theirs) for _, mine, theirs in clashes]
    remedy = "Make the calls in the same order on all ranks"
    if found and all(found):
        remedy = f"Pass {', and '.join(dict.fromkeys(one for remedies in found for one in remedies))}"
    elif {item for _, mine, theirs in clashes for item in mine.differing(theirs)} == {"handle"}:
        remedy = "Pass handles of one and the same dispatch on all ranks, and make the calls in the same order"
    return EPError(f"{where}: all ranks must make the same call, but {said} ({me}). {remedy}")


def clashes_among(said: dict[int, list[int]], mine: list[int]) -> list[tuple[str, Agreement, Agreement]]:
    """Return the ranks that make another call than most, for `disagreement`. All ranks thus name the same ones.

    Args:
        said: By rank, the words of what must agree; also this rank's.
        mine: The words of this rank, which count where as many ranks make one call as another.
    """
    counts = Counter(map(tuple, said.values()))
    usual = max(counts, key=lambda words: (counts[words], words == tuple(mine)))
    return [
        (f"rank {rank}", Agreement.from_words(usual), Agreement.from_words(words))
        for rank, words in sorted(said.items())
        if tuple(words) != usual
    ]


def overflow(rank: int, num_rows: int, limit: int, me: str, *, is_closed: bool = False) -> EPOverflow:
    """Return the error for a dispatch of more rows than the `num_worst_tokens` of a rank.

    Args:
        rank: The rank that would receive them.
        num_rows: How many.
        limit: Its `num_worst_tokens`.
        me: This rank, as messages name it.
        is_closed: The buffer is closed thereby.
    """
    return EPOverflow(
        f"dispatch: rank {rank} receives {num_rows} rows, more than its num_worst_tokens={limit} ({me}). "
        f"Raise num_worst_tokens; tokens x ranks always suffices{_CLOSED if is_closed else ''}"
    )


def expanded_overflow(rank: int, num_rows: int, limit: int, me: str, *, is_closed: bool = False) -> EPOverflow:
    """Return the error for more expanded rows than the worst case has memory for; see `overflow`."""
    return EPOverflow(
        f"dispatch: rank {rank} receives {num_rows} expanded rows, and the worst case is {limit} ({me}): tokens name "
        "an expert more than once. Dispatch with do_cpu_sync=True, or have each token name an expert "
        f"once{_CLOSED if is_closed else ''}"
    )


def checksum(counts: Sequence[Sequence[int]]) -> int:
    """Return a number that tells handles of different dispatches apart: from their `rank_prefix_matrix`, and, if they
    are expanded, from the selections of each expert by each rank.
    """
    # From 1 on: 0 in an agreement is a call without a handle.
    return 1 + zlib.crc32(array("q", chain.from_iterable(counts)))


def handle_number(ends: Sequence[Sequence[int]], handle: Any) -> int:
    """Return the number of a handle inside one node, which ranks compare.

    On the CPU the handle carries the number of its dispatch, in items that are zeros otherwise (also after a worst-case
    dispatch of V1): the rows from each rank to each, which other handles are compared by, are often the same in all
    dispatches.

    Args:
        ends: Its `rank_prefix_matrix`.
        handle: The handle.
    """
    return checksum([*ends, handle.recv_channel_prefix_matrix.flatten()[:1].tolist()])


class Header(NamedTuple):
    """What a rank publishes when it enters a call.

    Attributes:
        agreement: What must be the same on all ranks.
        num_tokens: Tokens of this rank.
        num_worst_tokens: Rows that it has allocated beforehand; 0: it allocates when the counts are known.
        is_posted: Its rows lie on its board. Where all ranks' do, the call needs nothing but the headers.
        max_tokens: Most tokens of a rank, as this rank gives it; 0: it does not.
    """

    agreement: Agreement
    num_tokens: int
    num_worst_tokens: int = 0
    is_posted: int = 0
    max_tokens: int = 0

    def words(self) -> list[int]:
        """Encode the header as words of the board."""
        return [*self.agreement.words(), self.num_tokens, self.num_worst_tokens, self.is_posted, self.max_tokens]


class Offer(NamedTuple):
    """The memory in which a rank receives the rows of a call, or gives them.

    Attributes:
        num_rows: Rows that fit there.
        is_staged: The memory is staging, of which every source has a part; it is used in rounds.
        bases: The base of each section; None for one without bytes.
        is_expanded: Rows go to their place in an expanded result, one for each selection; records are compact.
    """

    num_rows: int
    is_staged: bool
    bases: tuple[Base | None, ...]
    is_expanded: bool = False

    def words(self) -> list[int]:
        """Encode the offer as words of the board."""
        words = [self.num_rows, int(self.is_staged) + 2 * int(self.is_expanded), len(self.bases)]
        for base in self.bases:
            words += base.words() if base is not None else _NO_BASE
        return words

    @classmethod
    def from_words(cls, words: Sequence[int]) -> Offer:
        """Decode an offer from words of the board."""
        num_rows, flags, num_bases = words[:3]
        parts = [words[3 + 3 * i : 6 + 3 * i] for i in range(num_bases)]
        bases = tuple(Base.from_words(part) if any(part) else None for part in parts)
        return cls(num_rows, bool(flags & 1), bases, bool(flags & 2))

    def rows_per_source(self, num_ranks: int) -> int:
        """Return the rows of staging that each source has."""
        return self.num_rows // num_ranks


def is_refusal(error: BaseException) -> bool:
    """Return whether an exception, raised before a call was begun, is about the call, which may be corrected and
    made.
    """
    # Assertions: arguments that exclude each other are asserted, as in DeepEP.
    return isinstance(error, (ValueError, TypeError, AssertionError, EPError))
