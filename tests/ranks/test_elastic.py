"""DeepEP V2's calls: compact and expanded, with and without the host's wait, cached, and what combine makes of them."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from common import NOTHING_POSTED, error_of, run_ranks
from deep_ep import Buffer, ElasticBuffer, EPHandle, EventHandle, EventOverlap, reference

pytestmark = pytest.mark.usefixtures("device")


class Case(NamedTuple):
    """A dispatch."""

    tokens: int = 9
    experts_per_rank: int = 3
    topk: int = 4
    hidden: int = 24
    alignment: int = 1
    is_fp8: bool = False
    idx_dtype: torch.dtype = torch.int64
    masked: float = 0.2
    is_twice: bool = False  # tokens name an expert twice, and experts that there are not


CASES = {
    "plain": Case(),
    "aligned": Case(alignment=4, idx_dtype=torch.int32),
    "scales": Case(is_fp8=True, alignment=8),
    "one expert": Case(experts_per_rank=1, topk=1),
    "nothing": Case(tokens=0),
    "masked": Case(masked=1.0),
    "twice": Case(is_twice=True, alignment=2),
    "many": Case(tokens=70, hidden=7, experts_per_rank=5, topk=6, alignment=16),
}


class Inputs(NamedTuple):
    """What a rank brings."""

    x: Any
    topk_idx: torch.Tensor
    weights: torch.Tensor


def inputs_of(case: Case, rank: int, num_ranks: int) -> Inputs:
    """The same on every rank that asks."""
    generator = torch.Generator("cpu").manual_seed(100 + rank)
    num_tokens, num_experts = max(0, case.tokens - rank), case.experts_per_rank * num_ranks
    x = torch.randn(num_tokens, case.hidden, generator=generator).bfloat16()
    scores = torch.rand(num_tokens, num_experts, generator=generator)
    topk = min(case.topk, num_experts)
    topk_idx = scores.topk(topk, 1)[1].to(case.idx_dtype) if num_tokens else torch.empty(0, topk, dtype=case.idx_dtype)
    if case.is_twice:
        topk_idx[::2, 1], topk_idx[1::3, 0] = topk_idx[::2, 0], num_experts + 2
    is_masked = torch.rand(topk_idx.shape, generator=generator) < case.masked
    topk_idx = topk_idx.masked_fill(is_masked, -1)
    weights = torch.rand(topk_idx.shape, generator=generator)
    if not case.is_fp8:
        return Inputs(x, topk_idx, weights)
    scales = torch.rand(num_tokens, 3, generator=generator).t().contiguous().t()
    return Inputs((x.to(torch.float8_e4m3fn), scales), topk_idx, weights)


def make_buffer(case: Case, **options: Any) -> ElasticBuffer:
    return ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=max(1, case.tokens), hidden=case.hidden, **options)


def parts_of(x: Any) -> list[torch.Tensor]:
    """The payload as bytes, and the scales."""
    payload, *scales = x if isinstance(x, tuple) else (x,)
    return [payload.contiguous().view(torch.uint8), *scales]


def expected_rows(told: reference.ElasticDispatched, part: int, every: list[Inputs]) -> list[torch.Tensor | None]:
    return [None if row is None else parts_of(every[row[0]].x)[part][row[1]] for row in told.rows]


def check_rows(x: Any, told: reference.ElasticDispatched, every: list[Inputs], is_zero: bool = False) -> None:
    for part, received in enumerate(parts_of(x)):
        for row, expected in enumerate(expected_rows(told, part, every)):
            if expected is not None:
                assert torch.equal(received[row], expected), (part, row)
            elif is_zero:
                assert not received[row].any()


def check_handle(handle: EPHandle, told: reference.ElasticDispatched, case: Case, has_waited: bool) -> None:
    num_rows = told.rank_ends[-1]
    assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == told.rank_ends
    assert handle.psum_num_recv_tokens_per_expert.tolist() == told.ends
    assert handle.num_unaligned_recv_tokens_per_expert.tolist() == told.counts
    width = None if handle.do_expand else 2
    assert torch.equal(handle.recv_src_metadata[:num_rows, :width].cpu(), told.sources[:, :width])
    aligned = [-(-count // case.alignment) * case.alignment for count in told.counts]
    if has_waited:
        assert handle.num_recv_tokens == num_rows
        assert handle.num_expanded_tokens == sum(aligned)
        assert handle.num_recv_tokens_per_expert_list == aligned
    else:
        assert handle.num_recv_tokens_per_expert_list == []


def check_dispatch(
    rank: int, num_ranks: int, case: Case, buffer: ElasticBuffer, has_waited: bool, is_expanded: bool
) -> tuple[EPHandle, Any]:
    every = [inputs_of(case, peer, num_ranks) for peer in range(num_ranks)]
    mine, num_experts = every[rank], case.experts_per_rank * num_ranks
    told = reference.elastic_dispatch(
        [one.topk_idx.cpu() for one in every], rank, num_experts, max(1, case.tokens), case.alignment, is_expanded
    )
    stats = torch.full((case.experts_per_rank,), 5, dtype=torch.int32)
    x, topk_idx, weights, handle, event = buffer.dispatch(
        mine.x, mine.topk_idx, mine.weights, stats, num_experts, expert_alignment=case.alignment,
        do_cpu_sync=has_waited, do_expand=is_expanded, do_zero_padding=is_expanded,
        use_tma_aligned_col_major_sf=is_expanded,
    )  # fmt: skip
    assert event.event is None
    check_rows(x, told, every, is_zero=is_expanded)
    check_handle(handle, told, case, has_waited)
    assert stats.tolist() == [5 + count for count in told.counts]
    num_rows = told.rank_ends[-1]
    if is_expanded:
        assert topk_idx is None
        for row, (source, column) in enumerate(zip(told.rows, told.columns, strict=True)):
            expected = 0.0 if source is None else float(every[source[0]].weights[source[1], column])
            assert float(weights[row]) == expected
        if case.is_fp8:
            assert x[1].stride() == (1, -(-x[1].size(0) // 4) * 4)
    else:
        assert torch.equal(topk_idx[:num_rows].cpu(), told.topk_idx)
        assert bool((topk_idx[num_rows:] == -1).all())
        for row, source in enumerate(told.rows):
            assert source is not None
            assert torch.equal(weights[row], every[source[0]].weights[source[1]])
    again, ids_again, weights_again, same, _ = buffer.dispatch(mine.x, topk_weights=mine.weights, handle=handle)
    assert same is handle
    check_rows(again, told, every)
    if is_expanded:
        is_row = torch.tensor([source is not None for source in told.rows], dtype=torch.bool)
        assert torch.equal(weights_again[: len(told.rows)][is_row], weights[: len(told.rows)][is_row])
    else:
        assert torch.equal(ids_again[:num_rows], topk_idx[:num_rows])
        assert torch.equal(weights_again[:num_rows], weights[:num_rows])
    return handle, told


def contributions(case: Case, rank: int, num_tokens: int, topk: int, dtype: torch.dtype) -> torch.Tensor:
    """[T, K, H], what each column contributes to each token of a rank."""
    generator = torch.Generator("cpu").manual_seed(500 + rank)
    return torch.randn(num_tokens, topk, case.hidden, generator=generator).to(dtype)


def check_combine(
    rank: int, num_ranks: int, case: Case, buffer: ElasticBuffer, handle: EPHandle, told: Any, dtype: torch.dtype
) -> None:
    every = [inputs_of(case, peer, num_ranks) for peer in range(num_ranks)]
    mine, num_experts = every[rank], case.experts_per_rank * num_ranks
    topk = mine.topk_idx.size(1)
    given = [contributions(case, peer, one.topk_idx.size(0), topk, dtype) for peer, one in enumerate(every)]
    num_rows = handle.num_expanded_tokens if handle.do_expand else handle.recv_src_metadata.size(0)
    y = torch.full((num_rows, case.hidden), float("nan"), dtype=dtype)
    weights = torch.full((num_rows,) if handle.do_expand else (num_rows, topk), 7.0)
    for row, source in enumerate(told.rows):
        if source is None:
            continue
        peer, token = source
        if handle.do_expand:
            y[row] = given[peer][token, told.columns[row]]
            weights[row] = every[peer].weights[token, told.columns[row]]
            continue
        total = None
        for column in range(topk):
            if told.topk_idx[row, column] >= 0:
                value = given[peer][token, column].to(torch.float64 if dtype == torch.float64 else torch.float32)
                total = value if total is None else total + value
        assert total is not None
        y[row] = total.to(dtype)
        weights[row] = every[peer].weights[token]
    is_summed = buffer.allow_multiple_reduction or not handle.do_expand
    biases = [torch.randn(mine.topk_idx.size(0), case.hidden).to(dtype) for _ in range(2)]
    for bias in (None, biases[0], tuple(biases)):
        some = () if bias is None else (bias,) if isinstance(bias, torch.Tensor) else bias
        expected = reference.elastic_combine(given[rank], mine.topk_idx, num_experts, num_ranks, some, is_summed)
        out, out_weights, event = buffer.combine(y, handle, weights, bias)
        assert event.event is None
        assert torch.equal(out, expected)
        is_selected = (mine.topk_idx >= 0) & (mine.topk_idx < num_experts)
        assert torch.equal(out_weights, mine.weights.masked_fill(~is_selected, 0.0))


def round_trips(rank: int, num_ranks: int, case: Case, has_multiple_reduction: bool) -> dict[str, int]:
    buffer = make_buffer(case, allow_multiple_reduction=has_multiple_reduction)
    for has_waited in (True, False):
        for is_expanded in (False, True):
            handle, told = check_dispatch(rank, num_ranks, case, buffer, has_waited, is_expanded)
            for dtype in (torch.bfloat16, torch.float32):
                check_combine(rank, num_ranks, case, buffer, handle, told, dtype)
    return buffer.stats()["calls"]


@pytest.mark.parametrize(("name", "num_ranks"), [("plain", 1), *((name, 2) for name in CASES), ("plain", 4)])
def test_round_trips(name: str, num_ranks: int) -> None:
    run_ranks(round_trips, num_ranks, CASES[name], True)


@pytest.mark.parametrize("name", ["aligned", "nothing"])
def test_without_sums_on_the_way(name: str) -> None:
    run_ranks(round_trips, 3, CASES[name], False)


@pytest.mark.cpu_only
@pytest.mark.parametrize("name", ["aligned", "scales", "nothing"])
def test_kernels_do_the_same(name: str) -> None:
    small = CASES[name]._replace(tokens=min(CASES[name].tokens, 5), hidden=16)
    run_ranks(round_trips, 2, small, name != "aligned", env={"DEEP_EP_TRANSPORT": "interpreted"})


STRAIGHT = [
    ("scales", 2, NOTHING_POSTED),  # otherwise so few rows would be posted
    ("twice", 3, NOTHING_POSTED),
    ("many", 4, NOTHING_POSTED),
    ("scales", 2, {"DEEP_EP_TRANSPORT": "interpreted"}),
    ("twice", 2, {"DEEP_EP_TRANSPORT": "interpreted"}),
]


@pytest.mark.cpu_only
@pytest.mark.parametrize(("name", "num_ranks", "env"), STRAIGHT)
def test_expanded_rows_are_put_straight(name: str, num_ranks: int, env: dict[str, str]) -> None:
    for calls in run_ranks(round_trips, num_ranks, CASES[name], name != "twice", env=env):
        assert calls["dispatch/expanded"] == 4, "with and without the host's wait, and cached"
        assert calls["dispatch/direct"] == 4


@pytest.mark.cpu_only
def test_some_ranks_post_the_rows_of_a_combine() -> None:
    """15 rows of rank 0 and their weights take 1024 bytes, 17 of rank 1 more."""
    first, second = run_ranks(round_trips, 2, CASES["plain"], True, env={"DEEP_EP_POSTED_BYTES": "1024"})
    assert first["combine/posted"] > 0
    assert "combine/posted" not in second


def lies_anywhere(rank: int, num_ranks: int, has_multiple_reduction: bool, dtype: torch.dtype) -> None:
    """Expanded rows that are combined where they came, with those of some ranks in other memory."""
    case = CASES["many"]._replace(tokens=12, hidden=16)
    buffer = make_buffer(case, allow_multiple_reduction=has_multiple_reduction)
    mine, num_experts = inputs_of(case, rank, num_ranks), case.experts_per_rank * num_ranks
    options = {"num_experts": num_experts, "expert_alignment": 4, "do_expand": True}
    x, _, weights, handle, _ = buffer.dispatch(mine.x.to(dtype), mine.topk_idx, mine.weights, **options)
    bias = torch.randn(mine.topk_idx.size(0), case.hidden).to(dtype)
    elsewhere, given, _ = buffer.combine(x.clone(), handle, weights, bias)
    in_place, same, _ = buffer.combine(x, handle, weights, bias)
    mixed, _, _ = buffer.combine(x if rank % 2 else x.clone(), handle, bias=bias)
    assert torch.equal(elsewhere, in_place)
    assert torch.equal(elsewhere, mixed)
    assert torch.equal(given, same)
    selected = ((mine.topk_idx >= 0) & (mine.topk_idx < num_experts))[:, :, None]
    every = (mine.x.to(dtype)[:, None, :] * selected).to(dtype)
    expected = reference.elastic_combine(every, mine.topk_idx, num_experts, num_ranks, (bias,), has_multiple_reduction)
    assert torch.equal(in_place, expected)


@pytest.mark.parametrize("has_multiple_reduction", [True, False])
def test_expanded_rows_are_combined_wherever_they_lie(has_multiple_reduction: bool) -> None:
    run_ranks(lies_anywhere, 3, has_multiple_reduction, torch.bfloat16)


@pytest.mark.cpu_only
@pytest.mark.parametrize("has_multiple_reduction", [True, False])
def test_kernels_combine_expanded_rows_wherever_they_lie(has_multiple_reduction: bool) -> None:
    env = {"DEEP_EP_TRANSPORT": "interpreted"}
    run_ranks(lies_anywhere, 2, has_multiple_reduction, torch.float32, env=env)


def some_without_memory(rank: int, num_ranks: int) -> dict[str, int]:
    """One rank has no memory for an expanded result: its rows come compactly, and those of its peers do not."""
    case = CASES["scales"]._replace(tokens=6, hidden=8192)  # an expanded result has at most 56 rows, a compact one 12
    buffer = make_buffer(case)
    handle, _ = check_dispatch(rank, num_ranks, case, buffer, True, is_expanded=True)
    sizes, left = buffer.stats()["arena"], 384 << 10
    held = None
    if rank == 0:
        num_columns = (sizes["reserved"] - sizes["used"] - left) // handle.num_expanded_tokens
        held = buffer.get_combine_buffer(handle, hidden=num_columns // 2, dtype=torch.bfloat16)
    handle, told = check_dispatch(rank, num_ranks, case, buffer, False, is_expanded=True)
    check_combine(rank, num_ranks, case, buffer, handle, told, torch.bfloat16)
    del held
    return buffer.stats()["calls"]


@pytest.mark.cpu_only
def test_ranks_without_memory_for_expanded_rows_unfold_them() -> None:
    """Peers put rows straight all the same."""
    env = {"DEEP_EP_TRANSPORT": "interpreted", "DEEP_EP_ARENA_BYTES": str(2 << 20)}
    first, second = run_ranks(some_without_memory, 2, env=env)
    assert first["dispatch/direct"] == first["dispatch/expanded"] == 2
    assert set(second) & {"dispatch/direct", "dispatch/expanded"} == {"dispatch/expanded"}


def odd_weights(rank: int, num_ranks: int) -> None:
    """-0.0, signalling NaNs and denormals, where the caller's thread flushes denormals to zero."""
    case = CASES["aligned"]
    buffer, mine = make_buffer(case), inputs_of(case, rank, num_ranks)
    num_experts = case.experts_per_rank * num_ranks
    odd = torch.tensor([-(1 << 31), 0x7F800001, 0x7F800001 - (1 << 31), 1, 1 - (1 << 31)], dtype=torch.int32)
    words = odd[torch.arange(mine.topk_idx.numel()) % len(odd)].view(mine.topk_idx.shape)
    torch.set_flush_denormal(True)
    for is_expanded in (False, True):
        x, _, weights, handle, _ = buffer.dispatch(
            mine.x, mine.topk_idx, words.view(torch.float32), num_experts=num_experts, do_expand=is_expanded
        )
        for has_copy in (False, True):  # in the window, or anywhere
            found = buffer.combine(x, handle, weights.clone() if has_copy else weights)[1]
            assert torch.equal(found.view(torch.int32), words.masked_fill(mine.topk_idx < 0, 0))


