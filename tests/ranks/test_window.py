"""Received tensors live in the window: no copy, freed with their last view, valid after `destroy()`."""

from __future__ import annotations

import gc
import os
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deep_ep
from common import NOTHING_POSTED, OneRank, layout_of, run_ranks
from deep_ep import launch
from deep_ep.transport import shm

TOKENS, HIDDEN, TOPK = 32, 64, 2


def make_buffer(num_nvl_bytes: int = 0) -> deep_ep.Buffer:
    return deep_ep.Buffer(dist.group.WORLD, num_nvl_bytes, explicitly_destroy=True)


def dispatch(buffer: deep_ep.Buffer, tokens: int = TOKENS, hidden: int = HIDDEN, dtype: Any = torch.float32) -> tuple:
    """Rank-constant rows, spread over all ranks."""
    num_experts = 2 * buffer.group_size
    topk_idx = (torch.arange(tokens * TOPK).view(tokens, TOPK) * 3 + buffer.rank) % num_experts
    layout = layout_of(buffer, topk_idx, num_experts)
    x = torch.full((tokens, hidden), float(buffer.rank + 1), dtype=dtype)
    return buffer.dispatch(
        x,
        **layout,
    )


def expected_rows(handle: tuple, rank: int) -> torch.Tensor:
    ends = [0, *handle[0][:, rank].tolist()]
    return torch.cat([torch.full((b - a,), s + 1.0) for s, (a, b) in enumerate(pairwise(ends))])


def lies_in_window(buffer: deep_ep.Buffer, tensor: torch.Tensor) -> bool:
    return buffer._engine.window.arena.base_of(tensor) is not None


def no_copy(rank: int, num_ranks: int) -> None:
    buffer = make_buffer()
    recv_x, _, _, _, handle, _ = dispatch(buffer)
    assert lies_in_window(buffer, recv_x)
    assert recv_x.is_contiguous()
    assert torch.equal(recv_x[:, 0], expected_rows(handle, rank))
    assert all(not lies_in_window(buffer, item) for item in handle)
    combined, _, _ = buffer.combine(recv_x, handle)
    assert not lies_in_window(buffer, combined)
    buffer.combine(recv_x.clone(), handle)
    room = buffer.get_combine_buffer(handle)
    assert lies_in_window(buffer, room)
    assert room.shape == recv_x.shape
    assert room.dtype == recv_x.dtype
    room.copy_(recv_x)
    assert torch.equal(buffer.combine(room, handle)[0], combined)
    assert buffer.stats()["calls"] == {"dispatch/direct": 1, "combine/pulled": 2, "combine/copied_in": 1}


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_rows_arrive_in_the_window_without_a_copy(device: str, num_ranks: int) -> None:
    run_ranks(no_copy, num_ranks, env=NOTHING_POSTED)


def lifetime(rank: int, num_ranks: int) -> None:
    buffer = make_buffer()
    recv_x, _, _, _, handle, _ = dispatch(buffer)
    view = recv_x[1::2, 3:5]
    kept = view.clone()
    del recv_x
    gc.collect()
    assert buffer.stats()["arena"]["used"] > 0, "a view holds the region"
    for _ in range(3):
        again = dispatch(buffer)[0]
        assert lies_in_window(buffer, again)
        again.fill_(-1)
    assert torch.equal(view, kept), "memory that is still viewed was offered again"
    del view, again
    gc.collect()
    assert buffer.stats()["arena"]["used"] == 0, "a handle pins no window memory"
    address = dispatch(buffer)[0].data_ptr()
    assert dispatch(buffer)[0].data_ptr() == address, "freed memory is used again"
    buffer.combine(dispatch(buffer)[0], handle)
    gc.collect()
    assert buffer.stats()["arena"]["used"] == 0
    dist.barrier()


def test_a_region_lives_as_long_as_any_view(device: str) -> None:
    run_ranks(lifetime, 2)


def after_destroy(rank: int, num_ranks: int) -> None:
    buffer = make_buffer()
    recv_x, _, _, _, handle, _ = dispatch(buffer)
    buffer.destroy()
    del buffer
    gc.collect()
    dist.barrier()
    assert torch.equal(recv_x[:, 0], expected_rows(handle, rank))
    recv_x.mul_(2)
    assert torch.equal(recv_x[:, -1], 2 * expected_rows(handle, rank))


def test_received_tensors_survive_the_buffer(device: str) -> None:
    run_ranks(after_destroy, 2)


def growth(rank: int, num_ranks: int) -> None:
    buffer = make_buffer(num_nvl_bytes=128)
    kept = []
    for tokens in (8, 64, 512, 2048):
        recv_x, _, _, _, handle, _ = dispatch(buffer, tokens=tokens, hidden=1000)
        assert lies_in_window(buffer, recv_x)
        kept.append((recv_x, handle))
    for recv_x, handle in kept:
        assert torch.equal(recv_x[:, 7], expected_rows(handle, rank))
    assert buffer.stats()["calls"] == {"dispatch/direct": 4}
    dist.barrier()


