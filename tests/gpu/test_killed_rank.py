"""A rank that is killed: the others say so within the limit, and go on with a new buffer.

It runs as a program without MPS:

    python tests/gpu/test_killed_rank.py "in a kernel"
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from moe import dispatch, make_buffer, make_layer, round_trip
from without_mps import LIMIT_SECS as MOST_SECS
from without_mps import results_of

from deep_ep.launch import run_ranks

NUM_RANKS, VICTIM = 3, 1
LIMIT_SECS = 5.0
PATIENCE_SECS = 60.0  # beyond the limit: without MPS every wait costs milliseconds
POINTS = ("before its call", "in a kernel")


def survive(rank: int, num_ranks: int, point: str) -> dict[str, Any]:
    survivors = [other for other in range(num_ranks) if other != VICTIM]
    group = dist.new_group(survivors)
    round_trip(make_buffer(), make_layer(rank, num_ranks, 0))  # what a process does only once takes longer
    buffer, layer = make_buffer(limit_secs=LIMIT_SECS), make_layer(rank, num_ranks, 1)
    handle = round_trip(buffer, layer)
    torch.cuda.synchronize()
    dist.barrier()
    if rank == VICTIM:
        if point == "in a kernel":
            buffer.dispatch(layer.x, handle=handle, async_finish=True)  # its kernel waits for ranks that sleep
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1.5)
    begin = time.monotonic()
    seen: dict[str, Any] = {"error": "none", "text": ""}
    try:
        if point == "in a kernel":
            buffer.dispatch(layer.x, handle=handle)
        dispatch(buffer, layer)
        buffer.check()
    except Exception as error:
        seen = {"error": type(error).__name__, "text": str(error)}
    seen["secs"] = time.monotonic() - begin
    buffer.destroy()
    fresh = make_buffer(group)
    round_trip(fresh, make_layer(fresh.rank, fresh.group_size, 2))
    fresh.check()
    fresh.destroy()
    return seen


@pytest.mark.parametrize("point", POINTS)
def test_survivors_name_a_killed_rank_and_go_on_without_it(point: str) -> None:
    results = results_of(__file__, point)
    assert results[VICTIM] is None
    for rank in {*range(NUM_RANKS)} - {VICTIM}:
        assert results[rank]["error"] in ("EPTimeout", "EPError")
        assert f"rank {VICTIM}" in results[rank]["text"]
        assert results[rank]["secs"] < LIMIT_SECS + PATIENCE_SECS


if __name__ == "__main__":
    print(json.dumps(run_ranks(survive, NUM_RANKS, sys.argv[1], may_die=[VICTIM], limit_secs=MOST_SECS)))
