"""Dispatch inside one node: rows go straight from the sender to where they stay.

Everyone learns from the headers who sends how much to whom, so everyone knows every slot; each receiver offers the
memory in which its tensors will live, and the senders write there. See `docs/protocol.md` for the steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import layout
from ..errors import EPError, EPOverflow
from ..handle import Handle
from ..kernels.rows import Lane, Section, as_bytes, put_rows
from ..transport import Window
from .call import ANNOUNCED, OFFERED, READY, TAKEN, Agreement, Call, Chain, Header, Offer, checksum
from .staging import Staging


@dataclass(frozen=True)
class Payload:
    """What travels.

    Attributes:
        x: [T, H] any dtype, contiguous.
        scales: [T, S] any dtype and strides, or None.
    """

    x: torch.Tensor
    scales: torch.Tensor | None = None


@dataclass(frozen=True)
class Routing:
    """Who gets what.

    Attributes:
        num_tokens_per_rank: [R] int32.
        num_tokens_per_expert: [E] int32.
        is_token_in_rank: [T, R] bool.
        topk_idx: [T, K] int32 or int64, or None.
        topk_weights: [T, K] float32, or None.
    """

    num_tokens_per_rank: torch.Tensor
    num_tokens_per_expert: torch.Tensor
    is_token_in_rank: torch.Tensor
    topk_idx: torch.Tensor | None = None
    topk_weights: torch.Tensor | None = None

    @property
    def num_experts(self) -> int:
        """E."""
        return self.num_tokens_per_expert.numel()


@dataclass
class Received:
    """Where the rows of a dispatch arrive. Made by the caller's thread, filled on the comm stream.

    Attributes:
        x: [n, H] in the window (in ordinary memory where the arena cannot hold it).
        scales: [n, S] likewise, or None.
        records: [n, W] uint8, source index, ids and weights side by side; dropped when the call ends.
        topk_idx: [n, K] ordinary memory, or None.
        topk_weights: [n, K] ordinary memory, or None.
        handle: The handle; its tensors are ordinary memory.
        is_staged: The arena could not hold the rows.
    """

    x: torch.Tensor
    scales: torch.Tensor | None
    records: torch.Tensor | None
    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None
    handle: Handle
    is_staged: bool

    def sections(self) -> list[torch.Tensor]:
        """The bytes of what arrives, a matrix for each section."""
        return [as_bytes(part) for part in (self.x, self.scales, self.records) if part is not None]


class Dispatch:
    """One dispatch of one rank.

    Full: `exchange_counts` on the comm stream, `make_room` by the caller who now knows how many rows come,
    `move_rows` on the comm stream. Worst case and cached: `make_room` first, then `move_rows`, which announces and
    offers at once.

    Args:
        chain: The calls of the buffer, of which this is the next.
        payload: What this rank sends.
        routing: Where it goes; None: where `handle` says.
        handle: The handle of an earlier dispatch.
        num_worst_tokens: Rows to make room for; 0: as many as come.
        num_channels: Columns of the handle's unused items.
    """

    def __init__(
        self,
        chain: Chain,
        payload: Payload,
        routing: Routing | None = None,
        handle: Handle | None = None,
        num_worst_tokens: int = 0,
        num_channels: int = 1,
    ):
        self._chain = chain
        self._window = chain.window
        self._payload = Payload(
            _out_of_scratch(chain.window, payload.x),
            _out_of_scratch(chain.window, payload.scales) if payload.scales is not None else None,
        )
        self._routing = routing
        self._handle = handle
        self._num_worst_tokens = num_worst_tokens
        self._num_channels = num_channels
        self._call: Call | None = None
        self._received: Received | None = None

    # By the caller ---------------------------------------------------------------------------------------------------

    def make_room(self, num_rows: int) -> Received:
        """Allocate everything that the call returns: rows in the arena, or elsewhere if it cannot hold them."""
        allocate, is_staged = self._window.arena.allocate, False
        rooms = [allocate((num_rows, columns), dtype) for columns, dtype in self._columns()]
        if any(room is None for room in rooms):
            is_staged = True
            rooms = [torch.empty(num_rows, columns, dtype=dtype) for columns, dtype in self._columns()]
        x = rooms.pop(0)
        assert x is not None
        scales = rooms.pop(0) if self._payload.scales is not None else None
        records = rooms.pop(0) if self._routing is not None else None
        topk_idx, topk_weights = self._empty_topk(num_rows)
        self._received = Received(x, scales, records, topk_idx, topk_weights, self._room_handle(num_rows), is_staged)
        return self._received

    def _columns(self) -> list[tuple[int, torch.dtype]]:
        """Columns and dtype of each section."""
        parts = [self._payload.x, self._payload.scales]
        columns = [(part.size(1), part.dtype) for part in parts if part is not None]
        if self._routing is not None:
            columns.append((sum(part.size(1) for part in self._record_parts()), torch.uint8))
        return columns

    @property
    def _row_bytes(self) -> int:
        return sum(columns * dtype.itemsize for columns, dtype in self._columns())

    def _empty_topk(self, num_rows: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if self._routing is None or self._routing.topk_idx is None or self._routing.topk_weights is None:
            return None, None
        return (
            torch.empty(num_rows, self._routing.topk_idx.size(1), dtype=self._routing.topk_idx.dtype),
            torch.empty(num_rows, self._routing.topk_weights.size(1), dtype=torch.float32),
        )

    def _room_handle(self, num_rows: int) -> Handle:
        if self._handle is not None:
            return self._handle
        assert self._routing is not None
        num_ranks = len(self._window.peers)
        unused = torch.zeros(2, num_ranks, self._num_channels, dtype=torch.int32)
        return Handle(
            rank_prefix_matrix=torch.empty(num_ranks, num_ranks, dtype=torch.int32),
            channel_prefix_matrix=unused[0].clone(),
            recv_channel_prefix_matrix=unused[1].clone(),
            recv_src_idx=torch.empty(num_rows, dtype=torch.int32),
            is_token_in_rank=self._routing.is_token_in_rank,
            send_head=torch.empty(*self._routing.is_token_in_rank.shape, dtype=torch.int32),
        )

    def abandon(self, error: BaseException) -> None:
        """Tell the peers that this rank will not finish a call that it has announced."""
        if self._call is not None and not isinstance(error, EPOverflow):
            self._window.fail(f"{self._call.operation} (call {self._call.epoch}): {type(error).__name__}: {error}")

    # On the comm stream ----------------------------------------------------------------------------------------------

    def exchange_counts(self) -> tuple[int, list[int]]:
        """Announce a full dispatch and learn what comes.

        Returns:
            The number of rows, and the selections of each local expert.
        """
        call = self._announce("dispatch")
        with call.contagious():
            call.signal(ANNOUNCED)
            call.wait(ANNOUNCED)
            call.headers()
            self._prefix = self._read_counts(call)
            return int(self._prefix[-1, self._window.rank]), self._local_expert_counts(call)

    def move_rows(self) -> None:
        """Offer the room, put this rank's rows into the peers', wait for theirs."""
        assert self._received is not None
        call = self._call or self._announce("cached dispatch" if self._handle else "worst-case dispatch")
        with call.contagious():
            staging = self._offer(call)
            call.wait(OFFERED)
            headers, offers = call.headers(), call.offers()
            if self._routing is None:
                prefix, slots = self._received.handle.rank_prefix_matrix, self._received.handle.send_head
            else:
                prefix = self._prefix if call.operation == "dispatch" else self._read_counts(call)
                self._check_room(headers, prefix)
                slots = layout.token_slots(self._routing.is_token_in_rank, prefix, self._window.rank)
                self._received.handle.rank_prefix_matrix.copy_(prefix)
                self._received.handle.send_head.copy_(slots)
            num_rounds = _num_rounds(offers, _blocks(prefix))
            rows_to = self._put_in_rounds(call, offers, prefix, slots, staging, num_rounds)
            self._unpack_records(int(prefix[-1, self._window.rank]))
        self._count(num_rounds, rows_to, prefix)

    def _announce(self, operation: str) -> Call:
        self.check_counts()
        x, scales, routing = self._payload.x, self._payload.scales, self._routing
        agreement = Agreement(
            operation,
            num_experts=routing.num_experts if routing is not None else 0,
            num_topk=routing.topk_idx.size(1) if routing is not None and routing.topk_idx is not None else 0,
            hidden=x.size(1),
            dtype=x.dtype,
            num_scales=scales.size(1) if scales is not None else 0,
            scale_dtype=scales.dtype if scales is not None else None,
            idx_dtype=routing.topk_idx.dtype if routing is not None and routing.topk_idx is not None else None,
            handle=checksum(self._handle.rank_prefix_matrix) if self._handle is not None else 0,
        )
        call = self._call = self._chain.begin(Header(agreement, x.size(0), self._num_worst_tokens))
        with call.contagious():
            counts = None
            if routing is not None:
                counts = torch.cat([routing.num_tokens_per_rank, routing.num_tokens_per_expert])
            call.post_header(counts)
        return call

    def check_counts(self) -> None:
        """The caller's counts must be those of its mask, else peers would wait for rows that never come."""
        if self._routing is None:
            return
        seen = self._routing.is_token_in_rank.sum(0, dtype=torch.int32)
        if not torch.equal(seen, self._routing.num_tokens_per_rank):
            raise ValueError(
                "dispatch: `num_tokens_per_rank` must be the column sums of `is_token_in_rank`, "
                f"got {self._routing.num_tokens_per_rank.tolist()}, the sums are {seen.tolist()}"
            )

    def _read_counts(self, call: Call) -> torch.Tensor:
        num_ranks = len(self._window.peers)
        counts = [peer.board.read_values(call.epoch, 0, num_ranks) for peer in self._window.peers]
        return layout.rank_prefix_matrix(torch.stack(counts))

    def _local_expert_counts(self, call: Call) -> list[int]:
        assert self._routing is not None
        num_ranks = len(self._window.peers)
        num_local = self._routing.num_experts // num_ranks
        start = num_ranks + self._window.rank * num_local
        counts = [peer.board.read_values(call.epoch, start, start + num_local) for peer in self._window.peers]
        return torch.stack(counts).sum(0).tolist()

    def _check_room(self, headers: list[Header], prefix: torch.Tensor) -> None:
        for rank, (header, num_rows) in enumerate(zip(headers, prefix[-1].tolist(), strict=True)):
            if 0 < header.num_worst_tokens < num_rows:
                raise EPOverflow(
                    f"dispatch: rank {rank} receives {num_rows} rows, more than its "
                    f"num_worst_tokens={header.num_worst_tokens} (rank {self._window.rank}/{len(headers)}). "
                    "Raise num_worst_tokens; tokens x ranks always suffices"
                )

    def _offer(self, call: Call) -> Staging | None:
        assert self._received is not None
        sections = self._received.sections()
        staging = Staging(self._window, [part.size(1) for part in sections]) if self._received.is_staged else None
        if staging is not None:
            call.post_offer(staging.offer)
        else:
            bases = tuple(self._window.arena.base_of(part) if part.numel() else None for part in sections)
            call.post_offer(Offer(self._received.x.size(0), False, bases))
        call.signal(OFFERED)
        return staging

    def _put_in_rounds(
        self,
        call: Call,
        offers: list[Offer],
        prefix: torch.Tensor,
        slots: torch.Tensor,
        staging: Staging | None,
        num_rounds: int,
    ) -> list[int]:
        """Every round: put, tell, wait, copy out of staging. One round where nobody is staged."""
        rows = self._outgoing()
        sections = [Section(part, call.peer_rows(offers, index, part.size(1))) for index, part in enumerate(rows)]
        blocks = _blocks(prefix)
        rank, num_ranks = self._window.rank, len(offers)
        rows_to = [0] * num_ranks
        for index in range(num_rounds):
            lanes = [_lane(offer, blocks[rank][peer], index, rank, num_ranks) for peer, offer in enumerate(offers)]
            for peer, count in enumerate(put_rows(sections, slots, lanes, first_peer=rank)):
                rows_to[peer] += count
            call.signal(READY + 2 * index)
            call.wait(READY + 2 * index)
            if staging is not None:
                self._copy_out(staging, [blocks[source][rank] for source in range(num_ranks)], index)
            if index + 1 < num_rounds:
                call.signal(TAKEN + 2 * index)
                call.wait(TAKEN + 2 * index)
        expected = [stop - start for start, stop in blocks[rank]]
        if rows_to != expected:
            raise EPError(
                f"{call.operation} (call {call.epoch}): the handle's slots send {rows_to} rows to the ranks, "
                f"its counts say {expected} (rank {rank}/{num_ranks}). Pass the handle as dispatch returned it"
            )
        return rows_to

    def _outgoing(self) -> list[torch.Tensor]:
        """The bytes to send, a matrix for each section, in the order of `Received.sections`."""
        parts = [as_bytes(self._payload.x)]
        if self._payload.scales is not None:
            parts.append(as_bytes(self._payload.scales.contiguous()))
        if self._routing is not None:
            parts.append(torch.cat(self._record_parts(), dim=1))
        return parts

    def _record_parts(self) -> list[torch.Tensor]:
        """Source index, ids and weights of every token, as bytes; a record is one row of each, side by side."""
        assert self._routing is not None
        parts = [torch.arange(self._payload.x.size(0), dtype=torch.int32).view(-1, 1)]
        if self._routing.topk_idx is not None and self._routing.topk_weights is not None:
            parts += [self._routing.topk_idx, self._routing.topk_weights]
        return [as_bytes(part) for part in parts]

    def _copy_out(self, staging: Staging, blocks: list[tuple[int, int]], index: int) -> None:
        assert self._received is not None
        lane = staging.offer.lane_rows(len(blocks))
        for source, (start, stop) in enumerate(blocks):
            first, last = min(start + index * lane, stop), min(start + (index + 1) * lane, stop)
            for part, staged in zip(self._received.sections(), staging.sections, strict=True):
                part[first:last] = staged[source * lane : source * lane + last - first]

    def _unpack_records(self, num_rows: int) -> None:
        """Split the records into source indices, ids and weights, and make the ids local."""
        received, routing = self._received, self._routing
        assert received is not None
        if routing is None or received.records is None:
            return
        records = received.records[:num_rows]
        received.handle.recv_src_idx[:num_rows] = _columns(records, 0, 4, torch.int32).view(-1)
        if received.topk_idx is not None and received.topk_weights is not None:
            split = 4 + received.topk_idx.size(1) * received.topk_idx.element_size()
            ids = _columns(records, 4, split, received.topk_idx.dtype)
            num_local = routing.num_experts // len(self._window.peers)
            ids = ids - self._window.rank * num_local
            is_local = (ids >= 0) & (ids < num_local)
            received.topk_idx[:num_rows] = torch.where(is_local, ids, -1)
            received.topk_idx[num_rows:] = -1
            weights = _columns(records, split, records.size(1), torch.float32)
            received.topk_weights[:num_rows] = torch.where(is_local, weights, 0.0)
        received.records = None

    def _count(self, num_rounds: int, rows_to: list[int], prefix: torch.Tensor) -> None:
        assert self._received is not None
        rows_from = [stop - start for start, stop in (row[self._window.rank] for row in _blocks(prefix))]
        path = "staged" if self._received.is_staged else "direct"
        self._chain.stats.count("dispatch", path, num_rounds, rows_to, rows_from, self._row_bytes)


