"""Two hosts on one machine: network namespaces with a cable between them, and real sockets.

This file is also the program that every rank runs: `python test_namespaces.py RANK`, inside its namespace.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from deep_ep import Buffer

NUM_RANKS, RANKS_PER_NODE = 4, 2
NUM_TOKENS, HIDDEN, TOPK, EXPERTS_PER_RANK = 96, 4096, 4, 4
INTERFACE, ADDRESSES, PORT = "ep0", ("10.231.7.1", "10.231.7.2"), 29517
PATIENCE_SECS = 60


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Two namespaces, each with an interface of the same name; skipped where the system refuses them."""
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need the `ip` program")
    names = (f"deep-ep-{os.getpid()}-a", f"deep-ep-{os.getpid()}-b")
    ends = (f"ep{os.getpid() % 100000}a", f"ep{os.getpid() % 100000}b")
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
            for name, end, address in zip(names, ends, ADDRESSES, strict=True):
                ip("link", "set", end, "netns", name)
                ip("-n", name, "link", "set", end, "name", INTERFACE)
                ip("-n", name, "addr", "add", f"{address}/24", "dev", INTERFACE)
                ip("-n", name, "link", "set", INTERFACE, "up")
                ip("-n", name, "link", "set", "lo", "up")
            subprocess.run(["ip", "netns", "exec", names[0], "true"], check=True, capture_output=True, timeout=20)
        except (subprocess.CalledProcessError, OSError) as error:
            pytest.skip(f"network namespaces are refused here: {getattr(error, 'stderr', None) or error}")
        yield names
    finally:
        for name in names:  # what is inside goes with them
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "del", name)
        with contextlib.suppress(subprocess.CalledProcessError):
            ip("link", "del", ends[0])