def test_the_arena_grows_by_segments_and_nothing_moves(device: str) -> None:
    run_ranks(growth, 2, env=NOTHING_POSTED)


def trimmed(rank: int, num_ranks: int) -> None:
    buffer = make_buffer()
    kept = dispatch(buffer)
    big = dispatch(buffer, tokens=4096)
    del big
    gc.collect()
    before = buffer.stats()["arena"]["committed"]
    given_back = buffer.trim()
    after = buffer.stats()["arena"]["committed"]
    assert given_back == before - after > 0
    assert torch.equal(kept[0][:, 0], expected_rows(kept[4], rank))
    recv_x, _, _, _, handle, _ = dispatch(buffer, tokens=4096)
    assert torch.equal(recv_x[:, 0], expected_rows(handle, rank))
    dist.barrier()


@pytest.mark.cpu_only
def test_trim_gives_memory_back_and_keeps_what_is_used(device: str) -> None:
    run_ranks(trimmed, 2)


def raw_buffer(rank: int, num_ranks: int) -> None:
    buffer = make_buffer(num_nvl_bytes=1 << 20)
    recv_x, _, _, _, handle, _ = dispatch(buffer)
    raw = buffer.get_local_buffer_tensor(torch.int8)
    assert raw.numel() == 1 << 20
    raw.zero_()
    again = buffer.get_local_buffer_tensor(torch.int8, offset=256)
    assert again.numel() == 1 << 20, "the length does not shrink with the offset"
    again[0] = 7
    assert raw[256] == 7, "both show the same memory"
    assert buffer.get_local_buffer_tensor(torch.float32, size=torch.Size([4, 8])).shape == (4, 8)
    dist.barrier()
    raw.zero_()
    assert torch.equal(recv_x[:, 0], expected_rows(handle, rank)), "zeroing the raw buffer harms no result"
    buffer.combine(recv_x, handle)
    rows = buffer.get_local_buffer_tensor(torch.float32, size=recv_x.shape)
    rows.copy_(recv_x)
    same, _, _ = buffer.combine(rows, handle)
    assert torch.equal(same, buffer.combine(recv_x, handle)[0])


def test_the_raw_buffer_holds_no_result_and_no_signal(device: str) -> None:
    run_ranks(raw_buffer, 2)


def overwrite_at_once(rank: int, num_ranks: int) -> None:
    """What the caller does with its tensors right after a call cannot reach a peer."""
    buffer = make_buffer()
    recv_x, _, _, _, handle, _ = dispatch(buffer)
    expected = buffer.combine(recv_x, handle)[0]
    rows = recv_x.clone()
    for _ in range(20):
        room = buffer.get_combine_buffer(handle)
        room.copy_(rows)
        combined, _, _ = buffer.combine(room, handle)
        room.fill_(float("nan"))
        assert torch.equal(combined, expected)
        x = torch.full((TOKENS, HIDDEN), float(rank + 1))
        again = buffer.dispatch(x, handle=handle)[0]
        x.fill_(float("nan"))
        assert torch.equal(again, rows)


def test_inputs_may_be_overwritten_when_the_call_ends(device: str) -> None:
    run_ranks(overwrite_at_once, 4)


def what_is_open(rank: int, num_ranks: int) -> tuple[list[str], int]:
    def memfds() -> list[str]:
        links = []
        for fd in os.listdir("/proc/self/fd"):
            try:
                links.append(os.readlink(f"/proc/self/fd/{fd}"))
            except OSError:
                continue
        return [link for link in links if "deep_ep" in link]

    shm_before = set(os.listdir("/dev/shm")) if Path("/dev/shm").exists() else set()
    buffer = make_buffer(1 << 20)
    recv_x = dispatch(buffer)[0]
    assert memfds()
    buffer.destroy()
    del buffer, recv_x
    gc.collect()
    shm_after = set(os.listdir("/dev/shm")) if Path("/dev/shm").exists() else set()
    return memfds(), len(shm_after - shm_before)


@pytest.mark.cpu_only
def test_nothing_stays_open_after_destroy(device: str) -> None:
    for left, names in run_ranks(what_is_open, 3):
        assert left == []
        assert names == 0


def test_one_rank_needs_no_process_group(device: str) -> None:
    buffer = deep_ep.Buffer(None, comm=OneRank(), explicitly_destroy=True)
    recv_x, _, _, counts, handle, _ = dispatch(buffer)
    assert lies_in_window(buffer, recv_x)
    assert sum(counts) == TOKENS * TOPK
    assert torch.equal(buffer.combine(recv_x, handle)[0], recv_x)
    assert "solo" in repr(buffer)
    buffer.destroy()
    assert torch.equal(recv_x, torch.ones(TOKENS, HIDDEN))


