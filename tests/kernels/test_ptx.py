"""What the compiler makes of the kernels: a single GPU hides a scope that is too narrow."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from deep_ep.kernels import (
    _triton,
    counts,
    exchange,
    finish,
    notify,
    pull,
    put,
    rail,
    relay,
    relay_sums,
    route,
    selections,
    send,
)

pytestmark = pytest.mark.skipif(not _triton.HAS_TRITON, reason="Triton is not installed")

MORE = " of 64 ranks"
NUMBERED = ("notify numbered", "notify nodes numbered", "notify selections")
COPIED = ("notify copied", "notify copied odd bytes")
HANDSHAKES = ("notify handle", "notify bare", "notify again", "notify nodes handle", "notify nodes again")
HANDSHAKES += ("notify selections handle", "notify selections again")
SEND_PHASES = ("send nodes handle", "send nodes again")
SEND_PHASES_NUMBERED = ("send nodes numbered",)
RECEIVE_PHASES = ("receive nodes counts", "receive nodes handle", "receive nodes again")
# Kernels of several blocks of several warps: the last block signals and waits, or only signals. For more than 32 ranks
# no two warps look at the same rank.
ENDING = ("put", "put along a handle", "pull", "put selections", "pull selections")  # they move rows before
OF_MANY_RANKS = tuple(name + MORE for name in (*NUMBERED, *COPIED, "put", "pull"))
FUSED_WAITING = (*NUMBERED, *COPIED, *ENDING)
FUSED = (*FUSED_WAITING, *SEND_PHASES_NUMBERED, *OF_MANY_RANKS)
WAITING = (*HANDSHAKES, *RECEIVE_PHASES, "finish")  # of one warp
SIGNALLING = (*WAITING, *SEND_PHASES, "ring doorbell", "await arrived", "rail handshake", "abort", "refuse")
MOVING = ("put aimed", "unfold selections", "fold selections", "copy_in", "forward", "forward fetched")
MOVING += ("sum for rail", "sum nodes")
BULK = (*MOVING, *ENDING)
AHEAD = tuple(name for name in BULK if not name.startswith(("pull", "fold")))  # they ask for rows one round early
SENDING = (*MOVING, "unpack", "unpack across nodes")
ROUTING = ("route", "route along a handle", "place", "describe", "describe compact", "arrange")

LL_WAITS = ("wait",)
LL_SENDS = (
    "dispatch send fp8=True rounded=False",
    "dispatch send fp8=True rounded=True",
    "dispatch send fp8=False rounded=False",
    "combine send copied=True logfmt=False",
    "combine send copied=True logfmt=True",
    "combine send copied=False logfmt=False",
)
LL_SIGNALLING = (*LL_WAITS, "barrier", "join", *LL_SENDS)
LL_RECEIVES = (
    "dispatch receive *fp32",
    "dispatch receive *i32",
    "dispatch receive *fp32 remote",
    "combine receive logfmt=False",
    "combine receive logfmt=True",
)

ACCESS = re.compile(r"\s*(?:@!?%\w+\s+)?(ld|st)\.(?:volatile\.)?global\..*\[ *(%rd\d+(?: *\+ *\d+)?) *\]")
INSTRUCTION = re.compile(r"^\s*(?:@!?%\w+\s+)?([a-z][\w.:]*)\s", re.MULTILINE)


@pytest.fixture(scope="module")
def ptx() -> dict[str, str]:
    """What each kernel is compiled to for sm_90. No GPU is needed for that."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_DEFAULT_FP_FUSION"] = "0"  # as it will be by default; kernels must not depend on it
    program = [sys.executable, str(Path(__file__).with_name("ptx.py"))]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def instructions(ptx: dict[str, str]) -> dict[str, list[str]]:
    """The instructions of each kernel, in program order."""
    return {kernel: INSTRUCTION.findall(text) for kernel, text in ptx.items()}


