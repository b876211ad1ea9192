"""Where low-latency rows lie, how many calls may be in flight, and who has which slot."""

from __future__ import annotations

import random
import re
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deep_ep import EPError
from deep_ep.engine.low_latency.cpu.shared import Done
from deep_ep.engine.low_latency.geometry import (
    MOST_IN_FLIGHT,
    MOST_TOKENS,
    NUM_SETS,
    NUM_SLOTS,
    Geometry,
    RowFormat,
    SetPlan,
    bytes_for_two,
    copy_bytes,
    plan_combine,
    plan_dispatch,
)
from deep_ep.engine.low_latency.in_flight import InFlight
from deep_ep.engine.low_latency.slots import FREE_SLOT, NO_SLOT, OWN_SLOT, Slots, zero_copy_view
from deep_ep.transport import MAX_EXPERTS

FORMS = [
    RowFormat(use_fp8=False),
    RowFormat(),
    RowFormat(round_scale=True),
    RowFormat(round_scale=True, use_ue8m0=True),
]
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


def plans(geometry: Geometry, num_bytes: int, has_copies: bool = False) -> list[tuple[SetPlan, int]]:
    """Of every kind of call: where its rows lie, and how many bytes they are."""
    dispatches = [
        (plan_dispatch("here", num_bytes, geometry, form, has_copies), geometry.dispatch_bytes(form)) for form in FORMS
    ]
    return [*dispatches, (plan_combine("here", num_bytes, geometry, has_copies), geometry.combine_bytes)]


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
    plan = plan_dispatch("test", 16 * 1024, geometry, FORMS[1])
    assert plan == SetPlan(4096, False)
    assert [plan.offset_of_set(number) for number in range(1, 6)] == [13312, 14336, 15360, 12288, 13312]
    assert [plan.slot_offset(index) for index in range(3)] == [0, 4096, 8192]
    assert plan_dispatch("test", 4 * 1024, geometry, FORMS[1]).takes_slot, "456 bytes, where a set has 256"


@settings(max_examples=400, deadline=None)
@given(geometries(), st.booleans())
def test_the_hint_always_suffices(geometry: Geometry, has_copies: bool) -> None:
    geometry = geometry._replace(num_topk=min(geometry.num_topk, 8)) if has_copies else geometry
    num_bytes = geometry.hint()
    for plan, needed in plans(geometry, num_bytes, has_copies):
        assert needed <= (plan.region_bytes if plan.takes_slot else plan.set_bytes)
        assert plan.sets_offset + NUM_SETS * plan.set_bytes <= num_bytes
        assert plan.set_bytes % 16 == plan.region_bytes % 16 == plan.copy_set_bytes % 16 == 0
        copied = min(needed, geometry.copied_combine_bytes) if needed == geometry.combine_bytes else needed
        assert not has_copies or copied <= plan.copy_set_bytes
        assert NUM_SETS * plan.copy_set_bytes == (copy_bytes(num_bytes, geometry.num_ranks) if has_copies else 0)


@settings(max_examples=300, deadline=None)
@given(geometries())
def test_with_five_experts_or_more_no_dispatch_takes_a_slot(geometry: Geometry) -> None:
    """With four none does that has whole groups of 128 channels, one for each selection."""
    geometry = geometry._replace(num_topk=min(geometry.num_topk, 8), hidden=max(geometry.hidden, 128))
    num_groups = geometry.hidden // 128
    four = geometry._replace(num_ranks=2, num_experts=4, hidden=128 * num_groups, num_topk=min(MOST_TOPK, num_groups))
    for form in FORMS:
        assert not plan_dispatch("test", four.hint(), four, form).takes_slot
        plan = plan_dispatch("test", geometry.hint(), geometry, form)
        assert not plan.takes_slot or geometry.num_experts < 5
        assert not plan_dispatch("test", max(geometry.hint(), bytes_for_two(geometry, form)), geometry, form).takes_slot