@pytest.mark.parametrize("env", [{}, {"DEEP_EP_TRANSPORT": "interpreted"}])
def test_weights_come_back_bit_by_bit(env: dict[str, str], device: str) -> None:
    if device == "cuda" and env:
        pytest.skip("kernels are not interpreted there")
    run_ranks(odd_weights, 2, env=env)


def unequal_alignments(rank: int, num_ranks: int) -> tuple[str, str]:
    case = CASES["plain"]
    buffer, mine = make_buffer(case), inputs_of(case, rank, num_ranks)
    options = {"num_experts": case.experts_per_rank * num_ranks, "expert_alignment": 2 + rank}
    buffer.dispatch(mine.x, mine.topk_idx, **options)  # compact rows do not depend on it
    return error_of(buffer.dispatch, mine.x, mine.topk_idx, do_expand=True, **options)


@pytest.mark.parametrize("env", [{}, {"DEEP_EP_TRANSPORT": "interpreted"}])
def test_unequal_alignments_of_expanded_rows_are_named(env: dict[str, str], device: str) -> None:
    if device == "cuda" and env:
        pytest.skip("kernels are not interpreted there")
    seen = run_ranks(unequal_alignments, 2, env=env)
    assert {kind for kind, _ in seen} <= {"EPError", "EPPeerFailed"}
    assert all("expert_alignment" in text for _, text in seen)


