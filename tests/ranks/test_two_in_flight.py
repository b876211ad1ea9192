"""Two micro-batches through one buffer of the hinted size: all orders in which engines run their halves."""

from __future__ import annotations

import random
from typing import Any

import pytest
from low_latency import Case, Given, check_combine, check_dispatch, dispatch, expected_rows, experts_rows, inputs
from low_latency import make_buffer as hinted_buffer

import deep_ep
from common import error_of, run_ranks
from deep_ep import reference
from deep_ep.kernels import _triton

# d sends a dispatch, c a combine, r receives the last of both; A and B are the micro-batches.
ORDERS = {
    "one after the other": "dA rA cA rA dB rB cB rB",
    "two results held": "dA rA dB rB cA rA cB rB",
    "combine while a dispatch is in flight": "dA rA cA dB rA rB cB rB",
    "dispatch and combine in turn": "dA rA dB cA rB rA cB rB",
    "two dispatches in flight": "dA dB rA cA rA rB cB rB",
    "both in flight": "dA dB rA rB cA cB rA rB",
}
BF16 = {"use_fp8": False}
SMALL = Case(experts_per_rank=3, max_tokens=1, hidden=24, topk=1, num_tokens=1)
INTERPRETED = {"DEEP_EP_TRANSPORT": "interpreted", "DEEP_EP_DEVICE": "cpu"}

only_cpu = pytest.mark.cpu_only
interpreted = pytest.mark.skipif(
    not _triton.INTERPRETED, reason="Triton is not there, or not in its interpreter's mode"
)


class Batch:
    """A dispatch and its combine, compared with the oracle."""

    def __init__(self, buffer: deep_ep.Buffer, case: Case, form: dict[str, bool], back: dict[str, bool]):
        self.buffer, self.case, self.form, self.back = buffer, case, form, back
        self.rank, size = buffer.rank, buffer.group_size
        self.every = [inputs(one, size, case) for one in range(size)]
        sent, scales = expected_rows([one.x for one in self.every], form)
        ids = [one.topk_idx for one in self.every]
        self.want = reference.low_latency_dispatch(sent, ids, case.max_tokens, case.experts_per_rank * size, scales)
        self.got: tuple = ()
        self.combined: Any = None
        self.hook: Any = None

    @property
    def mine(self) -> Given:
        return self.every[self.rank]

    def step(self, name: str) -> None:
        if name == "d":
            self.got = dispatch(self.buffer, self.mine, self.case, return_recv_hook=True, **self.form)
            self.hook = self.got[4]
        elif name == "r":
            self.hook()
            if self.combined is not None:
                use_logfmt = self.back.get("use_logfmt", False)
                check_combine(self.combined, self.every, self.want, self.form, self.rank, use_logfmt)
        else:
            x, handle = experts_rows(check_dispatch(self.got, self.want[self.rank], self.form), self.rank), self.got[2]
            if self.back.get("zero_copy"):
                room = self.buffer.get_next_low_latency_combine_buffer(handle)
                room.copy_(x)
                x = room
            self.combined, _, self.hook = self.buffer.low_latency_combine(
                x, self.mine.topk_idx, self.mine.topk_weights, handle, return_recv_hook=True, **self.back
            )


def play(buffer: deep_ep.Buffer, order: str, cases: list[Case], form: dict[str, bool], back: dict[str, bool]) -> None:
    batches = {name: Batch(buffer, case, form, back) for name, case in zip("AB", cases, strict=True)}
    for step in order.split():
        batches[step[1]].step(step[0])


def all_orders(rank: int, num_ranks: int, num_rounds: int, kinds: list[tuple[dict, dict]], case: Case) -> None:
    """Every order with every kind of call, of one size and of two that change from round to round."""
    draw = random.Random(num_ranks)
    buffer = hinted_buffer(num_ranks, case)
    for number in range(num_rounds):
        for order in ORDERS.values():
            form, back = kinds[number % len(kinds)]
            smaller = case._replace(max_tokens=draw.randint(1, case.max_tokens), hidden=draw.randint(1, case.hidden))
            cases = [one._replace(seed=2 * number + batch) for batch, one in enumerate((case, smaller))]
            play(buffer, order, draw.sample(cases, 2) if number % 2 else [cases[0]] * 2, form, back)
    buffer.check()
    buffer.destroy()


