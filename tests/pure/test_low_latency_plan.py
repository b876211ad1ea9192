"""Where low-latency rows lie, how many calls may be under way, and who has which zero-copy tensor."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deep_ep import EPError
from deep_ep.engine.low_latency.flights import Flights
from deep_ep.engine.low_latency.geometry import (
    MOST_SETS,
    MOST_TOKENS,
    NUM_ZERO_COPY,
    Form,
    Geometry,
    Plan,
    copy_bytes,
    plan_sets,
)
from deep_ep.engine.low_latency.zero_copy import ZeroCopy, zero_copy_view
from deep_ep.transport import MAX_EXPERTS

FORMS = [Form(use_fp8=False), Form(), Form(round_scale=True), Form(round_scale=True, use_ue8m0=True)]
MOST_TOPK = 32


# Geometry ------------------------------------------------------------------------------------------------------------


@st.composite
def geometries(draw: st.DrawFn, num_ranks: int | None = None) -> Geometry:
    ranks = num_ranks or draw(st.integers(1, 9))
    num_experts = ranks * draw(st.one_of(st.just(1), st.integers(1, 40)))
    hidden = draw(st.one_of(st.integers(1, 20), st.integers(100, 140), st.integers(1, 9000)))
    most = min(MOST_TOPK, num_experts)
    num_topk = draw(st.one_of(st.just(most), st.integers(1, most)))
    return Geometry(ranks, num_experts, draw(st.integers(1, 300)), hidden, num_topk)


def needs(geometry: Geometry) -> list[int]:
    return [*(geometry.dispatch_bytes(form) for form in FORMS), geometry.combine_bytes]


def test_worked_example() -> None:
    """2 ranks, 4 experts, at most 3 tokens of 130 channels with 2 experts each."""
    geometry = Geometry(2, 4, 3, 130, 2)
    assert (geometry.num_local_experts, geometry.num_groups, geometry.num_rows) == (2, 2, 6)
    assert geometry.scales_offset == 132
    assert [geometry.row_bytes(form) for form in FORMS] == [272, 144, 144, 144]
    assert [geometry.num_scales(form) for form in FORMS[1:]] == [2, 2, 1]
    assert geometry.dispatch_bytes(FORMS[1]) == 3 * 144 + 3 * 2 * 4
    assert (geometry.ranges_offset, geometry.slot_bytes) == (260, 272)
    assert geometry.combine_bytes == 4 * 3 * 272
    plan = plan_sets("test", 4 * 1024, geometry.dispatch_bytes(FORMS[1]), geometry)
    assert plan == Plan(1024, 2)
    assert [plan.set_offset(number) for number in range(1, 6)] == [1024, 512, 1536, 0, 1024]
    assert [plan.zero_copy_offset(index) for index in range(2)] == [2048, 3072]


@settings(max_examples=400, deadline=None)
@given(geometries())
def test_the_hint_always_suffices(geometry: Geometry) -> None:
    num_bytes = geometry.hint()
    for needed in needs(geometry):
        plan = plan_sets("test", num_bytes, needed, geometry)
        assert needed <= plan.set_bytes
        assert plan.sets_per_quarter & (plan.sets_per_quarter - 1) == 0
        assert 2 <= plan.num_sets <= MOST_SETS
        for number in range(20):
            begin = plan.set_offset(number)
            assert begin % 16 == 0
            assert (number & 1) * plan.quarter_bytes <= begin
            assert begin + needed <= ((number & 1) + 1) * plan.quarter_bytes
        ends = [plan.zero_copy_offset(index) + geometry.combine_bytes for index in range(NUM_ZERO_COPY)]
        assert ends[0] <= plan.zero_copy_offset(1)
        assert ends[1] <= num_bytes


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 6).flatmap(lambda ranks: st.lists(geometries(ranks), min_size=2, max_size=4)), st.data())
def test_calls_side_by_side_never_share_memory(several: list[Geometry], data: st.DataObject) -> None:
    """Whatever their sizes: the set of a call, that of the next one, and the zero-copy tensors."""
    num_bytes = max(one.hint() for one in several) + data.draw(st.integers(0, 100_000))
    number = data.draw(st.integers(1, 100))
    first, second = (data.draw(st.sampled_from([(n, one) for one in several for n in needs(one)])) for _ in range(2))
    spans = []
    for at, (needed, geometry) in enumerate((first, second)):
        plan = plan_sets("test", num_bytes, needed, geometry)
        spans.append((plan.set_offset(number + at), needed))
        assert spans[-1][0] + needed <= plan.zero_copy_offset(0)
    (a, a_bytes), (b, b_bytes) = spans
    assert a + a_bytes <= b or b + b_bytes <= a


@settings(max_examples=200, deadline=None)
@given(geometries(), st.integers(1, 9), st.integers(1, 50))
def test_calls_of_one_size_take_all_sets_in_turn(geometry: Geometry, times: int, number: int) -> None:
    for needed in needs(geometry):
        plan = plan_sets("test", times * geometry.hint(), needed, geometry)
        begins = [plan.set_offset(number + i) for i in range(plan.num_sets)]
        assert plan.set_offset(number + plan.num_sets) == begins[0]
        for one, other in zip(sorted(begins), sorted(begins)[1:], strict=False):
            assert one + needed <= other


@settings(max_examples=200, deadline=None)
@given(geometries(), st.floats(0.0, 1.0), st.integers(1, MOST_TOPK))
def test_too_little_memory_is_said_and_what_is_named_suffices(geometry: Geometry, part: float, num_topk: int) -> None:
    """Also where tokens name more experts than there are: that the hint does not know of."""
    geometry = geometry._replace(num_topk=num_topk)
    for needed in needs(geometry):
        num_bytes = int(part * geometry.hint())
        quarter_bytes = num_bytes // 4 // 16 * 16
        if needed > quarter_bytes:
            with pytest.raises(ValueError, match=r"here: .* need num_rdma_bytes=\d+, the buffer has ") as error:
                plan_sets("here", num_bytes, needed, geometry)
            wanted, there = map(int, re.findall(r"num_rdma_bytes=(\d+), the buffer has (\d+)", str(error.value))[0])
            assert there == num_bytes < wanted
            num_bytes = wanted
        plan = plan_sets("here", num_bytes, needed, geometry)
        assert plan.set_bytes >= needed


def copied_needs(geometry: Geometry) -> list[tuple[int, int]]:
    """What sets need in a memory, and in a copy of it."""
    dispatched = [(geometry.dispatch_bytes(form),) * 2 for form in FORMS]
    return [*dispatched, (geometry.combine_bytes, geometry.copied_combine_bytes)]


@settings(max_examples=400, deadline=None)
@given(geometries(), st.integers(1, 9))
def test_the_hint_suffices_for_copies_of_far_memory(geometry: Geometry, times: int) -> None:
    geometry = geometry._replace(num_topk=min(geometry.num_topk, 8))
    num_bytes = times * geometry.hint()
    for needed, copied in copied_needs(geometry):
        plan = plan_sets("test", num_bytes, needed, geometry, copied)
        assert needed <= plan.set_bytes
        assert copied <= plan.copy_set_bytes
        assert plan.copy_set_bytes % 16 == 0
        assert plan.sets_per_quarter * plan.copy_set_bytes <= plan.copy_quarter_bytes
        assert 2 * plan.copy_quarter_bytes == copy_bytes(num_bytes, geometry.num_ranks)
        near = plan_sets("test", num_bytes, needed, geometry)
        assert near.copy_quarter_bytes == 0
        if needed == geometry.combine_bytes:
            assert plan.num_sets == near.num_sets, "as many results are in flight as inside a node"


def test_copies_take_little_more_than_half_of_the_memory() -> None:
    for num_ranks in (2, 8, 64):
        num_bytes = 1 << 30
        copies = (num_ranks - 1) * copy_bytes(num_bytes, num_ranks)
        assert copies <= num_bytes * 9 / 16


@settings(max_examples=200, deadline=None)
@given(geometries(), st.floats(0.0, 1.0), st.integers(1, MOST_TOPK), st.integers(1, 40))
def test_too_little_memory_for_copies_is_said_and_what_is_named_suffices(
    geometry: Geometry, part: float, num_topk: int, more: int
) -> None:
    geometry = geometry._replace(num_topk=num_topk, max_tokens=more * geometry.max_tokens)
    for needed, copied in copied_needs(geometry):
        num_bytes = int(part * geometry.hint())
        try:
            plan_sets("here", num_bytes, needed, geometry, copied)
        except ValueError as error:
            wanted, there = map(int, re.findall(r"num_rdma_bytes=(\d+), the buffer has (\d+)", str(error))[0])
            assert there == num_bytes < wanted
            assert wanted % 128 == 0
            num_bytes = wanted
        plan = plan_sets("here", num_bytes, needed, geometry, copied)
        assert plan.set_bytes >= needed
        assert plan.copy_set_bytes >= copied


def test_a_larger_buffer_has_more_sets() -> None:
    geometry = Geometry(4, 32, 16, 512, 4)
    assert plan_sets("test", geometry.hint(), geometry.combine_bytes, geometry).num_sets == 2
    assert plan_sets("test", 2 * geometry.hint(), geometry.combine_bytes, geometry).num_sets == 4
    assert plan_sets("test", 64 * geometry.hint(), geometry.combine_bytes, geometry).num_sets == MOST_SETS
    assert plan_sets("test", geometry.hint(), geometry.dispatch_bytes(Form()), geometry).num_sets == MOST_SETS


def test_an_expert_and_a_place_fit_into_one_word() -> None:
    assert (MAX_EXPERTS - 1) << 16 | (MOST_TOKENS - 1) < 1 << 31
    assert MOST_TOKENS - 1 < 1 << 16


# Flights -------------------------------------------------------------------------------------------------------------


def test_one_in_flight_with_two_sets() -> None:
    flights = Flights()
    first = flights.send("here", 2)
    for _ in range(2):  # nothing changes
        with pytest.raises(EPError, match="here: 2 results would be in flight, the window has sets for 1"):
            flights.send("here", 2)
    assert flights.age(first) == 0
    flights.receive(first)
    with pytest.raises(EPError, match="called before"):
        flights.receive(first)
    assert flights.send("here", 2) == 2


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_as_many_in_flight_as_half_the_sets(depth: int) -> None:
    flights = Flights()
    pending = [flights.send("here", 2 * depth) for _ in range(depth)]
    assert [flights.age(one) for one in pending] == list(range(depth))[::-1]
    with pytest.raises(EPError, match=f"{depth + 1} results would be in flight, the window has sets for {depth}"):
        flights.send("here", 2 * depth)
    # The oldest one counts: what came after it may be received, but its own set is still read.
    for one in reversed(pending[1:]):
        flights.receive(one)
    with pytest.raises(EPError, match=f"{depth + 1} results"):
        flights.send("here", 2 * depth)
    flights.receive(pending[0])
    flights.send("here", 2 * depth)


def test_deep_flights_need_calls_of_one_size() -> None:
    flights = Flights()
    flights.receive(flights.send("here", 2))
    pending = flights.send("here", 8)
    with pytest.raises(EPError, match="2 results would be in flight, the window has sets for 1 right after calls of"):
        flights.send("here", 8)
    flights.receive(pending)
    for _ in range(2):
        flights.receive(flights.send("here", 8))
    flights.send("here", 8)
    flights.send("here", 8)  # the three before it were of its size


@pytest.mark.parametrize("seed", range(20))
def test_a_call_that_passes_by_is_one_that_is_sent_and_received(seed: int) -> None:
    """With results in flight, barriers, and sizes that change rarely or often."""
    draw = random.Random(seed)
    quick, plain = Flights(), Flights()
    pending: list[int] = []
    num_passed, num_barriers, num_sets = 0, 0, 2
    for _ in range(400):
        if draw.random() < (0.05, 0.3, 0.8)[seed % 3]:
            num_sets = draw.choice([2, 2, 4, 8])
        if pending and draw.random() < 0.6:
            number = pending.pop(draw.randrange(len(pending)))
            assert quick.receive(number) == plain.receive(number)
        if plain.needs_barrier(num_sets):
            assert not quick.pass_by(num_sets)
            num_barriers += 1
            for flights in (quick, plain):
                flights.receive(flights.send("here", 0))
        if draw.random() < 0.1:
            try:
                number = plain.send("here", num_sets)
            except EPError:
                with pytest.raises(EPError):
                    quick.send("here", num_sets)
                continue
            assert quick.send("here", num_sets) == number
            pending.append(number)
            continue
        before = copy.deepcopy(vars(quick))
        if quick.pass_by(num_sets):
            plain.make_way("here", num_sets, lambda: pytest.fail("nothing had to be done before"))
            plain.receive(plain.send("here", num_sets))
            num_passed += 1
        assert vars(quick) == vars(plain)
        assert quick.num_consumed == plain.num_consumed
        assert before["_num_sent"] == quick._num_sent - 1 or before == vars(quick), "all of it, or nothing"
    assert num_passed > 20
    assert num_barriers > 0


def test_calls_of_a_decoding_loop_pass_by() -> None:
    for sizes in ((2, 8), (8, 8), (2, 4)):  # of a dispatch and a combine
        flights = Flights()
        assert all(flights.pass_by(num_sets) for _ in range(40) for num_sets in sizes)


def test_what_everybody_has_received() -> None:
    flights = Flights()
    assert flights.num_consumed <= 0
    for number in range(1, 4):
        flights.receive(flights.send("here", 4))
        assert flights.num_consumed == number - 1, "peers have sent this one, so they had received the one before"
    first, second = flights.send("here", 4), flights.send("here", 4)
    flights.receive(second)
    assert flights.num_consumed == 3 - 2
    flights.receive(first)
    assert flights.num_consumed == 5 - 2, "two were in flight: peers may still be reading the last two"


class Rank:
    """A rank of the model: what it has sent and received, and what its host would let it do."""

    def __init__(self) -> None:
        self.flights = Flights()
        self.pending: dict[int, int] = {}
        self.num_sent = 0
        self.unread: set[int] = set()  # calls that it has not received, sent or not

    def try_to_send(self, num_sets: int) -> bool:
        assert not self.flights.needs_barrier(num_sets), "the barriers are among the calls"
        try:
            flight = self.flights.send("model", num_sets)
        except EPError:
            return False
        self.num_sent += 1
        self.pending[self.num_sent] = flight
        return True

    def receive(self, number: int) -> None:
        self.flights.receive(self.pending.pop(number))
        self.unread.discard(number)


def with_barriers(sets: list[int]) -> list[int]:
    """The calls with those barriers (0) that the engines put between them. Sizes alone decide, not hooks."""
    flights, calls = Flights(), []
    for num_sets in sets:
        for size in ([0] if flights.needs_barrier(num_sets) else []) + [num_sets]:
            flights.receive(flights.send("model", size))
            calls.append(size)
    return calls


class Model:
    """Ranks that send calls of given sizes. Asserts that nobody writes what another has still to read.

    Args:
        sets: How many sets each call divides the memory into, from call 1 on.
        num_ranks: R.
    """

    QUARTER_BYTES = 1 << 12

    def __init__(self, sets: list[int], num_ranks: int):
        self.sets = with_barriers(sets)
        self.ranks = [Rank() for _ in range(num_ranks)]
        for rank in self.ranks:
            rank.unread = set(range(1, len(self.sets) + 1))
        self.most_in_flight = 0

    def span(self, number: int) -> range:
        if not self.sets[number - 1]:
            return range(0)
        plan = Plan(self.QUARTER_BYTES, self.sets[number - 1] // 2)
        begin = plan.set_offset(number)
        return range(begin, begin + plan.set_bytes)

    def send(self, rank: Rank) -> bool:
        """Write the set, the post and the table of the next call."""
        if rank.num_sent == len(self.sets) or not rank.try_to_send(self.sets[rank.num_sent]):
            return False
        number, self.most_in_flight = rank.num_sent, max(self.most_in_flight, len(rank.pending))
        mine = self.span(number)
        for other in self.ranks:
            for earlier in (one for one in other.unread if one < number):
                theirs = self.span(earlier)
                is_apart = mine.stop <= theirs.start or theirs.stop <= mine.start
                assert is_apart, f"call {number} is written over call {earlier}, which is still to be read"
                assert earlier % MOST_SETS != number % MOST_SETS, "likewise the post"
        return True

    def receive(self, rank: Rank, number: int) -> bool:
        """Possible when all have sent it."""
        if any(other.num_sent < number for other in self.ranks):
            return False
        rank.receive(number)
        return True

    @property
    def is_done(self) -> bool:
        return all(not rank.unread for rank in self.ranks)


def own_ways(model: Model, chance: random.Random, most_pending: int) -> None:
    """Every rank calls its hooks when and in which order it likes."""
    while not model.is_done:
        rank = chance.choice(model.ranks)
        if rank.pending and (len(rank.pending) >= most_pending or chance.random() < 0.5):
            model.receive(rank, chance.choice(list(rank.pending)))
        else:
            model.send(rank) or (rank.pending and model.receive(rank, min(rank.pending)))


@pytest.mark.parametrize("num_sets", [2, 4, 8])
def test_no_set_is_written_while_it_is_read_with_calls_of_one_size(num_sets: int) -> None:
    deepest = 0
    for seed in range(150):
        chance = random.Random(seed)
        model = Model([num_sets] * 24, chance.randint(2, 4))
        own_ways(model, chance, most_pending=8)
        deepest = max(deepest, model.most_in_flight)
    assert deepest == num_sets // 2, "the model goes as far as it may"


def test_no_set_is_written_while_it_is_read_with_calls_of_any_size() -> None:
    """One result in flight: hooks are called before the next call is sent."""
    for seed in range(300):
        chance = random.Random(seed)
        sets = [chance.choice([2, 2, 4, 8]) for _ in range(24)]
        own_ways(Model(sets, chance.randint(2, 4)), chance, most_pending=1)


def program_of(chance: random.Random, sets: list[int]) -> list[int]:
    """What every rank does, in order: 0 sends the next call, n > 0 calls the hook of call n. As one host allows it."""
    alone, program = Model(sets, 1), []
    rank = alone.ranks[0]
    while not alone.is_done:
        if rank.pending and chance.random() < 0.5:
            number = chance.choice(list(rank.pending))
        elif alone.send(rank):
            program.append(0)
            continue
        else:
            number = min(rank.pending)
        alone.receive(rank, number)
        program.append(number)
    return program


def in_step(
    model: Model, chance: random.Random, program: list[int], look: Callable[[Rank], None] | None = None
) -> None:
    """All ranks run one program, each at its own pace."""
    steps = dict.fromkeys(range(len(model.ranks)), 0)
    while not model.is_done:
        index = chance.choice([one for one, step in steps.items() if step < len(program)])
        rank, number = model.ranks[index], program[steps[index]]
        steps[index] += model.send(rank) if number == 0 else model.receive(rank, number)
        if look is not None:
            look(rank)


def test_a_call_of_another_size_behind_deep_flights_needs_a_barrier() -> None:
    """The fast rank has received call 2, which the slow one has only sent, and call 3 would lie over call 1."""
    assert with_barriers([8, 8, 2]) == [8, 8, 0, 2]
    assert with_barriers([8, 2, 8, 2, 8, 2]) == [8, 2, 8, 2, 8, 2], "a decoding loop never does"
    assert with_barriers([8, 8, 2, 2, 8, 8, 2, 2])[3:] == [2, 2, 8, 8, 2, 2]


@pytest.mark.parametrize("in_order", [True, False])
def test_no_set_is_written_while_it_is_read_with_calls_of_any_sizes_and_depths(in_order: bool) -> None:
    deepest = 0
    for seed in range(300):
        chance = random.Random(seed)
        sets = [size for _ in range(8) for size in [chance.choice([2, 4, 8])] * chance.randint(1, 6)]
        model = Model(sets, chance.randint(2, 4))
        if in_order:
            in_step(model, chance, program_of(chance, sets))
        else:
            own_ways(model, chance, most_pending=8)
        deepest = max(deepest, model.most_in_flight)
    assert deepest > 2


def test_what_counts_as_consumed_has_been_received_by_all() -> None:
    """So zero-copy tensors are handed out again only when nobody reads them."""
    for seed in range(150):
        chance = random.Random(seed)
        sets = [chance.choice([2, 4, 8])] * 24
        model = Model(sets, chance.randint(2, 4))

        def look(rank: Rank, model: Model = model) -> None:
            for other in model.ranks:
                assert min(other.unread, default=99) > rank.flights.num_consumed

        in_step(model, chance, program_of(chance, sets), look)


# Zero copy -----------------------------------------------------------------------------------------------------------


def handles(count: int) -> list[torch.Tensor]:
    """What handles are known by."""
    return [torch.empty(4, dtype=torch.int32) for _ in range(count)]


def test_a_handle_keeps_its_tensor_until_it_is_combined() -> None:
    leases, (first, second) = ZeroCopy(), handles(2)
    index = leases.take(first, 0)
    assert leases.take(first, 0) == index
    other = leases.take(second, 0)
    assert {index, other} == {0, 1}
    assert leases.give(second, 3) == other
    assert leases.give(first, 4) == index


def test_two_handles_at_a_time() -> None:
    leases, (first, second, third) = ZeroCopy(), handles(3)
    index = leases.take(first, 0)
    leases.take(second, 0)
    with pytest.raises(EPError, match="all 2 buffers belong to handles"):
        leases.take(third, 100)
    leases.give(first, 5)
    with pytest.raises(EPError, match="peers may still read them"):
        leases.take(third, 4)
    assert leases.take(third, 5) == index


def test_the_tensor_that_was_free_longest_is_taken() -> None:
    leases, (first, second, third) = ZeroCopy(), handles(3)
    one, other = leases.take(first, 0), leases.take(second, 0)
    assert one != other
    leases.give(second, 5)
    leases.give(first, 6)
    assert leases.take(third, 10) == other


def test_a_combine_needs_its_handles_tensor_once() -> None:
    leases, (first, second) = ZeroCopy(), handles(2)
    with pytest.raises(EPError, match="get_next_low_latency_combine_buffer"):
        leases.give(first, 1)
    leases.take(first, 0)
    with pytest.raises(EPError, match="get_next_low_latency_combine_buffer"):
        leases.give(second, 1)
    leases.give(first, 1)
    with pytest.raises(EPError, match="Call it first"):
        leases.give(first, 2)
    leases.take(first, 1)  # the same handle again: another combine of it
    leases.give(first, 3)


def test_leases_never_overlap() -> None:
    """Random handles: each tensor is one handle's, and is handed on only when its last combine has been consumed."""
    for seed in range(100):
        chance = random.Random(seed)
        leases, known = ZeroCopy(), handles(4)
        held: dict[int, int] = {}  # handle -> tensor
        combined = {0: 0, 1: 0}  # tensor -> its last combine
        number = consumed = 0
        for _ in range(60):
            number += 1
            consumed = max(consumed, number - chance.randint(1, 4))
            handle = chance.randrange(4)
            if handle in held and chance.random() < 0.5:
                index = leases.give(known[handle], number)
                assert index == held.pop(handle)
                combined[index] = number
                continue
            free = [one for one in range(2) if one not in held.values() and combined[one] <= consumed]
            if handle not in held and not free:
                with pytest.raises(EPError):
                    leases.take(known[handle], consumed)
                continue
            index = leases.take(known[handle], consumed)
            assert index == held.get(handle, index)
            assert handle in held or index in free
            held[handle] = index


def test_rows_of_a_zero_copy_tensor_are_slots_apart() -> None:
    geometry = Geometry(2, 4, 3, 130, 2)
    memory = torch.zeros(geometry.combine_bytes, dtype=torch.uint8)
    view = zero_copy_view(memory, geometry)
    assert view.shape == (2, 6, 130)
    assert view.stride() == (6 * 136, 136, 1)
    view[1, 5] = 1.0
    assert memory[11 * 272 : 11 * 272 + 260].view(torch.bfloat16).tolist() == [1.0] * 130
    assert int(memory.count_nonzero()) == 260
    view[0, 0] = 1.0
    assert memory[:260].view(torch.bfloat16).tolist() == [1.0] * 130
