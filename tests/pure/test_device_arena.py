"""The arena of device memory: regions and their tensors, and the order of the streams that use them.

Streams and events are made here, and the memory is the CPU's: the arena only records, waits and asks.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deep_ep.transport import device
from deep_ep.transport.device import DeviceArena, Part
from deep_ep.transport.spans import UNIT_BYTES, Span


class World:
    """What the device has done: the work of each stream up to some number."""

    def __init__(self) -> None:
        self.done: dict[str, int] = {}
        self.is_capturing = False
        self.num_events = 0

    def stream(self, name: str) -> FakeStream:
        return FakeStream(self, name)

    def finish(self, stream: FakeStream, num_left: int = 0) -> None:
        """Do the work of a stream but for some, and what that work waits for."""
        self.done = latest(self.done, *stream.queue[: max(0, len(stream.queue) - num_left)])


class FakeStream:
    """A stream that counts its work. Each piece of it comes behind a number of pieces of every other stream."""

    def __init__(self, world: World, name: str):
        self.world, self.name = world, name
        self.behind: dict[str, int] = {}
        self.queue: list[dict[str, int]] = []

    def work(self) -> int:
        self.behind = {**self.behind, self.name: self.behind.get(self.name, 0) + 1}
        self.queue.append(self.behind)
        return self.behind[self.name]

    def record_event(self) -> FakeEvent:
        assert not self.world.is_capturing
        self.world.num_events += 1
        return FakeEvent(self.world, self.behind)

    def wait_event(self, event: FakeEvent) -> None:
        assert not self.world.is_capturing
        self.behind = latest(self.behind, event.behind)

    def is_behind(self, stream: FakeStream, number: int) -> bool:
        return self.behind.get(stream.name, 0) >= number


class FakeEvent:
    def __init__(self, world: World, behind: dict[str, int]):
        self.world, self.behind = world, behind

    def query(self) -> bool:
        assert not self.world.is_capturing
        return all(self.world.done.get(name, 0) >= number for name, number in self.behind.items())


def latest(*many: dict[str, int]) -> dict[str, int]:
    merged: dict[str, int] = {}
    for one in many:
        for name, number in one.items():
            merged[name] = max(number, merged.get(name, 0))
    return merged


def make_arena(*num_units: int) -> DeviceArena:
    arena = DeviceArena(0)
    for number, units in enumerate(num_units):
        memory = torch.zeros(units * UNIT_BYTES, dtype=torch.uint8)
        arena.add(number, Part(memory, (memory.data_ptr(),), memory), 0)
    return arena


def take(arena: DeviceArena, num_units: int, stream: FakeStream, is_capturing: bool = False) -> torch.Tensor:
    stream.world.is_capturing = is_capturing
    region = arena.allocate((num_units, UNIT_BYTES), torch.uint8, stream, is_capturing)
    stream.world.is_capturing = False
    assert region is not None
    return region


def unit_of(arena: DeviceArena, region: torch.Tensor) -> int:
    """Where a region of the first segment begins."""
    base = arena.base_of(region)
    assert base is not None
    assert base[0] == 0
    return base[1] // UNIT_BYTES


# Regions and their tensors -------------------------------------------------------------------------------------------


@pytest.fixture(params=["storages", "foreign memory"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How regions are made: by torch's private functions, or where it has none."""
    if request.param == "foreign memory":
        monkeypatch.setattr(device, "_can_watch_storages", lambda: False)
    return request.param


def test_this_torch_keeps_the_objects_of_storages() -> None:
    """Else regions are made the slow way, and nothing says so."""
    assert device._can_watch_storages()


_hoard: list[Any] = []


