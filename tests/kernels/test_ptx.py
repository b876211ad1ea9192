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
    "meet new=True counts=False prefix=False",
    "meet new=False counts=False prefix=False",
)
FINISHING = ("finish dispatch", "finish combine")
WAITING = (*MEETINGS, *FINISHING)
SIGNALLING = (*WAITING, "abort")
BULK = ("put", "pull", "copy_in")
SENDING = (*BULK, "unpack")

INSTRUCTION = re.compile(r"^\s*(?:@!?%\w+\s+)?([a-z][\w.:]*)\s", re.MULTILINE)


@pytest.fixture(scope="module")
def instructions() -> dict[str, list[str]]:
    """The instructions of each kernel for sm_90, in program order. No GPU is needed to compile them."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    program = [sys.executable, str(Path(__file__).with_name("ptx.py"))]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    return {kernel: INSTRUCTION.findall(ptx) for kernel, ptx in json.loads(done.stdout).items()}


def is_barrier(instruction: str) -> bool:
    return instruction.startswith(("bar.", "barrier."))


def is_atomic(instruction: str) -> bool:
    return instruction.startswith(("atom.", "red."))


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
def test_a_signal_is_an_exchange_that_releases(instructions: dict[str, list[str]], kernel: str) -> None:
    atomics = [one for one in instructions[kernel] if is_atomic(one)]
    assert atomics
    assert all({"release", "exch", "b64"} <= set(one.split(".")) for one in atomics)


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
        elif is_atomic(one):
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


def test_giving_up_waits_for_nobody(instructions: dict[str, list[str]]) -> None:
    assert [one for one in instructions["abort"] if "acquire" in one] == []


@pytest.mark.parametrize("kernel", SENDING)
def test_a_kernel_that_moves_rows_neither_signals_nor_waits(instructions: dict[str, list[str]], kernel: str) -> None:
    assert [one for one in instructions[kernel] if is_ordered(one) or is_barrier(one)] == []


@pytest.mark.parametrize("kernel", BULK)
def test_rows_are_moved_in_vectors_of_16_bytes(instructions: dict[str, list[str]], kernel: str) -> None:
    for direction in ("ld.global", "st.global"):
        assert any(one.startswith(direction) and one.endswith("v4.b32") for one in instructions[kernel]), direction
