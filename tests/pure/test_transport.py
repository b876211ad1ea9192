"""Spans, boards, memory, words, topology, choice of a transport: what needs no second process."""

from __future__ import annotations

import platform
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from deep_ep import env, topology, transport
from deep_ep.errors import EPError, EPTimeout, EPTransportError, EPUnsupported
from deep_ep.transport.arena import Arena
from deep_ep.transport.board import HEADER, OFFER, POSTED_BYTES, Board, progress_of
from deep_ep.transport.memory import PrivateMemory, SharedMemory, available_bytes, commit_fresh
from deep_ep.transport.spans import UNIT_BYTES, Span, SpanSet
from deep_ep.transport.symm import RenumberingStore
from deep_ep.transport.words import AtomicWord, Word


def test_removing_a_span_returns_what_was_there() -> None:
    spans = SpanSet(Span(0, 5), Span(8, 12))
    assert spans.remove(Span(4, 9)) == [Span(4, 5), Span(8, 9)]
    assert list(spans) == [Span(0, 4), Span(9, 12)]


def test_adding_a_span_joins_neighbours() -> None:
    spans = SpanSet(Span(0, 4), Span(9, 12))
    spans.add(Span(4, 9))
    assert list(spans) == [Span(0, 12)]


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5 * UNIT_BYTES)), max_size=40), st.randoms())
def test_taking_and_giving_back_never_overlaps_and_loses_nothing(steps: list, shuffle: object) -> None:
    whole = Span(0, 16 * UNIT_BYTES)
    free, taken = SpanSet(whole), []
    for is_take, num_bytes in steps:
        if is_take:
            span = free.take(num_bytes)
            if span is None:
                assert all(one.num_bytes < num_bytes for one in free)
                continue
            assert span.num_bytes >= num_bytes
            assert all(span.stop <= other.start or other.stop <= span.start for other in taken)
            taken.append(span)
        elif taken:
            free.add(taken.pop(shuffle.randrange(len(taken))))  # type: ignore[attr-defined]
        assert free.num_bytes + sum(span.num_bytes for span in taken) == whole.num_bytes
    for span in taken:
        free.add(span)
    assert list(free) == [whole]


def spans_of(units: set[int]) -> list[Span]:
    """The spans that a set of units makes."""
    starts = [unit for unit in sorted(units) if unit - 1 not in units]
    stops = [unit + 1 for unit in sorted(units) if unit + 1 not in units]
    return [Span(start * UNIT_BYTES, stop * UNIT_BYTES) for start, stop in zip(starts, stops, strict=True)]


@given(st.lists(st.tuples(st.sampled_from(["add", "remove", "take"]), st.integers(0, 19), st.integers(1, 6))))
def test_a_set_of_spans_is_a_set_of_units(steps: list[tuple[str, int, int]]) -> None:
    spans, units = SpanSet(), set[int]()
    for step, start, count in steps:
        some = set(range(start, start + count))
        span = Span(start * UNIT_BYTES, (start + count) * UNIT_BYTES)
        if step == "add" and units.isdisjoint(some):
            lower = [unit for unit in range(start) if units | some >= set(range(unit, unit + count))]
            assert spans.has_below(span.start, span.num_bytes) == bool(lower), "whether `take` would prefer another"
            spans.add(span)
            units |= some
        elif step == "remove":
            assert spans.remove(span) == spans_of(units & some)
            units -= some
        elif step == "take":
            room = [unit for unit in sorted(units) if units >= set(range(unit, unit + count))]
            taken = spans.take(count * UNIT_BYTES - start)
            assert taken == (Span(room[0] * UNIT_BYTES, (room[0] + count) * UNIT_BYTES) if room else None)
            units -= set(range(room[0], room[0] + count)) if room else set()
        assert list(spans) == list(SpanSet(*spans)) == spans_of(units)
        assert spans.num_bytes == len(units) * UNIT_BYTES
        assert spans.largest_bytes() == max((one.num_bytes for one in spans), default=0)


@pytest.mark.parametrize("memory_type", [SharedMemory.create, PrivateMemory])
def test_an_arena_grows_within_its_limit(memory_type: object) -> None:
    memory, mapped = memory_type(), []  # type: ignore[operator]
    arena = Arena(memory, 0, limit_bytes=4 << 20, on_map=mapped.append)
    first = arena.allocate((1 << 20,), torch.uint8)
    second = arena.allocate((3, 1 << 18), torch.float32)
    assert first is not None
    assert second is not None
    assert second.shape == (3, 1 << 18)
    assert arena.allocate((1 << 20,), torch.uint8) is None, "the limit holds"
    assert len(mapped) == 1, "a limited arena is one segment"
    del second
    assert arena.allocate((1 << 20,), torch.uint8) is not None
    assert arena.allocate((0, 7), torch.bfloat16).shape == (0, 7)
    assert arena.base_of(torch.zeros(3)) is None
    assert arena.base_of(first).offset == mapped[0].span.start