@settings(max_examples=200, deadline=None)
@given(geometries(), st.floats(0.0, 1.0), st.integers(1, MOST_TOPK), st.integers(1, 40), st.booleans())
def test_too_little_memory_is_said_and_what_is_named_suffices(
    geometry: Geometry, part: float, num_topk: int, more: int, has_copies: bool
) -> None:
    """Also where tokens name more experts than there are: that the hint does not know of."""
    geometry = geometry._replace(num_topk=num_topk, max_tokens=more * geometry.max_tokens)
    num_bytes = int(part * geometry.hint())
    for _ in range(3):
        try:
            plans(geometry, num_bytes, has_copies)
            break
        except ValueError as error:
            wanted, there = map(int, re.findall(r"num_rdma_bytes=(\d+), the buffer has (\d+)", str(error))[0])
            assert there == num_bytes < wanted
            num_bytes = wanted
    plans(geometry, num_bytes, has_copies)


def test_copies_take_little_more_than_the_memory() -> None:
    for num_ranks in (2, 8, 64):
        num_bytes = 1 << 30
        assert (num_ranks - 1) * copy_bytes(num_bytes, num_ranks) <= num_bytes * 9 / 8


def test_an_expert_and_a_place_fit_into_one_word() -> None:
    assert (MAX_EXPERTS - 1) << 16 | (MOST_TOKENS - 1) < 1 << 31
    assert MOST_TOKENS - 1 < 1 << 16


# In flight -----------------------------------------------------------------------------------------------------------


def begin(in_flight: InFlight, slot: int, wide_bytes: int = 0) -> int:
    in_flight.require_capacity("here", slot, wide_bytes)
    return in_flight.send(slot)


def test_two_in_flight_and_not_three() -> None:
    in_flight = InFlight(Slots())
    first, second = (begin(in_flight, NO_SLOT) for _ in range(2))
    for _ in range(2):  # nothing changes
        with pytest.raises(EPError, match="here: 3 results would be in flight, the window has room for 2"):
            begin(in_flight, NO_SLOT)
    assert in_flight.receive(second) == 0  # calls that were sent after it
    with pytest.raises(EPError, match="the call before the last one is still in flight, and only the last one may be"):
        begin(in_flight, NO_SLOT)
    assert in_flight.receive(first) == 1
    with pytest.raises(EPError, match="called before"):
        in_flight.receive(first)
    assert begin(in_flight, NO_SLOT) == 3


def test_calls_that_are_given_up() -> None:
    in_flight = InFlight(Slots())
    first, second = (begin(in_flight, NO_SLOT) for _ in range(2))
    in_flight.receive(first)
    in_flight.abandon()
    with pytest.raises(EPError, match="has given up this call"):
        in_flight.receive(second)
    in_flight.go_on_from(9)
    assert (in_flight.next_number, in_flight.num_consumed) == (9, 8)
    in_flight.receive(begin(in_flight, NO_SLOT))
    assert in_flight.num_consumed == 8, "peers may still read call 9"


def test_a_wide_dispatch_names_the_memory_that_it_wants() -> None:
    in_flight = InFlight(Slots())
    for _ in range(2):
        in_flight.receive(begin(in_flight, FREE_SLOT, 1024))
    begin(in_flight, FREE_SLOT)
    with pytest.raises(EPError, match=r"room for 1, since the calls before took its 3 slots.*num_rdma_bytes=1024"):
        begin(in_flight, FREE_SLOT)
    begin(in_flight, NO_SLOT)


class Rank(NamedTuple):
    """A rank of the model: what its host would let it do, what it has not received, and what lies in its memory."""

    in_flight: InFlight
    slots: Slots
    unread: set[int]
    pending: list[int]
    units: dict[int, int]  # a set or a slot -> the call that wrote it
    handles: list[torch.Tensor]


