"""Random low-latency calls, compared exactly. A dispatch and its combine are a *round*.

An expert gives back, for a token, one row of small integers that is the expert's plus one that is the token's. So every
sum of weighted rows is exact, in any order, and tells which experts and which token it was made of.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Collection
from typing import Any

import torch

from ...buffers.legacy import Buffer
from ...errors import EPError
from ...event import EventOverlap
from . import oracle
from .checks import Mismatch, same, scribble_input
from .data import EXPERTS, IDS, TOKENS, WEIGHTS, Data, Palette, X
from .program import MASKED, MICRO_BATCHES, ROUND, ProgramCall
from .state import State

_MOST_TOKENS, _MOST_HIDDEN, _MOST_EXPERTS_PER_RANK, _MOST_TOPK = 12, 300, 4, 32
_MOST_ROWS_PER_RANK = _MOST_TOKENS * _MOST_EXPERTS_PER_RANK  # of one source: few tokens may have many experts
_LOGFMT_ERROR = 0.023  # half a step of 32 binary orders of magnitude in 510
_BF16_ERROR = 2.0**-8
_FORMS: tuple[dict[str, Any], ...] = (
    {"use_fp8": False},
    {"use_fp8": True},
    {"use_fp8": True, "round_scale": True},
    {"use_fp8": True, "round_scale": True, "use_ue8m0": True},
)


def hint(num_ranks: int) -> int:
    """Bytes that a buffer needs for these calls."""
    num_experts = _MOST_EXPERTS_PER_RANK * num_ranks
    return Buffer.get_low_latency_rdma_size_hint(_MOST_TOKENS, _MOST_HIDDEN, num_ranks, num_experts)


class Sizes:
    """The sizes of a round, the same on all ranks."""

    def __init__(self, draw: random.Random, num_ranks: int, palette: Palette | None):
        max_tokens = draw.randint(1, _MOST_TOKENS)
        hidden = draw.choice((1, 128, 2 * draw.randint(0, 60) + 1, draw.randint(1, _MOST_HIDDEN)))
        most = _MOST_EXPERTS_PER_RANK if draw.random() < 0.8 else _MOST_ROWS_PER_RANK // max_tokens
        sizes = (max_tokens, hidden, draw.randint(1, most), draw.randint(1, 6 if draw.random() < 0.8 else _MOST_TOPK))
        if palette is not None:
            sizes = draw.choice(palette.low_latency)
        self.max_tokens, self.hidden, self.num_local, self.num_topk = sizes
        self.num_experts = num_ranks * self.num_local
        self.idx_dtype = draw.choice((torch.int32, torch.int64))


class Round:
    """A dispatch and its combine.

    Args:
        state: Of the segment.
        data: Of the call.
        sizes: Of the round.
        index: Which round of the call it is: each has data of its own.
        masked: Ranks that this rank has masked.
    """

    def __init__(self, state: State, data: Data, sizes: Sizes, index: int = 0, masked: Collection[int] = ()):
        self.state, self.data, self.sizes, self.masked = state, data, sizes, masked
        self._index, self._draw, self._form = index, data.draw, data.draw.choice(_FORMS)
        self.settle: Callable[[], None] | None = None
        most = sizes.max_tokens
        self._num_tokens = [
            self._draw.choice((0, 1, most, self._draw.randint(0, most))) for _ in range(state.num_ranks)
        ]
        ranks = range(state.num_ranks)
        self._ids = [self._make_ids(rank) for rank in ranks]
        self._xs = [self._make_x(rank) for rank in ranks]
        self._handle: tuple = ()

    def look_at_masks(self) -> None:
        """A call has been received: whom this rank does without is known. Those who expect no change do not look."""

    def _purpose(self, purpose: int) -> int:
        return purpose + 100 * (self._index + 1)

    def _make_ids(self, rank: int) -> torch.Tensor:
        raw = self.data.bits((self._num_tokens[rank], self.sizes.num_topk), torch.int64, rank, self._purpose(IDS))
        limits = torch.iinfo(self.sizes.idx_dtype)
        ids = raw % (self.sizes.num_experts + 2) - 1  # one on either side selects nothing
        wild = torch.tensor([limits.min, limits.max, -2])
        return torch.where((raw >> 8) % 20 == 0, wild[(raw >> 16) % 3], ids).to(self.sizes.idx_dtype)

    def _make_x(self, rank: int) -> torch.Tensor:
        shape = (self._num_tokens[rank], self.sizes.hidden)
        if self._form["use_fp8"]:  # numbers of all the magnitudes that a group may have side by side
            return (self.data.bits(shape, torch.int16, rank, self._purpose(X)).float() / 128).bfloat16()
        return self.data.bits(shape, torch.bfloat16, rank, self._purpose(X))

    def _rows_of_experts(self) -> torch.Tensor:
        return self.data.integers((self.sizes.num_experts, self.sizes.hidden), 0, self._purpose(EXPERTS))

    def _rows_of_tokens(self, rank: int) -> torch.Tensor:
        return self.data.integers((self._num_tokens[rank], self.sizes.hidden), rank, self._purpose(TOKENS))

    # Dispatch --------------------------------------------------------------------------------------------------------

    def dispatch(self, way: dict[str, Any]) -> None:
        """Send. `settle` then waits, and checks."""
        state, sizes, device = self.state, self.sizes, self.state.buffer.device
        x, ids = (one[state.rank].to(device, copy=True) for one in (self._xs, self._ids))
        has_stats = self._draw.random() < 0.3
        total = torch.full((sizes.num_local,), 5, dtype=torch.int32, device=device) if has_stats else None
        waits = torch.zeros(state.num_ranks, dtype=torch.int64, device=device) if has_stats else None
        got = state.buffer.low_latency_dispatch(
            x, ids, sizes.max_tokens, sizes.num_experts, total, waits, **self._form, **way
        )
        recv, count, self._handle, event, hook = got

        def settle() -> None:
            _wait(state, event, hook)
            self.look_at_masks()
            scribble_input(x)
            self._check_dispatched(recv, count)
            if total is not None:
                same("cumulative_local_expert_recv_stats", total, count + 5)

        self.settle = settle

    def _check_dispatched(self, recv: Any, count: torch.Tensor) -> None:
        recv_x, scales = recv if isinstance(recv, tuple) else (recv, None)
        sent, sent_scales = self._xs, None
        if self._form["use_fp8"]:
            options = (self._form.get("round_scale", False), self._form.get("use_ue8m0", False))
            cast = [oracle.fp8(x, *options) for x in self._xs]
            sent, sent_scales = [values for values, _ in cast], [one for _, one in cast]
        args = (count, self._handle, sent, sent_scales, self._ids, self.state.rank, self.masked)
        check_packed(recv_x, scales, *args)

    def _packed(self, local: int) -> oracle.PackedExpert:
        return oracle.packed(self._ids, self.state.rank * self.sizes.num_local + local, self.masked)

    # Combine ---------------------------------------------------------------------------------------------------------

    def combine(self, way: dict[str, Any]) -> None:
        """Send what the experts give back. `settle` then waits, and checks."""
        state, draw, rank, device = self.state, self._draw, self.state.rank, self.state.buffer.device
        form = draw.choice(("plain", "plain", "zero copy", "LogFMT"))
        has_out = draw.random() < 0.5
        shrink = 1 / 64 if form == "LogFMT" and draw.random() < 0.7 else 1.0  # magnitudes below 1 are compressed
        y = (self._results() * shrink).bfloat16()
        weights = self._weights(rank)
        ids = self._ids[rank].to(device, copy=True)
        x = y.to(device)
        if form == "zero copy" and not _write_in_place(state.buffer, self._handle, x):
            form = "plain"
        shape = (self._num_tokens[rank], self.sizes.hidden)
        out = torch.full(shape, 7.0, dtype=torch.bfloat16, device=device) if has_out else None
        combined, event, hook = state.buffer.low_latency_combine(
            x,
            ids,
            weights.to(device),
            self._handle,
            use_logfmt=form == "LogFMT",
            zero_copy=form == "zero copy",
            out=out,
            **way,
        )

        def settle() -> None:
            _wait(state, event, hook)
            self.look_at_masks()
            scribble_input(x)
            experts, tokens = self._rows_of_experts(), self._rows_of_tokens(rank)
            expected = oracle.weighted_sum(
                experts * shrink, tokens * shrink, self._ids[rank], weights, self.sizes.num_local, self.masked
            )
            if form == "LogFMT":
                reach = oracle.weighted_sum(
                    experts.abs() * shrink,
                    tokens.abs() * shrink,
                    self._ids[rank],
                    weights.abs(),
                    self.sizes.num_local,
                    self.masked,
                )
                _near("combined_x", combined, expected, reach.float() * (_LOGFMT_ERROR + 2 * _BF16_ERROR))
            else:
                same("combined_x", combined, expected)

        self.settle = settle

    def _weights(self, rank: int) -> torch.Tensor:
        shape = (self._num_tokens[rank], self.sizes.num_topk)
        return self.data.integers(shape, rank, self._purpose(WEIGHTS)) / 8

    def _results(self) -> torch.Tensor:
        """[L, R * M, H]: the experts' rows where dispatch put the tokens, NaN where it put none."""
        sizes = self.sizes
        out = torch.full((sizes.num_local, self.state.num_ranks * sizes.max_tokens, sizes.hidden), torch.nan)
        tokens = [self._rows_of_tokens(rank) for rank in range(self.state.num_ranks)]
        experts = self._rows_of_experts()
        for local in range(sizes.num_local):
            want = self._packed(local)
            out[local, : want.tokens.numel()] = (
                _rows_at(tokens, want) + experts[self.state.rank * sizes.num_local + local]
            )
        return out


