"""The proxy over NVSHMEM: what it moves, with a stand-in for NVSHMEM, and what is made of it with the real one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from heaps import Heaps

from deep_ep.kernels import _triton, exchange, send
from deep_ep.transport import remote
from deep_ep.transport.remote import RemoteLayout

pytestmark = pytest.mark.skipif(not _triton.HAS_TRITON, reason="Triton is not installed")

P, H = 2, 24  # ranks of a node, words of a header
ROW_BYTES = 4 << 20
LIBRARY = "libnvshmem_device.bc"


# What it moves --------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[2, 3])
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[RemoteLayout, Heaps]:
    """Two or three nodes of two ranks. PEs are in the opposite order of ranks."""
    if not _triton.INTERPRETED:
        pytest.skip("the stand-in for NVSHMEM is for Triton's interpreter")
    layout = RemoteLayout(request.param * P, request.param, H)
    num_bytes = 8 * layout.num_words + 2 * ROW_BYTES
    heaps = Heaps([torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(layout.num_ranks)])
    heaps.stand_in(monkeypatch, send)
    return layout, heaps


def context_of(layout: RemoteLayout, heaps: Heaps, rank: int, epoch: int) -> send.SendContext:
    heaps.pe = pe_of(layout, rank)
    state = torch.zeros(exchange.Context.num_state_words(layout.num_ranks), dtype=torch.int64)
    state[exchange.STATE_EPOCH] = epoch
    pes = torch.tensor([pe_of(layout, one) for one in range(layout.num_ranks)], dtype=torch.int32)
    words = heaps.heaps[heaps.pe].data_ptr()
    return send.SendContext(rank, layout.num_ranks, P, H, words, layout.shadow_boards, state, pes)


def pe_of(layout: RemoteLayout, rank: int) -> int:
    return layout.num_ranks - 1 - rank


def words_of(layout: RemoteLayout, heaps: Heaps, rank: int) -> torch.Tensor:
    return heaps.heaps[pe_of(layout, rank)].view(torch.int64)[: layout.num_words]


def remote_ranks(layout: RemoteLayout, rank: int) -> list[int]:
    return [other for other in range(layout.num_ranks) if other // P != rank // P]


def write_shadow_boards(layout: RemoteLayout, heaps: Heaps, rank: int) -> torch.Tensor:
    """Different words everywhere in this rank's shadow boards; as they are then, [R, board words]."""
    shadow_boards = words_of(layout, heaps, rank)[layout.shadow_boards : layout.doorbells]
    shadow_boards.copy_(torch.arange(1, shadow_boards.numel() + 1))
    return shadow_boards.view(layout.num_ranks, layout.board_words).clone()


def test_layouts_of_doorbells_are_the_same_for_both() -> None:
    assert (send.DOORBELL_EPOCH, send.DOORBELL_SECTIONS) == (remote.DOORBELL_EPOCH, remote.DOORBELL_SECTIONS)
    assert exchange.NUM_SECTIONS == remote.MOST_SECTIONS


@pytest.mark.parametrize(("epoch", "num_words"), [(4, H), (5, H), (5, 3)])
def test_words_are_carried_to_remote_boards_and_nowhere_else(
    world: tuple[RemoteLayout, Heaps], epoch: int, num_words: int
) -> None:
    layout, heaps = world
    rank = 1
    shadow_boards = write_shadow_boards(layout, heaps, rank)
    expected = [words_of(layout, heaps, one).clone() for one in range(layout.num_ranks)]
    for other in remote_ranks(layout, rank):
        for start, size in ((layout.header(epoch, rank), num_words), (layout.progress(rank), 1)):
            expected[other][start : start + size] = shadow_boards[other][start : start + size]
    send.send_words(context_of(layout, heaps, rank, epoch), num_words)
    for one in range(layout.num_ranks):
        assert torch.equal(words_of(layout, heaps, one), expected[one]), one
    # Of each block: behind what went before, then the payload, then the word.
    assert [call[0] for call in heaps.calls] == ["fence", "put", "set"] * len(remote_ranks(layout, rank))


def test_of_a_rank_that_failed_only_the_failure_is_carried(world: tuple[RemoteLayout, Heaps]) -> None:
    layout, heaps = world
    rank = 2
    shadow_boards = write_shadow_boards(layout, heaps, rank)
    expected = [words_of(layout, heaps, one).clone() for one in range(layout.num_ranks)]
    line = layout.failure(rank)
    for other in remote_ranks(layout, rank):
        expected[other][line + 1 : line + 8] = shadow_boards[other][line + 1 : line + 8]
        expected[other][line] = 1
    context = context_of(layout, heaps, rank, 7)
    context.state[exchange.STATE_FAILED] = 1
    send.send_words(context, H)
    for one in range(layout.num_ranks):
        assert torch.equal(words_of(layout, heaps, one), expected[one]), one


