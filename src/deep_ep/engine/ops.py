"""The steps of a call, as the scripts of `streamed.py` take them: one set for one hop, one for two.

A call has a *signature*: everything about it but its tensors' memory and the number of its tokens. What follows from it
(which kernels, how they are launched, the words that must agree, the widths of rows) is found once, and kept: the steps
of a signature. A call then checks little, takes memory, and hands addresses to launches that are bound already.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from ..kernels.notify import Post
from .memory import Columns, Sections
from .parcel import Payload, Received, Routing
from .shapes import Shapes
from .signals import Counts


class DispatchSignature(NamedTuple):
    """What tells dispatches apart.

    Attributes:
        operation: One of `call.OPERATIONS`.
        hidden: H.
        dtype: Of the payload.
        alignment: The payload begins at a multiple of so many bytes, at most 16.
        num_scales: Scales of a row.
        scale_dtype: Their type; None: there are none.
        num_topk: K; 0: ids and weights do not travel.
        idx_dtype: Type of the ids; None: there are none.
        num_experts: E; 0: there is a handle.
        num_sms: Most blocks of a kernel; None: nothing bounds them.
    """

    operation: str
    hidden: int
    dtype: torch.dtype
    alignment: int
    num_scales: int
    scale_dtype: torch.dtype | None
    num_topk: int
    idx_dtype: torch.dtype | None
    num_experts: int
    num_sms: int | None


class CombineSignature(NamedTuple):
    """What tells combines apart.

    Attributes:
        hidden: H.
        dtype: Of the rows.
        num_topk: K, of the weights that come back with the rows; 0: none do.
        num_biases: At most two.
        is_aligned: Sums and biases begin at multiples of 16 bytes.
        num_sms: Most blocks of a kernel; None: nothing bounds them.
    """

    hidden: int
    dtype: torch.dtype
    num_topk: int
    num_biases: int
    is_aligned: bool
    num_sms: int | None


class Supply(NamedTuple):
    """How a rank gives its rows in a combine.

    Attributes:
        path: `pulled`, `copied_in` or `staged`.
        post: What it says of them.
        copies: Pairs of a region and the rows that are copied into it first.
    """

    path: str
    post: Post
    copies: list[tuple[torch.Tensor, torch.Tensor]]


class DispatchSteps(Protocol):
    """The steps of dispatches with one signature: in the order of a call, and some of them launch kernels.

    Attributes:
        columns: What the rows consist of, for whoever makes room for them.
    """

    columns: Columns

    def route(self, scope: Any, routing: Routing, num_channels: int, num_rows: int) -> Any:
        """Memory for the routes of a dispatch that has routing; `num_rows` is what it made room for, 0: it guesses."""
        ...

    def follow(self, handle: Any) -> Any:
        """The routes of a dispatch that follows a handle."""
        ...

    def notify(self, scope: Any, post: Post, payload: Payload, routing: Routing | None, routes: Any) -> None:
        """Number the tokens, if there is routing; say what this rank brings and offers, and hear all others."""
        ...

    def offer(self, scope: Any, post: Post, payload: Payload, routes: Any) -> None:
        """Say and hear again, with exact offers, after a guess that did not fit everywhere."""
        ...

    def move(self, scope: Any, payload: Payload, routing: Routing | None, routes: Any, sections: Sections) -> None:
        """Move the rows, and wait for the peers' to be there. Does nothing while a call is held."""
        ...

    def grow(self, told: Counts, payload: Payload, routing: Routing) -> None:
        """Make room, on all ranks alike, where some rank lacks it for this call or for its combine."""
        ...

    def rerouted(self, scope: Any, routes: Any, told: Counts, routing: Routing) -> Any:
        """The routes with exact memory, after a guess that did not fit."""
        ...

    def unpack(self, scope: Any, routing: Routing, routes: Any, sections: Sections, num_channels: int) -> Any:
        """Take the records apart, into memory for as many rows as there is room for."""
        ...

    def received(
        self, routing: Routing, routes: Any, sections: Sections, unpacked: Any, num_rows: int, told: Counts | None
    ) -> Received:
        """What a dispatch returns: so many rows, and the handle. Counts are told of a full dispatch alone."""
        ...


class CombineSteps(Protocol):
    """The steps of combines with one signature."""

    def notify(self, scope: Any, supply: Supply, handle: Any) -> None:
        """Copy in what must be, say where this rank's rows are, and hear all others."""
        ...

    def sum(
        self,
        scope: Any,
        parts: Sequence[torch.Tensor],
        handle: Any,
        sums: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor],
    ) -> None:
        """Sum what the peers have for this rank's tokens, and wait until they have summed what this rank has."""
        ...


class Ops(Protocol):
    """Where steps come from: one hop (`one_hop.py`), or two (`relays/two_hops.py`).

    Attributes:
        can_stage: Rows without room in the window may go through the staging.
        shapes: How bulk kernels are launched, of steps that are made from now on.
    """

    can_stage: bool
    shapes: Shapes

    def dispatch(self, signature: DispatchSignature) -> DispatchSteps:
        """The steps of a signature, made anew."""
        ...

    def combine(self, signature: CombineSignature) -> CombineSteps:
        """Likewise."""
        ...

    def numbers(self) -> dict[str, Any]:
        """What it has counted beside the engine."""
        ...

    def close(self) -> None:
        """Let go of what it holds, once everything that was launched is done."""
        ...