class Model:
    """Ranks that send calls. Asserts that nobody writes what another has still to read.

    Args:
        kinds: Of each call: d(ispatch), c(ombine), z(ero-copy combine) or w(ide dispatch).
        num_ranks: R.
    """

    def __init__(self, kinds: str, num_ranks: int):
        self.kinds = kinds
        self.ranks = []
        for _ in range(num_ranks):
            slots = Slots()
            self.ranks.append(Rank(InFlight(slots), slots, set(range(1, len(kinds) + 1)), [], {}, []))
        self.num_refused = 0

    def send(self, rank: Rank) -> bool:
        """Write the rows of the next call, if the host lets it."""
        number = rank.in_flight.next_number
        if number > len(self.kinds):
            return False
        kind = self.kinds[number - 1]
        slot = {"d": NO_SLOT, "z": OWN_SLOT}.get(kind, FREE_SLOT)
        try:
            if kind == "z" and not rank.handles:
                rank.handles.append(torch.empty(4, dtype=torch.int32))
                index, _ = rank.slots.lease(rank.handles[0], rank.in_flight.num_consumed)
                self.write(rank, NUM_SETS + index, 0)  # the caller writes there from now on
            begin(rank.in_flight, slot)
        except EPError as error:
            self.num_refused += "slots" in str(error)
            rank.handles.clear()
            return False
        unit = number % NUM_SETS
        if slot == FREE_SLOT:
            unit = NUM_SETS + rank.slots.take(number)[0]
        elif slot == OWN_SLOT:
            unit = NUM_SETS + rank.slots.give_back(rank.handles.pop(), number)
        self.write(rank, unit, number)
        rank.pending.append(number)
        return True

    def write(self, rank: Rank, unit: int, number: int) -> None:
        before = rank.units.get(unit, 0)
        assert all(before not in other.unread for other in self.ranks), f"call {number} is written over call {before}"
        rank.units[unit] = number

    def receive(self, rank: Rank, number: int) -> bool:
        """Possible when all have sent it."""
        if any(other.in_flight.next_number <= number for other in self.ranks):
            return False
        rank.in_flight.receive(number)
        rank.pending.remove(number)
        rank.unread.discard(number)
        return True

    def check_consumed(self, rank: Rank) -> None:
        for other in self.ranks:
            assert min(other.unread, default=1 << 30) > rank.in_flight.num_consumed


@pytest.mark.parametrize("kinds", ["d", "c", "dc", "ddcc", "dcw", "ddzz", "dczz", "any"])
def test_nothing_is_written_while_it_is_read(kinds: str) -> None:
    """Every rank calls its hooks when and in which order it likes."""
    num_refused = 0
    for seed in range(150):
        draw = random.Random(f"{kinds} {seed}")
        calls = "".join(draw.choices("ddccwz", k=24)) if kinds == "any" else (kinds * 24)[:24]
        model = Model(calls, draw.randint(2, 4))
        while any(rank.unread for rank in model.ranks):
            rank = draw.choice(model.ranks)
            if rank.pending and (len(rank.pending) == MOST_IN_FLIGHT or draw.random() < 0.5):
                model.receive(rank, draw.choice(rank.pending))
            elif not model.send(rank) and rank.pending:
                model.receive(rank, min(rank.pending))
            model.check_consumed(rank)
        num_refused += model.num_refused
    if set(kinds) <= set("dc"):  # of two micro-batches none is refused; of combines in a row, some
        assert (num_refused > 0) == (kinds == "c")


def test_two_micro_batches_are_never_refused() -> None:
    """Whatever order their halves have, with plain and with zero-copy combines."""
    for seed in range(300):
        draw = random.Random(seed)
        slots = Slots()
        in_flight = InFlight(slots)
        batches: list[list[int]] = [[], []]  # the call of each that is in flight
        turns, handles = [0, 0], [torch.empty(4, dtype=torch.int32) for _ in range(2)]
        for _ in range(60):
            index = draw.randrange(2)
            if batches[index]:
                in_flight.receive(batches[index].pop())
                continue
            other = batches[1 - index]
            if other and other[0] < in_flight.next_number - 1:
                continue  # the other one has been in flight for a call already: its hook comes first
            turns[index] += 1
            slot = NO_SLOT
            if turns[index] % 2 == 0:
                slot = FREE_SLOT if draw.random() < 0.5 else OWN_SLOT
                if slot == OWN_SLOT:
                    slots.lease(handles[index], in_flight.num_consumed)
            batches[index] = [begin(in_flight, slot)]
            if slot == FREE_SLOT:
                slots.take(batches[index][0])
            elif slot == OWN_SLOT:
                slots.give_back(handles[index], batches[index][0])


