"""The steps of a combine on the CPU, inside one node: each rank sums its tokens' rows out of the peers' memory.

The row of token t at rank d is the one that dispatch put there, so the handle's slots say where to read. A rank that is
read from ends the call only when all peers have read. See `docs/protocol.md` for the protocol.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from ...handle import check_rows, is_refused, refusal
from ...kernels.reduce import reduce_rows, sum_rows
from ...kernels.rows import as_bytes, row_bytes
from ...trace import RECEIVE, SEND
from ..protocol import OFFERED, READY, TAKEN, Agreement, Header, Offer, handle_number
from ..staging import Staging, token_blocks
from .call import Call, Chain
from .posted import Block, fetch_rows, post_rows, section_starts
from .scope import CpuScope


class CpuCombine:
    """The steps of one combine, see `ops.CombineSteps`.

    Args:
        chain: The calls of the buffer, of which this is the next.
        parts: What to give back: rows [n, H], contiguous, and perhaps weights [n, K] float32, contiguous.
        biases: [T, H] tensors of the rows' dtype, added first.
    """

    def __init__(self, chain: Chain, parts: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]):
        self._chain = chain
        self._window = chain.window
        self._parts = parts
        self._biases = biases
        self._handle: Any = None
        self._sums: list[torch.Tensor] = []  # of each part
        self._source: CpuCombineSource | None = None
        self._ends: list[list[int]] = []  # the handle's `rank_prefix_matrix`

    # By the caller ---------------------------------------------------------------------------------------------------

    def outputs(self, scope: CpuScope, parts: Sequence[torch.Tensor], handle: Any) -> list[torch.Tensor]:
        """Allocate private memory for the sums."""
        if not scope.is_under_way() and not self._is_refused(handle):
            self._check_rows(handle)
        self._handle = handle
        self._sums = [self._chain.result((handle.num_tokens, part.size(1)), part.dtype) for part in parts]
        return list(self._sums)

    def notify(self, scope: CpuScope, parts: Sequence[torch.Tensor], handle: Any) -> None:
        """Offer this rank's rows to the peers, after copying them into the window where that is needed."""
        scope.launch(partial(self._offer_rows, scope))

    def sum(
        self,
        scope: CpuScope,
        source: None,
        parts: Sequence[torch.Tensor],
        handle: Any,
        sums: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor],
    ) -> None:
        """Sum the rows of this rank's tokens out of the peers' memory, then wait until all peers have done the same."""
        scope.launch(partial(self._sum_rows, scope))

    def _check_rows(self, handle: Any) -> None:
        check_rows(handle, self._window.rank, "combine")

    def _is_refused(self, handle: Any) -> bool:
        return is_refused(handle)

    # On the comm stream ----------------------------------------------------------------------------------------------

    def _leave_scratch(self) -> None:
        """Copy the inputs that lie in the scratch: staged rows are written there, see `CpuDispatch`."""
        if not self._window.is_scratch_shown:
            return
        out_of_scratch = self._window.out_of_scratch
        self._parts = [out_of_scratch(part) for part in self._parts]
        self._biases = [out_of_scratch(bias) for bias in self._biases]
        self._handle = self._handle._make(map(out_of_scratch, self._handle))

    def _offer_rows(self, scope: CpuScope) -> None:
        """Announce the combine, and offer this rank's rows, or post them."""
        self._leave_scratch()
        if self._is_refused(self._handle):
            # Before the call is begun: the handles of all ranks are marked, so all of them refuse it.
            raise refusal("combine")
        self._ends = self._handle.rank_prefix_matrix.tolist()
        num_rows = self._num_given()
        is_posted = self._can_post(num_rows)
        call = scope.begin(Header(self._agreement(), self._handle.num_tokens, is_posted=is_posted))
        call.post_header()
        with call.slice("post rows" if is_posted else "provide rows", SEND, rows=num_rows):
            source = self._source = self._post(call, num_rows) if is_posted else self._find_rows(num_rows)
        call.post_offer(source.offer)
        # Rows that lie ready need no second signal; staged ones come when all offers, and so the rounds, are known.
        call.signal(READY if source.staging is None else OFFERED)

    def _sum_rows(self, scope: CpuScope) -> None:
        """Sum rows that were posted on boards, or read rows from the peers' windows in rounds."""
        assert self._source is not None
        call = scope.call
        call.wait(OFFERED)
        headers, num_rounds = call.headers(), 1
        if all(header.is_posted for header in headers):
            with call.slice("sum rows", RECEIVE):
                self._sum_posted(call)
        else:
            num_rounds = self._sum_in_rounds(call, headers, call.offers(), self._source.staging)
        self._count(self._source.path, num_rounds)

    def _num_given(self) -> int:
        """Return the number of rows that this rank gives back."""
        return self._ends[-1][self._window.rank]

    def _can_post(self, num_rows: int) -> bool:
        """Return whether the rows of every rank are few enough to be posted on the boards."""
        return section_starts(num_rows, self._widths())[-1] <= self._chain.posted_bytes

    def _agreement(self) -> Agreement:
        x, *weights = self._parts
        return Agreement(
            "combine",
            num_topk=weights[0].size(1) if weights else 0,
            hidden=x.size(1),
            dtype=x.dtype,
            handle=self._handle_number(),
        )

    def _handle_number(self) -> int:
        """Return the number of the handle, which ranks compare."""
        return handle_number(self._ends, self._handle)

    def _widths(self) -> list[int]:
        return [row_bytes(part) for part in self._parts]

    def _post(self, call: Call, num_rows: int) -> CpuCombineSource:
        """Post the rows on the board, wherever they lie: copying a few rows costs less than waiting until all peers
        have read.
        """
        post_rows(call, num_rows, self._parts)
        starts = section_starts(num_rows, self._widths())[:-1]
        # Offered, too: if another rank has too many rows to post, all ranks read these from here.
        bases = tuple(self._window.board.base_of_rows(call.epoch, start) for start in starts)
        return CpuCombineSource("posted", Offer(num_rows, False, bases), (), None)

    def _find_rows(self, num_rows: int) -> CpuCombineSource:
        """Find the rows in the arena, or bring them there: all at once, or through staging."""
        arena = self._window.arena
        regions: list[torch.Tensor] = []
        for section in self._parts:
            if section.numel() == 0 or arena.base_of(section) is not None:
                regions.append(section)
                continue
            region = arena.allocate(section.shape, section.dtype)
            if region is None:
                self._chain.warn_staged("combine")
                staging = self._make_staging()
                return CpuCombineSource("staged", staging.offer, (), staging)
            # Rows behind these did not come in the dispatch, so no handle names them.
            region[:num_rows].copy_(section[:num_rows])
            regions.append(region)
        path = "pulled" if regions[0] is self._parts[0] else "copied_in"
        bases = tuple(arena.base_of(region) if region.numel() else None for region in regions)
        return CpuCombineSource(path, Offer(self._parts[0].size(0), False, bases), tuple(regions), None)

    def _make_staging(self) -> Staging:
        return Staging(self._window, self._widths())

    def _tables(self, call: Call, offers: list[Offer]) -> list[list[torch.Tensor]]:
        """Return the rows of all ranks, for each section."""
        parts = enumerate(self._parts)
        return [call.peer_rows(offers, index, part.size(1), part.dtype) for index, part in parts]

    def _sum_posted(self, call: Call) -> None:
        """Sum the rows that all ranks have posted.

        A board stays unchanged until its peers have made their next call, so there is no wait.
        """
        blocks = token_blocks(self._ends)[self._window.rank]
        counts = [stop - start for start, stop in blocks]
        zipped = zip(self._ends[-1], blocks, counts, strict=True)
        theirs = [Block(num_posted, start, count) for num_posted, (start, _), count in zipped]
        rows = [part.new_empty(sum(counts), part.size(1)) for part in self._parts]
        fetch_rows(call, theirs, rows)
        # By rank, then by token: the order in which the rows were fetched.
        token_idx = (self._handle.send_head.t() >= 0).nonzero()[:, 1]
        for out, part, bias in zip(self._sums, rows, (self._biases, ()), strict=False):
            sum_rows(out, part, token_idx, counts, bias)

    def _sum_in_rounds(self, call: Call, headers: list[Header], offers: list[Offer], staging: Staging | None) -> int:
        """Sum the rows round by round: copy in if staged, signal, wait, sum, signal, wait.

        There is one round if no rank is staged.
        """
        most_tokens = max(header.num_tokens for header in headers)
        staged_rows = [offer.rows_per_source(len(offers)) for offer in offers if offer.is_staged]
        # The smallest part decides for all: a token is summed in one round, from its rows of all ranks.
        range_tokens = min(staged_rows, default=max(1, most_tokens))
        tables = self._tables(call, offers)
        num_rounds = max(1, -(-most_tokens // range_tokens))
        for index in range(num_rounds):
            start = index * range_tokens
            if staging is not None:
                with call.slice("copy in", SEND, round=index):
                    self._copy_in(staging, start, range_tokens)
            # A rank that is not staged has signalled round 0 with its offer.
            if staging is not None or index:
                call.signal(READY + 2 * index)
            if staged_rows:  # else all were ready as soon as they had offered
                call.wait(READY + 2 * index)
            with call.slice("sum rows", RECEIVE, round=index):
                self._sum_range(offers, tables, start, range_tokens)
            call.signal(TAKEN + 2 * index)
            call.wait(TAKEN + 2 * index)
        return num_rounds

    def _copy_in(self, staging: Staging, start: int, range_tokens: int) -> None:
        """Copy the rows of source tokens `[start, start + range_tokens)` into the sources' parts of staging."""
        ends = [0, *self._handle.rank_prefix_matrix[:, self._window.rank].tolist()]
        limits = self._handle.recv_src_idx.new_tensor([start, start + range_tokens])
        for source, (begin, end) in enumerate(pairwise(ends)):
            # The rows of a source are in the order of its tokens, so those of a range lie side by side.
            first, last = torch.searchsorted(self._handle.recv_src_idx[begin:end], limits).tolist()
            self._copy_block(staging, source, begin + first, begin + last, start, range_tokens)

    def _copy_block(self, staging: Staging, source: int, first: int, last: int, start: int, range_tokens: int) -> None:
        """Copy rows `[first, last)`, of tokens of one source from `start` on, into the part of that source."""
        for part, staged in zip(self._parts, staging.sections, strict=True):
            staged[source * range_tokens : source * range_tokens + last - first] = as_bytes(part[first:last])

    def _sum_range(self, offers: list[Offer], tables: list[list[torch.Tensor]], start: int, range_tokens: int) -> None:
        """Sum this rank's tokens `[start, start + range_tokens)`."""
        slots, stop = self._handle.send_head, min(start + range_tokens, self._handle.num_tokens)
        if start >= stop:
            return
        shifts = self._shifts(offers, start, range_tokens)
        biases = [[bias[start:stop] for bias in self._biases], []]
        for out, table, bias in zip(self._sums, tables, biases, strict=False):
            tokens = slice(start, stop)
            reduce_rows(out[tokens], table, slots[tokens], shifts, bias, scratch=self._chain.scratch)

    def _shifts(self, offers: list[Offer], start: int, range_tokens: int) -> list[int]:
        """Return the distance between the rows of a range and their slots.

        At a staged rank, rows begin at this rank's part of staging.
        """
        if not any(offer.is_staged for offer in offers):
            return [0] * len(offers)
        rank, prefix = self._window.rank, self._handle.rank_prefix_matrix
        before = (self._handle.send_head[:start] >= 0).sum(0).tolist()
        first_slots = prefix[rank - 1].tolist() if rank else [0] * len(offers)
        return [
            rank * range_tokens - first - count if offer.is_staged else 0
            for offer, first, count in zip(offers, first_slots, before, strict=True)
        ]

    def _count(self, path: str, num_rounds: int) -> None:
        rank, blocks = self._window.rank, token_blocks(self._ends)
        rows_to = [stop - start for start, stop in (row[rank] for row in blocks)]
        rows_from = [stop - start for start, stop in blocks[rank]]
        bytes_each = sum(self._widths())
        self._chain.stats.count("combine", path, num_rounds, rows_to, rows_from, bytes_each)


@dataclass(frozen=True)
class CpuCombineSource:
    """How a rank gives its rows in a combine.

    Attributes:
        path: `posted`, `pulled`, `copied_in` or `staged`.
        offer: The offer that is sent to the peers.
        regions: Held until the call ends: the peers read them.
        staging: Where rounds go, if staged.
    """

    path: str
    offer: Offer
    regions: tuple[torch.Tensor, ...]
    staging: Staging | None
