"""The steps of calls across nodes. Inside a node everything is as in `one_hop.py`.

A token that goes to another node crosses once, to the rank of this rank's rail there, which relays it to the ranks of
its node; on the way back it sums what they have. A call is

    dispatch   notify (all ranks of all nodes)
               steer, put (this node's ranks, and the outbox for others)
               for each chunk: ring                           | the courier carries
               for each chunk: wait for it to land, forward   | or: meet the rail, forward
               finish (this node), unpack
    combine    copy in unless the rows lie in the window, notify
               for each chunk: sum this node's rows, ring     | the courier carries, or: meet the rail
               wait for all chunks, sum what the nodes have, finish (this node)

Letters: R ranks are N nodes of P; T tokens, n rows received, F rows that this rank passes on inside its node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ....handle import RailHandle
from ....kernels import notify, relay, relay_sums, staging, steer
from ....kernels.exchange import STATE_RAIL_BYTES
from ....kernels.notify import Counted, Form, Numbered, Post
from ....kernels.pull import copy_in
from ....kernels.put import Put, Unpack
from ....kernels.rail import FarRows
from ....kernels.staging import FinishCombine, FinishDispatch
from ....topology import Topology
from ...ops import Counts, Sections, received_of
from ...parcel import Payload, Received, Routing, Unpacked, empty_topk
from ...protocol import ANNOUNCED, OFFERED, READY
from ..memory import Memory, Supply
from ..scope import Scope
from ..shapes import Shapes
from ..signals import Handshaking, Signals
from ..steps import (
    CombineSignature,
    DeviceCombine,
    DeviceDispatch,
    DispatchSignature,
    combine_terms,
    rows_of,
    terms_of,
)
from .couriers import Freight
from .far import Far
from .routes import Router, Routes


class TwoHops:
    """Where the steps of calls across nodes come from.

    Args:
        topology: Where this rank stands.
        far: The far memory, with its courier.
        signals: Of the buffer; from now on they reach all nodes.
        memory: Of the buffer.
        shapes: How bulk kernels are launched.
    """

    def __init__(self, topology: Topology, far: Far, signals: Signals, memory: Memory, shapes: Shapes):
        places, device = signals.places, signals.places.state.device
        self.topology = topology
        self.far = far
        self.signals = signals
        self.memory = memory
        self.shapes = shapes
        self.router = Router(topology, memory, device)
        self.plan = self.router.plan
        # The same calls as inside a node, over other tables: of this node's ranks, and of what `steer` aims at.
        self.node = relay_sums.Node(topology.node, places.table[:, self.router.near], self.plan, places.state)
        self.aimed = replace(places, table=torch.zeros_like(places.table))
        self.own = replace(places, rank=0, num_ranks=1, num_nodes=1)  # for a count of this rank alone
        self.counts = places.state.new_empty(places.num_ranks, dtype=torch.int32)
        self.nothing = torch.zeros(1, dtype=torch.int32, device=device)
        self.guessed_passed_on = 0
        self._point_to_far()
        self._prepare()

    def _point_to_far(self) -> None:
        """Have kernels say what is for a far rank on its board, or to its mirror, and look for what it says here."""
        places, layout, courier = self.signals.places, self.far.layout, self.far.courier
        base, boards = self.far.places.words.data_ptr(), courier.boards
        near = range(self.router.near.start, self.router.near.stop)
        for rank in (rank for rank in range(self.topology.num_ranks) if rank not in near):
            places.windows[0, rank] = base + 8 * layout.mirror(rank) if boards is None else boards[rank]
            places.homes[rank] = base
        self.signals.far_board = self.far.places.words
        self.signals.tell_failure, self.signals.carry = courier.tell_failure, courier.carry_words

    def _prepare(self) -> None:
        """Compile and load what signals: no peer's limit passes while a kernel is compiled."""
        places, courier = self.signals.places, self.far.courier
        is_whole = courier.carry_words is None
        notify.prepare_nodes(places, [(True, True)] if is_whole else [(True, False), (False, True)])
        courier.prepare(self.plan)
        staging.prepare_all(places)

    def dispatch(self, signature: DispatchSignature) -> TwoHopDispatch:
        """The steps of dispatches with one signature."""
        return TwoHopDispatch(self, signature)

    def combine(self, signature: CombineSignature) -> TwoHopCombine:
        """The steps of combines with one signature."""
        return TwoHopCombine(self, signature)

    def numbers(self) -> dict[str, Any]:
        """What the rail has carried."""
        rows_bytes = int(self.signals.places.host[STATE_RAIL_BYTES])
        return {"rail": {**self.far.courier.numbers(), "rows_bytes_sent": rows_bytes}}

    def close(self) -> None:
        """Let what is queued leave."""
        self.far.courier.close()


