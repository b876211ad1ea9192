"""The planner's bytes against what `Buffer` counts, and against what the interfaces of several hosts count."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from common import run_ranks
from deep_ep import Buffer, EPUnsupported
from deep_ep.planner import Routing, find_reach
from deep_ep.planner.routing import count_reach, sample_routes
from deep_ep.planner.traffic import find_traffic
from deep_ep.tools.namespaces import Hosts, making_hosts, sent_bytes

T, H, E, K = 1024, 4096, 32, 4
NUM_CALLS = 4
ROUTING = Routing(E, K)


def selections(rank: int) -> torch.Tensor:
    return sample_routes(ROUTING, T, seed=rank)


def layouts(rank: int, num_ranks: int) -> tuple[list[int], list[int]]:
    buffer = Buffer(dist.group.WORLD, num_nvl_bytes=1 << 20, num_cpu_timeout_secs=60.0, explicitly_destroy=True)
    per_rank, per_node, *_ = buffer.get_dispatch_layout(selections(rank).to(buffer.device), E)
    buffer.destroy()
    return per_rank.tolist(), per_node.tolist()


@pytest.mark.cpu_only
def test_counts_are_those_of_the_layout() -> None:
    told = run_ranks(layouts, 4, env={"DEEP_EP_RANKS_PER_NODE": "2"})
    for rank, (per_rank, per_node) in enumerate(told):
        counted = count_reach(selections(rank) // (E // 4), 4, 2)
        assert (T * counted.ranks).tolist() == per_rank
        assert (T * counted.nodes).tolist() == per_node
    expected = find_reach(ROUTING, 4, 2)
    for index, reach in enumerate((expected.ranks, expected.nodes)):
        seen = sum(sum(one[index]) for one in told)
        assert seen == pytest.approx(4 * T * float(reach.sum()), rel=0.02)


def crossing(rank: int, num_ranks: int, hosts: Hosts) -> tuple[int, int]:
    """Bytes that this rank's host sends in a dispatch and in a combine; the least of some, since TCP may send twice."""
    buffer = Buffer(dist.group.WORLD, num_nvl_bytes=64 << 20, num_rdma_bytes=64 << 20, explicitly_destroy=True)
    x, topk_idx = torch.randn(T, H).bfloat16(), selections(rank)
    layout = buffer.get_dispatch_layout(topk_idx, E)

    def dispatch() -> tuple:
        per_rank, per_node, per_expert, mask, _ = layout
        return buffer.dispatch(
            x, num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_node, is_token_in_rank=mask,
            num_tokens_per_expert=per_expert, topk_idx=topk_idx, topk_weights=torch.ones(T, K),
        )  # fmt: skip

    dispatch()  # connections are made
    sent = []
    for _ in range(NUM_CALLS):
        counters = [_counter()]
        recv_x, *_, handle, _ = dispatch()
        counters.append(_counter())
        buffer.combine(recv_x, handle)
        counters.append(_counter())
        sent.append((counters[1] - counters[0], counters[2] - counters[1]))
    buffer.destroy()
    return min(one for one, _ in sent), min(other for _, other in sent)


def _counter() -> int:
    """What the interface has sent, when nobody is in a call."""
    dist.barrier()
    value = sent_bytes()
    dist.barrier()
    return value


@pytest.mark.cpu_only
def test_bytes_are_those_that_interfaces_count() -> None:
    try:
        with making_hosts(2, 2) as hosts:
            told = run_ranks(crossing, 4, hosts, enter=hosts.enter, env={"DEEP_EP_TIMEOUT_SECS": "60"})
    except EPUnsupported as error:
        pytest.skip(str(error))
    reach = find_reach(ROUTING, 4, 2)
    for index, op in enumerate(("dispatch", "combine")):
        expected = float(find_traffic(reach, "normal", op, "bf16", T, H, K).network_out_bytes[:2].sum())
        wire = [told[rank][index] for rank in (0, 2)]  # both ranks of a host read the same counter
        assert sum(wire) / 2 == pytest.approx(expected, rel=0.01), (op, wire, expected)
