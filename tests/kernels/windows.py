"""Windows of several ranks in one process: what kernels need to run rank after rank, without any peer to wait for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from deep_ep.kernels import exchange
from deep_ep.kernels.exchange import Context
from deep_ep.kernels.reduce import reduce_rows

_MOST_EXPERTS = 64


def make_context(rank: int, num_ranks: int, device: str) -> Context:
    """The words of a rank that meets nobody, and need not wait: all boards are one, on which all ranks have come to all
    steps of call 0. The table is filled by `offer`.
    """
    header_words = Context.num_header_words(num_ranks, _MOST_EXPERTS)
    num_host_words = Context.num_host_words(num_ranks, _MOST_EXPERTS) + _MOST_EXPERTS
    board = torch.zeros(Context.board_bytes(num_ranks, header_words) // 8, dtype=torch.int64, device=device)
    board[: 8 * num_ranks : 8] = (1 << 24) - 1
    windows = torch.full((1, num_ranks), board.data_ptr(), dtype=torch.int64, device=device)
    windows.board = board  # kept as long as its address
    return Context(
        rank=rank,
        num_ranks=num_ranks,
        windows=windows,
        own_boards=windows[0].clone(),
        state=torch.zeros(Context.num_state_words(num_ranks), dtype=torch.int64, device=device),
        table=torch.zeros(exchange.TABLE_ROWS, num_ranks, dtype=torch.int64, device=device),
        host=torch.zeros(num_host_words, dtype=torch.int64, device="cpu", pin_memory=device == "cuda"),
        header_words=header_words,
        limit_ns=10**9,
    )


def with_subnormals(rows: torch.Tensor) -> torch.Tensor:
    """The same rows, some columns scaled down so far that BF16 has their numbers only as subnormal ones."""
    rows = rows.clone()
    rows[..., 1::3] *= 2.0**-130
    return rows


def reduce_on_cpu(
    out: torch.Tensor, peers: Sequence[torch.Tensor], slots: torch.Tensor, biases: Sequence[torch.Tensor] = ()
) -> None:
    """`reduce_rows` by the CPU: on a GPU, torch makes zeros of subnormal numbers where it adds to chosen rows."""
    summed = out.cpu()
    shifts, on_cpu = [0] * len(peers), [bias.cpu() for bias in biases]
    reduce_rows(summed, [rows.cpu() for rows in peers], slots.cpu(), shifts, on_cpu)
    out.copy_(summed)


def offer(
    context: Context,
    sections: Sequence[Sequence[torch.Tensor] | None],
    num_rows: Sequence[int],
    first_slots: Sequence[int] | None = None,
    rows_per_source: Sequence[int] | None = None,
    expanded: Sequence[int] | None = None,
) -> None:
    """Fill the table as a handshake does: addresses of the peers' rows, their number, and this rank's first slots; for
    calls of selections also the expanded rows that the peers take or give.

    If ranks are staged, with the rows of their lanes: `sections` are then their staging, and `num_rows` 0.
    """
    rows = [[peer.data_ptr() for peer in peers] if peers else [0] * context.num_ranks for peers in sections]
    rows += [[0] * context.num_ranks] * (exchange.NUM_SECTIONS - len(rows))
    rows += [
        list(num_rows),
        list(first_slots or [0] * context.num_ranks),
        list(rows_per_source or [0] * context.num_ranks),
        list(expanded or [0] * context.num_ranks),
    ]
    context.state[exchange.STATE_STAGED] = sum(rows_of > 0 for rows_of in rows_per_source or [])
    context.table.copy_(torch.tensor(rows, dtype=torch.int64, device="cpu"))


def fail(context: Context) -> None:
    """Have the buffer failed: kernels behind this do nothing."""
    context.state[exchange.STATE_FAILED] = 1


class Boards:
    """Boards of several ranks, all in this process. Ranks meet one after the other.

    Args:
        num_ranks: R.
        device: Where they are.
    """

    def __init__(self, num_ranks: int, device: str):
        self.contexts = [make_context(rank, num_ranks, device) for rank in range(num_ranks)]
        num_bytes = Context.board_bytes(num_ranks, self.contexts[0].header_words)
        self.boards = [torch.zeros(num_bytes // 8, dtype=torch.int64, device=device) for _ in range(num_ranks)]
        addresses = torch.tensor([board.data_ptr() for board in self.boards], dtype=torch.int64, device="cpu")
        for one in self.contexts:
            one.windows[0].copy_(addresses)
            one.own_boards.copy_(addresses[one.rank])

    def handshake(self, *calls: Callable[[Context], None]) -> None:
        """All ranks make a call. None can wait for one that comes later, so each comes twice: the first time its
        peers are missing, but its words stay; before the second it forgets that it failed.
        """
        epochs = [one.state[exchange.STATE_EPOCH].item() for one in self.contexts]
        for one, call in zip(self.contexts, calls, strict=True):
            call(replace(one, limit_ns=1))
            self.forget_failures()
        for one, call, epoch in zip(self.contexts, calls, epochs, strict=True):
            one.state[exchange.STATE_EPOCH] = epoch
            call(one)

    def forget_failures(self) -> None:
        num_ranks = len(self.contexts)
        for one, board in zip(self.contexts, self.boards, strict=True):
            board[8 * num_ranks : 16 * num_ranks] = 0
            one.state[exchange.STATE_FAILED :] = 0
            synchronize(one)
            one.host.zero_()

    def record(self, rank: int) -> list[int] | None:
        """What a rank wrote down when it failed: code, epoch, operation, subject, seen, expected, origin."""
        words = self.contexts[rank].state.tolist()
        synchronize(self.contexts[rank])
        told = self.contexts[rank].host[: exchange.STATE_WORDS].tolist()
        assert words[exchange.STATE_FAILED] == told[exchange.STATE_FAILED], "the host is told"
        if not words[exchange.STATE_FAILED]:
            return None
        record = slice(exchange.STATE_RECORD, exchange.STATE_RECORD + 7)
        assert words[record] == told[record]
        return words[record]


def synchronize(context: Context) -> None:
    """Wait for the kernels: the host's words are written by them."""
    if context.state.device.type == "cuda":
        torch.cuda.synchronize()