@pytest.mark.cpu_only
def test_two_hosts_with_a_cable_between_them(hosts: tuple[str, str], device: str) -> None:
    processes = [start(rank, hosts[rank // RANKS_PER_NODE]) for rank in range(NUM_RANKS)]
    try:
        answers = [process.communicate(timeout=PATIENCE_SECS) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, (_, errors) in zip(processes, answers, strict=True):
        assert process.returncode == 0, errors[-3000:]
    told = [json.loads(answer.splitlines()[-1]) for answer, _ in answers]
    for node in (0, 1):
        ranks = told[node * RANKS_PER_NODE : (node + 1) * RANKS_PER_NODE]
        for call in ranks[0]:
            # Each token crosses once for the node, however many of its ranks it goes to; in low-latency mode once for
            # each rank there, and its experts' results all come back.
            payload = sum(one[call]["payload_bytes"] for one in ranks)
            wire = ranks[0][call]["wire_bytes"]
            assert payload < wire < 1.1 * payload, (node, call, payload, wire)


def start(rank: int, host: str) -> subprocess.Popen:
    root = Path(__file__).parents[2]
    variables = {
        **os.environ,
        "DEEP_EP_HOST": host,
        "DEEP_EP_TIMEOUT_SECS": "30",
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "MASTER_ADDR": ADDRESSES[0],
        "MASTER_PORT": str(PORT),
        "PYTHONPATH": os.pathsep.join([str(root / "src"), str(root / "tests")]),
    }
    command = ["ip", "netns", "exec", host, sys.executable, __file__, str(rank)]
    return subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


# Inside a namespace --------------------------------------------------------------------------------------------------


def wire_bytes() -> int:
    """Bytes that have left this host so far."""
    return int(Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes").read_text())


def run_rank(rank: int) -> dict[str, dict[str, int]]:
    import torch.distributed as dist

    from deep_ep import Buffer, reference

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=NUM_RANKS)
    random = torch.Generator().manual_seed(5)
    num_experts, node = NUM_RANKS * EXPERTS_PER_RANK, rank // RANKS_PER_NODE
    xs = [torch.randn(NUM_TOKENS, HIDDEN, generator=random).bfloat16() for _ in range(NUM_RANKS)]
    ids = [torch.rand(NUM_TOKENS, num_experts, generator=random).topk(TOPK).indices for _ in range(NUM_RANKS)]
    weights = [torch.rand(NUM_TOKENS, TOPK, generator=random) for _ in range(NUM_RANKS)]
    layouts = [reference.layout(one, num_experts, NUM_RANKS, RANKS_PER_NODE) for one in ids]
    masks = [layout.is_token_in_rank for layout in layouts]
    expected = reference.dispatch(xs, masks, topk_idx=ids, topk_weights=weights, num_experts=num_experts)

    hint = Buffer.get_low_latency_rdma_size_hint(NUM_TOKENS, HIDDEN, NUM_RANKS, num_experts)
    buffer = Buffer(dist.group.WORLD, num_rdma_bytes=hint, low_latency_mode=True, explicitly_destroy=True)
    assert buffer.runtime is not None
    assert buffer.runtime.get_num_rdma_ranks() == 2
    per_rank, per_node, per_expert, mask, _ = buffer.get_dispatch_layout(ids[rank], num_experts)
    assert per_node is not None
    dist.barrier()
    before = wire_bytes()
    dist.barrier()
    recv_x, recv_ids, recv_weights, _, handle, _ = buffer.dispatch(
        xs[rank],
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_node,
        is_token_in_rank=mask,
        num_tokens_per_expert=per_expert,
        topk_idx=ids[rank],
        topk_weights=weights[rank],
    )
    dist.barrier()
    between = wire_bytes()
    dist.barrier()
    combined, combined_weights, _ = buffer.combine(recv_x, handle, topk_weights=recv_weights)
    dist.barrier()
    after = wire_bytes()

    assert torch.equal(recv_x, expected[rank].recv_x)
    assert torch.equal(recv_ids, expected[rank].recv_topk_idx)
    assert torch.equal(recv_weights, expected[rank].recv_topk_weights)
    rows = [one.recv_x for one in expected]
    sums = reference.combine(
        rows, masks, topk_weights=[one.recv_topk_weights for one in expected], ranks_per_node=RANKS_PER_NODE
    )[rank]
    assert torch.equal(combined, sums.combined_x)
    assert torch.equal(combined_weights, sums.combined_topk_weights)
    low_latency = low_latency_calls(buffer, xs, ids, weights)
    buffer.destroy()
    dist.barrier()
    dist.destroy_process_group()
    peer = (rank + RANKS_PER_NODE) % NUM_RANKS
    there, back = int(per_node[1 - node]), int(layouts[peer].num_tokens_per_node[node])
    return {
        "dispatch": {
            # The row, ids and weights, the token's index and the mask of ranks.
            "payload_bytes": there * (2 * HIDDEN + TOPK * (8 + 4) + 4 + 1),
            "wire_bytes": between - before,
        },
        "combine": {"payload_bytes": back * (2 * HIDDEN + TOPK * 4), "wire_bytes": after - between},
        **low_latency,
    }


def low_latency_calls(
    buffer: Buffer, xs: list[torch.Tensor], ids: list[torch.Tensor], weights: list[torch.Tensor]
) -> dict[str, dict[str, int]]:
    """A dispatch in BF16 and its combine, straight to each rank of the other host."""
    import torch.distributed as dist

    from deep_ep import reference

    rank, num_experts = buffer.rank, NUM_RANKS * EXPERTS_PER_RANK
    weights = [(8 * one).round() / 8 for one in weights]  # products in FP32 are exact: bits can be compared
    expected = reference.low_latency_dispatch(xs, ids, NUM_TOKENS, num_experts)
    dist.barrier()
    before = wire_bytes()
    dist.barrier()
    recv_x, count, handle, _, _ = buffer.low_latency_dispatch(
        xs[rank], ids[rank], NUM_TOKENS, num_experts, use_fp8=False
    )
    dist.barrier()
    between = wire_bytes()
    dist.barrier()
    combined, _, _ = buffer.low_latency_combine(recv_x, ids[rank], weights[rank], handle)
    dist.barrier()
    after = wire_bytes()
    assert torch.equal(count, expected[rank].recv_count)
    for expert, num_rows in enumerate(count.tolist()):
        assert torch.equal(recv_x[expert, :num_rows], expected[rank].recv_x[expert, :num_rows])
    sums = reference.low_latency_combine([one.recv_x for one in expected], ids, weights, expected)
    assert torch.equal(combined, sums[rank])
    far = range(RANKS_PER_NODE) if rank >= RANKS_PER_NODE else range(RANKS_PER_NODE, NUM_RANKS)
    rows = sum(int((ids[rank] // EXPERTS_PER_RANK == one).any(1).sum()) for one in far)
    back = sum(int((ids[one] // EXPERTS_PER_RANK == rank).sum()) for one in far)
    return {
        "low-latency dispatch": {"payload_bytes": rows * 2 * HIDDEN, "wire_bytes": between - before},
        "low-latency combine": {"payload_bytes": back * 2 * HIDDEN, "wire_bytes": after - between},
    }


if __name__ == "__main__":
    print(json.dumps(run_rank(int(sys.argv[1]))))
