"""The figures of DeepEP V2: sizes of buffers, and how many SMs and queue pairs a call should use.

Plain arithmetic, no tensors. Shape letters: R ranks in N nodes of P, E experts, H hidden size, K top-k, M most tokens
of a rank. The formulas are DeepEP's: callers compare what they give.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from .sizing import align, ceil_div

SIZE_UNIT_BYTES = 2 << 20
_PART_UNIT_BYTES = 32  # to which each part of a token is aligned
_UNKNOWN_TOPK = 32
_CHANNELS_PER_SCALE = 32
_RAIL_EXTRA_TOKENS = 1280  # slots of a rail beside M
_LEAST_SMS, _SMS_WITHOUT_OVERLAP = 4, 64
_SM_MARGIN = 1.25


class Domains(NamedTuple):
    """How ranks are grouped.

    Attributes:
        num_ranks: R.
        ranks_per_node: P: ranks that can load and store each other's memory.
        is_hybrid: Whether calls know of the nodes.
    """

    num_ranks: int
    ranks_per_node: int
    is_hybrid: bool = True

    @property
    def physical(self) -> tuple[int, int]:
        """Nodes, and ranks of a node."""
        return self.num_ranks // self.ranks_per_node, self.ranks_per_node

    @property
    def logical(self) -> tuple[int, int]:
        """The same as calls see them: scale-out and scale-up ranks."""
        return self.physical if self.is_hybrid else (1, self.num_ranks)


def elastic_buffer_bytes(
    domains: Domains,
    max_tokens: int,
    hidden: int,
    num_topk: int = 0,
    use_fp8: bool = False,
    has_multiple_reduction: bool = True,
) -> int:
    """Size of a buffer for dispatches and combines.

    Args:
        domains: The ranks.
        max_tokens: M.
        hidden: H.
        num_topk: K; 0: not known.
        use_fp8: Dispatch moves FP8 with a scale for every 32 elements.
        has_multiple_reduction: Sums are made on the way, so that a token has at most one row for each rank.

    Returns:
        Bytes, a multiple of 2 MiB.
    """
    topk = num_topk or _UNKNOWN_TOPK
    num_scales = ceil_div(hidden, _CHANNELS_PER_SCALE) if use_fp8 else 0
    dispatch_bytes = _token_bytes(hidden * (1 if use_fp8 else 2), num_scales, 8 * topk + 4 * (1 + topk))
    combine_bytes = _token_bytes(2 * hidden, 0, 8 * topk)
    num_dispatch, num_combine = _slots(domains, max_tokens, topk, has_multiple_reduction)
    return align(max(num_dispatch * dispatch_bytes, num_combine * combine_bytes), SIZE_UNIT_BYTES)


def _token_bytes(row_bytes: int, num_scales: int, other_bytes: int) -> int:
    return sum(align(part, _PART_UNIT_BYTES) for part in (row_bytes, 4 * num_scales, other_bytes))


def _slots(domains: Domains, max_tokens: int, topk: int, has_multiple_reduction: bool) -> tuple[int, int]:
    """Slots of tokens that a dispatch and a combine need."""
    num_out, num_up = domains.logical
    rail_tokens = num_out * (max_tokens + _RAIL_EXTRA_TOKENS)

    def num_terms(num_groups: int) -> int:
        return min(num_groups, topk) if has_multiple_reduction else topk

    num_copies = 1 if has_multiple_reduction else topk
    if num_out > 1:
        num_dispatch = num_up * num_out * max_tokens + max_tokens + rail_tokens
        num_combine = num_terms(num_up) * num_out * max_tokens + num_terms(num_out) * max_tokens
        return num_dispatch, num_combine + num_copies * rail_tokens
    is_one_domain = domains.ranks_per_node == domains.num_ranks
    num_dispatch = domains.num_ranks * max_tokens + (0 if is_one_domain else max_tokens)
    num_combine = num_terms(domains.num_ranks) * max_tokens
    return num_dispatch, num_combine + (0 if is_one_domain else domains.num_ranks * max_tokens * num_copies)


def engram_bytes(num_entries: int, hidden: int, num_fetched: int, item_bytes: int) -> tuple[int, int]:
    """Bytes on the GPU, for what is fetched, and on the host, for this rank's part of the table."""
    entry_bytes = align(hidden * item_bytes, _PART_UNIT_BYTES)
    return align(entry_bytes * num_fetched, SIZE_UNIT_BYTES), align(entry_bytes * num_entries, SIZE_UNIT_BYTES)