def unequal_interfaces(rank: int, num_ranks: int) -> tuple[str, str]:
    case = CASES["plain"]
    mine, num_experts = inputs_of(case, rank, num_ranks), case.experts_per_rank * num_ranks
    buffer = Buffer(dist.group.WORLD, 1 << 20)
    if rank:
        elastic = ElasticBuffer.from_buffer(buffer, max(1, case.tokens))
        return error_of(elastic.dispatch, mine.x, mine.topk_idx, num_experts=num_experts)
    per_rank, _, per_expert, mask, _ = buffer.get_dispatch_layout(mine.topk_idx, num_experts)
    return error_of(
        buffer.dispatch, mine.x, num_tokens_per_rank=per_rank, is_token_in_rank=mask, num_tokens_per_expert=per_expert,
        topk_idx=mine.topk_idx, topk_weights=mine.weights,
    )  # fmt: skip


@pytest.mark.cpu_only
def test_kernels_do_not_mix_both_interfaces_in_one_call() -> None:
    """Ranks of `ElasticBuffer` read the counts that their peers store, which those of `Buffer` do not."""
    seen = run_ranks(unequal_interfaces, 2, env={"DEEP_EP_TRANSPORT": "interpreted"})
    assert {kind for kind, _ in seen} <= {"EPError", "EPPeerFailed"}
    assert all("ElasticBuffer" in text for _, text in seen), seen


def weights_of_some(rank: int, num_ranks: int, is_expanded: bool) -> tuple[str, str]:
    """One rank alone gives weights to a cached dispatch, in which they travel as something else."""
    case = CASES["plain"]
    buffer, mine = make_buffer(case), inputs_of(case, rank, num_ranks)
    options = {"num_experts": case.experts_per_rank * num_ranks, "do_expand": is_expanded}
    handle = buffer.dispatch(mine.x, mine.topk_idx, **options)[3]
    weights = mine.weights if rank else None
    return error_of(lambda: (buffer.dispatch(mine.x, topk_weights=weights, handle=handle), buffer.check()))


@pytest.mark.parametrize("is_expanded", [False, True])
@pytest.mark.parametrize("env", [{}, {"DEEP_EP_TRANSPORT": "interpreted"}])
def test_weights_of_some_ranks_are_named(env: dict[str, str], is_expanded: bool, device: str) -> None:
    if device == "cuda" and env:
        pytest.skip("kernels are not interpreted there")
    seen = run_ranks(weights_of_some, 2, is_expanded, env=env)
    assert {kind for kind, _ in seen} <= {"EPError", "EPPeerFailed"}
    assert all("Pass `topk_weights` on all ranks, or on none" in text for _, text in seen), seen
    assert not any("scale" in text for _, text in seen), seen


def unequal_reductions(rank: int, num_ranks: int) -> tuple[str, str]:
    case = CASES["plain"]
    buffer, mine = make_buffer(case, allow_multiple_reduction=rank == 0), inputs_of(case, rank, num_ranks)
    num_experts = case.experts_per_rank * num_ranks
    x, _, _, handle, _ = buffer.dispatch(mine.x, mine.topk_idx, num_experts=num_experts, do_expand=True)
    return error_of(lambda: (buffer.combine(x, handle), buffer.check()))