def over_comm(rank: int, num_ranks: int) -> None:
    class Comm:
        Get_rank = staticmethod(lambda: rank)
        Get_size = staticmethod(lambda: num_ranks)

        @staticmethod
        def allgather(value: Any) -> list[Any]:
            values: list[Any] = [None] * num_ranks
            dist.all_gather_object(values, value)
            return values

    buffer = deep_ep.Buffer(None, comm=Comm(), explicitly_destroy=True)
    recv_x, _, _, _, handle, _ = dispatch(buffer)
    assert torch.equal(recv_x[:, 0], expected_rows(handle, rank))
    buffer.combine(recv_x, handle)
    buffer.destroy()


@pytest.mark.cpu_only
def test_an_mpi_like_communicator_does_as_well(device: str) -> None:
    run_ranks(over_comm, 3)


def several_nodes(rank: int, num_ranks: int) -> None:
    buffer = make_buffer()
    per_rank, per_node, *_ = buffer.get_dispatch_layout(torch.tensor([[0, 1], [2, 3]]), 4)
    assert per_rank.tolist() == [1, 1, 1, 1]
    assert per_node is not None
    assert per_node.tolist() == [1, 1]
    assert deep_ep.get_physical_domain_size(dist.group.WORLD) == (2, 2)
    assert deep_ep.get_logical_domain_size(dist.group.WORLD, allow_hybrid_mode=False) == (1, 4)


def test_several_nodes_have_a_layout(device: str) -> None:
    run_ranks(several_nodes, 4, env={"DEEP_EP_RANKS_PER_NODE": "2"})


def other_defaults(rank: int, num_ranks: int) -> None:
    """DeepEP's scripts set default dtype and device; what a buffer makes must not follow them."""
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("meta")
    buffer = make_buffer()
    device = buffer.device
    topk_idx = torch.arange(2 * num_ranks, device=device).view(num_ranks, 2)
    layout = layout_of(buffer, topk_idx, 2 * num_ranks)
    x = torch.ones(num_ranks, 8, device=device, dtype=torch.float32)
    for num_worst_tokens in (0, 3 * num_ranks):
        recv_x, _, _, _, handle, _ = buffer.dispatch(
            x,
            **layout,
            topk_idx=topk_idx,
            topk_weights=torch.ones(num_ranks, 2, device=device, dtype=torch.float32),
            num_worst_tokens=num_worst_tokens,
        )
        combined, _, _ = buffer.combine(recv_x, handle, bias=x)
        assert torch.equal(combined, 2 * x)
    buffer.get_combine_buffer(handle, dtype=torch.bfloat16).fill_(1)


@pytest.mark.parametrize("arena_bytes", ["0", pytest.param("4096", marks=pytest.mark.cpu_only)])
def test_default_dtype_and_device_do_not_matter(device: str, arena_bytes: str) -> None:
    launch.run_ranks(other_defaults, 2, env={"DEEP_EP_ARENA_BYTES": arena_bytes})


def without_proc(rank: int, num_ranks: int) -> None:
    """As between containers with process namespaces of their own: `/proc/<pid>/fd` of a peer leads nowhere."""
    if rank == 1:

        def refuse(address: object) -> None:
            raise PermissionError("refused")

        shm._open = refuse  # type: ignore[assignment]
    buffer = make_buffer()
    recv_x, _, _, _, handle, _ = dispatch(buffer, tokens=3000, hidden=700)
    assert torch.equal(recv_x[:, 0], expected_rows(handle, rank))
    buffer.combine(recv_x, handle)


@pytest.mark.cpu_only
def test_descriptors_go_over_sockets_where_proc_is_refused(device: str) -> None:
    run_ranks(without_proc, 3)


def staged(rank: int, num_ranks: int) -> int:
    """Rows that find no room go through staging: same results, one warning."""
    buffer = make_buffer(num_nvl_bytes=1 << 20)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            recv_x, _, _, _, handle, _ = dispatch(buffer)
            assert not lies_in_window(buffer, recv_x)
            assert torch.equal(recv_x[:, 0], expected_rows(handle, rank))
            combined, _, _ = buffer.combine(recv_x, handle)
            rows = buffer.get_local_buffer_tensor(recv_x.dtype, size=recv_x.shape)
            rows.copy_(recv_x)  # an input in the scratch itself, which staging overwrites
            assert torch.equal(buffer.combine(rows, handle)[0], combined)
            rows = buffer.get_local_buffer_tensor(recv_x.dtype, size=torch.Size([TOKENS, HIDDEN]))
            rows.fill_(rank + 1)
            assert torch.equal(buffer.dispatch(rows, handle=handle)[0], recv_x)
    assert buffer.stats()["calls"] == {"dispatch/staged": 6, "combine/staged": 6}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dispatch(make_buffer(num_nvl_bytes=1 << 20))  # its warning is only logged
    return len([one for one in caught if "go through staging" in str(one.message)])


@pytest.mark.cpu_only
def test_too_small_an_arena_works_and_warns_once(device: str) -> None:
    assert run_ranks(staged, 2, env={"DEEP_EP_ARENA_BYTES": "4096", **NOTHING_POSTED}) == [1, 1]
