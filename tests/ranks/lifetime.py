"""What tests of forgotten buffers and of forked children share."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import deep_ep
from common import layout_of

ONE_NODE: dict[str, str] = {}
NODES = {"DEEP_EP_RANKS_PER_NODE": "1"}
INTERPRETED = {"DEEP_EP_TRANSPORT": "interpreted", "DEEP_EP_DEVICE": "cpu"}
INTERPRETED_NODES = {**INTERPRETED, **NODES}
CHILD_SECS = 20  # that a forked child may take, until it is taken for hung

MAX_TOKENS, HIDDEN = 4, 128


def make_buffer(num_ranks: int, *, low_latency: bool = False, **options: Any) -> deep_ep.Buffer:
    """With memory for low-latency calls, if they are wanted."""
    options = {"explicitly_destroy": True, "num_cpu_timeout_secs": 30, "num_gpu_timeout_secs": 30, **options}
    if low_latency:
        hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(MAX_TOKENS, HIDDEN, num_ranks, num_ranks)
        options |= {"num_rdma_bytes": hint, "low_latency_mode": True}
    return deep_ep.Buffer(dist.group.WORLD, **options)


def arguments(buffer: deep_ep.Buffer, value: float) -> dict[str, Any]:
    """Of a dispatch of rows that hold `value`: every token goes to every rank."""
    num_ranks = buffer.group_size
    topk_idx = torch.arange(num_ranks).repeat(MAX_TOKENS, 1)
    return {
        "x": torch.full((MAX_TOKENS, HIDDEN), value),
        **layout_of(buffer, topk_idx, num_ranks),
    }


def values(rows: torch.Tensor) -> list[float]:
    """The different numbers in rows."""
    return sorted(set(rows.flatten().tolist()))


def round_trip(buffer: deep_ep.Buffer) -> None:
    """Dispatch and combine, checked."""
    recv_x, _, _, _, handle, _ = buffer.dispatch(**arguments(buffer, buffer.rank + 1.0))
    assert values(recv_x) == [rank + 1.0 for rank in range(buffer.group_size)]
    combined, _, _ = buffer.combine(recv_x, handle)
    assert values(combined) == [buffer.group_size * (buffer.rank + 1.0)]


def low_latency_arguments(rank: int, num_ranks: int) -> dict[str, Any]:
    """Of a low-latency dispatch: token t goes to expert t of all ranks, which have one each."""
    return {
        "x": torch.full((num_ranks, HIDDEN), rank + 1.0, dtype=torch.bfloat16),
        "topk_idx": torch.arange(num_ranks).view(-1, 1),
        "num_max_dispatch_tokens_per_rank": MAX_TOKENS,
        "num_experts": num_ranks,
        "use_fp8": False,
    }


def in_a_child(work: Callable[[], Any]) -> str:
    """What `work` returns in a forked child, as text, or how the child died; one that hangs is killed."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(CHILD_SECS)
        try:
            answer = str(work())
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(write, answer.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        answer = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return answer if code == 0 else f"exit code {code}: {answer}"


def eventually(condition: Callable[[], bool], secs: float = 20.0) -> bool:
    """Whether something comes to hold."""
    deadline = time.monotonic() + secs
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()
