"""What the compiler makes of the kernels: a single GPU hides a scope that is too narrow."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from deep_ep.kernels import _triton

pytestmark = pytest.mark.skipif(not _triton.HAS_TRITON, reason="Triton is not installed")

MEETINGS = (
    "meet new=True counts=True prefix=True",
    "meet new=True counts=False prefix=True",
    "meet new=True counts=False prefix=True pushed",
    "meet new=True counts=False prefix=False",
    "meet new=False counts=False prefix=False",
)
NODES = tuple(f"meet nodes says=True hears=True counts={has_counts}" for has_counts in (True, False))
SAYING = tuple(f"meet nodes says=True hears=False counts={has_counts}" for has_counts in (True, False))
HEARING = tuple(f"meet nodes says=False hears=True counts={has_counts}" for has_counts in (True, False))
FINISHING = ("finish dispatch", "finish combine")
WAITING = (*MEETINGS, *NODES, *HEARING, *FINISHING)
SIGNALLING = (*WAITING, *SAYING, "ring", "await landed", "meet rail", "abort", "refuse")
BULK = (
    "put",
    "pull",
    "copy_in",
    "push",
    "sum_inbox",
    "forward",
    "forward fetched",
    "sum for rail",
    "sum nodes",
)
AHEAD = (
    "put",
    "copy_in",
    "forward",
    "forward fetched",
    "sum for rail",
    "sum nodes",
)  # they ask for rows one round early
SENDING = (*BULK, "unpack", "unpack across nodes")
STEERING = ("steer", "steer along a handle")

LL_WAITS = ("dispatch wait", "combine wait")
LL_SENDS = (
    "dispatch send fp8=True rounded=False",
    "dispatch send fp8=True rounded=True",
    "dispatch send fp8=False rounded=False",
    "combine send copied=True logfmt=False",
    "combine send copied=True logfmt=True",
    "combine send copied=False logfmt=False",
)
LL_SIGNALLING = (*LL_WAITS, "barrier", *LL_SENDS)
LL_RECEIVES = (
    "dispatch receive *fp32",
    "dispatch receive *i32",
    "dispatch receive *fp32 far",
    "combine receive logfmt=False",
    "combine receive logfmt=True",
)

INSTRUCTION = re.compile(r"^\s*(?:@!?%\w+\s+)?([a-z][\w.:]*)\s", re.MULTILINE)


@pytest.fixture(scope="module")
def ptx() -> dict[str, str]:
    """What each kernel is compiled to for sm_90. No GPU is needed for that."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    program = [sys.executable, str(Path(__file__).with_name("ptx.py"))]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def instructions(ptx: dict[str, str]) -> dict[str, list[str]]:
    """The instructions of each kernel, in program order."""
    return {kernel: INSTRUCTION.findall(text) for kernel, text in ptx.items()}


def loops(text: str) -> list[list[str]]:
    """The instructions of each loop: from where a branch goes back to, up to the branch."""
    lines, labels, found = text.splitlines(), {}, []
    for index, line in enumerate(lines):
        if label := re.match(r"(\$\w+):", line):
            labels[label[1]] = index
        elif (branch := re.search(r"\bbra(?:\.uni)?\s+(\$\w+);", line)) and branch[1] in labels:
            found.append(INSTRUCTION.findall("\n".join(lines[labels[branch[1]] : index + 1])))
    return found


def is_poll(loop: list[str]) -> bool:
    return any(one.startswith("ld.acquire.") for one in loop)


def is_barrier(instruction: str) -> bool:
    return instruction.startswith(("bar.", "barrier."))


def is_atomic(instruction: str) -> bool:
    return instruction.startswith(("atom.", "red."))


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


@pytest.mark.parametrize("kernel", SIGNALLING)
def test_a_barrier_stands_between_the_last_store_and_each_signal(
    instructions: dict[str, list[str]], kernel: str
) -> None:
    has_barrier = False
    for one in instructions[kernel]:
        if is_barrier(one):
            has_barrier = True
        elif is_store(one):
            has_barrier = False
        elif is_signal(one):
            assert has_barrier, "the writes of other threads could come after the signal"
            has_barrier = False


@pytest.mark.parametrize("kernel", WAITING)
def test_a_wait_acquires_and_a_barrier_hands_on_what_it_saw(instructions: dict[str, list[str]], kernel: str) -> None:
    """Progress and failures, before the loop and in it; then a barrier, before any thread reads what peers wrote."""
    looks = [index for index, one in enumerate(instructions[kernel]) if one.startswith("ld.acquire.")]
    assert len(looks) == 4
    behind = instructions[kernel][looks[-1] + 1 :]
    barrier = next(index for index, one in enumerate(behind) if is_barrier(one))
    assert [one for one in behind[:barrier] if one.startswith("ld.global")] == []


@pytest.mark.parametrize("kernel", [*SAYING, "ring", "abort", "refuse"])
def test_who_only_says_something_waits_for_nobody(instructions: dict[str, list[str]], kernel: str) -> None:
    assert [one for one in instructions[kernel] if "acquire" in one] == []


@pytest.mark.parametrize("kernel", [*SENDING, *STEERING])
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


@pytest.mark.parametrize("kernel", [*WAITING, "await landed", "meet rail", *LL_WAITS, *LL_SENDS])
def test_no_barrier_stands_in_a_loop_that_polls(ptx: dict[str, str], kernel: str) -> None:
    """Warps may leave it at different times: who stayed would wait for the others for good."""
    polls = [loop for loop in loops(ptx[kernel]) if is_poll(loop)]
    innermost = min(polls, key=len)
    assert [one for one in innermost if is_barrier(one)] == []
    # Four chunks, or progress; and failures. Triton 3.6 has two lanes look at the same chunk.
    num_looks = 5 if kernel == "await landed" else 2
    assert len([one for one in innermost if one.startswith("ld.acquire.")]) >= num_looks
    if kernel not in WAITING:  # of several warps
        assert len(polls) == 1, "one loop, in no other"


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
        ("dispatch receive *fp32 far", ("ld.global", "st.global")),
        ("combine receive logfmt=False", ("ld.global", "st.global")),
    ],
)
def test_low_latency_rows_move_in_vectors_of_16_bytes(
    instructions: dict[str, list[str]], kernel: str, directions: tuple[str, ...]
) -> None:
    for direction in directions:
        assert any(one.startswith(direction) and one.endswith("v4.b32") for one in instructions[kernel]), direction
