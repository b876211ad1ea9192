"""Byte sizes: what a buffer must hold for a given configuration.

Plain integer arithmetic, no tensors. Shape letters: R ranks, E experts, H hidden size, M the most tokens that
one rank dispatches in a low-latency call.
"""

from __future__ import annotations

# The size hints are DeepEP's, to the byte: callers add them up, compare them and store them.
RANKS_PER_NODE = 8
ALIGNMENT_BYTES = 128
SLOT_ALIGNMENT_BYTES = 16  # rows travel in 16-byte pieces
CHANNELS_PER_SCALE = 128

_MAX_TOPK = 128  # room per token for as many expert ids and weights
_MAX_SCALES = 128  # and for as many FP8 scales
_IDX_BYTES = 8  # int64 expert ids
_FLOAT_BYTES = 4
_SOURCE_META_BYTES = 8
_ROW_EXTRA_BYTES = _SOURCE_META_BYTES + _MAX_TOPK * (_IDX_BYTES + _FLOAT_BYTES) + _MAX_SCALES * _FLOAT_BYTES
_RDMA_ROW_EXTRA_BYTES = _ROW_EXTRA_BYTES + 16
_RDMA_COUNTERS = 18  # per channel, node and direction: counts of 8 ranks twice, and 2 of the node
_LOW_LATENCY_HEADER_BYTES = 16  # in front of every dispatched row


def ceil_div(value: int, unit: int) -> int:
    """Return `value / unit` rounded up."""
    return -(-value // unit)


def align(value: int, unit: int) -> int:
    """Return the smallest multiple of `unit` that is not below `value`."""
    return ceil_div(value, unit) * unit


def split_ranks(num_ranks: int) -> tuple[int, int]:
    """Return `(nodes, ranks per node)` as the size hints count them: nodes of 8, the last perhaps not full.

    The hints are asked for before any buffer exists, so they know only the group size, not the hosts.
    """
    return ceil_div(num_ranks, RANKS_PER_NODE), min(num_ranks, RANKS_PER_NODE)


def nvl_buffer_bytes(hidden_bytes: int, num_ranks: int, num_channels: int, num_recv_tokens: int) -> int:
    """Size of the buffer that the ranks of one node share.

    Args:
        hidden_bytes: bytes of one token's row.
        num_ranks: size of the group; need not be a multiple of 8.
        num_channels: channels, each with a queue per peer of the node.
        num_recv_tokens: slots of one queue.

    Returns:
        Bytes, a multiple of 128.

    Raises:
        ValueError: a negative size, or less than one rank.
    """
    _check_hint_arguments("nvl_buffer_bytes", hidden_bytes, num_ranks)
    num_nodes, num_local_ranks = split_ranks(num_ranks)
    num_queues = num_channels * num_local_ranks
    counter_bytes = num_queues * (2 * num_nodes + 3) * 4
    row_bytes = hidden_bytes + _ROW_EXTRA_BYTES
    return align(counter_bytes + num_queues * num_recv_tokens * row_bytes, ALIGNMENT_BYTES)


def rdma_buffer_bytes(hidden_bytes: int, num_ranks: int, num_channels: int, num_recv_tokens: int) -> int:
    """Size of the buffer that nodes send into; 0 where there is only one node.

    Args:
        hidden_bytes: bytes of one token's row.
        num_ranks: size of the group; need not be a multiple of 8.
        num_channels: channels, each with a send and a receive queue per node.
        num_recv_tokens: slots of one queue.

    Returns:
        Bytes, a multiple of 128.

    Raises:
        ValueError: a negative size, or less than one rank.
    """
    _check_hint_arguments("rdma_buffer_bytes", hidden_bytes, num_ranks)
    num_nodes, _ = split_ranks(num_ranks)
    if num_nodes == 1:
        return 0
    num_queues = 2 * num_channels * num_nodes  # one to send from, one to receive into
    row_bytes = hidden_bytes + _RDMA_ROW_EXTRA_BYTES
    return align(num_queues * (_RDMA_COUNTERS * 4 + num_recv_tokens * row_bytes), ALIGNMENT_BYTES)


def low_latency_dispatch_slot_bytes(hidden: int) -> int:
    """Bytes of one dispatched low-latency row: header, then BF16 values or FP8 values with their scales."""
    scale_bytes = ceil_div(hidden, CHANNELS_PER_SCALE) * _FLOAT_BYTES
    return align(_LOW_LATENCY_HEADER_BYTES + max(2 * hidden, hidden + scale_bytes), SLOT_ALIGNMENT_BYTES)


def low_latency_combine_slot_bytes(hidden: int) -> int:
    """Bytes of one combined low-latency row: BF16 values, and minimum and maximum per 128 channels."""
    range_bytes = ceil_div(hidden, CHANNELS_PER_SCALE) * _FLOAT_BYTES
    return align(range_bytes + 2 * hidden, SLOT_ALIGNMENT_BYTES)


def low_latency_buffer_bytes(
    num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
) -> int:
    """Size of a low-latency buffer: two sets of a send, a receive and a signal area.

    Args:
        num_max_dispatch_tokens_per_rank: M, the most tokens of one rank in one call.
        hidden: H, channels of a token; any number.
        num_ranks: R; checked only, the size does not depend on it.
        num_experts: E, experts of all ranks together.

    Returns:
        Bytes, a multiple of 128, at least one more than needed (as in the original).

    Raises:
        ValueError: a negative size, or less than one rank.
    """
    where = "low_latency_buffer_bytes"
    _check_at_least(where, "num_max_dispatch_tokens_per_rank", num_max_dispatch_tokens_per_rank, 0)
    _check_at_least(where, "hidden", hidden, 0)
    _check_at_least(where, "num_ranks", num_ranks, 1)
    _check_at_least(where, "num_experts", num_experts, 0)
    dispatch_bytes = low_latency_dispatch_slot_bytes(hidden)
    combine_bytes = low_latency_combine_slot_bytes(hidden)
    num_slots = num_experts * num_max_dispatch_tokens_per_rank
    send_bytes = max(num_max_dispatch_tokens_per_rank * dispatch_bytes, num_slots * combine_bytes)
    recv_bytes = num_slots * max(dispatch_bytes, combine_bytes)
    signal_bytes = align(num_experts * 4, ALIGNMENT_BYTES)
    total_bytes = 2 * (send_bytes + recv_bytes + signal_bytes)
    return align(total_bytes + 1, ALIGNMENT_BYTES)


def _check_hint_arguments(where: str, hidden_bytes: int, num_ranks: int) -> None:
    _check_at_least(where, "hidden_bytes", hidden_bytes, 0)
    _check_at_least(where, "num_ranks", num_ranks, 1)


def _check_at_least(where: str, name: str, value: int, limit: int) -> None:
    if value < limit:
        raise ValueError(f"{where}: {name} must be at least {limit}, got {value}")