def check_packed(
    recv_x: torch.Tensor,
    scales: torch.Tensor | None,
    count: torch.Tensor,
    handle: tuple,
    sent: list[torch.Tensor],
    sent_scales: list[torch.Tensor] | None,
    ids: list[torch.Tensor],
    rank: int,
    masked: Collection[int] = (),
) -> None:
    """Compare what a dispatch returned, as far as it is valid.

    Args:
        recv_x: [L, R * M, H].
        scales: [L, R * M, S], or None.
        count: [L] int32.
        handle: Of the dispatch.
        sent: By rank: [T, H], as it travels.
        sent_scales: By rank: [T, S], or None.
        ids: By rank: [T, K].
        rank: This rank.
        masked: Ranks from which nothing comes.

    Raises:
        Mismatch: It is not what the oracle expects.
    """
    src_info, ranges, recv_x = handle[0].cpu(), handle[1].tolist(), recv_x.cpu()
    if (scales is None) != (sent_scales is None):
        raise Mismatch(f"recv_scales: got {type(scales).__name__}, expected {type(sent_scales).__name__}")
    bits = torch.uint8 if recv_x.dtype.itemsize == 1 else torch.int16  # torch cannot index FP8
    sent = [one.view(bits) for one in sent]
    for local, num_rows in enumerate(count.tolist()):
        want = oracle.packed(ids, rank * recv_x.size(0) + local, masked)
        starts = [sum(want.counts[:source]) for source in range(len(ids))]
        expected_ranges = [start << 32 | one for start, one in zip(starts, want.counts, strict=True)]
        if num_rows != sum(want.counts) or ranges[local] != expected_ranges:
            raise Mismatch(
                f"local expert {local}: got {num_rows} rows, ranges {ranges[local]}, expected {sum(want.counts)} rows, "
                f"ranges {expected_ranges}"
            )
        same("src_info", src_info[local, :num_rows], want.tokens.int())
        same("recv_x", recv_x[local, :num_rows].view(bits), _rows_at(sent, want))
        if scales is not None and sent_scales is not None:
            same("recv_scales", scales[local, :num_rows].contiguous(), _rows_at(sent_scales, want))