class Flow:
    """Where control may go in a kernel, line by line."""

    def __init__(self, text: str):
        self.lines = text.splitlines()
        labels = {}
        for index, line in enumerate(self.lines):
            if label := re.match(r"(\$\w+):", line):
                labels[label[1]] = index
        self.nexts: list[list[int]] = [[] for _ in self.lines]
        self.jumps = []  # from a line, to a line
        for index, line in enumerate(self.lines[:-1]):
            if branch := re.search(r"^\s*(@!?%\w+\s+)?bra(?:\.uni)?\s+(\$\w+);", line):
                target = labels[branch[2]]
                self.jumps.append((index, target))
                self.nexts[index] = [target, index + 1] if branch[1] else [target]
            elif not re.match(r"\s*(ret|exit|trap);", line):
                self.nexts[index] = [index + 1]
        self.befores: list[list[int]] = [[] for _ in self.lines]
        for index, nexts in enumerate(self.nexts):
            for one in nexts:
                self.befores[one].append(index)

    def reached(self, starts: list[int], edges: list[list[int]], stops: Callable[[int], bool]) -> set[int]:
        """Where one comes from these lines on, without going on from where it stops."""
        seen, todo = set(), list(starts)
        while todo:
            index = todo.pop()
            if index not in seen:
                seen.add(index)
                if not stops(index):
                    todo += edges[index]
        return seen

    def loops(self) -> list[list[str]]:
        """The instructions of each loop: all that lies between where a branch goes back to and the branch."""
        found = []
        for index, head in self.jumps:
            behind = self.reached([head], self.nexts, lambda _: False)
            if head <= index and index in behind:
                body = behind & self.reached([index], self.befores, lambda one, head=head: one == head)
                found.append(INSTRUCTION.findall("\n".join(self.lines[one] for one in sorted(body))))
        return found

    def races(self) -> list[str]:
        """Words that all threads load and one stores, or the other way, while no barrier stands between."""
        uses = {}
        for index, line in enumerate(self.lines):
            if use := ACCESS.match(line):
                uses[index] = (use[1], use[2])
        is_end = [bool(re.match(r"\s*(@!?%\w+\s+)?bar(rier)?\.", line)) for line in self.lines]
        found = []
        for index, (kind, word) in uses.items():
            for other in self.reached(self.nexts[index], self.nexts, lambda one: is_end[one]):
                if uses.get(other, (kind, None)) == ({"ld": "st", "st": "ld"}[kind], word):
                    found.append(f"{self.lines[index].strip()} | {self.lines[other].strip()}")
        return found


def loops(text: str) -> list[list[str]]:
    return Flow(text).loops()


def is_poll(loop: list[str]) -> bool:
    return any(one.startswith("ld.acquire.") for one in loop)


def is_barrier(instruction: str) -> bool:
    return instruction.startswith(("bar.", "barrier."))


def is_atomic(instruction: str) -> bool:
    """Whether it is one on global memory: a histogram counts in that of its block."""
    return instruction.startswith(("atom.", "red.")) and "shared" not in instruction.split(".")


def is_signal(instruction: str) -> bool:
    return instruction.startswith("st.release.")


def is_counter(instruction: str) -> bool:
    """Whether it counts the blocks of a kernel."""
    return is_atomic(instruction) and "add" in instruction.split(".")


def is_ordered(instruction: str) -> bool:
    """Whether it takes part in ordering memory between threads."""
    words = instruction.split(".")
    return bool({"acquire", "release", "acq_rel", "fence", "membar", "volatile"} & set(words)) or is_atomic(instruction)


def is_store(instruction: str) -> bool:
    return instruction.startswith("st.global")


@pytest.mark.parametrize("kernel", SIGNALLING)
def test_every_signal_and_every_look_at_one_is_of_system_scope(instructions: dict[str, list[str]], kernel: str) -> None:
    ordered = [one for one in instructions[kernel] if is_ordered(one)]
    assert ordered
    assert [one for one in ordered if "sys" not in one.split(".")] == []


@pytest.mark.parametrize("kernel", SIGNALLING)
def test_a_signal_is_a_store_that_releases(instructions: dict[str, list[str]], kernel: str) -> None:
    assert [one for one in instructions[kernel] if is_atomic(one)] == [], "words may be in the host's memory"
    signals = [one for one in instructions[kernel] if is_signal(one)]
    assert signals
    assert all({"sys", "b64"} <= set(one.split(".")) for one in signals)