def test_unequal_reductions_are_named() -> None:
    seen = run_ranks(unequal_reductions, 2)
    assert {kind for kind, _ in seen} <= {"EPError", "EPPeerFailed"}
    assert all("`allow_multiple_reduction`" in text for _, text in seen), seen


def fewer_rows(rank: int, num_ranks: int) -> None:
    """Expanded rows end with the last expert's, as grouped GEMMs leave them, although the worst case has more."""
    case = CASES["plain"]
    buffer = make_buffer(case._replace(tokens=200), allow_multiple_reduction=False)
    mine, num_experts = inputs_of(case, rank, num_ranks), case.experts_per_rank * num_ranks
    x, _, weights, handle, _ = buffer.dispatch(
        mine.x, mine.topk_idx, mine.weights, num_experts=num_experts, do_expand=True, do_cpu_sync=False
    )
    end = int(handle.psum_num_recv_tokens_per_expert[-1])
    whole, expected, _ = buffer.combine(x, handle, weights)
    cut, found, _ = buffer.combine(x[:end].contiguous(), handle, weights[:end].contiguous())
    assert torch.equal(cut, whole)
    assert torch.equal(found, expected)
    assert torch.equal(found, mine.weights.masked_fill(mine.topk_idx < 0, 0))


def test_rows_behind_the_last_expert_may_be_left_out() -> None:
    run_ranks(fewer_rows, 2)


def num_used(handle: EPHandle) -> int:
    """Rows of an expanded result up to the last one in use."""
    num_rows = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
    return 1 + int(handle.recv_src_metadata[:num_rows, 2:].max())


def too_few_rows(rank: int, num_ranks: int, has_multiple_reduction: bool, has_waited: bool) -> list[tuple[str, str]]:
    case = CASES["aligned"]
    buffer, mine = make_buffer(case, allow_multiple_reduction=has_multiple_reduction), inputs_of(case, rank, num_ranks)
    options = {"num_experts": case.experts_per_rank * num_ranks, "do_cpu_sync": has_waited}
    x, _, _, handle, _ = buffer.dispatch(mine.x, mine.topk_idx, **options)
    errors = [error_of(buffer.combine, x[:-1].contiguous(), handle)]
    buffer.combine(x, handle)  # nothing is lost
    x, _, weights, handle, _ = buffer.dispatch(
        mine.x, mine.topk_idx, mine.weights, **options, do_expand=True, expert_alignment=case.alignment
    )
    last = num_used(handle)
    for num_rows in (last - 1, 0):
        given = x[:num_rows].contiguous(), handle, weights[:num_rows].contiguous()
        errors.append(error_of(buffer.combine, *given))
        assert f"first {last} rows" in errors[-1][1], errors[-1]
    whole = buffer.combine(x, handle, weights)
    cut = buffer.combine(x[:last].contiguous(), handle, weights[:last].contiguous())
    assert torch.equal(cut[0], whole[0])
    assert torch.equal(cut[1], whole[1])
    return errors


@pytest.mark.parametrize("has_waited", [True, False])
@pytest.mark.parametrize("has_multiple_reduction", [True, False])
def test_fewer_rows_than_came_are_refused(has_multiple_reduction: bool, has_waited: bool, device: str) -> None:
    if device == "cuda" and not has_waited:
        pytest.skip("the host does not know there how many came")
    for errors in run_ranks(too_few_rows, 2, has_multiple_reduction, has_waited):
        for kind, text in errors:
            assert kind == "ValueError", text
            assert text.startswith("combine: `x` must have"), text


def missing_rows(rank: int, num_ranks: int) -> None:
    """The last row in use is not given, which no host knows."""
    case = CASES["aligned"]._replace(tokens=5)
    for has_multiple_reduction in (True, False):
        buffer = make_buffer(case, allow_multiple_reduction=has_multiple_reduction)
        mine, num_experts = inputs_of(case, rank, num_ranks), case.experts_per_rank * num_ranks
        x, _, weights, handle, _ = buffer.dispatch(
            mine.x, mine.topk_idx, mine.weights, num_experts=num_experts, do_expand=True, do_cpu_sync=False
        )
        last = num_used(handle) - 1
        cut = buffer.combine(x[:last].contiguous(), handle, weights[:last].contiguous())
        x[last], weights[last] = 0, 0
        as_zeros = buffer.combine(x, handle, weights)
        assert torch.equal(cut[0], as_zeros[0])
        assert torch.equal(cut[1], as_zeros[1])


def test_kernels_take_missing_rows_for_zeros(device: str) -> None:
    """Where the host has not waited for the counts. They read nothing behind what is given."""
    run_ranks(missing_rows, 2, env={} if device == "cuda" else {"DEEP_EP_TRANSPORT": "interpreted"})


def refused_handle(rank: int, num_ranks: int) -> list[tuple[str, str]]:
    """Tokens name an expert more often than the worst case has rows for, and the combine is queued behind that."""
    buffer, topk_idx = ElasticBuffer(None, 1, num_max_tokens_per_rank=4), torch.zeros(4, 3, dtype=torch.int64)
    x, _, _, handle, event = buffer.dispatch(
        torch.ones(4, 8), topk_idx, num_experts=2 * num_ranks, do_expand=True, do_cpu_sync=False,
        async_with_compute_stream=True,
    )  # fmt: skip
    return [error_of(buffer.combine, x, handle), error_of(event.current_stream_wait)]


@pytest.mark.cpu_only
def test_a_combine_behind_an_overflow_names_it() -> None:
    for errors in run_ranks(refused_handle, 2):
        assert [kind for kind, _ in errors] == ["EPOverflow", "EPOverflow"], errors


def one_row(rank: int, num_ranks: int) -> None:
    """Scales and weights of a cached dispatch travel side by side, and are apart where they come."""
    x, scales, weights = torch.ones(1, 8), torch.ones(1, 3), torch.full((1, 2), 0.5)
    buffer = ElasticBuffer(dist.group.WORLD, 1, num_max_tokens_per_rank=4)
    topk_idx = torch.tensor([[rank, -1]])
    handle = buffer.dispatch((x, scales), topk_idx, weights, num_experts=num_ranks)[3]
    (_, came), _, came_weights, _, _ = buffer.dispatch((x, scales), None, weights, handle=handle)
    assert came.stride() == (3, 1)
    assert came_weights.stride() == (2, 1)
    assert came.untyped_storage().data_ptr() != came_weights.untyped_storage().data_ptr()
    assert came.tolist() == [[1.0, 1.0, 1.0]]
    assert came_weights.tolist() == [[0.5, 0.5]]


def test_results_of_one_row_have_memory_of_their_own() -> None:
    run_ranks(one_row, 2)