def _rows_at(parts: list[torch.Tensor], want: oracle.PackedExpert) -> torch.Tensor:
    """The rows of an expert's tokens, out of [T, ...] tensors of all ranks."""
    return torch.cat([part[want.tokens[want.sources == source]] for source, part in enumerate(parts)])


def _write_in_place(buffer: Buffer, handle: tuple, rows: torch.Tensor) -> bool:
    """Write rows where a combine finds them, if the memory has room for one more such tensor; alike on all ranks."""
    try:
        buffer.get_next_low_latency_combine_buffer(handle).copy_(rows)
    except EPError as error:
        if not str(error).startswith("get_next_low_latency_combine_buffer: "):
            raise
        return False
    return True


def _near(name: str, got: torch.Tensor, expected: torch.Tensor, error: torch.Tensor) -> None:
    far = ~((got.cpu().float() - expected.float()).abs() <= error)
    if far.any():
        row, column = far.nonzero()[0].tolist()
        one, other, limit = (float(tensor[row, column]) for tensor in (got, expected, error))
        raise Mismatch(f"{name}: row {row}, column {column}: got {one}, expected {other} within {limit:g}")


def _wait(state: State, event: EventOverlap, hook: Callable[[], None] | None) -> None:
    """Wait for a call, or receive it."""
    if hook is not None:
        state.fault("before a hook")
        hook()
    if event.event is not None:
        event.current_stream_wait()


