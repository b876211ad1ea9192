"""A call that a rank refuses, since its arguments are wrong: nothing was sent, and the peers are told at once."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deep_ep
from common import NOTHING_POSTED, error_of, run_ranks

LIMIT_SECS = 60.0
AT_ONCE_SECS = 25.0  # far from the limit, also on a busy machine
TOKENS, HIDDEN, TOPK = 6, 128, 2

ONE_NODE = [("posted", 2, {}), ("put", 3, NOTHING_POSTED)]
NODES = [("2x1", 2, {"DEEP_EP_RANKS_PER_NODE": "1"}), ("2x2", 4, {"DEEP_EP_RANKS_PER_NODE": "2"})]
KERNELS = [
    ("kernels", 2, {"DEEP_EP_TRANSPORT": "interpreted"}),
    ("kernels 2x1", 2, {"DEEP_EP_TRANSPORT": "interpreted", "DEEP_EP_RANKS_PER_NODE": "1"}),
]


def worlds(*groups: list[tuple[str, int, dict[str, str]]]) -> Any:
    cases = [case for group in groups for case in group]
    return pytest.mark.parametrize(("num_ranks", "env"), [case[1:] for case in cases], ids=[case[0] for case in cases])


def make_buffer(num_ranks: int, **more: Any) -> deep_ep.Buffer:
    num_bytes = deep_ep.Buffer.get_low_latency_rdma_size_hint(TOKENS, HIDDEN, num_ranks, 2 * num_ranks)
    is_low_latency = more.pop("low_latency_mode", False)
    return deep_ep.Buffer(
        dist.group.WORLD,
        1 << 20,
        num_bytes if is_low_latency else 0,
        is_low_latency,
        explicitly_destroy=True,
        num_cpu_timeout_secs=LIMIT_SECS,
        num_gpu_timeout_secs=LIMIT_SECS,
        **more,
    )


def calls(buffer: deep_ep.Buffer, num_ranks: int) -> dict[str, Callable[..., Any]]:
    """Each call, of a given x; all have been made once with the right one."""
    num_experts = 2 * num_ranks
    ids = torch.arange(TOKENS * TOPK).view(TOKENS, TOPK) % num_experts
    weights = torch.ones(TOKENS, TOPK)
    x = torch.ones(TOKENS, HIDDEN, dtype=torch.bfloat16)
    if buffer.low_latency_mode:
        rows, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, TOKENS, num_experts, use_fp8=False)
        buffer.low_latency_combine(rows, ids, weights, handle)
        return {
            "low_latency_dispatch": lambda x: buffer.low_latency_dispatch(x, ids, TOKENS, num_experts, use_fp8=False),
            "low_latency_combine": lambda x: buffer.low_latency_combine(
                rows if x.is_contiguous() else rows.transpose(0, 1), ids, weights, handle
            ),
        }
    per_rank, per_node, per_expert, mask, _ = buffer.get_dispatch_layout(ids, num_experts)
    layout = (per_rank, per_node, mask, per_expert, ids, weights)
    rows, _, _, _, handle, _ = buffer.dispatch(x, None, *layout)
    buffer.combine(rows, handle)
    return {
        "dispatch": lambda x: buffer.dispatch(x, None, *layout),
        "cached dispatch": lambda x: buffer.dispatch(x, handle),
        "combine": lambda x: buffer.combine(rows if x.is_contiguous() else rows.t().contiguous().t(), handle),
    }


def require_low_latency(device: str, env: dict[str, str]) -> None:
    if device == "cuda" and "DEEP_EP_RANKS_PER_NODE" in env:
        pytest.skip("low latency across nodes needs NVSHMEM there")


def right_and_wrong() -> tuple[torch.Tensor, torch.Tensor]:
    right = torch.ones(TOKENS, HIDDEN, dtype=torch.bfloat16)
    return right, torch.ones(HIDDEN, TOKENS, dtype=torch.bfloat16).t()


def go_on(buffer: deep_ep.Buffer, call: Callable[..., Any], x: torch.Tensor) -> None:
    """Make a call twice. The first may still find what a peer had sent before it heard of the refusal, and closed."""
    for _ in range(2):
        call(x)
        buffer.check()


def one_refuses(rank: int, num_ranks: int, names: list[str]) -> list[tuple[tuple[str, str], float, str]]:
    """For each call: what it raises, after how long, and what the next one does. The last rank refuses."""
    results = []
    for name in names:
        buffer = make_buffer(num_ranks, low_latency_mode=name.startswith("low_latency"))
        call, (right, wrong) = calls(buffer, num_ranks)[name], right_and_wrong()
        dist.barrier()
        begin = time.monotonic()
        error = error_of(call, wrong if rank == num_ranks - 1 else right)
        if error[0] == "none":
            error = error_of(buffer.check)  # where kernels wait, the host learns of it later
        secs = time.monotonic() - begin
        dist.barrier()
        results.append((error, secs, error_of(lambda: go_on(buffer, call, right))[0]))  # noqa: B023
        buffer.destroy()
    return results


def check_one_refuses(names: list[str], num_ranks: int, env: dict[str, str]) -> None:
    *peers, refuser = run_ranks(one_refuses, num_ranks, names, env=env)
    for (kind, text), _, later in refuser:
        assert kind == "ValueError", text
        assert later in ("EPClosed", "EPPeerFailed")
    for (kind, text), secs, later in (result for peer in peers for result in peer):
        assert kind == "EPPeerFailed", text
        assert f"rank {num_ranks - 1} refused this call, of which nothing was sent: " in text
        assert "ValueError: " in text or "look at its output" in text
        assert secs < AT_ONCE_SECS
        assert later == "EPClosed"


@worlds(ONE_NODE, NODES)
def test_peers_of_a_rank_that_refuses_raise_at_once(device: str, num_ranks: int, env: dict) -> None:
    check_one_refuses(["dispatch", "cached dispatch", "combine"], num_ranks, env)


@worlds(ONE_NODE[:1], NODES)
def test_peers_of_a_rank_that_refuses_a_low_latency_call_raise_at_once(device: str, num_ranks: int, env: dict) -> None:
    require_low_latency(device, env)
    check_one_refuses(["low_latency_dispatch", "low_latency_combine"], num_ranks, env)


@pytest.mark.cpu_only
@worlds(KERNELS)
def test_kernels_that_wait_for_a_rank_that_refuses_end_at_once(device: str, num_ranks: int, env: dict) -> None:
    names = ["dispatch"] if "DEEP_EP_RANKS_PER_NODE" in env else ["dispatch", "low_latency_combine"]
    check_one_refuses(names, num_ranks, env)


def all_refuse(rank: int, num_ranks: int, name: str) -> list[str]:
    buffer = make_buffer(num_ranks, low_latency_mode=name.startswith("low_latency"))
    call, (right, wrong) = calls(buffer, num_ranks)[name], right_and_wrong()
    kinds = []
    for _ in range(2):
        for _ in range(3):
            time.sleep(0.05 * rank)  # not all at the same time
            kinds.append(error_of(call, wrong)[0])
        call(right)
    buffer.check()
    buffer.destroy()
    return kinds


@pytest.mark.parametrize(
    ("name", "num_ranks", "env"),
    [
        ("dispatch", 3, {}),
        ("combine", 2, NOTHING_POSTED),
        ("dispatch", 2, NODES[0][2]),
        ("low_latency_dispatch", 2, {}),
        ("low_latency_dispatch", 2, NODES[0][2]),
    ],
)
def test_a_mistake_made_alike_everywhere_can_be_corrected(device: str, name: str, num_ranks: int, env: dict) -> None:
    if name.startswith("low_latency"):
        require_low_latency(device, env)
    for kinds in run_ranks(all_refuse, num_ranks, name, env=env):
        assert kinds == ["ValueError"] * 6


@pytest.mark.cpu_only
def test_kernels_take_a_corrected_call(device: str) -> None:
    for kinds in run_ranks(all_refuse, 2, "dispatch", env=KERNELS[0][2]):
        assert kinds == ["ValueError"] * 6


def refuse_twice(rank: int, num_ranks: int) -> str:
    """All ranks refuse a call, make it, refuse the next one, and only then receive the first."""
    buffer = make_buffer(num_ranks, low_latency_mode=True)
    right, wrong = right_and_wrong()
    num_experts = 2 * num_ranks
    ids = torch.arange(TOKENS * TOPK).view(TOKENS, TOPK) % num_experts

    def send(x: torch.Tensor) -> Any:
        return buffer.low_latency_dispatch(x, ids, TOKENS, num_experts, use_fp8=False, return_recv_hook=True)[-1]

    time.sleep(0.3 * rank)  # so that quick ranks see the refusals of slow ones
    kinds = [error_of(send, wrong)[0]]
    time.sleep(0.3 * rank)
    hook = send(right)
    kinds.append(error_of(send, wrong)[0])
    assert kinds == ["ValueError"] * 2
    return error_of(hook)[1]


@pytest.mark.parametrize("env", [{}, NODES[0][2]], ids=["one node", "2x1"])
def test_a_rank_remembers_what_it_had_refused_when_it_made_a_call(device: str, env: dict) -> None:
    require_low_latency(device, env)
    assert run_ranks(refuse_twice, 2, env=env) == ["", ""]


def masked_refuser(rank: int, num_ranks: int) -> tuple[str, list[int]]:
    buffer = make_buffer(num_ranks, low_latency_mode=True, enable_shrink=True)
    call, (right, wrong) = calls(buffer, num_ranks)["low_latency_dispatch"], right_and_wrong()
    dist.barrier()
    kind = error_of(call, wrong if rank == 1 else right)[0]
    status = torch.zeros(num_ranks, dtype=torch.int32)
    buffer.low_latency_query_mask_buffer(status)
    dist.barrier()
    return kind, status.tolist()


@pytest.mark.filterwarnings("ignore")
def test_a_rank_that_refuses_is_masked_where_ranks_are_masked(device: str) -> None:
    results = run_ranks(masked_refuser, 3)
    assert results[1] == ("ValueError", [0, 0, 0])
    assert results[0] == results[2] == ("none", [0, 1, 0])


def go_on_alone(rank: int, num_ranks: int, is_low_latency: bool, shrinks: bool) -> list[tuple[str, str, list[int]]]:
    """Rank 0 refuses its second step, and goes on with the third before the others look. Returns what comes of each
    step: an error, and which steps of the ranks the rows that came are of; 0: none came.
    """
    buffer = make_buffer(num_ranks, low_latency_mode=is_low_latency, enable_shrink=shrinks)
    ids = torch.arange(num_ranks).repeat(TOKENS, 1)
    results = []
    for step in range(1, 5):
        x = torch.full((TOKENS, HIDDEN), float(step), dtype=torch.bfloat16)
        is_wrong = rank == 0 and step == 2
        if rank and step == 2:
            time.sleep(0.3)
        steps: list[int] = []
        with error_kept() as error:
            if is_low_latency:
                rows, _, handle, _, _ = buffer.low_latency_dispatch(
                    x, ids, 1 if is_wrong else TOKENS, num_ranks, use_fp8=False
                )
                buffer.check()
                ranges = [(one >> 32, one & 0xFFFFFFFF) for one in handle[1][0].tolist()]
                steps = [int(rows[0, start, 0]) if count else 0 for start, count in ranges]
            else:
                layout = buffer.get_dispatch_layout(ids, num_ranks)[:4]
                per_rank, per_node, per_expert, mask = layout
                rows, *_ = buffer.dispatch(
                    x[1:] if is_wrong else x, None, per_rank, per_node, mask, per_expert, ids, torch.ones(ids.shape)
                )
                buffer.check()
                steps = rows.view(num_ranks, TOKENS, HIDDEN)[:, 0, 0].int().tolist()
        results.append((*error, steps))
    return results


@contextlib.contextmanager
def error_kept() -> Iterator[list[str]]:
    """A block that may fail: the kind and the text of its error."""
    kept = ["none", ""]
    try:
        yield kept
    except Exception as error:
        kept[:] = [type(error).__name__, str(error)]


@worlds(ONE_NODE, NODES)
@pytest.mark.parametrize("is_low_latency", [False, True], ids=["normal", "low latency"])
def test_a_rank_that_goes_on_after_a_mistake_of_its_own_is_not_taken_for_in_step(
    device: str, is_low_latency: bool, num_ranks: int, env: dict
) -> None:
    if is_low_latency:
        require_low_latency(device, env)
    check_go_on_alone(is_low_latency, num_ranks, env)


@pytest.mark.cpu_only
@worlds(KERNELS)
@pytest.mark.parametrize("is_low_latency", [False, True], ids=["normal", "low latency"])
def test_kernels_do_not_take_it_for_in_step_either(
    device: str, is_low_latency: bool, num_ranks: int, env: dict
) -> None:
    if is_low_latency and "DEEP_EP_RANKS_PER_NODE" in env:
        pytest.skip("low latency across nodes needs NVSHMEM there")
    check_go_on_alone(is_low_latency, num_ranks, env)


def check_go_on_alone(is_low_latency: bool, num_ranks: int, env: dict) -> None:
    for rank, results in enumerate(run_ranks(go_on_alone, num_ranks, is_low_latency, False, env=env)):
        (first, *_), *others = results
        assert first == "none"
        kinds = [kind for kind, *_ in others]
        assert kinds == (
            ["ValueError", "EPPeerFailed", "EPClosed"] if rank == 0 else ["EPPeerFailed"] + 2 * ["EPClosed"]
        )
        assert all("rank 0 refused this call, of which nothing was sent" in text for _, text, _ in others[rank == 0 :])


@pytest.mark.filterwarnings("ignore")
@worlds(ONE_NODE[1:], NODES, KERNELS[:1])
def test_ranks_mask_each_other_where_one_goes_on_after_a_mistake_of_its_own(
    device: str, num_ranks: int, env: dict
) -> None:
    require_low_latency(device, env)
    if device == "cuda" and "DEEP_EP_TRANSPORT" in env:
        pytest.skip("kernels run there anyway")
    alone, *others = run_ranks(go_on_alone, num_ranks, True, True, env=env)
    assert [kind for kind, *_ in alone] == ["none", "ValueError", "none", "none"]
    assert [steps for *_, steps in alone[2:]] == [[step] + [0] * (num_ranks - 1) for step in (3, 4)]
    for results in others:
        assert [kind for kind, *_ in results] == ["none"] * 4
        assert [steps for *_, steps in results[1:]] == [[0] + [step] * (num_ranks - 1) for step in (2, 3, 4)]


def send_and_refuse(rank: int, num_ranks: int, shrinks: bool, who: str) -> list[tuple[str, list[int]]]:
    """Rank 0 refuses its second step alone, and sends the third. Before it is received, a later call is refused, by all
    or by rank 0. Returns what comes of this call and the next one: an error, and which steps of the ranks came.
    """
    buffer = make_buffer(num_ranks, low_latency_mode=True, enable_shrink=shrinks)
    ids = torch.arange(num_ranks).repeat(TOKENS, 1)

    def send(step: int, max_tokens: int = TOKENS) -> Callable[[], list[int]]:
        x = torch.full((TOKENS, HIDDEN), float(step), dtype=torch.bfloat16)
        rows, _, handle, _, hook = buffer.low_latency_dispatch(
            x, ids, max_tokens, num_ranks, use_fp8=False, return_recv_hook=True
        )

        def receive() -> list[int]:
            hook()
            buffer.check()
            ranges = [(one >> 32, one & 0xFFFFFFFF) for one in handle[1][0].tolist()]
            return [int(rows[0, start, 0]) if count else 0 for start, count in ranges]

        return receive

    assert send(1)() == [1] * num_ranks
    dist.barrier()
    if rank == 0:
        assert error_of(send, 2, 1)[0] == "ValueError"
    step = 3 if rank == 0 else 2
    receive = send(step)
    if rank == 0 or who == "all":
        assert error_of(send, 9, 1)[0] == "ValueError"
    dist.barrier()
    results = []
    for further in (receive, lambda: send(step + 1)()):
        steps: list[int] = []
        with error_kept() as error:
            steps = further()
        kind, text = error
        assert kind in ("none", "EPClosed") or "rank 0 refused this call, of which nothing was sent" in text
        results.append((kind, steps))
        dist.barrier()
    return results


@pytest.mark.filterwarnings("ignore")
@worlds(ONE_NODE[1:], NODES[:1], KERNELS[:1])
@pytest.mark.parametrize("shrinks", [False, True], ids=["fails", "masks"])
@pytest.mark.parametrize("who", ["all", "alone"])
def test_a_later_refusal_hides_no_earlier_one(device: str, num_ranks: int, env: dict, shrinks: bool, who: str) -> None:
    require_low_latency(device, env)
    if device == "cuda" and "DEEP_EP_TRANSPORT" in env:
        pytest.skip("kernels run there anyway")
    alone, *others = run_ranks(send_and_refuse, num_ranks, shrinks, who, env=env)
    if not shrinks:
        assert [alone, *others] == [[("EPPeerFailed", []), ("EPClosed", [])]] * num_ranks
        return
    none = [0] * (num_ranks - 1)
    assert alone == [("none", [3, *none]), ("none", [4, *none])]
    for results in others:
        assert results == [("none", [0] + [step] * (num_ranks - 1)) for step in (2, 3)]


def come_back(rank: int, num_ranks: int, refusing: tuple[int, ...]) -> list[int]:
    """Some ranks refuse a call that no rank makes. Then all come into step again. Returns who is masked at the end."""
    buffer = make_buffer(num_ranks, low_latency_mode=True, enable_shrink=True)
    call, (_, wrong) = calls(buffer, num_ranks)["low_latency_dispatch"], right_and_wrong()
    if rank in refusing:
        assert error_of(call, wrong)[0] == "ValueError"
    dist.barrier()
    buffer.low_latency_clean_mask_buffer()
    dist.barrier()
    buffer.clean_low_latency_buffer(TOKENS, HIDDEN, 2 * num_ranks)
    status = torch.zeros(num_ranks, dtype=torch.int32)
    buffer.low_latency_query_mask_buffer(status)
    dist.barrier()
    return status.tolist()


@worlds(ONE_NODE[1:], NODES[:1], KERNELS[:1])
@pytest.mark.parametrize("refusing", [(0,), (0, 1)])
def test_ranks_that_have_refused_a_call_come_into_step(
    device: str, num_ranks: int, env: dict, refusing: tuple[int, ...]
) -> None:
    require_low_latency(device, env)
    if device == "cuda" and "DEEP_EP_TRANSPORT" in env:
        pytest.skip("kernels run there anyway")
    assert run_ranks(come_back, num_ranks, refusing, env=env) == [[0] * num_ranks] * num_ranks


def other_counts(rank: int, num_ranks: int) -> None:
    """The ids are those of the layout, and the counts per expert are not."""
    buffer = make_buffer(num_ranks)
    for num_tokens in (TOKENS, 1):
        ids, x = torch.arange(num_tokens * TOPK).view(num_tokens, TOPK), torch.ones(num_tokens, HIDDEN)
        per_rank, per_node, per_expert, mask, _ = buffer.get_dispatch_layout(ids, TOKENS * TOPK)
        topk = (ids, torch.ones(num_tokens, TOPK))
        with pytest.raises(ValueError, match="selects expert 0 1 times, `num_tokens_per_expert` counts 2"):
            buffer.dispatch(x, None, per_rank, per_node, mask, per_expert + 1, *topk)
        recv_x, *_ = buffer.dispatch(x, None, per_rank, per_node, mask, per_expert, *topk)
        assert recv_x.size(0) == num_ranks * int(per_rank[rank])
        ids[:, 0] = ids[:, 1]  # of the layout no more, in the same tensor
        with pytest.raises(ValueError, match="selects expert 0 0 times, `num_tokens_per_expert` counts 1"):
            buffer.dispatch(x, None, per_rank, per_node, mask, per_expert, *topk)
    buffer.destroy()


@pytest.mark.cpu_only
@worlds(ONE_NODE, NODES)
def test_counts_that_are_not_those_of_the_ids(num_ranks: int, env: dict[str, str]) -> None:
    run_ranks(other_counts, num_ranks, env=env)