def in_order(rank: int, num_ranks: int) -> None:
    """The second buffer sends what the first one has not summed yet: V2 has one comm stream in a process."""
    case = CASES["many"]
    first, second = make_buffer(case), make_buffer(case)
    mine, options = inputs_of(case, rank, num_ranks), {"num_experts": case.experts_per_rank * num_ranks}
    x, _, _, handle, _ = first.dispatch(mine.x, mine.topk_idx, **options)
    expected = first.combine(x, handle)[0]
    sent, _, _, other, _ = second.dispatch(expected, mine.topk_idx, **options)
    if rank:
        time.sleep(0.3)  # the sum of rank 0 has to wait
    out, _, event = first.combine(x, handle, async_with_compute_stream=True)
    again = second.dispatch(out, handle=other)[0]
    assert torch.equal(again, sent)
    event.current_stream_wait()


def test_buffers_of_a_process_keep_their_order() -> None:
    run_ranks(in_order, 2)


@pytest.mark.cpu_only
@pytest.mark.filterwarnings("ignore:(dispatch|combine). the arena has no room")
@pytest.mark.parametrize("has_multiple_reduction", [True, False])
def test_the_same_through_staging(has_multiple_reduction: bool) -> None:
    """All ranks stage, and then some of them."""
    case = CASES["scales"]._replace(tokens=30, hidden=512)
    for limit in (4096, 96 << 10):
        env = {**NOTHING_POSTED, "DEEP_EP_ARENA_BYTES": str(limit)}
        seen = run_ranks(round_trips, 3, case, has_multiple_reduction, env=env)
        assert sum(calls.get("combine/staged", 0) for calls in seen) > 0
        assert all("combine/posted" not in calls for calls in seen)


def no_memory(rank: int, num_ranks: int) -> tuple[str, str]:
    case = CASES["plain"]._replace(tokens=40, hidden=512)
    buffer, mine = make_buffer(case), inputs_of(case, rank, num_ranks)
    x, _, _, handle, _ = buffer.dispatch(mine.x, mine.topk_idx, num_experts=case.experts_per_rank * num_ranks)
    return error_of(buffer.combine, x.clone(), handle)


@pytest.mark.cpu_only
def test_kernels_refuse_to_sum_staged_rows_in_another_order() -> None:
    env = {"DEEP_EP_TRANSPORT": "interpreted", "DEEP_EP_ARENA_BYTES": str(160 << 10)}
    seen = run_ranks(no_memory, 2, env=env)
    assert {kind for kind, _ in seen} <= {"EPTransportError", "EPPeerFailed"}
    assert any("num_bytes" in text for _, text in seen)


def asynchronous(rank: int, num_ranks: int, is_expanded: bool) -> None:
    case = CASES["aligned"]
    buffer, mine = make_buffer(case), inputs_of(case, rank, num_ranks)
    options = {
        "num_experts": case.experts_per_rank * num_ranks,
        "do_expand": is_expanded,
        "do_zero_padding": is_expanded,
    }
    at_once, _, _, handle, _ = buffer.dispatch(mine.x, mine.topk_idx, mine.weights, **options)
    summed, _, _ = buffer.combine(at_once, handle)
    for has_waited in (True, False):
        later, ids, weights, second, event = buffer.dispatch(
            mine.x, mine.topk_idx, mine.weights, **options, do_cpu_sync=has_waited, async_with_compute_stream=True,
            previous_event=buffer.capture(), allocate_on_comm_stream=True,
        )  # fmt: skip
        assert isinstance(event, EventOverlap)
        assert event.event is not None
        out, _, done = buffer.combine(later, second, previous_event=event, async_with_compute_stream=True)
        done.current_stream_wait()
        assert torch.equal(out, summed)
        num_rows = at_once.size(0)
        assert torch.equal(later[:num_rows], at_once)
        assert torch.equal(second.recv_src_metadata[: handle.num_recv_tokens], handle.recv_src_metadata)
        assert weights is not None
        assert (ids is None) == is_expanded
        third, _, _, _, event = buffer.dispatch(mine.x, handle=second, async_with_compute_stream=True)
        event.current_stream_wait()
        assert torch.equal(third[:num_rows], at_once)


@pytest.mark.parametrize("is_expanded", [False, True])
def test_asynchronous_calls(is_expanded: bool) -> None:
    run_ranks(asynchronous, 2, is_expanded)


def the_last_step_waits(rank: int, num_ranks: int) -> None:
    case = CASES["plain"]
    buffer, mine = make_buffer(case), inputs_of(case, rank, num_ranks)
    stream, gate = buffer.get_comm_stream(), type(buffer.get_comm_stream())("gate")
    release: list[int] = []
    held = EventHandle(gate.submit(lambda: release.append(1)))
    x, _, _, handle, event = buffer.dispatch(
        mine.x, mine.topk_idx, num_experts=case.experts_per_rank * num_ranks, previous_event_before_epilogue=held,
        async_with_compute_stream=True,
    )  # fmt: skip
    event.current_stream_wait()
    assert release == [1]
    buffer.combine(x, handle, previous_event_before_epilogue=held)
    stream.synchronize()
    gate.stop()


@pytest.mark.cpu_only
def test_the_last_step_waits() -> None:
    run_ranks(the_last_step_waits, 2)


def the_sum_waits(rank: int, num_ranks: int, point: str) -> None:
    """The event of rank 0 completes when rank 1 is at a point that it reaches only with the rows of rank 0."""
    case = CASES["plain"]
    buffer, mine = make_buffer(case, num_cpu_timeout_secs=30, num_gpu_timeout_secs=30), inputs_of(case, rank, num_ranks)
    x, _, _, handle, _ = buffer.dispatch(mine.x, mine.topk_idx, num_experts=case.experts_per_rank * num_ranks)
    bias, held = torch.zeros_like(mine.x), None
    expected = buffer.combine(x, handle, bias=torch.ones_like(mine.x))[0]

    def fill() -> None:
        dist.recv(torch.zeros(1), 1)
        bias.fill_(1.0)

    def tell(step: str) -> None:
        if step == point:
            dist.send(torch.zeros(1), 0)

    with ThreadPoolExecutor(1) as pool:
        if rank == 0:
            held = EventHandle(pool.submit(fill))
        else:
            bias.fill_(1.0)
            buffer.set_fault_hook(tell)
        out = buffer.combine(x, handle, bias=bias, previous_event_before_epilogue=held)[0]
    assert torch.equal(out, expected)


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    ("point", "env"),
    [("combine: before taken", NOTHING_POSTED), ("combine: before pull", {"DEEP_EP_TRANSPORT": "interpreted"})],
)
def test_only_the_sum_of_a_combine_waits(point: str, env: dict[str, str]) -> None:
    run_ranks(the_sum_waits, 2, point, env=env)


def the_peer_leaves(rank: int, num_ranks: int, is_expanded: bool, has_multiple_reduction: bool) -> None:
    """The event of rank 0 completes when the combine of rank 1 has returned. (On a board its rows stay as they are.)"""
    case = CASES["aligned"]
    buffer, mine = make_buffer(case, allow_multiple_reduction=has_multiple_reduction), inputs_of(case, rank, num_ranks)
    x, _, weights, handle, _ = buffer.dispatch(
        mine.x, mine.topk_idx, mine.weights, num_experts=case.experts_per_rank * num_ranks, do_expand=is_expanded
    )
    expected = buffer.combine(x, handle, weights)
    with ThreadPoolExecutor(1) as pool:
        held = EventHandle(pool.submit(dist.recv, torch.zeros(1), 1)) if rank == 0 else None
        out = buffer.combine(x, handle, weights, previous_event_before_epilogue=held)
        if rank:
            x.fill_(7.0)
            dist.send(torch.zeros(1), 0)
    assert torch.equal(out[0], expected[0])
    assert torch.equal(out[1], expected[1])
    assert buffer.stats()["calls"]["combine/posted"] == 2