def _draw_way(draw: random.Random) -> dict[str, Any]:
    """How a call stands to the caller's stream."""
    way = draw.choice(("plain", "async_finish", "return_recv_hook"))
    return {} if way == "plain" else {way: True}


def play_round(state: State, call: ProgramCall) -> None:
    """A dispatch, new rows from every expert, and a combine."""
    data = state.data(call)
    sizes = Sizes(data.draw, state.num_ranks, state.limits.palette)
    _play(Round(state, data, sizes))
    if data.draw.random() < 0.05:
        state.buffer.clean_low_latency_buffer(sizes.max_tokens, sizes.hidden, sizes.num_experts)


def _play(one: Round) -> None:
    for send in (one.dispatch, one.combine):
        send(_draw_way(one.data.draw))
        assert one.settle is not None
        one.settle()


def micro_batches(state: State, call: ProgramCall) -> None:
    """Two rounds at once, as engines have them: halves in any order, of one size or of two.

    Where the memory is too small for so many results, the call is refused on all ranks alike; then the oldest result is
    received first.
    """
    data = state.data(call)
    draw = data.draw
    sizes = [Sizes(draw, state.num_ranks, state.limits.palette)]
    sizes.append(sizes[0] if draw.random() < 0.7 else Sizes(draw, state.num_ranks, state.limits.palette))
    rounds = [Round(state, data, one, index) for index, one in enumerate(sizes)]
    steps = [iter((one.dispatch, None, one.combine, None)) for one in rounds]  # None: settle what was sent
    order = [index for index in range(2) for _ in range(4)]
    draw.shuffle(order)
    in_flight: list[Round] = []

    def settle(one: Round) -> None:
        if one in in_flight:
            in_flight.remove(one)
            assert one.settle is not None
            one.settle()

    for index in order:
        one, send = rounds[index], next(steps[index])
        if send is None:
            settle(one)
            continue
        settle(one)
        while True:
            try:
                send({"return_recv_hook": True})
            except EPError as error:
                if "in flight" not in str(error) or not in_flight:
                    raise
                settle(in_flight[0])
            else:
                in_flight.append(one)
                break


def masked_rounds(state: State, call: ProgramCall) -> None:
    """One rank and the others mask each other, go on apart, and come together again."""
    data = state.data(call)
    draw, buffer = data.draw, state.buffer
    alone = draw.randrange(state.num_ranks)
    masked = [rank for rank in range(state.num_ranks) if (rank == alone) != (state.rank == alone)]
    state.settle()
    state.barrier()  # whoever is masked must have read what it was sent
    for rank in masked:
        buffer.low_latency_update_mask_buffer(rank, True)
    for index in range(draw.randint(1, 3)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # nobody else is masked
            warnings.filterwarnings("ignore", module="triton")  # its interpreter warns of the logarithm of 0
            _play(Round(state, data, Sizes(draw, state.num_ranks, state.limits.palette), index, masked))
    state.barrier()  # until all have made as many calls
    buffer.low_latency_clean_mask_buffer()
    status = torch.ones(state.num_ranks, dtype=torch.int32, device=buffer.device)
    buffer.low_latency_query_mask_buffer(status)
    same("mask_status", status, torch.zeros(state.num_ranks, dtype=torch.int32))
    state.barrier()  # until nobody is masked
    _play(Round(state, data, Sizes(draw, state.num_ranks, state.limits.palette), 3))


PLAYERS: dict[str, Callable[[State, ProgramCall], None]] = {
    ROUND: play_round,
    MICRO_BATCHES: micro_batches,
    MASKED: masked_rounds,
}