def test_which_calls_are_done() -> None:
    done = Done()
    assert [done.has(number) for number in (0, 1)] == [True, False]
    done.add(2)
    assert [done.has(number) for number in (1, 2, 3)] == [False, True, False]
    assert Done.of(done.word).word == done.word == 1
    done.add(1)
    assert [done.has(number) for number in (1, 2, 3)] == [True, True, False]
    done.add(3)
    assert done.word == 3 << 1


# Slots ---------------------------------------------------------------------------------------------------------------


def handles(count: int) -> list[torch.Tensor]:
    """What handles are known by."""
    return [torch.empty(4, dtype=torch.int32) for _ in range(count)]


def test_a_handle_keeps_its_tensor_until_it_is_combined() -> None:
    slots, (first, second) = Slots(), handles(2)
    index, _ = slots.lease(first, 0)
    assert slots.lease(first, 0)[0] == index
    other, _ = slots.lease(second, 0)
    assert other != index
    assert slots.leased == 1 << index | 1 << other
    assert slots.give_back(second, 3) == other
    assert slots.give_back(first, 4) == index
    assert slots.leased == 0


def test_two_handles_at_a_time() -> None:
    slots, (first, second, third) = Slots(), handles(3)
    index, _ = slots.lease(first, 0)
    slots.lease(second, 0)
    with pytest.raises(EPError, match="all 2 buffers belong to handles"):
        slots.lease(third, 100)
    slots.give_back(first, 5)
    free, _ = slots.lease(third, 4)
    assert free not in (index, slots.lease(second, 0)[0]), "the third slot, which nobody reads"
    slots.give_back(third, 6)
    with pytest.raises(EPError, match=r"read 2 of the window's 3 slots, and 1 belong to other handles.*first$"):
        slots.lease(first, 4)
    with pytest.raises(EPError, match=r"first, or make the buffer with num_rdma_bytes=1024$"):
        slots.lease(first, 4, bytes_for_two=1024)
    assert slots.lease(first, 5) == (index, 5)


def test_the_slot_that_was_free_longest_is_taken() -> None:
    slots, (first,) = Slots(), handles(1)
    assert [slots.take(number) for number in (1, 2, 3, 4)] == [(0, 0), (1, 0), (2, 0), (0, 1)]
    assert slots.lease(first, 3) == (1, 2)
    assert [slots.take(number)[0] for number in (5, 6, 7)] == [2, 0, 2], "not the one that is leased"
    slots.give_back(first, 8)
    assert slots.take(9)[0] == 0


def test_a_handle_that_dies_gives_its_slot_back() -> None:
    slots, some = Slots(), handles(2)
    for one in some:
        slots.lease(one, 0)
    assert slots.num_leased() == 2
    del one
    some.clear()
    assert slots.num_leased() == 0


def test_a_combine_needs_its_handles_tensor_once() -> None:
    slots, (first, second) = Slots(), handles(2)
    with pytest.raises(EPError, match="get_next_low_latency_combine_buffer"):
        slots.give_back(first, 1)
    slots.lease(first, 0)
    with pytest.raises(EPError, match="get_next_low_latency_combine_buffer"):
        slots.give_back(second, 1)
    slots.give_back(first, 1)
    with pytest.raises(EPError, match="Call it first"):
        slots.give_back(first, 2)
    slots.lease(first, 1)  # the same handle again: another combine of it
    slots.give_back(first, 3)


def test_slots_that_only_the_device_knows_are_taken_for_read() -> None:
    slots, (first,) = Slots(), handles(1)
    slots.is_exact = False
    slots.take(4)
    with pytest.raises(EPError, match=r"peers may still read 3 of the window's 3 slots"):
        slots.lease(first, 3)
    slots.lease(first, 4)
    assert NUM_SLOTS == 3


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