def test_an_arena_without_a_limit_doubles() -> None:
    mapped: list = []
    arena = Arena(PrivateMemory(), first_bytes=3 << 20, limit_bytes=0, on_map=mapped.append)
    kept = [arena.allocate((2 << 20,), torch.uint8) for _ in range(5)]
    assert all(one is not None for one in kept)
    assert [mapping.span.num_bytes >> 20 for mapping in mapped] == [4, 4, 8]


def test_shared_memory_is_seen_by_another_mapping() -> None:
    memory = SharedMemory.create()
    span = memory.grow(10_000)
    assert span == Span(0, 3 * UNIT_BYTES)
    memory.commit(span)
    one, two = memory.map(span), memory.map(Span(UNIT_BYTES, 2 * UNIT_BYTES))
    one.view(Span(UNIT_BYTES + 5, UNIT_BYTES + 6))[0] = 77
    assert two.view(Span(UNIT_BYTES + 5, UNIT_BYTES + 6))[0] == 77
    assert two.offset_of(two.address + 9) == UNIT_BYTES + 9
    assert two.offset_of(one.address) is None or one.address == two.address
    memory.close()
    memory.close()
    assert two.view(Span(UNIT_BYTES + 5, UNIT_BYTES + 6))[0] == 77, "mappings outlive the descriptor"


def test_a_mapping_shows_rows_of_any_dtype() -> None:
    memory = PrivateMemory()
    memory.grow(UNIT_BYTES)
    span = memory.grow(UNIT_BYTES)
    mapping = memory.map(span)
    mapping.view(Span(span.start + 16, span.start + 24))[:] = bytes([1, 0, 2, 0, 3, 0, 4, 0])
    assert mapping.rows(span.start + 16, 2, 2, torch.int16).tolist() == [[1, 2], [3, 4]]
    assert mapping.rows(span.start + 16, 1, 8, torch.uint8).tolist() == [[1, 0, 2, 0, 3, 0, 4, 0]]
    assert mapping.rows(span.stop, 0, 3, torch.int64).shape == (0, 3)
    with pytest.raises(EPTransportError, match=rf"there can be no torch.int64 at byte {span.start + 4}"):
        mapping.rows(span.start + 4, 1, 1, torch.int64)


@pytest.mark.parametrize("memory_type", [SharedMemory.create, PrivateMemory])
def test_more_memory_than_there_is_gives_an_error_with_numbers(memory_type: object) -> None:
    memory = memory_type()  # type: ignore[operator]
    needed = available_bytes() + (1 << 30)
    span = memory.grow(needed)
    with pytest.raises(EPTransportError, match=rf"{span.num_bytes} bytes of memory are needed, \d+ are available"):
        memory.commit(span)
    assert Arena(memory, 0, 0, lambda _: None).allocate((needed,), torch.uint8) is None


class Scarce(PrivateMemory):
    """Memory that cannot be committed from some byte on."""

    end = UNIT_BYTES * 3

    def commit(self, span: Span) -> None:
        if span.stop > self.end:
            raise EPTransportError("there is no more")


def test_what_could_not_be_committed_stays_uncommitted() -> None:
    memory, one_unit = Scarce(), UNIT_BYTES
    uncommitted = SpanSet(Span(0, one_unit), Span(2 * one_unit, 4 * one_unit), Span(5 * one_unit, 6 * one_unit))
    with pytest.raises(EPTransportError):
        commit_fresh(memory, uncommitted, Span(1, 6 * one_unit))
    assert list(uncommitted) == [Span(2 * one_unit, 4 * one_unit), Span(5 * one_unit, 6 * one_unit)]
    memory.end = 6 * one_unit
    assert commit_fresh(memory, uncommitted, Span(3 * one_unit, 6 * one_unit)) == [
        Span(3 * one_unit, 4 * one_unit),
        Span(5 * one_unit, 6 * one_unit),
    ]
    assert list(uncommitted) == [Span(2 * one_unit, 3 * one_unit)]


def test_a_board_carries_posts_by_parity() -> None:
    memory = PrivateMemory()
    board = Board(memory.map(memory.grow(Board.num_bytes(4))), 4)
    board.post(HEADER, 6, [1, -2, 3])
    board.post(HEADER, 7, [4, 5])
    board.post(OFFER, 6, [9])
    board.post_values(6, torch.tensor([10, 20], dtype=torch.int32), torch.tensor([30], dtype=torch.int32))
    board.post_values(7, torch.tensor([40], dtype=torch.int32))
    assert board.read(HEADER, 6)[:3] == [1, -2, 3]
    assert board.read(HEADER, 7)[:2] == [4, 5]
    assert board.read(OFFER, 8)[0] == 9, "epoch 8 uses the slot of epoch 6"
    assert board.read_values(6, 1, 3) == [20, 30]
    rows, back = torch.arange(6, dtype=torch.uint8), torch.zeros(3, dtype=torch.uint8)
    board.write_rows(6, 64, rows.data_ptr(), 6)
    board.write_rows(7, 64, back.data_ptr(), 3)
    board.read_rows(8, 66, back.data_ptr(), 3)
    assert back.tolist() == [2, 3, 4]
    for start, num_bytes in ((POSTED_BYTES, 1), (-1, 1), (0, -1)):
        with pytest.raises(EPTransportError, match="not among those of posted rows"):
            board.read_rows(6, start, back.data_ptr(), num_bytes)
    board.write_text("ü" * 5000)
    assert board.read_text().startswith("üüü")
    assert progress_of(2, 0) > progress_of(1, 1000)


