"""Remote memory: what a GPU rank shares with ranks of other nodes, which cannot address its window.

Every rank has the same pieces, laid out alike. A *proxy* moves bytes out of a piece of one rank to the same piece of
another, and then stores a word there: a thread over TCP, with the pieces in pinned host memory (`proxy.py`), or kernels
over NVSHMEM, with the pieces in its symmetric memory (`nvshmem.py`). `docs/protocol.md` has the state table.

The *words* are one piece:

    board          [board words]       written for this rank by remote ranks, as a local board is by local ones
    arrived        [N, C, 8]           line (n, c), word 0: the last call of which chunk c of node n's rows has arrived
    shadow_boards  [R, board words]    what this rank writes for each remote rank, before it is sent to that one's board
    doorbells      [N, C, 16]          which of this rank's rows are to be sent, see the words of a doorbell below

The *rows* are a piece of 2 B bytes: the outbox, from which rows are sent, and at B the receive buffer, where they
arrive.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST_CHUNKS = 4  # of the rows that a call has for a node
LINE_WORDS = 8
DOORBELL_WORDS = 16
MOST_SECTIONS = 3  # payload, scales, records

# Words of a doorbell. The epoch comes last, with release. A section without bytes is not sent. Offsets count from
# the beginning of the piece. The proxy stores the epoch into the last word once the rows may be overwritten.
DOORBELL_EPOCH, DOORBELL_PIECE, DOORBELL_SECTIONS = 0, 1, 2  # then, for each section: source and target offset, bytes
DOORBELL_LEFT = DOORBELL_WORDS - 1

# Kernels know these by the same numbers (`kernels/exchange.py`).
STEP_BITS = 24  # progress is `epoch << STEP_BITS | step`
GONE = 7  # the code, in a record, of the failure of a rank whose connection is gone
HAS_FAILED = 1  # the word before a record; any other but 0 is a call that the rank refuses to make


@dataclass(frozen=True)
class RemoteLayout:
    """Where the words of a rank's remote memory are, counted in words of 8 bytes.

    Attributes:
        num_ranks: R.
        num_nodes: N.
        header_words: Words of a header, as the kernels count them.
    """

    num_ranks: int
    num_nodes: int
    header_words: int

    @property
    def board_words(self) -> int:
        """Words of a board: progress and failures, a line for each rank, and two headers of each."""
        return 2 * LINE_WORDS * self.num_ranks + 2 * self.num_ranks * self.header_words

    @property
    def arrived(self) -> int:
        """The word at which the arrival words begin."""
        return self.board_words

    @property
    def shadow_boards(self) -> int:
        """The word at which the shadow boards begin."""
        return self.arrived + self.num_nodes * MOST_CHUNKS * LINE_WORDS

    @property
    def doorbells(self) -> int:
        """The word at which the doorbells begin."""
        return self.shadow_boards + self.num_ranks * self.board_words

    @property
    def num_words(self) -> int:
        """The number of words in all."""
        return self.doorbells + self.num_nodes * MOST_CHUNKS * DOORBELL_WORDS

    def progress(self, rank: int) -> int:
        """Return the word of a rank's progress, in a board."""
        return LINE_WORDS * rank

    def failure(self, rank: int) -> int:
        """Return the line of a rank's failure, in a board: a word (`HAS_FAILED`), and the record behind it."""
        return LINE_WORDS * (self.num_ranks + rank)

    def header(self, epoch: int, rank: int) -> int:
        """Return the word at which the header of a rank in a call begins, in a board."""
        return 2 * LINE_WORDS * self.num_ranks + ((epoch & 1) * self.num_ranks + rank) * self.header_words

    def shadow_board(self, rank: int) -> int:
        """Return the word at which the shadow of a remote rank's board begins."""
        return self.shadow_boards + rank * self.board_words

    def arrival_word(self, node: int, chunk: int) -> int:
        """Return the arrival word of a chunk from a node."""
        return self.arrived + (node * MOST_CHUNKS + chunk) * LINE_WORDS

    def doorbell(self, node: int, chunk: int) -> int:
        """Return the word at which the doorbell of a chunk for a node begins."""
        return self.doorbells + (node * MOST_CHUNKS + chunk) * DOORBELL_WORDS