class TwoHopDispatch(DeviceDispatch):
    """The steps of dispatches with one signature, see `ops.DispatchSteps`."""

    def __init__(self, ops: TwoHops, signature: DispatchSignature):
        super().__init__(ops.signals, ops.memory, signature)
        signals, places, topology = ops.signals, ops.signals.places, ops.topology
        operation, num_topk = signature.operation, signature.num_topk
        self._has_routing = signature.num_experts > 0
        self._ops, self._num_topk = ops, num_topk
        row_bytes, scale_bytes, _ = self._columns.widths()
        num_words = relay.relay_record_words(topology.ranks_per_node, num_topk) if self._has_routing else 0
        self._widths = [row_bytes, scale_bytes, 4 * num_words]  # as rows cross
        step = ANNOUNCED if operation == "dispatch" else OFFERED
        self._terms = terms_of(signature, step, places.num_ranks)
        self._notifies: dict[torch.dtype, Handshaking] = {}  # by the word that a mask is looked at by
        exact = self._terms._replace(step=OFFERED)
        self._second_handshake = signals.handshake(exact, Form(has_nodes=True, is_new=False))
        self._shape, rows = ops.shapes.for_put(signature.num_sms), rows_of(signature)
        num_local = self._terms.num_local
        # Records and slots are `steer`'s; `put` moves rows and scales along the slots that it has found.
        self._put = Put(ops.aimed, self._shape, rows._replace(has_records=False, num_topk=0, idx_dtype=torch.int32))
        self._finish = FinishDispatch(places, READY, self._terms.operation, rows, num_local)
        self._unpack = Unpack(places, self._shape.num_blocks, num_topk, rows.idx_dtype, has_ends=True)

    def route(self, scope: Scope, routing: Routing, num_channels: int, num_rows: int) -> Routes:
        """Memory for the routes, with room for as many relayed rows as there may be."""
        ops, most = self._ops, self._ops.guessed_passed_on
        if num_rows:
            # A rank relays rows for all ranks of its node: as many as they receive together, as far as memory goes.
            capacity = ops.far.capacity(self._widths)
            most = max(num_rows, min(num_rows * ops.topology.ranks_per_node, capacity))
        routes = ops.router.of_routing(scope, routing, num_channels, most)
        if num_rows:
            routes.course.passed_on.fill_(-1)  # how many rows there are, the host never knows
        return routes

    def follow(self, scope: Scope, handle: RailHandle) -> Routes:
        """The routes of a handle."""
        del scope
        return self._ops.router.of_handle(handle)

    def _notify(self, scope: Scope, post: Post, payload: Payload, routing: Routing | None, routes: Routes) -> None:
        """Number the tokens, and exchange counts and offers with all ranks of all nodes."""
        signals, course = self._ops.signals, routes.course
        word, counted, numbered = torch.uint8, None, None
        if routing is not None:
            assert course.numbers is not None
            word = notify.node_word(signals.places, routing.is_token_in_rank)
            counted = Counted(self._ops.counts, routing.num_tokens_per_rank, routing.num_tokens_per_expert)
            numbered = Numbered(routing.is_token_in_rank, course.numbers, course.node_slots)
        launch = self._notifies.get(word)
        if launch is None:
            has = self._has_routing
            form = Form(has_counts=has, has_prefix=has, has_nodes=True, is_numbered=has, word=word)
            launch = self._notifies[word] = signals.handshake(self._terms, form)
        post = self._with_far_rows(post, payload, routes)
        if scope.reach is not None:
            scope.reach("meet")
        signals.is_announced = True
        launch(post, counted, routes.prefix, routes.nodes, numbered)

    def _rows_to(self, routes: Routes) -> None:
        """A handle across nodes does not have them."""
        del routes

    def _offer(self, post: Post, payload: Payload, routes: Routes) -> None:
        """Exchange offers once more."""
        self._second_handshake(self._with_far_rows(post, payload, routes), nodes=routes.nodes)

    def _with_far_rows(self, post: Post, payload: Payload, routes: Routes) -> Post:
        capacity = self._ops.far.capacity(self._widths)
        bound = max(routes.course.passed_on.size(0), payload.x.size(0) * self._ops.topology.num_nodes)
        return post._replace(far_rows=min(capacity, bound))

    def move(self, scope: Scope, payload: Payload, routing: Routing | None, routes: Routes, sections: Sections) -> None:
        """Put rows for this node, send those for others, and relay what comes from there."""
        del sections  # nobody is staged
        ops, widths = self._ops, self._widths
        signals, topology, courier, outbox = ops.signals, ops.topology, ops.far.courier, ops.far.memory
        places, plan, shape, course = signals.places, ops.plan, self._shape, routes.course
        index, num_local = self._terms.operation, self._terms.num_local
        topk_idx = routing.topk_idx if routing is not None else None
        topk_weights = routing.topk_weights if routing is not None else None
        rows = ops.far.rows(widths)
        courier.await_left(index, OFFERED)
        if scope.reach is not None:
            scope.reach("put")
        where = (plan, ops.aimed.table, outbox.data_ptr(), rows.offsets)
        steer.steer(places, shape.num_blocks, course, topk_idx, topk_weights, num_local, *where)
        self._put(payload.x, payload.scales, course.slots)
        freight = Freight(outbox, rows, plan, index, shape.num_blocks)
        signals.mark("rail")
        for chunk in range(courier.num_chunks):
            courier.send(freight, chunk)
        for chunk in range(courier.num_chunks):
            if chunk:
                signals.mark("rail")
            courier.await_landed(freight, chunk)
            if scope.reach is not None:
                scope.reach("forward")
            relay.forward(
                places, shape, plan, outbox[rows.landing :], rows.offsets, widths[0], widths[1], course.passed_on,
                places.table, ops.router.near.start, topology.ranks_per_node, topology.node, routing is not None,
                self._num_topk, num_local, chunk, courier.num_chunks, courier.sources,
            )  # fmt: skip
        if scope.reach is not None:
            scope.reach("finish")
        prefix = routes.prefix if routes.prefix is not None else course.slots
        self._finish(payload.x, payload.scales, course.slots, topk_idx, topk_weights, prefix)

    def grow(self, told: Counts) -> None:
        """Add a segment, and far memory, where some rank lacks room."""
        ops, columns = self._ops, self._columns
        num_passed_on = told.far_rows[ops.topology.rank]
        ops.guessed_passed_on = num_passed_on + num_passed_on // 16 + 64
        ops.memory.grow_alike(told, columns, self._num_topk)
        most = max(max(told.far_rows), max(told.num_tokens) * ops.topology.num_nodes)
        ops.far.make_room(most, max(sum(self._widths), columns.back_bytes(self._num_topk)))

    def rerouted(self, scope: Scope, routes: Routes, told: Counts, routing: Routing) -> Routes:
        """With exact room for the rows that this rank passes on."""
        num_passed_on = told.far_rows[self._ops.topology.rank]
        return routes.with_passed_on(self._ops.router.empty_passed_on(scope, routing.is_token_in_rank, num_passed_on))

    def unpack(self, scope: Scope, routing: Routing, routes: Routes, sections: Sections, num_channels: int) -> Unpacked:
        """Take the records apart."""
        assert routes.prefix is not None
        assert sections.records is not None
        num_rows = sections.num_rows
        with scope.outputs:
            handle = self._ops.router.empty_handle(routing, routes, num_rows, num_channels)
            topk_idx, topk_weights = empty_topk(routing, num_rows)
        sources, ends = handle.recv_src_meta.view(torch.int32), handle.recv_gbl_rank_prefix_sum
        self._unpack(sections.records, num_rows, routes.prefix, sources, topk_idx, topk_weights, ends)
        unpacked = Unpacked(handle, topk_idx, topk_weights)
        scope.hold_unpacked(routing, unpacked)
        return unpacked

    def received(
        self, routes: Routes, sections: Sections, unpacked: Unpacked, num_rows: int, told: Counts | None
    ) -> Received:
        """As many rows as came, and as this rank passes on."""
        handle, passed_on = unpacked.handle, routes.course.passed_on
        if told is not None:
            passed_on = passed_on[: told.far_rows[self._ops.topology.rank]]
        handle = handle._replace(recv_src_meta=handle.recv_src_meta[:num_rows], send_nvl_head=passed_on)
        return received_of(sections, num_rows, unpacked.topk_idx, unpacked.topk_weights, handle)