def test_where_only_failures_are_carried_a_rank_that_works_says_nothing(world: tuple[RemoteLayout, Heaps]) -> None:
    layout, heaps = world
    context = context_of(layout, heaps, 1, 7)
    send.send_words(context, 0, is_failure_only=True)
    assert heaps.calls == []
    write_shadow_boards(layout, heaps, 1)
    context.state[exchange.STATE_FAILED] = 1
    send.send_words(context, 0, is_failure_only=True)
    assert [call[0] for call in heaps.calls] == ["fence", "put", "set"] * len(remote_ranks(layout, 1))
    assert {call[1] // 8 for call in heaps.calls if call[0] == "set"} == {layout.failure(1)}


def ring(layout: RemoteLayout, heaps: Heaps, rank: int, chunk: int, epoch: int, sections: dict[int, list]) -> None:
    """Write the doorbells of a chunk: by node, source offset, target offset and bytes of each section."""
    for node, entries in sections.items():
        doorbell = layout.doorbell(node, chunk)
        flat = [number for entry in entries for number in entry]
        words_of(layout, heaps, rank)[doorbell : doorbell + 2 + len(flat)] = torch.tensor([epoch, 0, *flat])


def send_chunk(layout: RemoteLayout, heaps: Heaps, context: send.SendContext, chunk: int, num_blocks: int) -> None:
    rows = context.words + 8 * layout.num_words
    doorbell_step = layout.doorbell(1, chunk) - layout.doorbell(0, chunk)
    send.send_rows(context, layout.doorbell(0, chunk), doorbell_step, rows, num_blocks)


@pytest.mark.parametrize("num_blocks", [1, 3, 8])
def test_rows_land_whole_at_the_ranks_of_the_rail(world: tuple[RemoteLayout, Heaps], num_blocks: int) -> None:
    layout, heaps = world
    rank, chunk, epoch = 3, 2, 9
    first = 8 * layout.num_words
    mine = heaps.heaps[pe_of(layout, rank)][first:]
    mine[:ROW_BYTES] = torch.randint(0, 256, (ROW_BYTES,), dtype=torch.uint8)
    big = send.MOST_SLICE_BYTES * num_blocks + 1000  # a slice more than one round has
    sections = {
        node: [(0, ROW_BYTES, min(big, 2 << 20)), (2 << 20, ROW_BYTES + (2 << 20), 48), (3 << 20, ROW_BYTES, 0)]
        for node in range(layout.num_nodes)
    }
    ring(layout, heaps, rank, chunk, epoch, sections)
    before = [heap.clone() for heap in heaps.heaps]
    send_chunk(layout, heaps, context_of(layout, heaps, rank, epoch), chunk, num_blocks)
    targets = {node * P + rank % P for node in range(layout.num_nodes) if node != rank // P}
    for one in range(layout.num_ranks):
        expected = before[pe_of(layout, one)]
        for source, target, size in sections[0] if one in targets else []:
            expected[first + target : first + target + size] = mine[source : source + size]
        assert torch.equal(heaps.heaps[pe_of(layout, one)], expected), one
    assert {call[0] for call in heaps.calls} == {"put"}
    assert sum(call[2] for call in heaps.calls) == len(targets) * sum(size for _, _, size in sections[0])
    assert all(call[2] <= send.MOST_SLICE_BYTES and (call[1] - first) % 16 == 0 for call in heaps.calls)


def test_a_doorbell_of_another_call_is_not_answered(world: tuple[RemoteLayout, Heaps]) -> None:
    layout, heaps = world
    ring(layout, heaps, 0, 1, 8, {1: [(0, ROW_BYTES, 4096)] * 3})
    send_chunk(layout, heaps, context_of(layout, heaps, 0, 9), 1, 2)
    assert heaps.calls == []


def test_landed_words_are_set_behind_a_quiet(world: tuple[RemoteLayout, Heaps]) -> None:
    layout, heaps = world
    rank, chunk, epoch = 2, 3, 1 << 41
    expected = [words_of(layout, heaps, one).clone() for one in range(layout.num_ranks)]
    arrived = layout.arrival_word(rank // P, chunk)
    for node in range(layout.num_nodes):
        if node != rank // P:
            expected[node * P + rank % P][arrived] = epoch
    send.signal_rows(context_of(layout, heaps, rank, epoch), arrived)
    for one in range(layout.num_ranks):
        assert torch.equal(words_of(layout, heaps, one), expected[one]), one
    assert heaps.calls[0] == ("quiet",)
    assert {call[0] for call in heaps.calls[1:]} == {"set"}


@pytest.mark.parametrize("word", [exchange.STATE_FAILED, exchange.STATE_HELD])
def test_rows_of_a_call_that_failed_or_is_held_stay(world: tuple[RemoteLayout, Heaps], word: int) -> None:
    layout, heaps = world
    ring(layout, heaps, 0, 0, 9, {1: [(0, ROW_BYTES, 4096)] * 3})
    context = context_of(layout, heaps, 0, 9)
    context.state[word] = 1
    send_chunk(layout, heaps, context, 0, 2)
    send.signal_rows(context, layout.arrival_word(0, 0))
    assert heaps.calls == []


# What the compiler makes of it, with the real library -----------------------------------------------------------------


def library_folder() -> str | None:
    """Where NVSHMEM's device library is, or None."""
    from torch.distributed._symmetric_memory._nvshmem_triton import NvshmemLibFinder

    try:
        return str(Path(NvshmemLibFinder.find_device_library()).parent)
    except RuntimeError:
        return None


@pytest.fixture(scope="module")
def made() -> dict[str, dict[str, str]]:
    """The Triton IR and the PTX of each kernel."""
    folder = library_folder()
    if folder is None:
        pytest.skip(f"there is no {LIBRARY} here; NVSHMEM_LIB_DIR may name its folder")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    program = [sys.executable, str(Path(__file__).with_name("send_ptx.py"))]
    environment["NVSHMEM_LIB_DIR"] = folder
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("kernel", "calls"),
    [
        ("words", ["nvshmem_fence", "nvshmemx_putmem_signal_block", "nvshmemx_putmem_signal_block"]),
        ("failure", ["nvshmem_fence", "nvshmemx_putmem_signal_block", "nvshmemx_putmem_signal_block"]),
        ("rows", ["nvshmemx_putmem_block"]),
        ("signal", ["nvshmem_quiet", "nvshmemx_signal_op"]),
        ("dispatch", ["nvshmemx_putmem_block"]),
        ("combine", ["nvshmemx_putmem_block"]),
        ("posts", ["nvshmemx_putmem_block"] * 4 + ["nvshmem_quiet", "nvshmemx_signal_op"]),
    ],
)
def test_kernels_call_nvshmem_and_write_and_signal_in_no_other_way(
    made: dict[str, dict[str, str]], kernel: str, calls: list[str]
) -> None:
    ttir = made[kernel]["ttir"]
    assert re.findall(r'tt\.extern_elementwise.*symbol = "(\w+)"', ttir) == calls
    # A combine's table is written before it is put.
    assert re.findall(r"tt\.(store|atomic\w*|elementwise_inline_asm)\b", ttir) == ["store"] * (kernel == "posts")


@pytest.mark.parametrize("kernel", ["words", "failure", "rows", "signal", "dispatch", "combine", "posts"])
def test_the_library_is_linked_in(made: dict[str, dict[str, str]], kernel: str) -> None:
    ptx = made[kernel]["ptx"]
    assert "nvshmemi_device_state_d" in ptx, "what `on_load` fills in"
    assert re.findall(r"\.extern \.func .*nvshmem", ptx) == [], "something is left to be found at load time"


@pytest.mark.parametrize("kernel", ["rows", "dispatch", "combine"])
def test_rows_are_put_in_vectors_of_16_bytes(made: dict[str, dict[str, str]], kernel: str) -> None:
    assert re.search(r"st\.volatile\.global\.v4\.u32|st\.global\.v4", made[kernel]["ptx"])


@pytest.mark.parametrize("kernel", ["words", "failure", "signal", "posts"])
def test_a_signal_is_of_system_scope_and_behind_a_fence(made: dict[str, dict[str, str]], kernel: str) -> None:
    """Where a PE can be addressed, the word is a volatile store; what orders it is the fence before."""
    ptx = made[kernel]["ptx"]
    fences = [found.start() for found in re.finditer(r"\b(?:membar\.sys|fence\.(?:sc|acq_rel)\.sys)\b", ptx)]
    assert fences
    entry = ptx.index(".visible .entry")
    store = ptx.index("st.volatile.b64", entry)
    assert any(entry < at < store for at in fences)


@pytest.mark.parametrize("kernel", ["dispatch", "combine", "posts"])
def test_what_carries_low_latency_calls_is_not_taken_for_the_calls(
    made: dict[str, dict[str, str]], kernel: str
) -> None:
    """Profiles are searched for names with these words."""
    (name,) = re.findall(r"\.visible \.entry (\w+)\(", made[kernel]["ptx"])
    assert "11low_latency" in name
    assert [word for word in ("dispatch", "combine", "notify") if word in name] == []