@pytest.mark.parametrize("kernel", [*SIGNALLING, *FUSED])
def test_a_barrier_stands_between_the_last_store_and_each_signal(
    instructions: dict[str, list[str]], kernel: str
) -> None:
    has_barrier = False
    for one in instructions[kernel]:
        if is_barrier(one):
            has_barrier = True
        elif is_store(one):
            has_barrier = False
        elif is_signal(one) or is_counter(one):
            assert has_barrier, "the writes of other threads could come after the signal"
            has_barrier = False


@pytest.mark.parametrize("kernel", [*WAITING, *FUSED_WAITING])
def test_a_wait_acquires_and_a_barrier_hands_on_what_it_saw(instructions: dict[str, list[str]], kernel: str) -> None:
    """Progress and failures, before the loop and in it; then a barrier, before any thread reads what peers wrote."""
    looks = [index for index, one in enumerate(instructions[kernel]) if one.startswith("ld.acquire.")]
    assert len(looks) == (8 if kernel == "pull" else 4), "a combine waits once, or in rounds"
    for last in looks[3::4]:
        behind = instructions[kernel][last + 1 :]
        barrier = next(index for index, one in enumerate(behind) if is_barrier(one))
        assert [one for one in behind[:barrier] if one.startswith(("ld.global", "ld.volatile"))] == []


# Handshakes of several warps, at the end of a kernel of several blocks -----------------------------------------------


@pytest.mark.parametrize("kernel", FUSED)
def test_signals_and_looks_of_the_last_block_are_of_system_scope(
    instructions: dict[str, list[str]], kernel: str
) -> None:
    ordered = [one for one in instructions[kernel] if is_ordered(one) and not is_counter(one)]
    # What a wait saw is handed from warp to warp by way of private memory; the compiler must not guess it, nor whether
    # the buffer has failed.
    private = [one for one in ordered if one.startswith("ld.volatile.")]
    assert len(private) >= (0 if kernel in SEND_PHASES_NUMBERED else 2)
    assert [one for one in ordered if one not in private and "sys" not in one.split(".")] == []


@pytest.mark.parametrize("kernel", FUSED)
def test_blocks_are_counted_before_the_last_one_signals(ptx: dict[str, str], kernel: str) -> None:
    flow = Flow(ptx[kernel])
    at = {index: one[0] for index, line in enumerate(flow.lines) if (one := INSTRUCTION.findall(line + "\n"))}
    atomics = [index for index, one in at.items() if is_atomic(one)]
    assert len(atomics) == 1
    assert is_counter(at[atomics[0]])
    # Blocks of one kernel, about memory of their own GPU, or also about that of peers.
    scope = "sys" if kernel.removesuffix(MORE) in ENDING else "gpu"
    assert {"acq_rel", scope} <= set(at[atomics[0]].split("."))
    signals = [index for index, line in enumerate(flow.lines) if "st.release." in line]
    assert signals
    assert all("st.release.sys.global.b64" in flow.lines[one] for one in signals)
    before = flow.reached([0], flow.nexts, lambda one: one == atomics[0])
    assert not before & set(signals), "whoever is not counted says nothing"
    assert not [one for one in before if "ld.acquire." in flow.lines[one]], "and waits for nobody"


@pytest.mark.parametrize("kernel", FUSED)
def test_a_barrier_hands_on_what_the_last_block_acquired(instructions: dict[str, list[str]], kernel: str) -> None:
    """One thread counts; the others read what other blocks wrote."""
    counter = next(index for index, one in enumerate(instructions[kernel]) if is_counter(one))
    behind = instructions[kernel][counter + 1 :]
    barrier = next(index for index, one in enumerate(behind) if is_barrier(one))
    assert [one for one in behind[:barrier] if one.startswith(("ld.global", "ld.volatile"))] == []


@pytest.mark.parametrize("kernel", FUSED)
def test_no_warp_stores_what_another_has_still_to_load(ptx: dict[str, str], kernel: str) -> None:
    """Else a slow warp would take the number of this call for that of the last one, or a failure for an old one."""
    assert Flow(ptx[kernel]).races() == []


@pytest.mark.parametrize("kernel", ENDING)
def test_warps_that_move_rows_wait_for_each_other_at_the_end_alone(ptx: dict[str, str], kernel: str) -> None:
    whole = INSTRUCTION.findall(ptx[kernel])
    counter = next(index for index, one in enumerate(whole) if is_counter(one))
    barriers = [index for index, one in enumerate(whole[:counter]) if is_barrier(one)]
    assert barriers, "before the block is counted"
    stores = [index for index, one in enumerate(whole[:counter]) if is_store(one)]
    assert stores[-1] < barriers[0]
    assert any(one.startswith("st.global") and one.endswith("v4.b32") for one in whole[:counter])


