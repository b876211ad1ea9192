"""What one rank brings to the cases of `bench low-latency`, and how its results are judged.

Every rank can draw every rank's rows, so each knows what it must get. Experts multiply by a number of their own: a row
from the wrong expert shows. Their results are below 1, so that LogFMT does compress them.

Letters: T tokens of a rank, H channels, G = ceil(H / 128) groups of them, K selections of a token, R ranks, L experts
of a rank, M = T.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from ...buffers.legacy import Buffer
from ...quant import cast_fp8, per_token_cast_back
from ...sizing import ceil_div
from .inputs import Drawn, Setting, draw

_EXACT, _LOSSY = 2.0**-7, 0.05  # errors, as a part of what was summed: of rounding to BF16, of LogFMT


class Delivered(NamedTuple):
    """What a dispatch delivered, by the product or by a peer.

    Attributes:
        x: [L, R * M, H] float8_e4m3fn.
        scales: [L, R * M, G] float32.
        src_info: [L, R * M] int32.
        layout_range: [L, R] int64, `count | first row << 32`.
    """

    x: torch.Tensor
    scales: torch.Tensor
    src_info: torch.Tensor
    layout_range: torch.Tensor


@dataclass(frozen=True)
class LowLatencyWork:
    """What one rank brings to every case.

    Attributes:
        setting: The setting.
        rank: This rank.
        num_ranks: R.
        buffer: The buffer.
        drawn: Rows and routes.
    """

    setting: Setting
    rank: int
    num_ranks: int
    buffer: Buffer
    drawn: Drawn

    @property
    def num_local(self) -> int:
        """L."""
        return self.setting.num_experts // self.num_ranks

    @property
    def num_rows(self) -> int:
        """Rows that one expert may receive."""
        return self.num_ranks * self.setting.num_tokens

    @property
    def num_selections(self) -> int:
        """Rows that this rank sends."""
        return self.setting.num_tokens * self.setting.num_topk

    def factors(self) -> torch.Tensor:
        """[E] bfloat16: what each expert multiplies by."""
        return (1 + torch.arange(self.setting.num_experts, device=self.buffer.device) % 3).bfloat16() / 64

    def experts(self, sent: Delivered) -> torch.Tensor:
        """[L, R * M, H] bfloat16: what this rank's experts make of their rows. Only those are touched."""
        shape = (self.num_local, self.num_rows, self.setting.hidden)
        results = torch.empty(shape, dtype=torch.bfloat16, device=self.buffer.device)
        expert, row = valid_rows(sent)
        factors = self.factors()[self.rank * self.num_local + expert].unsqueeze(1)
        results[expert, row] = per_token_cast_back(sent.x[expert, row], sent.scales[expert, row]) * factors
        return results


def make_buffer(setting: Setting, num_ranks: int) -> Buffer:
    """A buffer of the size that DeepEP's users give it."""
    sizes = (setting.num_tokens, setting.hidden, num_ranks, setting.num_experts)
    num_bytes = Buffer.get_low_latency_rdma_size_hint(*sizes)
    return Buffer(dist.group.WORLD, 0, num_bytes, low_latency_mode=True, explicitly_destroy=True, device=setting.device)


def make_work(setting: Setting, rank: int, num_ranks: int, buffer: Buffer) -> LowLatencyWork:
    """Draw rows and routes."""
    return LowLatencyWork(setting, rank, num_ranks, buffer, draw(setting, rank, buffer.device))


def valid_rows(sent: Delivered) -> tuple[torch.Tensor, torch.Tensor]:
    """Which rows of a dispatch are there: their experts and their places, [n] int64 each."""
    counts = (sent.layout_range & 0xFFFFFFFF).sum(1, keepdim=True)
    is_valid = torch.arange(sent.x.size(1), device=counts.device) < counts
    expert, row = is_valid.nonzero(as_tuple=True)
    return expert, row


# Bytes ---------------------------------------------------------------------------------------------------------------


class RowBytes(NamedTuple):
    """Bytes of one row, in the forms that it takes on its way."""

    bf16: int
    fp8: int
    logfmt: int

    @classmethod
    def of(cls, hidden: int) -> RowBytes:
        """Of rows of so many channels: FP8 with its scales, LogFMT with its ranges."""
        beside = 4 * ceil_div(hidden, 128)
        return cls(2 * hidden, hidden + beside, ceil_div(10 * hidden, 8) + beside)


# Results -------------------------------------------------------------------------------------------------------------


def is_sent(work: LowLatencyWork, sent: Delivered) -> bool:
    """Whether the rows of all sources are there, in order, to the bit."""
    return all(_is_sent_from(work, source, sent) for source in range(work.num_ranks))


def _is_sent_from(work: LowLatencyWork, source: int, sent: Delivered) -> bool:
    drawn = draw(work.setting, source, work.buffer.device)
    q, scales = cast_fp8(drawn.x)
    first_expert = work.rank * work.num_local
    experts = torch.arange(first_expert, first_expert + work.num_local, device=q.device)
    chooses = (drawn.topk_idx == experts.view(-1, 1, 1)).any(2)  # [L, T]
    expert, token = chooses.nonzero(as_tuple=True)
    blocks = sent.layout_range[:, source]
    row = (blocks >> 32)[expert] + chooses.long().cumsum(1)[expert, token] - 1
    return (
        torch.equal(blocks & 0xFFFFFFFF, chooses.sum(1))
        and torch.equal(sent.src_info[expert, row].long(), token)
        and torch.equal(sent.x.view(torch.uint8)[expert, row], q.view(torch.uint8)[token])
        and torch.equal(sent.scales[expert, row], scales[token])
    )


def is_combined(work: LowLatencyWork, combined: torch.Tensor, is_lossy: bool = False) -> bool:
    """Whether the sums are right, as far as their format allows."""
    x, topk_idx, weights = work.drawn
    back, factors = per_token_cast_back(*cast_fp8(x)), work.factors()
    total = torch.zeros_like(x, dtype=torch.float32)
    magnitude = torch.zeros_like(total)
    for k in range(work.setting.num_topk):
        row = (back * factors[topk_idx[:, k]].unsqueeze(1)).float() * weights[:, k : k + 1]
        total += row
        magnitude += row.abs()
    error = (combined.float() - total).abs()
    return bool((error <= magnitude * (_LOSSY if is_lossy else _EXACT) + 1e-6).all())
