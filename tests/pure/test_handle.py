"""Handles that callers hand back."""

from __future__ import annotations

import threading

import torch

from deep_ep.handle import RailHandle, parse_handle

NUM_TOKENS, NUM_ROWS, NUM_RANKS, NUM_NODES = 3, 5, 4, 2


def rail_handle() -> RailHandle:
    def ints(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32)

    return RailHandle(
        is_token_in_rank=torch.zeros(NUM_TOKENS, NUM_RANKS, dtype=torch.bool),
        rdma_channel_prefix_matrix=ints(NUM_NODES, 1),
        gbl_channel_prefix_matrix=ints(NUM_RANKS, 1),
        recv_rdma_channel_prefix_matrix=ints(NUM_NODES, 1),
        recv_rdma_rank_prefix_sum=ints(NUM_NODES),
        recv_gbl_channel_prefix_matrix=ints(NUM_RANKS, 1),
        recv_gbl_rank_prefix_sum=ints(NUM_RANKS),
        recv_src_meta=torch.zeros(NUM_ROWS, 8, dtype=torch.uint8),
        send_rdma_head=ints(NUM_TOKENS, NUM_NODES),
        send_nvl_head=ints(0, NUM_RANKS // NUM_NODES),
    )


def test_a_handle_may_get_its_size_while_it_is_looked_at() -> None:
    """As that of an asynchronous worst-case dispatch across nodes does, on the comm thread."""
    handle, is_over = rail_handle(), threading.Event()

    def resize() -> None:
        sizes = [torch.zeros(size, NUM_RANKS // NUM_NODES, dtype=torch.int32) for size in (89, 0)]
        while not is_over.is_set():
            for one in sizes:
                handle.send_nvl_head.data = one

    thread = threading.Thread(target=resize)
    thread.start()
    try:
        for _ in range(4000):
            parsed = parse_handle(tuple(handle), NUM_RANKS, torch.device("cpu"), "combine", NUM_NODES)
            assert parsed.send_nvl_head is handle.send_nvl_head
    finally:
        is_over.set()
        thread.join()