@pytest.mark.cpu_only
@pytest.mark.parametrize(("is_expanded", "has_multiple_reduction"), [(False, True), (True, True), (True, False)])
def test_a_small_combine_ends_before_its_peers_have_summed(is_expanded: bool, has_multiple_reduction: bool) -> None:
    run_ranks(the_peer_leaves, 2, is_expanded, has_multiple_reduction)


def no_tokens(rank: int, num_ranks: int) -> None:
    buffer, num_experts = ElasticBuffer(None, 1), 3 * num_ranks
    x, topk_idx, weights = torch.empty(0, 8), torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 2)
    for is_expanded, num_rows in ((False, 0), (True, 12)):  # padding of three experts, which is not written
        came, ids, came_weights, handle, _ = buffer.dispatch(
            x, topk_idx, weights, num_experts=num_experts, expert_alignment=4, do_cpu_sync=False, do_expand=is_expanded
        )
        assert came.shape == (num_rows, 8)
        assert came_weights.shape == ((num_rows,) if is_expanded else (0, 2))
        assert is_expanded or ids.shape == (0, 2)
        assert handle.num_recv_tokens == 0
        assert handle.recv_src_metadata.shape == (0, 4)
        assert handle.num_unaligned_recv_tokens_per_expert.tolist() == [0, 0, 0]
        assert buffer.dispatch(x, handle=handle)[0].shape == came.shape
        out, out_weights, _ = buffer.combine(came, handle, came_weights)
        assert out.shape == (0, 8)
        assert out_weights.shape == (0, 2)


@pytest.mark.parametrize("env", [{}, {"DEEP_EP_TRANSPORT": "interpreted"}])
def test_a_worst_case_of_no_tokens_has_no_rows(env: dict[str, str], device: str) -> None:
    if device == "cuda" and env:
        pytest.skip("kernels are not interpreted there")
    run_ranks(no_tokens, 2, env=env)


def unequal_most_tokens(rank: int, num_ranks: int) -> tuple[Any, ...]:
    case = CASES["plain"]
    buffer, mine = make_buffer(case), inputs_of(case, rank, num_ranks)
    options = {"num_experts": case.experts_per_rank * num_ranks, "num_max_tokens_per_rank": 20 + rank}
    _, _, _, handle, _ = buffer.dispatch(mine.x, mine.topk_idx, **options)
    seen = (handle.num_max_tokens_per_rank, int(handle.recv_src_metadata[-1, 0]))
    return seen, error_of(
        lambda: (buffer.dispatch(mine.x, mine.topk_idx, do_cpu_sync=False, **options), buffer.check())
    )


def test_the_largest_number_of_tokens_counts_where_the_host_waits() -> None:
    results = run_ranks(unequal_most_tokens, 2)
    for seen, (kind, text) in results:
        assert seen[0] == 21
        assert 21 <= seen[1] < 21 + 9
        assert kind in ("EPError", "EPPeerFailed")  # this rank has noticed it, or a peer has
        assert "max_tokens" in text
        assert "20" in text
        assert "21" in text


def empty_rank(rank: int, num_ranks: int) -> tuple[int, list[int]]:
    """Each rank gives its own number of tokens as the most, also the one that has none."""
    buffer, num_tokens = make_buffer(CASES["plain"]), 5 * rank
    topk_idx = torch.zeros(num_tokens, 1, dtype=torch.int64)
    options = {"num_experts": num_ranks, "num_max_tokens_per_rank": num_tokens}
    _, _, _, handle, _ = buffer.dispatch(torch.ones(num_tokens, 8), topk_idx, **options)
    return handle.num_max_tokens_per_rank, handle.recv_src_metadata[:, 0].tolist()


def test_no_tokens_at_most_on_one_rank_are_the_most_of_another() -> None:
    assert run_ranks(empty_rank, 2) == [(5, [5, 6, 7, 8, 9]), (5, [])]


def handles_of_other_ranks(rank: int, num_ranks: int) -> list[tuple[str, str]]:
    case = CASES["plain"]
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [0, 2], [0, 1])]
    sizes: dict[str, Any] = {"num_bytes": 1 << 21, "num_max_tokens_per_rank": case.tokens, "explicitly_destroy": True}
    *buffers, same = [
        ElasticBuffer(group, **sizes) if rank in ranks else None
        for group, ranks in zip(groups, ((0, 1), (0, 2), (0, 1)), strict=True)
    ]
    buffers, mine = [one for one in buffers if one is not None], inputs_of(case, rank, 2)
    made = [buffer.dispatch(mine.x, mine.topk_idx, num_experts=2 * case.experts_per_rank) for buffer in buffers]
    if same is not None:
        x, _, _, handle, _ = made[0]
        same.combine(same.dispatch(mine.x, handle=handle)[0], handle)  # as good as an own one
    if rank:
        return []
    first, (x, _, _, handle, _) = buffers[0], made[1]
    return [
        error_of(first.dispatch, mine.x, handle=handle),
        error_of(first.combine, x, handle),
        error_of(first.get_combine_buffer, handle),
    ]


def test_handles_of_other_ranks_are_refused() -> None:
    seen, *_ = run_ranks(handles_of_other_ranks, 3)
    assert len(seen) == 3
    for kind, text in seen:
        assert kind == "ValueError"
        assert "was made by a buffer of ranks [0, 2], this one has ranks [0, 1]" in text


def different_handles(rank: int, num_ranks: int, is_dispatch: bool, how: str) -> tuple[str, str, list[int]]:
    """Two expanded dispatches, which the ranks confuse. They differ in the experts of as many compact rows, in how many
    go to each of two experts and ranks, or in the alignment.
    """
    num_tokens, hidden = 0 if how == "counts" and rank == 0 else 40, 64
    buffer = ElasticBuffer(None, 1 << 21, allow_multiple_reduction=how != "alignment", explicitly_destroy=True)
    x = torch.full((num_tokens, hidden), rank + 1.0)
    topk_idx = torch.zeros(num_tokens, 2, dtype=torch.int64)
    options = {"num_experts": num_ranks if how == "counts" else 2 * num_ranks, "do_expand": True}

    def dispatch(is_first: bool) -> tuple:
        topk_idx[:, 1] = -1 if is_first or how == "counts" else 1
        if how == "counts":
            topk_idx[:, 0] = torch.arange(num_tokens) >= (38 if is_first else 2)
        alignment = 8 if how == "alignment" and is_first else 1
        return buffer.dispatch(x, topk_idx, num_max_tokens_per_rank=40, expert_alignment=alignment, **options)

    one, other = dispatch(True), dispatch(False)
    guards = [buffer.get_combine_buffer(one[3], hidden, torch.float32).fill_(7.0) for _ in range(4)]
    del guards[0]
    dist.barrier()
    rows, _, _, handle, _ = other if rank else one
    kind, text = error_of(buffer.dispatch, x, handle=handle) if is_dispatch else error_of(buffer.combine, rows, handle)
    dist.barrier()
    return kind, text, [int((guard != 7.0).any(1).sum()) for guard in guards]