@pytest.mark.parametrize("kernel", COPIED)
def test_rows_are_copied_before_blocks_are_counted(ptx: dict[str, str], kernel: str) -> None:
    """In vectors where rows have them, and each piece loaded in the loop that stores the one before."""
    unit = "b8" if "odd" in kernel else "v4.b32"
    moving = [
        [one for one in loop if one.startswith(("ld.global", "st.global")) and one.endswith(unit)]
        for loop in loops(ptx[kernel])
    ]
    moving = [loop for loop in moving if loop]
    assert len(moving) == 1
    assert {one[:2] for one in moving[0]} == {"ld", "st"}
    whole = INSTRUCTION.findall(ptx[kernel])
    counter = next(index for index, one in enumerate(whole) if is_counter(one))
    assert [one for one in whole[counter:] if one.startswith(("ld.global", "st.global")) and one.endswith(unit)] == []


@pytest.mark.parametrize("kernel", [*SEND_PHASES, *SEND_PHASES_NUMBERED, "ring doorbell", "abort", "refuse"])
def test_who_only_says_something_waits_for_nobody(instructions: dict[str, list[str]], kernel: str) -> None:
    assert [one for one in instructions[kernel] if "acquire" in one] == []


@pytest.mark.parametrize("kernel", [*SENDING, *ROUTING])
def test_a_kernel_that_moves_rows_neither_signals_nor_waits(instructions: dict[str, list[str]], kernel: str) -> None:
    assert [one for one in instructions[kernel] if is_ordered(one)] == []


@pytest.mark.parametrize("kernel", SENDING)
def test_warps_that_move_rows_do_not_wait_for_each_other(instructions: dict[str, list[str]], kernel: str) -> None:
    """Those that steer may: Triton 3.6 transposes their tiles, which are read by node and written by rank."""
    assert [one for one in instructions[kernel] if is_barrier(one)] == []


@pytest.mark.parametrize("kernel", BULK)
def test_rows_are_moved_in_vectors_of_16_bytes(instructions: dict[str, list[str]], kernel: str) -> None:
    for direction in ("ld.global", "st.global"):
        assert any(one.startswith(direction) and one.endswith("v4.b32") for one in instructions[kernel]), direction


@pytest.mark.parametrize("kernel", AHEAD)
def test_rows_are_loaded_in_the_loop_that_stores_them(ptx: dict[str, str], kernel: str) -> None:
    """A compiler that takes what is loaded ahead for the same in all rounds would move one row again and again."""

    def moves(loop: list[str], direction: str) -> bool:
        return any(one.startswith(direction) and one.endswith("v4.b32") for one in loop)

    innermost = min((loop for loop in loops(ptx[kernel]) if moves(loop, "st.global")), key=len)
    assert moves(innermost, "ld.global")


# Names ---------------------------------------------------------------------------------------------------------------


def test_kernels_are_named_after_what_profiles_are_searched_for(ptx: dict[str, str]) -> None:
    """Callers find the kernels of a dispatch, of a combine, and of the handshake before, by a part of their names."""
    modules = (send, counts, exchange, notify, pull, put, rail, relay, relay_sums, finish, route, selections)
    names = {name for module in modules for name in vars(module) if name.endswith("_kernel")}
    compiled = {kernel: re.findall(r"\.entry\s+(\w+)", text) for kernel, text in ptx.items()}
    normal = [kernel for kernel in compiled if kernel not in (*LL_SIGNALLING, *LL_RECEIVES)]
    chosen = {"dispatch_selections_kernel", "unfold_selections_kernel"}
    chosen |= {"combine_selections_kernel", "fold_selections_kernel"}
    assert {name for kernel in normal for name in compiled[kernel]} <= names | chosen
    assert compiled["put"] == ["dispatch_rows_kernel"]
    assert compiled["pull"] == ["combine_rows_kernel"]
    for kernel in (*HANDSHAKES, *SEND_PHASES, *RECEIVE_PHASES, *NUMBERED, *COPIED, *SEND_PHASES_NUMBERED):
        kinds = [kind for kind in ("copied", "selections") if kind in kernel]
        assert compiled[kernel] == ["_".join(["_notify", *kinds, "kernel"])]
    assert compiled["put selections"] == ["dispatch_selections_kernel"]
    assert compiled["pull selections"] == ["combine_selections_kernel"]
    assert compiled["unfold selections"] == ["unfold_selections_kernel"]
    assert compiled["fold selections"] == ["fold_selections_kernel"]
    assert {name for name in names if "dispatch" in name} == {"dispatch_rows_kernel"}
    assert {name for name in names if "combine" in name} == {"combine_rows_kernel"}
    notifying = {"_notify_kernel", "_notify_copied_kernel", "_notify_selections_kernel"}
    assert {name for name in names if "notify" in name} == notifying