class TwoHopCombine(DeviceCombine):
    """The steps of combines with one signature, see `ops.CombineSteps`."""

    def __init__(self, ops: TwoHops, signature: CombineSignature):
        super().__init__(ops.signals, ops.memory)
        self._ops = ops
        self._terms = combine_terms(signature)
        self._handshake = ops.signals.handshake(self._terms, Form(has_nodes=True))
        self._shape = ops.shapes.for_pull(signature.num_sms)
        self._copy_shape = ops.shapes.for_copy(signature.num_sms)
        hidden, dtype, num_topk = signature.hidden, signature.dtype, signature.num_topk
        self._widths = [hidden * dtype.itemsize, 4 * num_topk][: 2 if num_topk else 1]
        self._finish = FinishCombine(ops.signals.places, READY, self._terms.operation, hidden, dtype, num_topk)

    def _rows_from(self, handle: RailHandle) -> None:
        """A handle across nodes does not have them."""
        del handle

    def _notify(self, scope: Scope, supply: Supply, handle: RailHandle) -> None:
        """Copy in what must be, and exchange offers with all ranks of all nodes."""
        ops, ends = self._ops, handle.recv_gbl_rank_prefix_sum.contiguous()
        for region, part in supply.copies:
            copy_in(ops.own, self._copy_shape, region, part, ends[-1:])
        if scope.reach is not None:
            scope.reach("meet")
        ops.signals.is_announced = True
        post = supply.post._replace(far_rows=ops.far.capacity(self._widths))
        self._handshake(post, nodes=ops.router.nodes_of(handle))

    def sum(
        self,
        scope: Scope,
        supply: Supply,
        parts: Sequence[torch.Tensor],
        handle: RailHandle,
        sums: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor],
    ) -> None:
        """Sum this node's rows for every rank of the rail, and then what the nodes have."""
        ops, shape, index = self._ops, self._shape, self._terms.operation
        courier, outbox = ops.far.courier, ops.far.memory
        rows, capacity = ops.far.rows(self._widths), ops.far.capacity(self._widths)
        passed_on = handle.send_nvl_head.contiguous()
        courier.await_left(index, OFFERED)
        freight = Freight(outbox, rows, ops.plan, index, shape.num_blocks, is_back=True)
        for chunk in range(courier.num_chunks):
            if scope.reach is not None:
                scope.reach("pull")
            for section, part in enumerate(parts):
                out = _rows_of(outbox, rows, section, capacity, part)
                relay_sums.sum_for_rail(ops.node, shape, section, out, passed_on, chunk, courier.num_chunks)
            ops.signals.mark("rail")
            courier.send(freight, chunk)
        courier.await_landed(freight, 0, courier.num_chunks)
        if scope.reach is not None:
            scope.reach("sum")
        landing = outbox.data_ptr() + rows.landing if courier.sources is None else 0
        node_slots = handle.send_rdma_head.contiguous()
        for section, out in enumerate(sums):
            far = relay_sums.FarSums(landing + rows.offsets[section], courier.sources)
            some = biases if section == 0 else ()
            relay_sums.sum_nodes(ops.node, far, shape, section, out, node_slots, passed_on, some)
        if scope.reach is not None:
            scope.reach("finish")
        nothing = (ops.nothing,) * 3  # of use only where somebody is staged
        self._finish(parts, sums, biases, *nothing)
        if supply.copies:
            self._release(supply)


def _rows_of(memory: torch.Tensor, rows: FarRows, section: int, capacity: int, part: torch.Tensor) -> torch.Tensor:
    """The outbox as rows of a section, [capacity, columns], for sums of the type of `part`."""
    start = rows.offsets[section]
    return memory[start : start + capacity * rows.widths[section]].view(part.dtype).view(capacity, part.size(1))