def hoarded_storage(*arguments: Any) -> torch.UntypedStorage:
    _hoard.append(torch._C._construct_storage_from_data_pointer(*arguments))  # type: ignore[attr-defined]
    return _hoard[-1]


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        pytest.param(device, "_new_storage", None, id="it makes none"),
        pytest.param(device, "_new_storage", lambda: None, id="it makes them otherwise"),
        pytest.param(device, "_new_storage", hoarded_storage, id="they never die"),
        pytest.param(torch.Tensor, "untyped_storage", lambda _: object(), id="they are always others"),
    ],
)
def test_a_torch_that_does_not_keep_them_is_found_out(
    where: Any, name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    device._can_watch_storages.cache_clear()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(where, name, value)
            assert not device._can_watch_storages()
            assert make_arena(4).allocate((3,), torch.float32) is not None
    finally:
        device._can_watch_storages.cache_clear()
        _hoard.clear()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float8_e4m3fn, torch.int64])
@pytest.mark.parametrize("shape", [(5,), (3, 7), torch.Size((2, 3, 4)), [2, 6]])
def test_a_region_has_the_shape_and_dtype_that_were_asked_for(way: str, shape: Any, dtype: torch.dtype) -> None:
    arena = make_arena(8)
    kept = arena.allocate((UNIT_BYTES,), torch.uint8)
    region = arena.allocate(shape, dtype)
    assert kept is not None
    assert region is not None
    assert (region.shape, region.dtype) == (torch.Size(shape), dtype)
    assert region.is_contiguous()
    assert not region.requires_grad
    assert region.untyped_storage().nbytes() == region.numel() * dtype.itemsize
    assert arena.base_of(region) == (0, UNIT_BYTES)
    region.view(torch.uint8).fill_(7)
    memory = arena._segments[0].owner.memory
    num_bytes = region.numel() * dtype.itemsize
    assert memory[UNIT_BYTES : UNIT_BYTES + num_bytes].unique().tolist() == [7]
    assert not memory[UNIT_BYTES + num_bytes :].any()