@pytest.mark.cpu_only
@pytest.mark.parametrize("is_dispatch", [True, False])
@pytest.mark.parametrize("how", ["experts", "counts", "alignment"])
@pytest.mark.parametrize("env", [{}, NOTHING_POSTED], ids=["posted", "put"])
def test_handles_of_different_expanded_dispatches_are_noticed(is_dispatch: bool, how: str, env: dict[str, str]) -> None:
    for kind, text, written in run_ranks(different_handles, 2, is_dispatch, how, env=env):
        assert kind in ("EPError", "EPPeerFailed")
        assert "Pass handles of one and the same dispatch" in text or kind == "EPPeerFailed", text
        assert not any(written)


def other_batch(rank: int, num_ranks: int, is_dispatch: bool, is_expanded: bool, is_synchronised: bool) -> tuple:
    """Two dispatches of the same counts: rank 1 takes the handle of the other one."""
    buffer = ElasticBuffer(None, 1 << 21, explicitly_destroy=True)
    topk_idx = torch.arange(2 * num_ranks).repeat(8, 1)
    options = {"num_experts": 2 * num_ranks, "num_max_tokens_per_rank": 8, "do_expand": is_expanded}
    made = [
        buffer.dispatch(torch.full((8, 64), 1.0 + batch), topk_idx, do_cpu_sync=is_synchronised, **options)
        for batch in range(2)
    ]
    rows, _, _, handle, _ = made[rank]
    again = torch.ones(8, 64)
    dist.barrier()
    return error_of(buffer.dispatch, again, handle=handle) if is_dispatch else error_of(buffer.combine, rows, handle)


@pytest.mark.cpu_only
@pytest.mark.parametrize("is_dispatch", [True, False])
@pytest.mark.parametrize("is_expanded", [True, False])
@pytest.mark.parametrize("is_synchronised", [True, False])
@pytest.mark.parametrize("env", [{}, NOTHING_POSTED], ids=["posted", "put"])
def test_handles_of_dispatches_with_the_same_counts_are_told_apart(
    is_dispatch: bool, is_expanded: bool, is_synchronised: bool, env: dict[str, str]
) -> None:
    for kind, text in run_ranks(other_batch, 2, is_dispatch, is_expanded, is_synchronised, env=env):
        assert kind in ("EPError", "EPPeerFailed")
        assert "Pass handles of one and the same dispatch" in text or kind == "EPPeerFailed", text


def wrong_metadata(rank: int, num_ranks: int) -> list[tuple[str, str]]:
    buffer = ElasticBuffer(None, 1 << 21, num_max_tokens_per_rank=4, explicitly_destroy=True)
    seen = []
    for make in (lambda rows: rows[:, :3], torch.Tensor.float, id):
        rows, _, _, handle, _ = buffer.dispatch(torch.ones(4, 64), torch.zeros(4, 2, dtype=torch.int64), num_experts=2)
        handle.recv_src_metadata = make(handle.recv_src_metadata)
        seen.append(error_of(buffer.combine, rows, handle))
    rows, _, _, handle, _ = buffer.dispatch(torch.ones(4, 64), torch.zeros(4, 2, dtype=torch.int64), num_experts=2)
    assert torch.equal(buffer.combine(rows, handle)[0], torch.full((4, 64), float(num_ranks)))
    return seen


def test_metadata_that_is_no_handle_s_is_refused() -> None:
    for columns, dtype, nothing in run_ranks(wrong_metadata, 1):
        assert columns[0] == "ValueError"
        assert "`handle.recv_src_metadata` must have shape [rows, 4]" in columns[1]
        assert dtype[0] in ("TypeError", "ValueError")
        assert "handle.recv_src_metadata" in dtype[1]
        assert nothing[0] == "TypeError"


def one_wrong_argument(rank: int, num_ranks: int, arguments: dict[str, Any]) -> tuple[str, str]:
    options = arguments if rank == 1 else {"num_bytes": 1 << 21}
    return error_of(ElasticBuffer, None, num_cpu_timeout_secs=30, **options)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({}, "pass `num_bytes`, or"),
        ({"num_bytes": 0}, "`num_bytes` must be at least 1, got 0"),
        ({"num_max_tokens_per_rank": 4, "hidden": -1}, "`hidden` must be at least 0, got -1"),
        ({"num_bytes": 1 << 21, "num_allocated_qps": "a"}, "`num_allocated_qps` must be an integer"),
    ],
)
def test_a_wrong_argument_of_one_rank_is_reported_to_the_others(arguments: dict[str, Any], reason: str) -> None:
    other, mine = run_ranks(one_wrong_argument, 2, arguments)
    assert mine[0] in ("ValueError", "TypeError")
    assert reason in mine[1]
    assert other[0] == "EPTransportError"
    assert f"rank 1 failed: {mine[0]}: {mine[1]}" in other[1], "not that it is silent, at the limit"


@pytest.mark.cpu_only
def test_kernels_take_many_columns() -> None:
    run_ranks(many_columns, 1, env={"DEEP_EP_TRANSPORT": "interpreted"})


def many_columns(rank: int, num_ranks: int) -> None:
    buffer = ElasticBuffer(None, 1 << 21, num_max_tokens_per_rank=2, explicitly_destroy=True)
    topk_idx = torch.arange(128).repeat(2, 1)
    _, recv_idx, _, handle, _ = buffer.dispatch(torch.ones(2, 8), topk_idx, num_experts=128)
    assert torch.equal(recv_idx, topk_idx)
    assert handle.dst_buffer_slot_idx[:, -1].tolist() == [0, 1]
    assert (handle.dst_buffer_slot_idx[:, :-1] == -1).all()
    kind, text = error_of(buffer.dispatch, torch.ones(1, 8), torch.zeros(1, 129, dtype=torch.int64), num_experts=1)
    assert kind == "ValueError"
    assert "at most 128 columns on a GPU, it has 129" in text


