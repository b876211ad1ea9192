"""A window for one rank, alone in its group or on its node: private memory, no peers. Works on every system."""

from __future__ import annotations

from ..control import Control
from .board import Board
from .memory import PrivateMemory
from .window import GroupRanks, Peer, Window, WindowSizes


def make_window(control: Control, sizes: WindowSizes) -> Window:
    """Make the window of a rank that has no peers."""
    memory = PrivateMemory()
    board = Board(memory.map(memory.grow(Board.num_bytes(1))), 1)
    group_ranks = GroupRanks(control.first_rank, control.num_all_ranks)
    return Window(0, [Peer(0, memory, board)], memory, sizes, control.limit_secs, group_ranks)