# Low latency ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", LL_SIGNALLING)
def test_low_latency_signals_and_looks_are_of_system_scope(instructions: dict[str, list[str]], kernel: str) -> None:
    ordered = [one for one in instructions[kernel] if is_ordered(one) and not is_counter(one)]
    # What a wait saw is handed from warp to warp by way of private memory; the compiler must not guess it.
    private = [one for one in ordered if one.startswith("ld.volatile.")]
    assert len(private) in (0, 2)
    assert [one for one in ordered if one not in private and "sys" not in one.split(".")] == []


@pytest.mark.parametrize("kernel", LL_SIGNALLING)
def test_low_latency_signals_release_and_the_last_block_has_acquired(
    instructions: dict[str, list[str]], kernel: str
) -> None:
    atomics = [set(one.split(".")) for one in instructions[kernel] if is_atomic(one)]
    counters = [one for one in atomics if "add" in one]
    assert len(counters) == (kernel in LL_SENDS)
    assert all({"acq_rel", "gpu"} <= one for one in counters), "blocks of one kernel, about memory of their own GPU"
    assert atomics == counters
    ordered = [one for one in instructions[kernel] if is_signal(one) or is_counter(one)]
    signals = ordered[len(counters) :]
    assert not any(is_signal(one) for one in ordered[: len(counters)]), "blocks are counted before anything is said"
    assert signals
    assert all({"b64", "sys"} <= set(one.split(".")) for one in signals)


@pytest.mark.parametrize("kernel", LL_SIGNALLING)
def test_a_barrier_stands_before_each_low_latency_signal(instructions: dict[str, list[str]], kernel: str) -> None:
    has_barrier = False
    for one in instructions[kernel]:
        if is_barrier(one):
            has_barrier = True
        elif is_atomic(one) or is_signal(one):
            assert has_barrier, "the writes of other threads could come after the signal"
            has_barrier = False
        elif is_store(one):
            has_barrier = False


@pytest.mark.parametrize("kernel", [*WAITING, *FUSED_WAITING, "await arrived", "rail handshake", *LL_WAITS, *LL_SENDS])
def test_no_barrier_stands_in_a_loop_that_polls(ptx: dict[str, str], kernel: str) -> None:
    """Warps may leave it at different times: who stayed would wait for the others for good."""
    polls = sorted((loop for loop in loops(ptx[kernel]) if is_poll(loop)), key=len)
    innermost = polls[0]
    assert [one for one in innermost if is_barrier(one)] == []
    # Four chunks, or progress; and failures. Triton 3.6 has two lanes look at the same chunk.
    num_looks = 5 if kernel == "await arrived" else 2
    assert len([one for one in innermost if one.startswith("ld.acquire.")]) >= num_looks
    if kernel in (*NUMBERED, *COPIED, *LL_SENDS):  # of several warps
        assert len(polls) == 1, "one loop, in no other"
    if kernel == "pull":
        assert [one for one in polls[1] if is_barrier(one)] == [], "and none where there are rounds"


@pytest.mark.parametrize("kernel", [*LL_WAITS, *LL_SENDS])
def test_a_low_latency_wait_is_followed_by_a_barrier_before_anybody_reads(
    instructions: dict[str, list[str]], kernel: str
) -> None:
    looks = [index for index, one in enumerate(instructions[kernel]) if one.startswith("ld.acquire.")]
    assert len(looks) == 4
    behind = instructions[kernel][looks[-1] + 1 :]
    barrier = next(index for index, one in enumerate(behind) if is_barrier(one))
    assert [one for one in behind[:barrier] if one.startswith("ld.")] == []