def handle_and_pointers(rank: int, num_ranks: int) -> None:
    case = CASES["plain"]
    mine, num_experts = inputs_of(case, rank, num_ranks), case.experts_per_rank * num_ranks
    with make_buffer(case, explicitly_destroy=True) as buffer:
        for is_copied in (0, 1):
            _, _, _, handle, _ = buffer.dispatch(
                mine.x, mine.topk_idx, num_experts=num_experts, do_handle_copy=is_copied, do_cpu_sync=1
            )
            assert (handle.topk_idx.data_ptr() == mine.topk_idx.data_ptr()) != bool(is_copied)
            assert torch.equal(handle.topk_idx, mine.topk_idx)
        assert handle.num_sms == buffer.get_theoretical_num_sms(num_experts, case.topk)
        x, ids, _, handle, _ = buffer.dispatch(mine.x, mine.topk_idx, num_experts=num_experts, do_cpu_sync=False)
        assert x.shape == (num_ranks * case.tokens, case.hidden)
        num_rows = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
        ids.fill_(3)  # clients write into what they received
        handle.recv_src_metadata = handle.recv_src_metadata[:num_rows]
        out, _, _ = buffer.combine(x[:num_rows].contiguous(), handle)
        is_sent = (mine.topk_idx >= 0).any(1)
        assert bool((out[~is_sent] == 0).all())
        for _ in range(3):
            buffer.barrier()
        buffer.barrier(use_comm_stream=False, with_cpu_sync=True)
        assert buffer.get_physical_domain_size() == buffer.get_logical_domain_size() == (1, num_ranks)
        assert buffer.num_bytes % (2 << 20) == 0
        assert buffer.runtime is not None
        buffer.destroy()
        buffer.destroy()
        assert buffer.runtime is None


def test_handles_barriers_and_the_end() -> None:
    run_ranks(handle_and_pointers, 2)


def mixed_interfaces(rank: int, num_ranks: int) -> tuple[str, str]:
    with Buffer(dist.group.WORLD, 1 << 20) as buffer:
        elastic = ElasticBuffer.from_buffer(buffer, num_max_tokens_per_rank=4)
        x, topk_idx = torch.full((3, 8), rank + 1.0), torch.arange(6).view(3, 2) % (2 * num_ranks)
        per_rank, _, per_expert, mask, _ = buffer.get_dispatch_layout(topk_idx, 2 * num_ranks)
        compact, _, _, handle, _ = elastic.dispatch(x, topk_idx, num_experts=2 * num_ranks)
        recv_x, *_ = buffer.dispatch(x, None, per_rank, None, mask, per_expert)
        assert torch.equal(compact, recv_x)
        assert elastic.get_combine_buffer(handle, 5, torch.float64).shape == (compact.size(0), 5)
        assert torch.equal(elastic.combine(compact, handle)[0], x * mask.sum(1, keepdim=True))
        # All tokens name expert 0 three times, and the worst case has rows for two.
        too_many = torch.zeros(4, 3, dtype=torch.int64)
        overflow = error_of(
            elastic.dispatch, x.new_zeros(4, 8), too_many, num_experts=2 * num_ranks, do_expand=True, do_cpu_sync=False
        )
        rows, _, _, handle, _ = elastic.dispatch(x.new_ones(4, 8), too_many, num_experts=2 * num_ranks, do_expand=True)
        assert rows.size(0) == (12 * num_ranks if rank == 0 else 0)
        assert torch.equal(elastic.combine(rows, handle)[0], torch.full((4, 8), 3.0))
        return overflow


@pytest.mark.cpu_only
def test_both_interfaces_over_one_window() -> None:
    for kind, text in run_ranks(mixed_interfaces, 2):
        assert kind == "EPOverflow"
        assert "more than once" in text


def mistakes(rank: int, num_ranks: int) -> list[tuple[str, str]]:
    case = CASES["plain"]
    buffer, mine = make_buffer(case), inputs_of(case, rank, num_ranks)
    num_experts = case.experts_per_rank * num_ranks
    x, _, _, handle, _ = buffer.dispatch(mine.x, mine.topk_idx, num_experts=num_experts)
    stats = torch.zeros(case.experts_per_rank, dtype=torch.int32)
    calls = (
        (buffer.dispatch, (mine.x, mine.topk_idx), {"handle": handle}),
        (buffer.dispatch, (mine.x,), {"handle": handle, "do_cpu_sync": True}),
        (buffer.dispatch, (mine.x,), {"handle": handle, "expert_alignment": 2}),
        (buffer.dispatch, (mine.x,), {"handle": handle, "do_expand": True}),
        (buffer.dispatch, (mine.x,), {"handle": handle, "cumulative_local_expert_recv_stats": stats}),
        (buffer.dispatch, (mine.x, mine.topk_idx), {"num_experts": num_experts, "num_max_tokens_per_rank": 1}),
        (buffer.dispatch, (mine.x, mine.topk_idx), {"num_experts": num_experts, "do_zero_padding": True}),
        (buffer.dispatch, (mine.x, mine.topk_idx), {}),
        (buffer.dispatch, (mine.x, mine.topk_idx), {"num_experts": num_experts, "num_qps": 1000}),
        (buffer.combine, (x[:-1], handle), {}),
        (buffer.combine, (x, handle), {"bias": [x, x]}),
        (buffer.combine, (x, "handle"), {}),
        (buffer.destroy, (), {}),
        (buffer.dispatch, (mine.x, mine.topk_idx[:, :0]), {"num_experts": num_experts}),
        (buffer.combine, (x, handle), {"bias": (mine.x, None)}),
        (ElasticBuffer, (None, None, 1 << 21, 4, 8), {}),
        (ElasticBuffer, (None, 1 << 21), {"num_allocated_qps": -1}),
        (buffer.dispatch, (mine.x, mine.topk_idx), {"num_experts": num_experts, "expert_alignment": (1 << 31) - 1}),
        (buffer.dispatch, (mine.x,), {"handle": object.__new__(EPHandle)}),
    )
    seen = [error_of(method, *args, **options) for method, args, options in calls]
    buffer.combine(x, handle)  # none of them has cost anything
    rates = {"sm_read_gbs": 0, "sm_write_gbs": 0}  # not known: the usual ones
    assert buffer.get_theoretical_num_sms(num_experts, 2, **rates) == buffer.get_theoretical_num_sms(num_experts, 2)
    assert ElasticBuffer(None, 1).group is dist.group.WORLD
    return seen


def test_mistakes_are_named() -> None:
    kinds = ["AssertionError"] * 3 + ["ValueError"] * 4 + ["TypeError", "AssertionError", "ValueError"]
    kinds += ["TypeError", "TypeError", "AssertionError", "ValueError", "TypeError", "ValueError"]
    kinds += ["ValueError", "ValueError", "TypeError"]
    for seen in run_ranks(mistakes, 2):
        assert [kind for kind, _ in seen] == kinds, seen
        assert all(text for _, text in seen)


def absent(rank: int, num_ranks: int) -> tuple[str, str]:
    if rank:
        time.sleep(4)
        return "none", ""
    return error_of(make_buffer, CASES["plain"], num_cpu_timeout_secs=2)


@pytest.mark.cpu_only
def test_a_rank_that_makes_no_buffer_is_named_within_the_limit() -> None:
    (kind, text), _ = run_ranks(absent, 2)
    assert kind == "EPTimeout"
    assert "within 2 s, there is no word from rank 1" in text


def no_nodes(rank: int, num_ranks: int) -> tuple[str, str]:
    return error_of(make_buffer, CASES["plain"])


@pytest.mark.cpu_only
def test_across_nodes_it_says_so() -> None:
    for kind, text in run_ranks(no_nodes, 2, env={"DEEP_EP_RANKS_PER_NODE": "1"}):
        assert kind == "EPUnsupported"
        assert "2 nodes" in text