def _out_of_scratch(window: Window, tensor: torch.Tensor) -> torch.Tensor:
    """A copy of what lies in the scratch, which a staged call overwrites."""
    return tensor.clone() if window.is_in_scratch(tensor) else tensor


def _columns(records: torch.Tensor, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
    """Bytes `[start, stop)` of every record, as a matrix of its own."""
    return records[:, start:stop].clone(memory_format=torch.contiguous_format).view(dtype)


def _blocks(prefix: torch.Tensor) -> list[list[tuple[int, int]]]:
    """`[s][d]` the slots [start, stop) that source s fills at destination d."""
    ends = prefix.tolist()
    starts = [[0] * len(ends), *ends[:-1]]
    return [list(zip(start, end, strict=True)) for start, end in zip(starts, ends, strict=True)]


def _num_rounds(offers: list[Offer], blocks: list[list[tuple[int, int]]]) -> int:
    """Rounds of a dispatch; all ranks find the same number, from what all of them read."""
    rounds = 1
    for peer, offer in enumerate(offers):
        if offer.is_staged:
            largest = max(stop - start for start, stop in (row[peer] for row in blocks))
            rounds = max(rounds, -(-largest // offer.lane_rows(len(offers))))
    return rounds


def _lane(offer: Offer, block: tuple[int, int], index: int, rank: int, num_ranks: int) -> Lane:
    """What this rank sends to one peer in round `index`: a piece of its block, or, straight, all of it in round 0."""
    start, stop = block
    if not offer.is_staged:
        return Lane(start, min(stop, offer.num_rows), 0) if index == 0 else Lane(0, 0, 0)
    rows = offer.lane_rows(num_ranks)
    begin = start + index * rows
    return Lane(begin, min(begin + rows, stop), rank * rows - begin)