@pytest.mark.parametrize("shape", [(5,), (3, 7), (2, 3, 4)])
def test_on_a_gpu_the_tensor_is_made_at_once(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def new_cuda_tensor(metadata: dict[str, Any], storage: torch.UntypedStorage) -> torch.Tensor:
        made.append(metadata)
        like = torch.empty(0, dtype=metadata["dtype"], device=metadata["device"])
        return like.set_(storage, metadata["storage_offset"], metadata["size"], metadata["stride"])

    monkeypatch.setattr(device, "_new_cuda_tensor", new_cuda_tensor)
    arena = make_arena(4)
    arena._segments[0].is_cuda = True
    region = arena.allocate(shape, torch.float32)
    assert region is not None
    assert len(made) == 1
    assert region.shape == shape
    assert region.stride() == torch.empty(shape).stride()
    assert arena.base_of(region) == (0, 0)


def test_tensors_of_one_region_are_beside_each_other_and_go_together(way: str) -> None:
    arena, world = make_arena(8), World()
    one, two = world.stream("one"), world.stream("two")
    shapes = (((3, 50), torch.uint8), ((3, 2), torch.float32), ((3, 0), torch.int64))
    cpu = torch.device("cpu")
    layout = device.region_layout(shapes, cpu)
    found = arena.allocate_region(layout, one)
    assert found is not None
    made, *where = found
    assert where == [0, 0]
    assert [(tuple(tensor.shape), tensor.dtype) for tensor in made] == list(shapes)
    assert all(tensor.is_contiguous() for tensor in made)
    rows, scales, nothing = made
    assert [arena.base_of(rows), arena.base_of(scales)] == [(0, 0), (0, 256)], "aligned to 128 bytes"
    assert layout.starts == [0, 256, 0]
    rows.fill_(1)
    scales.fill_(2)
    assert rows.sum() == 150
    arena.used_by(scales, two)
    number = two.work()
    del rows, made, nothing, found
    assert arena.num_bytes()["used"] == UNIT_BYTES, "of what is left"
    assert scales.tolist() == [[2, 2]] * 3
    del scales
    assert arena.num_bytes()["used"] == 0
    again = take(arena, 1, one)
    assert unit_of(arena, again) == 0
    assert one.is_behind(two, number)
    empty = arena.allocate_region(device.region_layout((((0, 4), torch.uint8),) * 2, cpu))
    assert empty is not None
    assert [tensor.shape for tensor in empty[0]] == [(0, 4)] * 2
    assert empty[1] == -1
    too_large = device.region_layout((((9, UNIT_BYTES), torch.uint8), ((1, 1), torch.uint8)), cpu)
    assert arena.allocate_region(too_large) is None


def test_default_device_and_inference_mode_do_not_matter(way: str) -> None:
    arena = make_arena(4)
    with torch.device("meta"), torch.inference_mode():
        region = arena.allocate((3,), torch.float32)
    assert region is not None
    assert arena.base_of(region) == (0, 0)
    region = arena.allocate((3,), torch.float32)
    assert region is not None
    weight = torch.ones(3, requires_grad=True)
    (weight * region.fill_(2)).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [2, 2, 2]


def saved_for_backward(region: torch.Tensor) -> torch.Tensor:
    return (torch.ones(region.shape, requires_grad=True) * region).sum()


def a_leaf_in_a_graph(region: torch.Tensor) -> torch.Tensor:
    leaf = region.detach().requires_grad_()
    return (leaf * leaf).sum()


@pytest.mark.parametrize(
    "keep",
    [
        lambda region: region.view(-1)[1:],
        lambda region: region.view(torch.uint8)[3:],
        lambda region: region.detach(),
        lambda region: region.untyped_storage(),
        lambda region: region.numpy()[1:],
        lambda region: torch.from_dlpack(region[1:]),
        lambda region: torch.nn.Parameter(region),
        saved_for_backward,
        a_leaf_in_a_graph,
    ],
)
def test_whatever_shows_a_region_keeps_it(way: str, keep: Callable[[torch.Tensor], Any]) -> None:
    arena = make_arena(4)
    region = arena.allocate((2, 3), torch.float32)
    kept = keep(region)
    del region
    gc.collect()
    other = arena.allocate((2, 3), torch.float32)
    assert arena.base_of(other) == (0, UNIT_BYTES), "the first region is taken"
    del kept
    gc.collect()
    assert arena.num_bytes()["used"] == UNIT_BYTES
    again = arena.allocate((2, 3), torch.float32)
    assert arena.base_of(again) == (0, 0)


def test_a_region_keeps_the_owner_of_its_memory(way: str) -> None:
    class Owner:
        pass

    arena, memory, owner = DeviceArena(0), torch.zeros(UNIT_BYTES, dtype=torch.uint8), Owner()
    arena.add(0, Part(memory, (memory.data_ptr(),), owner), 0)
    lives = weakref.ref(owner)
    region = arena.allocate((4,), torch.float32)
    assert region is not None
    view = region[1:].fill_(5)
    del arena, owner, memory, region
    gc.collect()
    assert lives() is not None
    assert view.tolist() == [5, 5, 5]
    if way == "storages":
        assert view.untyped_storage().owner.owner is lives()  # type: ignore[attr-defined]
    del view
    gc.collect()
    assert lives() is None


def test_a_region_may_die_on_any_thread(way: str) -> None:
    arena = make_arena(4)
    dying = [arena.allocate((4,), torch.float32)[1:]]  # type: ignore[index]
    region = arena.allocate((4,), torch.float32)
    assert region is not None
    loss = saved_for_backward(region)
    del region
    for end in (dying.clear, loss.backward):
        used = arena.num_bytes()["used"]
        thread = threading.Thread(target=end)
        thread.start()
        thread.join()
        assert arena.num_bytes()["used"] == used - UNIT_BYTES
    assert arena.largest_free_bytes() == 4 * UNIT_BYTES


def test_regions_that_die_while_others_are_taken_are_not_lost(way: str) -> None:
    arena = make_arena(64)
    passed: list[Any] = []
    is_over = threading.Event()

    def drop() -> None:
        while not is_over.is_set() or passed:
            if passed:
                passed.pop()

    thread = threading.Thread(target=drop)
    thread.start()
    for index in range(3000):
        region = arena.allocate((1 + index % 3, UNIT_BYTES), torch.uint8)
        if region is not None:
            passed.append(region)
        del region
    is_over.set()
    thread.join()
    assert arena.num_bytes()["used"] == 0
    assert arena.largest_free_bytes() == 64 * UNIT_BYTES


def test_no_elements_need_no_room() -> None:
    arena = make_arena(1)
    kept = arena.allocate((UNIT_BYTES,), torch.uint8)
    empty = arena.allocate((0, 7), torch.bfloat16)
    assert kept is not None
    assert empty is not None
    assert (empty.shape, empty.dtype) == (torch.Size((0, 7)), torch.bfloat16)
    assert arena.allocate((1,), torch.uint8) is None


def test_the_base_of_a_tensor_is_that_of_its_segment() -> None:
    arena = make_arena(1, 4)
    regions = [arena.allocate((units * UNIT_BYTES // 4,), torch.float32) for units in (1, 2, 1)]
    assert [arena.base_of(region) for region in regions] == [(0, 0), (1, 0), (1, 2 * UNIT_BYTES)]
    assert arena.base_of(regions[1][5:]) == (1, 20)
    assert arena.base_of(torch.zeros(3)) is None
    assert arena.largest_free_bytes() == UNIT_BYTES


# The order of streams ------------------------------------------------------------------------------------------------


@pytest.fixture
def world() -> World:
    return World()


def test_one_stream_needs_no_events(world: World) -> None:
    arena, stream = make_arena(64), world.stream("one")
    for number in range(100):
        rows = take(arena, 3, stream)
        arena.largest_free_bytes()
        inbox = take(arena, 5 + number % 3, stream)
        del inbox
        arena.reclaim(stream)
        assert unit_of(arena, rows) == 0
        del rows
    assert world.num_events == 0


def test_two_objects_for_one_stream_are_one_stream(world: World) -> None:
    class Same(FakeStream):
        def __eq__(self, other: object) -> bool:
            return isinstance(other, Same)

        __hash__ = object.__hash__

    arena = make_arena(64)
    for _ in range(2 * device._MOST_AGE):
        region = take(arena, 3, Same(world, "one"))
        take(arena, 2, Same(world, "one"))
        arena.used_by(region, Same(world, "one"))
        del region
        arena.reclaim(Same(world, "one"))
    assert world.num_events == 0


def test_another_stream_waits_for_the_one_before(world: World) -> None:
    arena, one, two = make_arena(64), world.stream("one"), world.stream("two")
    region = take(arena, 3, one)
    number = one.work()
    del region
    arena.reclaim(one)
    assert world.num_events == 0
    other = take(arena, 3, two)
    assert unit_of(arena, other) == 0
    assert two.is_behind(one, number)


def test_memory_that_nobody_reclaimed_is_waited_for_too(world: World) -> None:
    arena, one, two = make_arena(64), world.stream("one"), world.stream("two")
    region = take(arena, 3, one)
    number = one.work()
    del region
    other = take(arena, 3, two)
    assert unit_of(arena, other) == 0
    assert two.is_behind(one, number)


def test_memory_that_a_call_releases_is_reclaimed_at_once_only_where_streams_take_turns(world: World) -> None:
    arena, one, two = make_arena(64), world.stream("one"), world.stream("two")
    for _ in range(3):
        region = take(arena, 3, one)
        number = one.work()
        del region
        arena.reclaim_released(one)
        assert arena.num_bytes()["used"] == 0
        assert arena._freed, "it is the next call's"
    other = take(arena, 3, two)
    assert two.is_behind(one, number)
    del other
    number = two.work()
    arena.reclaim_released(two)
    later = two.work()
    assert not arena._freed
    take(arena, 3, one)
    assert one.is_behind(two, number)
    assert not one.is_behind(two, later), "what came behind the call is not waited for"


def test_every_piece_of_a_region_is_waited_for(world: World) -> None:
    arena, one = make_arena(6), world.stream("one")
    region = take(arena, 6, one)
    number = one.work()
    del region
    arena.reclaim(one)
    kept = []
    for name in ("two", "three", "four"):
        stream = world.stream(name)
        kept.append(take(arena, 2, stream))
        assert stream.is_behind(one, number)
        assert stream.behind.keys() <= {"one"}, "and for nobody else"
        stream.work()
    assert [unit_of(arena, region) for region in kept] == [0, 2, 4]


def test_what_is_taken_from_the_middle_leaves_both_ends(world: World) -> None:
    arena, one, two, three = make_arena(6), world.stream("one"), world.stream("two"), world.stream("three")
    region = take(arena, 6, one)
    number = one.work()
    del region
    arena.reclaim(one)
    lower = Span(0, 2 * UNIT_BYTES)
    free = arena._segments[0].free
    free.remove(lower)  # no call can: they take the lowest
    assert unit_of(arena, take(arena, 2, two)) == 2
    free.add(lower)
    kept = take(arena, 2, three)
    assert unit_of(arena, kept) == 0
    assert three.is_behind(one, number)


def test_what_is_taken_from_several_regions_waits_for_all_of_them(world: World) -> None:
    arena, streams = make_arena(9), [world.stream(name) for name in ("one", "two", "three")]
    regions = [take(arena, 3, stream) for stream in streams]
    numbers = [stream.work() for stream in streams]
    while regions:
        del regions[0]
        arena.reclaim(streams[2 - len(regions)])
    last = world.stream("last")
    kept = [take(arena, 2, last)]  # of the first
    assert [last.is_behind(*pair) for pair in zip(streams, numbers, strict=True)] == [True, False, False]
    kept.append(take(arena, 2, last))  # the rest of the first, and a part of the second
    assert [last.is_behind(*pair) for pair in zip(streams, numbers, strict=True)] == [True, True, False]
    kept.append(take(arena, 5, last))
    assert all(last.is_behind(*pair) for pair in zip(streams, numbers, strict=True))


def test_streams_that_were_noted_are_waited_for(world: World) -> None:
    arena, one, two = make_arena(64), world.stream("one"), world.stream("two")
    region = take(arena, 3, one)
    view = region.view(-1)[5:]
    arena.used_by(view, two)
    arena.used_by(view, two)
    arena.used_by(torch.zeros(3), two)
    arena.used_by(region, None)
    number = two.work()
    del region, view
    arena.reclaim(one)
    assert world.num_events == 1, "of the other stream, and once"
    two.work()
    again = take(arena, 3, one)
    assert unit_of(arena, again) == 0
    assert one.is_behind(two, number)
    assert not one.is_behind(two, number + 1)


def test_a_call_waits_for_the_last_user_alone(world: World) -> None:
    """Who took memory has waited for all before it."""
    arena, one, two, three = make_arena(4), world.stream("one"), world.stream("two"), world.stream("three")
    for stream in (one, two):
        region = take(arena, 4, stream)
        stream.work()
        del region
        arena.reclaim(stream)
    one.work()
    take(arena, 4, three)
    assert three.is_behind(two, 1)
    assert three.is_behind(one, 1)
    assert not three.is_behind(one, 2), "the first stream's event is that of the second stream's wait"


def test_where_streams_take_turns_later_work_is_not_waited_for(world: World) -> None:
    arena, one, two = make_arena(64), world.stream("one"), world.stream("two")
    take(arena, 3, two)
    region = take(arena, 3, one)
    number = one.work()
    del region
    arena.reclaim(one)  # a call ends
    one.work()  # what its caller launches behind it
    region = take(arena, 3, two)
    assert unit_of(arena, region) == 0
    assert two.is_behind(one, number)
    assert not two.is_behind(one, number + 1)


def test_turns_of_streams_are_forgotten(world: World) -> None:
    arena, one, two = make_arena(64), world.stream("one"), world.stream("two")
    take(arena, 3, one)
    take(arena, 3, two)
    for _ in range(device._MIXED_AGE):
        arena.reclaim(two)
    num_events = world.num_events
    for _ in range(10):
        take(arena, 3, two)
        arena.reclaim(two)
    assert world.num_events == num_events


def test_a_region_that_is_taken_again_at_once_needs_no_event_among_many_streams(world: World) -> None:
    arena, one, two = make_arena(64), world.stream("one"), world.stream("two")
    kept = take(arena, 1, two)
    arena.used_by(kept, one)
    for _ in range(20):
        region = take(arena, 3, one)
        assert unit_of(arena, region) == 1
        del region
    assert world.num_events == 0


def test_entries_that_stay_get_an_event_and_go(world: World) -> None:
    arena, stream = make_arena(4), world.stream("one")
    region = take(arena, 4, stream)
    stream.work()
    del region
    for _ in range(device._MOST_AGE + 1):
        arena.reclaim(stream)
    assert world.num_events == 0
    arena.reclaim(stream)
    assert world.num_events == 1
    arena.reclaim(stream)
    assert world.num_events == 1
    assert arena.allocate((1,), torch.uint8, stream, True) is None, "the work is not done"
    world.finish(stream)
    arena.reclaim(stream)
    assert take(arena, 4, stream, is_capturing=True) is not None


def test_only_old_entries_get_an_event(world: World) -> None:
    """Also where others are asked for theirs at each reclaim."""
    arena, stream = make_arena(8), world.stream("one")
    regions = [take(arena, 2, stream), take(arena, 2, stream)]
    stream.work()
    regions.pop()
    arena.reclaim()
    assert world.num_events == 1, "the stream of the call is not known"
    regions.pop()
    for _ in range(device._MOST_AGE + 1):
        arena.reclaim(stream)
    assert world.num_events == 1
    arena.reclaim(stream)
    assert world.num_events == 2


def test_an_entry_stays_until_all_its_events_have_happened(world: World) -> None:
    arena, streams = make_arena(2), [world.stream("one"), world.stream("two")]
    region = take(arena, 2, streams[0])
    arena.used_by(region, streams[1])
    for stream in streams:
        stream.work()
    del region
    arena.reclaim()
    for stream in streams:
        arena.reclaim()
        assert arena.allocate((1,), torch.uint8, streams[0], True) is None
        world.finish(stream)
    arena.reclaim()
    take(arena, 2, streams[0], is_capturing=True)


def test_a_rest_that_nobody_takes_gets_an_event_and_goes(world: World) -> None:
    arena, stream = make_arena(6), world.stream("one")
    region = take(arena, 5, stream)
    del region
    for _ in range(2 * device._MOST_AGE):
        region = take(arena, 2, stream)
        stream.work()
        del region
    assert world.num_events == 1
    world.finish(stream)
    arena.reclaim(stream)
    region = take(arena, 4, stream, is_capturing=True)
    assert unit_of(arena, region) == 2


def test_a_capture_takes_only_what_needs_no_wait(world: World) -> None:
    arena, one, two = make_arena(10), world.stream("one"), world.stream("two")
    first, second, third = take(arena, 2, one), take(arena, 2, one), take(arena, 2, two)
    one.work()
    del first
    arena.reclaim(one)
    del third
    captured = take(arena, 2, one, is_capturing=True)
    assert unit_of(arena, captured) == 6, "neither what an entry names, nor what nobody has reclaimed"
    del captured
    eager = [take(arena, 2, one) for _ in range(3)]
    assert [unit_of(arena, region) for region in eager] == [0, 4, 8], "a graph keeps what it has taken"
    eager.pop()
    world.finish(one)
    arena.reclaim()
    arena.reclaim()
    given_up = take(arena, 2, one, is_capturing=True)
    assert unit_of(arena, given_up) == 8
    arena.give_up(given_up)
    del given_up, second, eager
    assert arena.num_bytes()["used"] == 2 * UNIT_BYTES, "of the first"
    arena.release_captured()
    assert arena.num_bytes()["used"] == 0


def test_records_stay_where_they_are_and_grow(world: World) -> None:
    arena, one, two = make_arena(64), world.stream("one"), world.stream("two")
    first = arena.records(1000, one)
    assert first is not None
    assert (first.shape, first.dtype) == (torch.Size((1000,)), torch.uint8)
    number = one.work()
    for num_bytes, stream in ((1000, two), (5000, one), (1000, one)):
        again = arena.records(num_bytes, stream)
        assert again is not None
        assert again.data_ptr() == first.data_ptr()
        assert again.numel() == num_bytes
    assert world.num_events == 0, "calls follow one another"
    assert arena._regions[first.data_ptr()].users == (one, two), "each of them once"
    assert arena.num_bytes()["used"] == 0, "they are nobody's result"
    more = two.work()
    del first, again
    larger = arena.records(device._LEAST_RECORD_BYTES + 1, one)
    assert larger is not None
    assert unit_of(arena, larger) == 0
    assert one.is_behind(two, more)
    three = world.stream("three")
    del larger
    arena._records = arena._some_records = None
    take(arena, 2, three)
    assert three.is_behind(one, number)
    empty = arena.records(0, one)
    assert empty is not None
    assert empty.numel() == 0


def test_what_an_exception_keeps_from_being_taken_is_not_lost(world: World) -> None:
    arena, one, two, three = make_arena(4), world.stream("one"), world.stream("two"), world.stream("three")
    region = take(arena, 4, one)
    number = one.work()
    del region
    arena.reclaim(one)
    with mock.patch.object(FakeStream, "wait_event", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        take(arena, 4, two)
    with mock.patch.object(device, "_new_storage", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        take(arena, 2, two)
    region = take(arena, 4, three)
    assert three.is_behind(one, number)
    more = three.work()
    del region
    with mock.patch.object(device, "_new_storage", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        take(arena, 4, three)  # the very same memory, which was not free in between
    region = take(arena, 4, two)
    assert two.is_behind(three, more)
    del region
    with mock.patch.object(torch, "empty", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        take(arena, 4, two)  # the region is there, and its tensor is not
    assert arena.num_bytes()["used"] == 0
    assert arena.largest_free_bytes() == 4 * UNIT_BYTES


def test_a_region_that_an_interrupt_kept_from_being_known_is_freed_once(world: World) -> None:
    class Interrupted(dict):
        def __setitem__(self, key: Any, value: Any) -> None:
            raise KeyboardInterrupt

    arena, stream = make_arena(4), world.stream("one")
    with mock.patch.object(arena, "_regions", Interrupted()), pytest.raises(KeyboardInterrupt):
        take(arena, 3, stream)
    gc.collect()
    arena._freed.append(device._Region(world))  # one that was interrupted earlier
    assert arena.num_bytes()["used"] == 0
    arena.reclaim(stream)
    assert list(arena._segments[0].free) == [(0, 4 * UNIT_BYTES)]


# Any order of calls --------------------------------------------------------------------------------------------------

NUM_UNITS = (6, 9)

steps = st.one_of(
    st.tuples(st.just("take"), st.integers(0, 2), st.integers(1, 5)),
    st.tuples(st.just("take"), st.just(0), st.integers(1, 5)),
    st.tuples(st.just("capture"), st.integers(0, 2), st.integers(1, 5)),
    st.tuples(st.just("drop"), st.integers(0, 5), st.just(0)),
    st.tuples(st.just("drop"), st.integers(0, 5), st.just(0)),
    st.tuples(st.just("use"), st.integers(0, 2), st.integers(0, 5)),
    st.tuples(st.just("reclaim"), st.integers(0, 3), st.just(0)),
    st.tuples(st.just("finish"), st.integers(0, 2), st.integers(0, 2)),
    st.tuples(st.just("release"), st.just(0), st.just(0)),
)


class Play:
    """Calls of an arena, and which work has used each unit of its memory."""

    def __init__(self) -> None:
        self.world = World()
        self.streams = [self.world.stream(name) for name in ("one", "two", "three")]
        self.arena = make_arena(*NUM_UNITS)
        self.uses: dict[tuple[int, int], dict[str, int]] = {}
        self.live: list[tuple[torch.Tensor, list[tuple[int, int]]]] = []
        self.captured: list[list[tuple[int, int]]] = []

    def play(self, kind: str, index: int, number: int) -> None:
        if kind in ("take", "capture"):
            self.take(self.streams[index], number, kind == "capture")
        elif kind == "drop" and self.live:
            del self.live[index % len(self.live)]
        elif kind == "use" and self.live:
            region, units = self.live[number % len(self.live)]
            self.arena.used_by(region, self.streams[index])
            self.use(self.streams[index], units)
        elif kind == "reclaim":
            self.arena.reclaim([*self.streams, None][index])
        elif kind == "finish":
            self.world.finish(self.streams[index], number)
        elif kind == "release":
            self.arena.release_captured()
            self.captured.clear()

    def take(self, stream: FakeStream, num_units: int, is_capturing: bool) -> None:
        expected = self.lowest(num_units)
        self.world.is_capturing = is_capturing
        region = self.arena.allocate((num_units, UNIT_BYTES), torch.uint8, stream, is_capturing)
        self.world.is_capturing = False
        if region is None:
            assert is_capturing or expected is None
            return
        base = self.arena.base_of(region)
        assert base is not None
        units = [(base[0], base[1] // UNIT_BYTES + offset) for offset in range(num_units)]
        if not is_capturing:
            assert units[0] == expected, "the lowest room that there is"
        assert self.taken().isdisjoint(units)
        known = self.world.done if is_capturing else latest(self.world.done, stream.behind)
        for unit in units:
            for name, number in self.uses.get(unit, {}).items():
                assert known.get(name, 0) >= number, f"unit {unit}: {stream.name} has not waited for {name}"
        self.live.append((region, units))
        if is_capturing:
            self.captured.append(units)
        self.use(stream, units)

    def use(self, stream: FakeStream, units: list[tuple[int, int]]) -> None:
        number = stream.work()
        for unit in units:
            self.uses.setdefault(unit, {})[stream.name] = number

    def taken(self) -> set[tuple[int, int]]:
        return {unit for units in [*(units for _, units in self.live), *self.captured] for unit in units}

    def lowest(self, num_units: int) -> tuple[int, int] | None:
        taken = self.taken()
        for segment, size in enumerate(NUM_UNITS):
            for start in range(size - num_units + 1):
                if all((segment, start + offset) not in taken for offset in range(num_units)):
                    return segment, start
        return None


@pytest.fixture(params=[(2, 3), (16, 64)], ids=["soon", "as it is"])
def ages(request: pytest.FixtureRequest) -> Iterator[None]:
    """After how many reclaims an entry gets its event, and turns of streams are forgotten."""
    with mock.patch.multiple(device, _MOST_AGE=request.param[0], _MIXED_AGE=request.param[1]):
        yield


@pytest.mark.usefixtures("ages")
@settings(deadline=None, max_examples=500)
@given(st.lists(steps, max_size=60))
def test_no_stream_uses_memory_before_those_that_had_it_are_done(calls: list[tuple[str, int, int]]) -> None:
    play = Play()
    for call in calls:
        play.play(*call)
    play.live.clear()
    play.arena.release_captured()
    assert play.arena.num_bytes()["used"] == 0
    for stream in play.streams:
        play.world.finish(stream)
    for _ in range(device._MOST_AGE + 3):
        play.arena.reclaim()
    assert play.arena._used == [], "nothing stays for ever"
    assert [list(segment.free) for segment in play.arena._segments] == [[(0, n * UNIT_BYTES)] for n in NUM_UNITS]