@pytest.mark.parametrize("word_type", [Word, AtomicWord])
def test_words_hold_64_bits(word_type: type[Word]) -> None:
    if word_type is AtomicWord and platform.libc_ver()[0] != "glibc":
        pytest.skip("libatomic is looked for on glibc systems only")
    memory = PrivateMemory()
    mapping = memory.map(memory.grow(4096))
    try:
        word = word_type(mapping.memory, 64)
        word.store_release((1 << 63) + 5)
    except EPUnsupported as error:
        pytest.skip(str(error))
    assert word.load_acquire() == (1 << 63) + 5
    word.store_before_writes(7)
    assert word.load_behind_reads() == 7
    assert Word(mapping.memory, 128).load_acquire() == 0


def test_nodes_follow_the_hosts() -> None:
    place = topology.arrange(3, ["a", "a", "b", "b"])
    assert (place.num_nodes, place.node, place.local_rank) == (2, 1, 1)
    assert topology.arrange(5, ["a"] * 6).num_nodes == 1
    split = topology.arrange(5, ["a"] * 6, ranks_per_node=2)
    assert (split.num_nodes, split.node, split.local_rank) == (3, 2, 1)


@pytest.mark.parametrize(
    ("hosts", "ranks_per_node"), [(["a", "b", "a"], 0), (["a", "a", "b"], 0), (["a"] * 4, 3), (["a", "a", "b", "b"], 4)]
)
def test_placements_that_cannot_work_are_shown(hosts: list[str], ranks_per_node: int) -> None:
    with pytest.raises(EPError, match=r"on a|must divide"):
        topology.arrange(0, hosts, ranks_per_node)


def test_the_choice_of_a_transport_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    assert transport.choose(1).name == "solo"
    assert transport.choose(4).name == "shm"
    monkeypatch.setenv("DEEP_EP_TRANSPORT", "shm")
    assert transport.choose(1)[:2] == ("shm", "DEEP_EP_TRANSPORT=shm")
    monkeypatch.setenv("DEEP_EP_TRANSPORT", "solo")
    with pytest.raises(EPUnsupported, match="it is for one rank, the group has 2"):
        transport.choose(2)
    monkeypatch.setenv("DEEP_EP_TRANSPORT", "pigeon")
    with pytest.raises(
        ValueError, match="'pigeon' is not one of auto, solo, shm, message, interpreted and interpreted-memory"
    ):
        transport.choose(2)


def test_variables_are_read_when_needed_and_say_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_EP_TIMEOUT_SECS", "2.5")
    assert env.TIMEOUT_SECS.get() == 2.5
    monkeypatch.setenv("DEEP_EP_ARENA_BYTES", "1e6")
    assert env.ARENA_BYTES.get() == 1_000_000
    for text in ("0", "-1", "soon"):
        monkeypatch.setenv("DEEP_EP_TIMEOUT_SECS", text)
        with pytest.raises(ValueError, match="DEEP_EP_TIMEOUT_SECS"):
            env.TIMEOUT_SECS.get()


def exchange(store: dist.Store, number: int, rank: int, value: str) -> str:
    """What torch does with the store when it makes symmetric memory, on one of two ranks."""
    store.set(f"CUDASymmetricMemory/{number}/{rank}", value)
    other = f"CUDASymmetricMemory/{number}/{1 - rank}"
    store.wait([other], timedelta(seconds=10))
    return store.get(other).decode()


def test_ranks_that_count_their_exchanges_differently_find_each_other() -> None:
    shared = dist.HashStore()
    deadline = time.monotonic() + 10
    stores = [RenumberingStore(shared, "name", deadline) for _ in range(2)]
    ranks = [(stores[0], 0, 7), (stores[1], 1, 0)]  # rank 0 has made seven before

    def both(store: RenumberingStore, rank: int, first: int) -> list[str]:
        return [exchange(store, first + index, rank, f"{rank} {index}") for index in range(2)]

    with ThreadPoolExecutor(2) as pool:
        assert [one.result() for one in [pool.submit(both, *rank) for rank in ranks]] == [
            ["1 0", "1 1"],
            ["0 0", "0 1"],
        ]
    late = RenumberingStore(shared, "other", time.monotonic())
    with pytest.raises(EPTimeout, match="rank 0 did not say where its memory is"):
        late.get("CUDASymmetricMemory/0/0")
