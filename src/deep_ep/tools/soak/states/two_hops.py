"""Calls across nodes as a model: `engine/cpu/nodes/`, with the boards of a node and the frames of the rails.

Rank (a, i) is number i of node a. It has a link to (b, i) of every other node b. A link is two queues of frames in each
direction: what is not yet handed to the system, which is lost with the process, and what is there to be read, which is
not. The second holds a few frames at most, so that a sender may have to wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product

from ....transport.links import BYE, FAILED, REFUSED
from .explore import Label, State, Step, Violation
from .node import NodeModel
from .one_hop import COMBINE
from .rail_calls import ModelFrame, RailProgram, frame_of
from .ranks import (
    DESTROY,
    DIRECT,
    FAULTS,
    GIVE_UP,
    KILL,
    RAISE,
    REFUSE,
    RUNS,
    STAGED,
    DrawnCall,
    Operation,
    Rank,
    changed,
    tag,
)
from .steps import topic_name

DEFECTS = (
    "no verdict",
    "failure not told to the rail",
    "announcement not waited for",
    "rows left behind unsent",
    "failure not looked at behind the sum",
    "caller does not wait for the comm stream",
)

_CAPACITY = 1  # frames that are there to be read. Fewer than in life: so a sender has to wait wherever it may have to
_AHEAD = 1  # chunks that are queued before the first has left
_LAST_WORDS = (FAILED, BYE, REFUSED)  # they do not lie in the inbox, but say something of the rank


class TwoHopsModel(NodeModel):
    """Ranks of several nodes.

    Args:
        num_ranks: R.
        ranks_per_node: P.
        choices: For each call what may be drawn.
        faults: What may go wrong, once.
        defect: One of `DEFECTS`.
        num_chunks: That each rank sends to each node in each call.
    """

    name = "two-hops"

    def __init__(
        self,
        num_ranks: int,
        ranks_per_node: int,
        choices: Sequence[Sequence[DrawnCall]],
        faults: Iterable[str] = FAULTS,
        defect: str | None = None,
        num_chunks: int = 2,
    ):
        self.size, self.num_nodes, self.num_chunks = ranks_per_node, num_ranks // ranks_per_node, num_chunks
        nodes = [range(rank - rank % self.size, rank - rank % self.size + self.size) for rank in range(num_ranks)]
        peers = [[peer for peer in nodes[rank] if peer != rank] for rank in range(num_ranks)]
        super().__init__(choices, faults, defect, peers, self.num_nodes - 1)
        self.node_ranks = nodes
        self.waits_for_comm_stream = defect != "caller does not wait for the comm stream"

    # Links -----------------------------------------------------------------------------------------------------------

    def node_of(self, rank: int, link: int) -> int:
        """The node at the other end, in the order of `Rail.nodes`."""
        return (rank // self.size + 1 + link) % self.num_nodes

    def other_end(self, rank: int, link: int) -> tuple[int, int]:
        """The rank at the other end, and its number for this link."""
        node = self.node_of(rank, link)
        return node * self.size + rank % self.size, (rank // self.size - node) % self.num_nodes - 1

    def send(self, ranks: list[Rank], rank: int, link: int, frame: ModelFrame) -> None:
        """`Link.send`: queue a frame, and hand over what the system takes."""
        queued = ranks[rank].queued
        ranks[rank] = ranks[rank]._replace(queued=changed(queued, link, (*queued[link], frame.number())))
        self.flush(ranks, rank, link)

    def flush(self, ranks: list[Rank], rank: int, link: int) -> None:
        """`Link.flush`. What is sent to a rank that is gone is forgotten."""
        peer, back = self.other_end(rank, link)
        waiting, there = ranks[rank].queued[link], ranks[peer].inbox[back]
        while waiting and (len(there) < _CAPACITY or ranks[peer].status != RUNS):
            there, waiting = (*[one for one in there if frame_of(one).topic != REFUSED], waiting[0]), waiting[1:]
        ranks[rank] = ranks[rank]._replace(queued=changed(ranks[rank].queued, link, waiting))
        if ranks[peer].status == RUNS:
            ranks[peer] = ranks[peer]._replace(inbox=changed(ranks[peer].inbox, back, there))

    def tell_end(self, ranks: list[Rank], rank: int, why: str) -> None:
        """The last words of a rank. One whose caller gives up says nothing itself: the links are the comm stream's."""
        if why in (KILL, GIVE_UP) or (why == RAISE and self.defect == "failure not told to the rail"):
            return
        topic = {RAISE: FAILED, DESTROY: BYE, REFUSE: REFUSED}[why]
        for link in range(self.num_nodes - 1):
            peer, back = self.other_end(rank, link)
            if why != REFUSE:
                ranks[rank] = ranks[rank]._replace(queued=changed(ranks[rank].queued, link, ()))
            said = (*ranks[peer].inbox[back], ModelFrame(topic, ranks[rank].call).number())
            ranks[peer] = ranks[peer]._replace(inbox=changed(ranks[peer].inbox, back, said))

    def next_frame(self, rank: Rank, link: int) -> ModelFrame | None:
        """The first frame that can be taken."""
        frames = (frame_of(one) for one in rank.inbox[link])
        return next((one for one in frames if one.topic not in _LAST_WORDS), None)

    def take(self, ranks: list[Rank], rank: int, link: int) -> ModelFrame:
        """`Rail.take`, which leaves the last words where they are."""
        inbox = ranks[rank].inbox[link]
        position = next(position for position, one in enumerate(inbox) if frame_of(one).topic not in _LAST_WORDS)
        left = (*inbox[:position], *inbox[position + 1 :])
        ranks[rank] = ranks[rank]._replace(inbox=changed(ranks[rank].inbox, link, left))
        return frame_of(inbox[position])

    def raise_reason(self, ranks: list[Rank], rank: int) -> str | None:
        """`Rail.look`: what the rail has said."""
        for link, frames in enumerate(ranks[rank].inbox):
            if any(frame_of(one).topic == FAILED for one in frames):
                return f"rank {self.other_end(rank, link)[0]} has failed, says the rail"
        return None

    def rail_reason(self, ranks: list[Rank], rank: int, links: Iterable[int]) -> str | None:
        """`Wait.require_working`, in a wait that depends on some links."""
        why = self.raise_reason(ranks, rank) or self.failed_peer(ranks, rank)
        if why is not None:
            return why
        refused = [peer for peer in self.peers[rank] if ranks[rank].is_refused_by(ranks[peer])]
        if refused:
            return f"rank {refused[0]} has refused the call"
        for link in links:
            peer, _ = self.other_end(rank, link)
            if self.next_frame(ranks[rank], link) is not None:
                continue
            if any(frame_of(one) == ModelFrame(REFUSED, ranks[rank].call) for one in ranks[rank].inbox[link]):
                return f"rank {peer} has refused the call, says the rail"
            if any(frame_of(one).topic == BYE for one in ranks[rank].inbox[link]) or not ranks[peer].is_alive:
                return f"rank {peer} is gone"
        return None

    # Steps on the rail -----------------------------------------------------------------------------------------------

    def program(self, call: int, drawn: DrawnCall, rank: int) -> list[Operation]:
        """What a rank does in a call."""
        return RailProgram(self, call, drawn, rank).operations()

    def end_call(self, ranks: list[Rank], rank: int, drawn: DrawnCall) -> None:
        """The rows of a dispatch that were delivered straight must be those of all sources, and whole."""
        me = ranks[rank]
        if drawn.kind != COMBINE and drawn.memory[rank] != STAGED:
            wrong = [rows for rows in me.region if rows != tag(me.call, self.num_chunks - 1)]
            if wrong:
                ranks[rank] = me._replace(spoiled=wrong[0])

    def other_steps(self, ranks: list[Rank], rank: int, operation: Operation, state: State) -> Iterator[Step]:
        """Frames that are waited for, and the rows of a call."""
        if operation.kind == "take":
            yield from self._take_steps(ranks, rank, operation, state)
        else:
            yield from self._traffic_steps(ranks, rank, operation, state)

    def _turned(self, ranks: list[Rank], rank: int) -> list[Rank]:
        """`Rail.turn`: what can be sent is sent, whenever a rank looks at its rail."""
        ranks = list(ranks)
        for link in range(self.num_nodes - 1):
            self.flush(ranks, rank, link)
        return ranks

    def _take_steps(self, ranks: list[Rank], rank: int, operation: Operation, state: State) -> Iterator[Step]:
        turned, link, label = self._turned(ranks, rank), operation.argument % 8, operation.label
        why = self.rail_reason(turned, rank, [link])
        if why is not None:
            yield self.raised(turned, rank, operation, state, why)
        elif self.next_frame(turned[rank], link) is not None:
            frame = self.take(turned, rank, link)
            expected = ModelFrame(operation.argument // 8, turned[rank].call)
            if frame[:2] != expected[:2]:
                yield label, Violation(f"rank {rank} takes {topic_name(frame.topic)} of call {frame.call}")
            else:
                yield label, self.after(turned, rank, operation, state)
        elif turned != ranks:
            yield Label(rank, "turn", label.call, True), self.packed(turned, state)

    def _traffic_steps(self, ranks: list[Rank], rank: int, operation: Operation, state: State) -> Iterator[Step]:
        """`Traffic`: pack, take, and do the own block, in any order; wait where nothing can be done."""
        turned, label = self._turned(ranks, rank), operation.label
        program: RailProgram = operation.act.__self__  # type: ignore[union-attr]
        links, me = range(self.num_nodes - 1), turned[rank]
        packed, taken, own = program.moved(me)
        # As `_packable` counts, before this turn: what is queued.
        packable = [link for link in links if packed[link] < self.num_chunks and len(me.queued[link]) < _AHEAD]
        if operation.kind == "start":
            for link in packable[:1]:
                yield self._packing(turned, rank, operation, link, state)
            if not packable:
                yield label, self.after(turned, rank, operation._replace(act=None), state)
            return
        unpacked = [link for link in links if packed[link] < self.num_chunks]
        untaken = [link for link in links if taken[link] < self.num_chunks]
        unsent = [link for link in links if me.queued[link] and self.defect != "rows left behind unsent"]
        pending = unpacked if operation.kind == "finish_packing" else sorted({*unpacked, *untaken, *unsent})
        if not pending and own:
            yield label, self.after(turned, rank, operation._replace(act=None), state)
            return
        takable = [link for link in untaken if self.next_frame(me, link) is not None]
        for link in packable:
            yield self._packing(turned, rank, operation, link, state)
        for link in takable:
            yield self._taking(turned, rank, operation, link, state)
        if not own:
            done = operation._replace(act=program.own_block)
            yield Label(rank, "own node", label.call, True), self.after(turned, rank, done, state, is_done=False)
        if not packable and not takable and own:
            why = self.rail_reason(turned, rank, pending)
            if why is not None:
                yield self.raised(turned, rank, operation, state, why)
            elif turned != ranks:
                yield Label(rank, "turn", label.call, True), self.packed(turned, state)

    def _packing(self, ranks: list[Rank], rank: int, operation: Operation, link: int, state: State) -> Step:
        program: RailProgram = operation.act.__self__  # type: ignore[union-attr]
        label = Label(rank, f"send ROWS to node {self.node_of(rank, link)}", operation.label.call)
        if program.drawn.kind == COMBINE and self.defect != "failure not looked at behind the sum":
            # The rows were there when the sum was made if nobody has failed behind it.
            why = self.failed_peer(ranks, rank)
            if why is not None:
                return self.raised(ranks, rank, operation, state, why)
        act = operation._replace(act=program.pack(link))
        return label, self.after(ranks, rank, act, state, is_done=False)

    def _taking(self, ranks: list[Rank], rank: int, operation: Operation, link: int, state: State) -> Step:
        program: RailProgram = operation.act.__self__  # type: ignore[union-attr]
        label = Label(rank, f"take ROWS of node {self.node_of(rank, link)}", operation.label.call)
        act = operation._replace(act=program.take_rows(link))
        return label, self.after(ranks, rank, act, state, is_done=False)


def two_hop_memories(num_ranks: int) -> list[tuple[str, ...]]:
    """Ways in which the ranks' rows may go: across nodes none are posted."""
    return list(product((DIRECT, STAGED), repeat=num_ranks))