@pytest.mark.parametrize("kernel", LL_RECEIVES)
def test_a_low_latency_receive_neither_signals_nor_waits(instructions: dict[str, list[str]], kernel: str) -> None:
    assert [one for one in instructions[kernel] if is_ordered(one)] == []


@pytest.mark.parametrize(
    ("kernel", "directions"),
    [
        ("dispatch send fp8=False rounded=False", ("ld.global", "st.global")),
        ("dispatch send fp8=True rounded=False", ("ld.global",)),
        ("combine send copied=True logfmt=False", ("ld.global", "st.global")),
        ("dispatch receive *fp32", ("ld.global", "st.global")),
        ("dispatch receive *fp32 remote", ("ld.global", "st.global")),
        ("combine receive logfmt=False", ("ld.global", "st.global")),
    ],
)
def test_low_latency_rows_move_in_vectors_of_16_bytes(
    instructions: dict[str, list[str]], kernel: str, directions: tuple[str, ...]
) -> None:
    for direction in directions:
        assert any(one.startswith(direction) and one.endswith("v4.b32") for one in instructions[kernel]), direction


def test_weighted_rows_are_summed_with_one_rounding_each(instructions: dict[str, list[str]]) -> None:
    found = instructions["combine receive logfmt=False"]
    assert found.count("fma.rn.f32") >= 8  # of a vector of BF16
    assert not [one for one in found if one.startswith("mul") and one.endswith("f32")]


def test_warps_that_encode_or_decode_logfmt_do_not_wait_for_each_other(ptx: dict[str, str]) -> None:
    """How tiles are laid out is up to the compiler: a group must lie in a warp, and a thread have whole vectors."""
    encoding = [loop for loop in loops(ptx["combine send copied=True logfmt=True"]) if count(loop, "lg2.approx") > 2]
    innermost = min(encoding, key=len)
    assert count(innermost, "lg2.approx") == 34, "of 32 channels, and of the ends of a range"
    assert [one for one in innermost if is_barrier(one)] == []
    assert count(innermost, "ld.global.v2.b64") == count(innermost, "st.global.v2.b32") == 4
    decoding = INSTRUCTION.findall(ptx["combine receive logfmt=True"])
    assert count(decoding, "ld.global.v4.b32") == 16 + 2, "8 rows of 32 channels at once, or one by one"
    assert count(decoding, "ex2.approx") == 8 * 32 + 32


def count(instructions: list[str], start: str) -> int:
    return sum(one.startswith(start) for one in instructions)


NAMES = dict.fromkeys((one for one in (*LL_SENDS, *LL_RECEIVES) if one.startswith("dispatch")), "low_latency::dispatch")
NAMES |= dict.fromkeys((one for one in (*LL_SENDS, *LL_RECEIVES) if one.startswith("combine")), "low_latency::combine")
NAMES |= {"wait": "low_latency::wait", "barrier": "low_latency::signal", "join": "low_latency::join"}


@pytest.mark.parametrize("kernel", [*LL_SIGNALLING, *LL_RECEIVES])
def test_low_latency_kernels_have_the_names_that_profiles_are_searched_for(ptx: dict[str, str], kernel: str) -> None:
    """Both halves of a call have one name, with `::dispatch` or `::combine` in it, and no other kernel has."""
    entries = re.findall(r"\.visible \.entry (\w+)\(", ptx[kernel])
    parts = NAMES[kernel].split("::")
    assert entries == ["_ZN" + "".join(f"{len(part)}{part}" for part in parts) + "E"], "as C++ mangles it"
    assert not {"dispatch", "combine", "notify"} & {*parts} or kernel in (*LL_SENDS, *LL_RECEIVES)


def test_kernels_of_one_name_are_not_taken_for_each_other(instructions: dict[str, list[str]]) -> None:
    """Neither by Triton's cache nor here: their instructions differ."""
    for name in ("low_latency::dispatch", "low_latency::combine"):
        alike = [tuple(instructions[kernel]) for kernel in NAMES if NAMES[kernel] == name]
        assert len(alike) > 3
        assert len(set(alike)) == len(alike)