def pp_buffer_bytes(tensor_bytes: int, num_in_flight: int) -> int:
    """Size of a buffer for pipeline sends: slots to send from and to receive in, for both neighbours."""
    return align(align(tensor_bytes, _PART_UNIT_BYTES) * num_in_flight * 4, SIZE_UNIT_BYTES)


def agrs_session_bytes(num_ranks: int, shapes: Sequence[Sequence[int]], item_bytes: int) -> int:
    """Bytes of a session that gathers a tensor of each shape from every rank."""
    return sum(align(num_ranks * math.prod(shape) * item_bytes, _PART_UNIT_BYTES) for shape in shapes)


def agrs_buffer_bytes(session_bytes: int) -> int:
    """Size of a buffer for sessions of so many bytes."""
    return align(session_bytes, SIZE_UNIT_BYTES)


class Rates(NamedTuple):
    """Speeds, in GB/s.

    Attributes:
        rdma: Of a rank's share of the network.
        nvlink: Of a GPU's NVLink.
        sm_read: What one SM reads.
        sm_write: What one SM writes.
    """

    rdma: float
    nvlink: float
    sm_read: float
    sm_write: float


def theoretical_num_sms(
    domains: Domains, num_experts: int, num_topk: int, rates: Rates, device_sms: int, prefers_overlap: bool
) -> int:
    """SMs that keep the slowest link busy, if the router is balanced.

    Args:
        domains: The ranks.
        num_experts: E.
        num_topk: K.
        rates: Of links and SMs.
        device_sms: SMs that there are.
        prefers_overlap: Other kernels shall have as many SMs as possible.
    """
    num_ranks, per_node = domains.num_ranks, domains.ranks_per_node
    num_out, num_up = domains.logical
    # Traffic in units of the rows that a rank receives. A token goes to so many ranks, and nodes, on average:
    ranks = _expected_groups(num_ranks, num_experts, num_topk)
    read = 1 / ranks
    if num_out > 1:
        nodes = _expected_groups(num_out, num_experts, num_topk)
        write = 1 / ranks + nodes / (ranks * num_out) + 1
        read += nodes / ranks
        rdma, nvlink = nodes / ranks * (1 - 1 / num_out), 1 - 1 / num_up
    else:
        share = per_node / num_ranks
        write = share + (1 / ranks if num_ranks > per_node else 0)
        nvlink, rdma = share * (1 - 1 / per_node), (num_ranks - per_node) / num_ranks
    is_rdma = num_out > 1 and rdma / rates.rdma > nvlink / rates.nvlink
    traffic, rate = (rdma, rates.rdma) if is_rdma else (nvlink, rates.nvlink)
    if traffic == 0:
        return device_sms
    needed = rate / traffic * max(read / rates.sm_read, write / rates.sm_write)
    num_sms = align(max(_LEAST_SMS, math.ceil(_SM_MARGIN * needed)), 2)
    return min(device_sms, num_sms if prefers_overlap else max(num_sms, _SMS_WITHOUT_OVERLAP))


def _expected_groups(num_groups: int, num_experts: int, num_topk: int) -> float:
    """Of that many groups of experts, how many a token selects at least one expert of."""
    others = num_experts - num_experts // num_groups
    return num_groups * (1 - math.comb(others, num_topk) / math.comb(num_experts, num_topk))