KINDS = [(BF16, {}), ({}, {"use_logfmt": True}), (BF16, {"zero_copy": True}), ({"round_scale": True}, {})]


@only_cpu
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_all_orders_run_at_the_hinted_size(device: str, num_ranks: int) -> None:
    run_ranks(all_orders, num_ranks, 4, KINDS, Case(experts_per_rank=4))


@only_cpu
@pytest.mark.parametrize(("num_ranks", "ranks_per_node"), [(2, 1), (4, 2)])
def test_all_orders_run_across_nodes(device: str, num_ranks: int, ranks_per_node: int) -> None:
    env = {"DEEP_EP_RANKS_PER_NODE": str(ranks_per_node)}
    run_ranks(all_orders, num_ranks, 2, KINDS[1:3], Case(experts_per_rank=4), env=env)


def some_orders(rank: int, num_ranks: int) -> None:
    """In the interpreter, which is slow: every order, and every kind of call, once."""
    buffer = hinted_buffer(num_ranks, SMALL)
    for number, order in enumerate(ORDERS.values()):
        form, back = KINDS[number % len(KINDS)]
        sizes = (SMALL, SMALL._replace(hidden=16))
        play(buffer, order, [case._replace(seed=number) for case in sizes], form, back)
    buffer.check()
    buffer.destroy()


@only_cpu
@interpreted
def test_all_orders_run_with_the_kernels(device: str) -> None:
    run_ranks(some_orders, 2, env=INTERPRETED)


def taken_and_not_used(rank: int, num_ranks: int) -> None:
    """Both handles have a zero-copy tensor, and are combined by copying all the same: into what is theirs."""
    buffer = hinted_buffer(num_ranks, SMALL)
    for seed in range(3):
        batches = [Batch(buffer, SMALL._replace(seed=2 * seed + one), BF16, {}) for one in range(2)]
        for batch in batches:
            batch.step("d")
            batch.step("r")
        for batch in batches:
            buffer.get_next_low_latency_combine_buffer(batch.got[2])
        for name in ("c", "r"):
            for batch in batches:
                batch.step(name)
    buffer.check()
    buffer.destroy()


@only_cpu
@pytest.mark.parametrize("env", [{}, pytest.param(INTERPRETED, marks=interpreted)], ids=["cpu", "kernels"])
def test_a_handle_with_a_zero_copy_tensor_may_be_combined_without(device: str, env: dict[str, str]) -> None:
    run_ranks(taken_and_not_used, 2, env=env)


FEW = Case(experts_per_rank=1, max_tokens=2, hidden=136, topk=2)
FOUR = Case(experts_per_rank=2, max_tokens=9, hidden=128, topk=8)


def few_experts(rank: int, num_ranks: int, case: Case) -> tuple[str, str]:
    """Dispatches take slots, and so one result may be in flight. What the error names suffices."""
    buffer = hinted_buffer(num_ranks, case)
    for seed in range(3):
        play(buffer, ORDERS["two results held"], [case._replace(seed=seed)] * 2, BF16, {})
    error = ("", "")
    for order in ORDERS.values():
        error = error_of(play, buffer, order, [case] * 2, BF16, {})
        if error[0] != "none":
            break
    wanted = int(error[1].rpartition("num_rdma_bytes=")[2])
    num_experts = case.experts_per_rank * num_ranks
    size = deep_ep.Buffer.get_low_latency_rdma_size_hint(case.max_tokens, case.hidden, num_ranks, num_experts)
    larger = hinted_buffer(num_ranks, case, times=-(-wanted // size))
    for order in ORDERS.values():
        play(larger, order, [case] * 2, BF16, {})
    return error


@only_cpu
@pytest.mark.parametrize(
    ("case", "env"),
    [(FEW, {}), pytest.param(FEW, INTERPRETED, marks=interpreted), (FOUR, {})],
    ids=["cpu", "kernels", "four experts"],
)
def test_with_very_few_experts_the_error_names_what_suffices(device: str, case: Case, env: dict[str, str]) -> None:
    results = run_ranks(few_experts, 2, case, env=env)
    assert len(set(results)) == 1, results  # all ranks refuse the same call, before anything is sent
    kind, text = results[0]
    assert kind == "EPError"
    assert "2 results would be in flight, the window has room for 1, since the calls before took" in text
