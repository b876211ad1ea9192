"""Low-latency calls on the CPU (`docs/low-latency.md`): publish rows in one's own memory, fetch from the peers'.

The low-latency memory of a rank begins with the tables, one for each of the last calls; the quarters follow. Rows that
a combine copies in are packed without gaps, so that only what is used is touched.

Everything called `send` or `receive` runs on the comm stream.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ... import logfmt, quant
from ...errors import EPError, EPTimeout
from ...event import EventHandle
from ...kernels import low_latency_rows as kernels
from ...kernels.rows import widest_dtype
from ...stream import CommStream
from ...trace import NO_SLICE, RECEIVE, SEND, WAIT, Slice
from ...transport import Arena, Base, Window, ordinary_tensor
from ...transport.board import NUM_SENT_POSTS
from ...transport.spans import Span
from ...transport.sparse import GRAIN_BYTES, Atlas, HollowMemory, SparseSegment
from ...transport.window import SENT_TABLE_BYTES, SENT_TABLES_BYTES, told
from ..call import LOW_LATENCY, Agreement, Call, Chain, Header
from .calls import BARRIER, COMBINE, DISPATCH, METHODS, Hook, Packed, Rows, Way, agreement_of
from .flights import Flights
from .geometry import Form, Geometry, Plan, plan_sets
from .zero_copy import ZeroCopy, zero_copy_view

_LEAST_RECYCLED_BYTES = 1 << 20  # below, torch's own allocation is as good
_LOGFMT_ROWS = 64  # compressed at a time
_NO_PLAN = Plan(GRAIN_BYTES, 1)  # of a call without rows


class DirectLowLatency:
    """Low-latency calls of one buffer.

    Args:
        chain: The normal calls of the buffer, with which these share their failures.
        stream: Where communication runs.
        num_bytes: That this rank asked for; the largest wish of all ranks counts.
        enable_shrink: Mask ranks that stay silent, instead of failing.
    """

    def __init__(self, chain: Chain, stream: CommStream, num_bytes: int, enable_shrink: bool):
        segment = chain.window.low_latency
        assert segment is not None, "the window has low-latency memory if any rank asks for it"
        assert segment.span.num_bytes >= num_bytes + SENT_TABLES_BYTES
        self._chain = chain
        self._stream = stream
        self._flights = Flights()
        self._zero_copy = ZeroCopy()
        self._results = Arena(HollowMemory())
        self.shared = _Shared(chain.window, segment, enable_shrink)

    # Calls -----------------------------------------------------------------------------------------------------------

    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        geometry: Geometry,
        form: Form,
        way: Way,
        recv_stats: torch.Tensor | None,
        wait_stats: torch.Tensor | None,
    ) -> tuple[Packed, EventHandle | None, Hook | None]:
        """Send each token to its experts; see `LowLatency`."""
        plan = plan_sets("low_latency_dispatch", self.shared.num_bytes, geometry.dispatch_bytes(form), geometry)
        packed = self._empty_packed(geometry, form)
        call = _Dispatch(self.shared, plan, wait_stats, x, topk_idx, geometry, form, packed, recv_stats)
        return packed, *self._make(call, way)

    def combine(
        self,
        rows: Rows,
        geometry: Geometry,
        way: Way,
        out: torch.Tensor | None,
        wait_stats: torch.Tensor | None,
    ) -> tuple[torch.Tensor, EventHandle | None, Hook | None]:
        """Bring the experts' rows back; see `LowLatency`."""
        plan = plan_sets("low_latency_combine", self.shared.num_bytes, geometry.combine_bytes, geometry)
        if out is None:
            out = self._chain.result((rows.topk_idx.size(0), geometry.hidden), torch.bfloat16)
        zero_copy_offset = None
        if rows.zero_copy:
            self._make_way(COMBINE, plan.num_sets)  # a refused call must not take the tensor
            index = self._zero_copy.give(rows.src_info, self._flights.next_number)
            zero_copy_offset = plan.zero_copy_offset(index)
        call = _Combine(self.shared, plan, wait_stats, rows, geometry, out, zero_copy_offset)
        return out, *self._make(call, way)

    def clean(self) -> None:
        """A barrier over the ranks that are not masked."""
        self._make(_Barrier(self.shared, _NO_PLAN, None), Way())

    def combine_buffer(self, src_info: torch.Tensor, geometry: Geometry) -> torch.Tensor:
        """The zero-copy tensor of a handle. Memory comes as it is written: most rows never are."""
        where = "get_next_low_latency_combine_buffer"
        plan = plan_sets(where, self.shared.num_bytes, geometry.combine_bytes, geometry)
        self._stream.synchronize()  # a queued combine may still have to be read by the peers
        offset = plan.zero_copy_offset(self._zero_copy.take(src_info, self._flights.num_consumed))
        return zero_copy_view(self.shared.uncommitted_bytes(offset, geometry.combine_bytes), geometry)

    # Masks -----------------------------------------------------------------------------------------------------------

    def update_mask(self, rank: int, is_masked: bool) -> None:
        """Mask a rank for this rank's calls, or no longer. Behind what is queued."""
        change = self.shared.masked.add if is_masked else self.shared.masked.discard
        self._stream.run(lambda: change(rank))

    def query_mask(self, status: torch.Tensor) -> None:
        """Write the masks into [R] int32."""

        def write() -> None:
            status.copy_(torch.tensor([int(rank in self.shared.masked) for rank in range(status.numel())]))

        self._stream.run(write)

    def clean_mask(self) -> None:
        """Mask nobody."""
        self._stream.run(self.shared.masked.clear)

    def trim(self) -> int:
        """Give memory of results that nobody uses back to the system. Returns the bytes given back."""
        return self._results.trim()

    # Inside ----------------------------------------------------------------------------------------------------------

    def _make(self, call: _LowLatencyCall, way: Way) -> tuple[EventHandle | None, Hook | None]:
        """Make a call: its send half, and its receive half unless there is a hook for that."""
        self._chain.require_working()
        operation = call.agreement.operation
        num_sets = 0 if isinstance(call, _Barrier) else call.plan.num_sets
        self._make_way(operation, num_sets)
        flight = self._flights.send(METHODS[operation], num_sets)
        call.number = flight.number
        send, receive = self._contagious(call, call.send, "send"), self._contagious(call, call.receive, "receive")
        if way.has_hook:
            self._stream.run(send)

            def hook() -> None:
                self._flights.receive(flight)
                self._stream.run(receive)

            return None, hook

        def both() -> None:
            send()
            receive()

        self._flights.receive(flight)
        if way.is_async:
            return EventHandle(self._stream.submit(both)), None
        self._stream.run(both)
        return None, None

    def _make_way(self, operation: str, num_sets: int) -> None:
        """Have everybody read what the next call writes over, or refuse it."""
        if self._flights.needs_barrier(num_sets):
            self.clean()
        self._flights.require_room(METHODS[operation], num_sets)

    def _contagious(self, call: _LowLatencyCall, work: Callable[[], None], name: str) -> Callable[[], None]:
        """Whatever goes wrong in a half goes wrong for all ranks."""

        def half() -> None:
            self._chain.require_working()
            trace = self.shared.window.trace
            try:
                if trace is not None:
                    trace.begin_call(f"{call.agreement.operation} {name}", call=call.number)
                work()
                if trace is not None:
                    trace.end_call(path=LOW_LATENCY)
            except BaseException as error:
                self._chain.fail(error, call.name)
                raise

        return half

    def _empty_packed(self, geometry: Geometry, form: Form) -> Packed:
        num_local, num_rows = geometry.num_local_experts, geometry.num_rows
        scales = None
        if form.scale_dtype is not None:
            scales = self._result((num_local, geometry.num_scales(form), num_rows), form.scale_dtype).transpose(1, 2)
        return Packed(
            self._result((num_local, num_rows, geometry.hidden), form.dtype),
            scales,
            ordinary_tensor((num_local,), torch.int32),
            ordinary_tensor((num_local, num_rows), torch.int32),
            ordinary_tensor((num_local, geometry.num_ranks), torch.int64),
        )

    def _result(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor, most of which is never touched: recycled if it is large."""
        large = math.prod(shape) * dtype.itemsize >= _LEAST_RECYCLED_BYTES
        region = self._results.allocate(shape, dtype) if large else None
        return region if region is not None else ordinary_tensor(shape, dtype)


class _Shared:
    """What the calls of a buffer have in common: the memory, the masks, and scratch.

    Args:
        window: Of the buffer.
        segment: Its low-latency memory.
        can_mask: Whether ranks that stay silent are masked.
    """

    def __init__(self, window: Window, segment: SparseSegment, can_mask: bool):
        self.window = window
        self.can_mask = can_mask
        self.masked: set[int] = set()
        self.atlas = Atlas()
        self.caster = kernels.Caster()
        self.summer = kernels.Summer()
        self._segment = segment
        self._segments: dict[int, Span] = {}
        self.atlas.add(segment.mapping)

    @property
    def num_bytes(self) -> int:
        """Of the sets and the zero-copy tensors."""
        return self._segment.span.num_bytes - SENT_TABLES_BYTES

    def bytes(self, offset: int, num_bytes: int) -> torch.Tensor:
        """This rank's bytes behind the tables, committed."""
        return self._segment.commit(SENT_TABLES_BYTES + offset, num_bytes)

    def uncommitted_bytes(self, offset: int, num_bytes: int) -> torch.Tensor:
        """The same, as they are."""
        return self._segment.bytes(SENT_TABLES_BYTES + offset, num_bytes)

    def table(self, number: int, size: int) -> torch.Tensor:
        """[size] int64: this rank's table of a call."""
        return self._segment.commit(_table_offset(number), 8 * size).view(torch.int64)

    def base(self, offset: int) -> Base:
        """What a peer needs to find bytes behind the tables."""
        span = self._segment.span
        return Base(span, span.start + SENT_TABLES_BYTES + offset)

    def own_place(self) -> int:
        """A place in this rank's own memory, which can always be read."""
        return self.atlas.place_of(self._segment.mapping, self._segment.span.start + SENT_TABLES_BYTES)

    def reach(self, rank: int, segment: Span) -> None:
        """Have a rank's low-latency memory in the atlas. Places move with it.

        Raises:
            _SpoiledError: Its memory was elsewhere before.
        """
        if self._segments.setdefault(rank, segment) != segment:
            raise _SpoiledError(f"window: the low-latency memory of rank {rank} has moved. This is a bug: report it")
        self.atlas.add(self.window.peers[rank].mapping(Base(segment, segment.start), segment.stop))

    def fault(self, point: str) -> None:
        """Reach a fault point."""
        if self.window.fault is not None:
            self.window.fault(point)


class _SpoiledError(EPError):
    """What a peer has published does not fit."""


class _Post(NamedTuple):
    """What a rank says of a call that it has sent, beside what must agree.

    Attributes:
        num_rows: Rows that it has published.
        base: Where they begin.
    """

    num_rows: int
    base: Base


class _LowLatencyCall(ABC):
    """One call of this rank.

    Args:
        shared: Of the buffer.
        plan: How calls of this size divide the memory.
        wait_stats: [R] int64; the nanoseconds waited for each rank are added. Or None.

    Attributes:
        agreement: What all ranks must say alike.
        number: Of the call, from 1.
    """

    agreement: Agreement
    number = 0

    def __init__(self, shared: _Shared, plan: Plan, wait_stats: torch.Tensor | None):
        self.shared = shared
        self.plan = plan
        self._wait_stats = wait_stats

    @property
    def name(self) -> Call:
        """The call, for messages."""
        return Call(self.shared.window, self.number, Header(self.agreement, 0))

    def send(self) -> None:
        """Publish, and say so. Waits for nothing."""
        window, operation = self.shared.window, self.agreement.operation
        with self._slice("publish", SEND):
            num_rows, base = self._publish()
        window.board.post_sent(self.number, [*self.agreement.words(), num_rows, *base.words()])
        self.shared.fault(f"{operation}: before sent")
        window.board.sent.store_release(self.number)
        self.shared.fault(f"{operation}: after sent")

    def receive(self) -> None:
        """Wait for everybody who is not masked, and fetch. Again without them, if peers turn out to be far ahead."""
        self.shared.fault(f"{self.agreement.operation}: before receive")
        while True:
            self._wait()
            spoiled = None
            try:
                with self._slice("fetch", RECEIVE):
                    self._fetch(self._posts())
            except _SpoiledError as error:
                spoiled = error
            # Whoever went on without this rank may have written over what was being read.
            ahead = self._ahead()
            if not ahead:
                break
            self._lose(ahead)
        if spoiled is not None:
            raise EPError(str(spoiled))
        self._finish()

    @abstractmethod
    def _publish(self) -> _Post:
        """Write rows and table into this rank's memory."""

    def _fetch(self, posts: dict[int, _Post]) -> None:
        """Read what the ranks in `posts` have published. Done again, without some of them, if they went on too early.

        Raises:
            _SpoiledError: It makes no sense.
        """
        del posts

    def _finish(self) -> None:
        """Do what is done only once."""
        return

    # Peers -----------------------------------------------------------------------------------------------------------

    def _wait(self) -> None:
        shared = self.shared
        ranks = [rank for rank in range(len(shared.window.peers)) if rank not in shared.masked]
        with self._slice("wait: sent", WAIT) as waiting:
            arrivals = shared.window.wait_sent(self.number, ranks, self.agreement.operation, may_lose=shared.can_mask)
            waiting.waited({rank: ns * 1e-9 for rank, ns in enumerate(arrivals.waited_ns) if ns})
        if self._wait_stats is not None:
            self._wait_stats.add_(torch.tensor(arrivals.waited_ns))
        if arrivals.lost:
            self._mask(arrivals.lost)

    def _slice(self, name: str, kind: str) -> Slice:
        """A part of the call, as a trace shows it."""
        trace = self.shared.window.trace
        return trace.slice(name, kind) if trace is not None else NO_SLICE

    def _note(self, counts: torch.Tensor, row_bytes: int, **more: Any) -> None:
        """Have the trace show the rows from each rank, and those for each local expert."""
        trace = self.shared.window.trace
        assert trace is not None
        trace.note(rows_from=counts.tolist(), row_bytes=row_bytes, **more)

    def _posts(self) -> dict[int, _Post]:
        """What the unmasked ranks have posted, with their memory within reach.

        Raises:
            _SpoiledError: They do not agree; it says who differs in what.
        """
        window, mine = self.shared.window, self.agreement
        expected, posts, clashes = mine.words(), {}, []
        for peer in window.peers:
            # A masked rank's post may be of any call. This rank itself can be masked, too.
            if peer.rank in self.shared.masked:
                continue
            words = peer.board.read_sent(self.number)
            size = len(expected)
            if words[:size] != expected:
                clashes.append(f"rank {peer.rank} has {mine.differences(Agreement.from_words(words[:size]))}")
            posts[peer.rank] = _Post(words[size], Base.from_words(words[size + 1 : size + 4]))
        if clashes:
            raise _SpoiledError(
                f"{self.name}: all ranks must make the same call, but {'; '.join(clashes)} "
                f"({window.me()}). Make the calls in the same order on all ranks"
            )
        for rank, post in posts.items():
            self.shared.reach(rank, post.base.segment)
        return posts

    def _ahead(self) -> dict[int, str]:
        """Which ranks have sent so much that the set of this call is another's, and how that is said."""
        peers = [peer for peer in self.shared.window.peers if peer.rank not in self.shared.masked]
        sent = {peer.rank: peer.board.sent.load_acquire() for peer in peers}
        # With 2k sets a peer that still waits for this rank is at most 2k - 1 calls further (`docs/low-latency.md`).
        limit = self.number + self.plan.num_sets
        return {
            rank: f", which has gone on without this rank (it is at call {number})"
            for rank, number in sent.items()
            if number >= limit
        }

    def _lose(self, lost: dict[int, str]) -> None:
        """Mask ranks, or fail for them."""
        window = self.shared.window
        if not self.shared.can_mask:
            raise EPTimeout(
                f"{self.name}: {told(lost)} ({window.me()}). This rank was too late; look "
                "at its output, and make a new buffer"
            )
        self._mask(lost)

    def _mask(self, lost: dict[int, str]) -> None:
        window = self.shared.window
        self.shared.masked.update(lost)
        warnings.warn(
            f"{self.name}: {told(lost)}. From now on masked: its experts' results are missing ({window.me()})",
            RuntimeWarning,
            stacklevel=2,
        )

    def _peer_table(self, rank: int, post: _Post, size: int) -> torch.Tensor:
        """[size] int64: a peer's table of this call, where it lies."""
        base = Base(post.base.segment, post.base.segment.start + _table_offset(self.number))
        mapping = self.shared.window.peers[rank].mapping(base, base.offset + 8 * size)
        return mapping.rows(base.offset, 1, size, torch.int64)[0]

    def _peer_place(self, rank: int, post: _Post, num_bytes: int) -> int:
        """The place where a peer's rows begin, of which `num_bytes` will be read."""
        mapping = self.shared.window.peers[rank].mapping(post.base, post.base.offset + num_bytes)
        return self.shared.atlas.place_of(mapping, post.base.offset)


class _Barrier(_LowLatencyCall):
    """Nothing is sent but the signal."""

    agreement = Agreement(BARRIER)

    def _publish(self) -> _Post:
        return _Post(0, self.shared.base(0))


class _Dispatch(_LowLatencyCall):
    """Tokens to experts. A set holds T rows, and behind them the tokens of each expert: [n] int32, by expert."""

    def __init__(
        self,
        shared: _Shared,
        plan: Plan,
        wait_stats: torch.Tensor | None,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        geometry: Geometry,
        form: Form,
        packed: Packed,
        recv_stats: torch.Tensor | None,
    ):
        super().__init__(shared, plan, wait_stats)
        self._x = x
        self._topk_idx = topk_idx
        self._geometry = geometry
        self._form = form
        self._packed = packed
        self._recv_stats = recv_stats
        self.agreement = agreement_of(
            DISPATCH, geometry, form.dtype, form.scale_dtype, int(form.round_scale), topk_idx.dtype
        )

    def _publish(self) -> _Post:
        geometry, form, x = self._geometry, self._form, self._x
        offset, row_bytes = self.plan.set_offset(self.number), geometry.row_bytes(form)
        rows = self.shared.bytes(offset, x.size(0) * row_bytes).view(-1, row_bytes)
        if form.use_fp8:
            first, stop = geometry.scales_offset, geometry.scales_offset + 4 * geometry.num_groups
            q = rows[:, : geometry.hidden].view(torch.float8_e4m3fn)
            self.shared.caster.cast(x, q, rows[:, first:stop].view(torch.float32), form.round_scale)
        else:
            rows.view(torch.bfloat16)[:, : geometry.hidden] = x
        selections = kernels.select(self._topk_idx, geometry.num_experts)
        self.shared.table(self.number, geometry.num_experts).copy_(selections.counts)
        num_sent = selections.keys.numel()
        tokens = self.shared.bytes(offset + geometry.places_offset(form), 4 * num_sent).view(torch.int32)
        tokens.copy_(selections.keys % max(1, x.size(0)))
        return _Post(x.size(0), self.shared.base(offset))

    def _fetch(self, posts: dict[int, _Post]) -> None:
        geometry, packed = self._geometry, self._packed
        arrivals = self._arrivals(posts)
        blocks, tokens = arrivals.blocks, arrivals.tokens
        counts = blocks.expert_counts.tolist()
        columns, atlas = self._atlas_rows()
        kernels.fetch_rows(packed.x.view(columns), atlas, arrivals.places, counts)
        if packed.scales is not None:
            self._fetch_scales(packed.scales, arrivals.places, counts)
        packed.src_info.view(-1).index_copy_(0, blocks.rows_apart(geometry.num_rows), tokens.int())
        packed.num_rows.copy_(blocks.expert_counts)
        packed.layout_range.copy_(blocks.layout_range())
        if self.shared.window.trace is not None:
            self._note(blocks.counts.sum(0), geometry.row_bytes(self._form), experts=blocks.expert_counts.tolist())

    def _finish(self) -> None:
        if self._recv_stats is not None:
            self._recv_stats.add_(self._packed.num_rows)

    def _atlas_rows(self) -> tuple[torch.dtype, torch.Tensor]:
        """The widest elements that rows can be fetched in, and the atlas in them."""
        num_bytes = self._geometry.hidden * self._form.dtype.itemsize
        dtype = widest_dtype(num_bytes, self._packed.x.data_ptr())
        return dtype, self.shared.atlas.rows(num_bytes // dtype.itemsize, dtype)

    def _fetch_scales(self, scales: torch.Tensor, places: torch.Tensor, counts: list[int]) -> None:
        geometry = self._geometry
        atlas = self.shared.atlas.rows(geometry.num_groups, torch.float32, geometry.scales_offset)
        values = atlas.index_select(0, places)
        kernels.spread_rows(scales, quant.pack_ue8m0(values) if self._form.use_ue8m0 else values, counts)

    def _arrivals(self, posts: dict[int, _Post]) -> _Arrivals:
        """Who sends what to this rank's experts, out of the peers' tables. Checked: it becomes addresses."""
        geometry, row_bytes = self._geometry, self._geometry.row_bytes(self._form)
        num_local, ranks = geometry.num_local_experts, list(posts)
        first = self.shared.window.rank * num_local
        tables = torch.stack([self._peer_table(rank, post, geometry.num_experts) for rank, post in posts.items()])
        counts = torch.zeros(geometry.num_ranks, num_local, dtype=torch.int64)
        counts[ranks] = tables[:, first : first + num_local]
        blocks = kernels.Blocks.of(counts.t().contiguous())
        starts, sizes = tables[:, :first].sum(1).tolist(), counts.sum(1)
        listed = [
            self._peer_tokens(rank, post, start, start + size)
            for (rank, post), start, size in zip(posts.items(), starts, sizes[ranks].tolist(), strict=True)
        ]
        tokens, limits = torch.cat(listed).long(), sizes.new_zeros(geometry.num_ranks)
        limits[ranks] = limits.new_tensor([post.num_rows for post in posts.values()])
        if not bool(((tokens >= 0) & (tokens < limits.repeat_interleave(sizes))).all()):
            raise self._spoiled()
        bases = torch.zeros_like(limits)
        bases[ranks] = bases.new_tensor(
            [self._peer_place(rank, post, post.num_rows * row_bytes) for rank, post in posts.items()]
        )
        places = bases.repeat_interleave(sizes).add_(tokens, alpha=row_bytes // GRAIN_BYTES)
        rows = kernels.rows_by_rank(blocks)
        return _Arrivals(
            blocks,
            torch.empty_like(tokens).scatter_(0, rows, tokens),
            torch.empty_like(places).scatter_(0, rows, places),
        )

    def _spoiled(self) -> _SpoiledError:
        return _SpoiledError(f"{self.name}: a peer's table makes no sense. This is a bug: report it")

    def _peer_tokens(self, rank: int, post: _Post, start: int, stop: int) -> torch.Tensor:
        """Some of the tokens that a peer has listed, int32, where they lie."""
        geometry = self._geometry
        if not 0 <= start <= stop <= post.num_rows * geometry.num_topk:
            raise self._spoiled()
        segment, offset = post.base
        base = Base(segment, offset + geometry.places_offset(self._form) + 4 * start)
        mapping = self.shared.window.peers[rank].mapping(base, base.offset + 4 * (stop - start))
        return mapping.rows(base.offset, 1, stop - start, torch.int32)[0]


class _Arrivals(NamedTuple):
    """What comes to this rank's experts.

    Attributes:
        blocks: How many rows for which expert from which rank.
        tokens: [n] int64, the token of each row at its source.
        places: [n] int64, the place of each row.
    """

    blocks: kernels.Blocks
    tokens: torch.Tensor
    places: torch.Tensor


class _Combine(_LowLatencyCall):
    """The experts' rows back.

    The table says, for each local expert and rank, how many rows there are and which is the first: [L, R] int64, `count
    | first row << 32`.
    """

    def __init__(
        self,
        shared: _Shared,
        plan: Plan,
        wait_stats: torch.Tensor | None,
        rows: Rows,
        geometry: Geometry,
        out: torch.Tensor,
        zero_copy_offset: int | None,
    ):
        super().__init__(shared, plan, wait_stats)
        self._rows = rows
        self._geometry = geometry
        self._out = out
        self._zero_copy_offset = zero_copy_offset
        self.agreement = agreement_of(
            COMBINE, geometry, torch.bfloat16, None, int(rows.use_logfmt), rows.topk_idx.dtype
        )

    def _publish(self) -> _Post:
        geometry = self._geometry
        table = self.shared.table(self.number, geometry.num_experts).view(geometry.num_local_experts, -1)
        blocks, rows = kernels.rows_of_layout(self._rows.layout_range, geometry.num_rows)
        if self._zero_copy_offset is not None:
            firsts = (self._rows.layout_range >> 32) + self._expert_rows()
            torch.bitwise_or(blocks.counts, firsts << 32, out=table)
            return _Post(table.size(0) * geometry.num_rows, self.shared.base(self._zero_copy_offset))
        torch.bitwise_or(blocks.counts, blocks.starts << 32, out=table)
        offset = self.plan.set_offset(self.number)
        if rows.numel() > geometry.num_experts * geometry.max_tokens:
            raise EPError(f"{self.name}: the handle speaks of {rows.numel()} rows, more than dispatch can bring")
        slots = self.shared.bytes(offset, rows.numel() * geometry.slot_bytes).view(-1, geometry.slot_bytes)
        x = self._rows.x.view(-1, geometry.hidden)
        if self._rows.use_logfmt:
            self._compress(x, rows, slots)
        else:
            torch.index_select(x, 0, rows, out=slots.view(torch.bfloat16)[:, : geometry.hidden])
        return _Post(rows.numel(), self.shared.base(offset))

    def _expert_rows(self) -> torch.Tensor:
        """[L, 1]: the first row of each local expert."""
        geometry = self._geometry
        return (torch.arange(geometry.num_local_experts) * geometry.num_rows).unsqueeze(1)

    def _compress(self, x: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
        geometry = self._geometry
        first, stop = geometry.ranges_offset, geometry.ranges_offset + 4 * geometry.num_groups
        for wanted, part in zip(rows.split(_LOGFMT_ROWS), slots.split(_LOGFMT_ROWS), strict=True):
            units, ranges = logfmt.encode(x.index_select(0, wanted))
            part[:, : 2 * geometry.hidden] = units
            part[:, first:stop] = ranges.flatten(1).view(torch.uint8)

    def _fetch(self, posts: dict[int, _Post]) -> None:
        geometry, topk_idx = self._geometry, self._rows.topk_idx
        selections = kernels.select(topk_idx, geometry.num_experts)
        places = self._expert_places(posts, selections)
        experts = topk_idx.clamp(0, geometry.num_experts - 1).long()
        first = places[experts]
        is_skipped = ~kernels.is_selection(topk_idx, geometry.num_experts) | (first < 0)
        pitch = geometry.slot_bytes // GRAIN_BYTES
        first += kernels.earlier_tokens(topk_idx, selections) * pitch
        first.masked_fill_(is_skipped, self.shared.own_place())
        atlas, ranges = self.shared.atlas.rows(geometry.hidden, torch.bfloat16), None
        if self._rows.use_logfmt:
            ranges = self.shared.atlas.rows(2 * geometry.num_groups, torch.bfloat16, geometry.ranges_offset)
        self.shared.summer.sum(self._out, atlas, first, self._rows.topk_weights, is_skipped, ranges)
        if self.shared.window.trace is not None:
            self._note(selections.counts.view(geometry.num_ranks, -1).sum(1), geometry.slot_bytes)

    def _expert_places(self, posts: dict[int, _Post], selections: kernels.Selections) -> torch.Tensor:
        """[E] int64: the place of this rank's first row at each expert; -1 where there is none. Checked."""
        geometry, me = self._geometry, self.shared.window.rank
        num_local = geometry.num_local_experts
        places = torch.full((geometry.num_ranks, num_local), -1)
        for rank, post in posts.items():
            # A copy, which does not change any more.
            blocks = self._peer_table(rank, post, geometry.num_experts).view(num_local, -1)[:, me].clone()
            counts, firsts = blocks & 0xFFFFFFFF, blocks >> 32
            wanted = selections.counts[rank * num_local : (rank + 1) * num_local]
            is_right = (counts == wanted) & (firsts >= 0) & (firsts + counts <= post.num_rows)
            if not self.shared.can_mask and not bool(is_right.all()):
                raise _SpoiledError(
                    f"{self.name}: rank {rank} has other rows for this rank than its tokens select. Pass the "
                    "`topk_idx` and the handle of one dispatch"
                )
            start = self._peer_place(rank, post, post.num_rows * geometry.slot_bytes)
            # A rank that had masked this one at the dispatch has nothing for it.
            places[rank] = torch.where(is_right, start + firsts * (geometry.slot_bytes // GRAIN_BYTES), -1)
        return places.flatten()


def _table_offset(number: int) -> int:
    return number % NUM_SENT_POSTS * SENT_TABLE_BYTES
