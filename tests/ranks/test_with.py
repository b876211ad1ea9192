"""`with Buffer(...)`: how it ends, and what peers learn of it."""

from __future__ import annotations

import gc
import sys
import time
import warnings
from concurrent.futures import Future
from typing import Any

import pytest
import torch
import torch.distributed as dist

from common import OneRank, layout_of, run_ranks
from deep_ep import Buffer, EPClosed, EPError, EventHandle

pytestmark = pytest.mark.usefixtures("device")

LIMIT_SECS = 60.0  # what nobody should wait for
SOON_SECS = 30.0  # on a busy machine


class Boom(Exception):
    pass


def make_buffer(**more: Any) -> Buffer:
    limits = {"num_cpu_timeout_secs": LIMIT_SECS, "num_gpu_timeout_secs": LIMIT_SECS}
    return Buffer(dist.group.WORLD, 1 << 20, **limits, **more)


def arguments(buffer: Buffer) -> dict[str, Any]:
    topk_idx = torch.arange(4).view(-1, 1) % buffer.group_size
    return {
        "x": torch.randn(4, 16),
        **layout_of(buffer, topk_idx, buffer.group_size),
        "topk_idx": topk_idx,
        "topk_weights": torch.ones(4, 1),
    }


@pytest.mark.parametrize("explicitly_destroy", [False, True])
def test_the_end_of_the_block_closes(explicitly_destroy: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Buffer(None, 1 << 20, comm=OneRank(), explicitly_destroy=explicitly_destroy) as buffer:
            given = arguments(buffer)
            recv_x, *_ = buffer.dispatch(**given)
        assert torch.equal(recv_x, given["x"])  # received tensors stay valid
        with pytest.raises(EPClosed):
            buffer.dispatch(**given)
        with pytest.raises(EPClosed), buffer:
            pass
        if explicitly_destroy:
            buffer.destroy()  # a second time does nothing
        del buffer
        gc.collect()


@pytest.mark.cpu_only
def test_the_end_of_the_block_waits_for_what_is_queued() -> None:
    before: Future = Future()
    with Buffer(None, 1 << 20, comm=OneRank()) as buffer:
        given = arguments(buffer)
        recv_x, *_, event = buffer.dispatch(
            **given, num_worst_tokens=4, previous_event=EventHandle(before), async_finish=True
        )
        before.set_result(None)
    assert event.event.query()
    assert torch.equal(recv_x, given["x"])


@pytest.mark.cpu_only
def test_an_exception_does_not_wait() -> None:
    before: Future = Future()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            with Buffer(None, 1 << 20, comm=OneRank(), explicitly_destroy=True) as buffer:
                given = arguments(buffer)
                event = EventHandle(before)
                buffer.dispatch(**given, num_worst_tokens=4, previous_event=event, async_finish=True)
                raise Boom
        except Boom:
            pass
        with pytest.raises(EPClosed):
            buffer.dispatch(**given)
        before.set_result(None)
        del buffer
        gc.collect()


def leave(rank: int, num_ranks: int, is_queued: bool) -> tuple[str, str, float]:
    """Rank 0 leaves by an exception, with a call of its own under way or not; the others make the next call."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        begin = time.monotonic()
        try:
            with make_buffer(explicitly_destroy=True) as buffer:
                given = arguments(buffer)
                buffer.dispatch(**given)
                begin = time.monotonic()
                if rank == 0:
                    if is_queued:  # the others make another one, so that it does not end
                        buffer.dispatch(**given, num_worst_tokens=16, async_finish=True)
                        time.sleep(0.1)
                    raise Boom("the disk is full \udcff")
                if is_queued:
                    time.sleep(0.5)
                buffer.dispatch(**given)
        except Boom:
            return "Boom", "", time.monotonic() - begin
        except EPError as error:
            return type(error).__name__, str(error), time.monotonic() - begin
        finally:
            del buffer
            gc.collect()
    return "none", "", 0.0


WAYS = {
    "one node": (3, {}),
    "two nodes": (4, {"DEEP_EP_RANKS_PER_NODE": "2"}),
    "kernels": (2, {"DEEP_EP_TRANSPORT": "interpreted"}),
    "kernels of two nodes": (2, {"DEEP_EP_TRANSPORT": "interpreted", "DEEP_EP_RANKS_PER_NODE": "1"}),
}


@pytest.mark.parametrize("is_queued", [False, True])
@pytest.mark.parametrize("way", [*WAYS])
def test_peers_learn_who_left(way: str, is_queued: bool, device: str) -> None:
    num_ranks, env = WAYS[way]
    is_cpu = device == "cpu" and "kernels" not in way
    if device == "cuda" and "kernels" in way:
        pytest.skip("a GPU does not interpret kernels")
    if is_queued and not is_cpu:
        pytest.skip("kernels that wait are no thread of the host")
    first, *others = run_ranks(leave, num_ranks, is_queued, env=env)
    assert first[0] == "Boom"
    assert first[2] < SOON_SECS
    for name, text, secs in others:
        assert name in ("EPError", "EPPeerFailed"), (name, text)
        assert "rank 0" in text
        assert secs < SOON_SECS
        if is_cpu and not is_queued:
            assert r"rank 0 left its `with` block by Boom: the disk is full \udcff" in text


def leave_masked(rank: int, num_ranks: int) -> list[int]:
    """Where ranks may be masked, the others go on without the one that left."""
    size = Buffer.get_low_latency_rdma_size_hint(4, 16, num_ranks, num_ranks)
    status = torch.zeros(num_ranks, dtype=torch.int32)
    try:
        with make_buffer(num_rdma_bytes=size, low_latency_mode=True, enable_shrink=True) as buffer:
            x, topk_idx = torch.randn(4, 16).bfloat16(), torch.arange(4).view(-1, 1) % num_ranks
            for turn in range(2):
                if rank == 0 and turn == 1:
                    raise Boom
                buffer.low_latency_dispatch(x, topk_idx, 4, num_ranks, use_fp8=False)
            buffer.low_latency_query_mask_buffer(status)
            dist.barrier()
    except Boom:
        dist.barrier()
    return status.tolist()


@pytest.mark.cpu_only  # kernels learn of it by the limit alone
@pytest.mark.filterwarnings("ignore")
def test_masked_ranks_do_not_mind() -> None:
    assert run_ranks(leave_masked, 3) == [[0, 0, 0], [1, 0, 0], [1, 0, 0]]


def ends_well(rank: int, num_ranks: int, kind: str) -> str:
    """All ranks leave in the same way, with a call queued; the last one is slower."""
    buffer = make_buffer()

    def program() -> Any:
        with buffer:
            given = torch.ones(4, 8), torch.arange(4).view(-1, 1) % num_ranks
            per_rank, per_node, per_expert, mask, _ = buffer.get_dispatch_layout(given[1], num_ranks)
            layout = {"num_tokens_per_rank": per_rank, "num_tokens_per_rdma_rank": per_node}
            layout |= {"is_token_in_rank": mask, "num_tokens_per_expert": per_expert}
            rows, _, _, _, handle, _ = buffer.dispatch(given[0], **layout)
            time.sleep(0.5 * rank)
            event = buffer.combine(rows, handle, async_finish=True)[2]
            if kind == "exit":
                sys.exit(0)
            yield event

    try:
        for _ in program():
            break
    except SystemExit:
        pass
    gc.collect()
    return "none" if buffer.runtime is None else "open"


@pytest.mark.cpu_only
@pytest.mark.parametrize("kind", ["exit", "generator"])
def test_a_normal_end_is_no_exception(kind: str) -> None:
    assert run_ranks(ends_well, 2, kind) == ["none", "none"]
