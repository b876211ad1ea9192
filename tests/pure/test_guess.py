"""How many rows a GPU's dispatch makes memory for before it knows how many come."""

from __future__ import annotations

import torch

from deep_ep.engine.cuda.memory import Memory
from deep_ep.stream import LaunchStream
from deep_ep.transport.device import DeviceWindow, Part


class Bytes:
    """Memory of one rank."""

    def grow(self, num_bytes: int) -> Part:
        memory = torch.zeros(num_bytes, dtype=torch.uint8)
        return Part(memory, (memory.data_ptr(),), memory)

    def is_capturing(self) -> bool:
        return False


def test_a_guess_stays_while_it_will_do() -> None:
    memory = Memory(DeviceWindow(0, 1, Bytes(), 0, 1 << 20), LaunchStream())
    guesses = []
    for num_rows in (1600, 1580, 1620, 1600, 1700, 1300, 0):
        memory.guess_from(num_rows)
        guesses.append(memory.guessed_rows)
        assert guesses[-1] > num_rows
    assert guesses == [1764, 1764, 1764, 1764, 1870, 1445, 64]
