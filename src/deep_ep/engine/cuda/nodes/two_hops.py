"""The steps of calls across nodes. Inside a node everything is as in `one_hop.py`.

A token that goes to another node crosses once, to the rank of this rank's rail there, which relays it to the ranks of
its node; on the way back it sums what they have. A call is

    dispatch   notify (all ranks of all nodes)
               route, put (this node's ranks, and the outbox for others)
               for each chunk: ring                           | the proxy sends
               for each chunk: wait for its arrival, forward  | or: rail handshake, forward
               finish (this node), unpack
    combine    copy in unless the rows lie in the window, notify
               for each chunk: sum this node's rows, ring     | the proxy sends, or: rail handshake
               wait for all chunks, sum what the nodes have, finish (this node)

Letters: R ranks are N nodes of P; T tokens, n rows received, F rows that this rank forwards inside its node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ....handle import RailHandle
from ....kernels import notify, relay, relay_sums, route
from ....kernels.exchange import STATE_RAIL_BYTES
from ....kernels.finish import Finish
from ....kernels.notify import Counted, HandshakeForm, Numbered, Post
from ....kernels.pull import copy_in
from ....kernels.put import Put, Unpack
from ....kernels.rail import RemoteRowLayout
from ....topology import Topology
from ...ops import Counts, Sections, received_of
from ...payload import DispatchResult, Payload, Routing, Unpacked, empty_topk
from ...protocol import ANNOUNCED, OFFERED, READY, TAKEN
from ..memory import CombineSource, Memory
from ..scope import CudaScope
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
from .proxies import Transfer
from .remote import RemoteMemory
from .routes import Router, TwoHopRoutes

# Of an element that a combine may bring back: FP32, whatever was dispatched. Rows for which remote memory is too small
# cannot be staged, and it grows in full dispatches alone.
_LEAST_COMBINE_BYTES = 4


class TwoHopOps:
    """Where the steps of calls across nodes come from.

    Args:
        topology: Where this rank stands.
        remote: The remote memory, with its proxy.
        signals: The signals of the buffer, which reach all nodes from now on.
        memory: The memory of the buffer.
        shapes: How bulk kernels are launched.
    """

    selections = None

    def __init__(self, topology: Topology, remote: RemoteMemory, signals: Signals, memory: Memory, shapes: Shapes):
        context, device = signals.context, signals.context.state.device
        self.topology = topology
        self.remote = remote
        self.signals = signals
        self.memory = memory
        self.shapes = shapes
        self.router = Router(topology, memory, device)
        self.plan = self.router.plan
        # The same calls as inside a node, over other tables: of this node's ranks, and of what `route` aims at.
        self.node = relay_sums.Node(topology.node, context.table[:, self.router.local], self.plan, context.state)
        self.aimed = replace(context, table=torch.zeros_like(context.table))
        self.own = replace(context, rank=0, num_ranks=1, num_nodes=1)  # for a count of this rank alone
        # The rank that waits for a silent one must name it before those that wait for this rank give up. So waits for
        # the rail take the limit, those at the end of a call for the node more, and those for all nodes most.
        self.patient = replace(context, limit_ns=context.limit_ns * 5 // 4)
        signals.handshake_context = replace(context, limit_ns=context.limit_ns * 3 // 2)
        self.counts = context.state.new_empty(context.num_ranks, dtype=torch.int32)
        self.guessed_forwarded = 0
        self._point_to_remote()
        self._prepare()

    def _point_to_remote(self) -> None:
        """Have kernels write what is for a remote rank to its board, or to its shadow board, and read what it writes
        here.
        """
        context, layout, proxy = self.signals.context, self.remote.layout, self.remote.proxy
        base, boards = self.remote.context.words.data_ptr(), proxy.boards
        local = range(self.router.local.start, self.router.local.stop)
        for rank in (rank for rank in range(self.topology.num_ranks) if rank not in local):
            context.windows[0, rank] = base + 8 * layout.shadow_board(rank) if boards is None else boards[rank]
            context.own_boards[rank] = base
        self.signals.remote_board = self.remote.context.words
        self.signals.tell_failure, self.signals.send_words = proxy.tell_failure, proxy.send_words

    def _prepare(self) -> None:
        """Compile and load the kernels that signal, so that no peer's time limit passes while a kernel is compiled."""
        context, proxy = self.signals.handshake_context, self.remote.proxy
        is_whole = proxy.send_words is None
        notify.prepare_nodes(context, [(True, True)] if is_whole else [(True, False), (False, True)])
        proxy.prepare(self.plan)
        Finish(self.patient, READY, 0).launch.prepare()
        for one in (self.aimed, self.own, self.patient, context):
            _ = one.words  # uploaded now: the first call may be captured

    def dispatch(self, signature: DispatchSignature) -> TwoHopDispatch:
        """Make the steps of dispatches with one signature."""
        return TwoHopDispatch(self, signature)

    def combine(self, signature: CombineSignature) -> TwoHopCombine:
        """Make the steps of combines with one signature."""
        return TwoHopCombine(self, signature)

    def stats(self) -> dict[str, Any]:
        """Return counters of what the proxy has sent."""
        rows_bytes = int(self.signals.context.host[STATE_RAIL_BYTES])
        return {"rail": {**self.remote.proxy.stats(), "rows_bytes_sent": rows_bytes}}

    def close(self) -> None:
        """Wait until what is queued has been sent, and close the proxy."""
        self.remote.proxy.close()


class TwoHopDispatch(DeviceDispatch):
    """The steps of dispatches with one signature, see `ops.DispatchSteps`."""

    def __init__(self, ops: TwoHopOps, signature: DispatchSignature):
        super().__init__(ops.signals, ops.memory, signature)
        signals, context, topology = ops.signals, ops.signals.context, ops.topology
        operation, num_topk = signature.operation, signature.num_topk
        self._has_routing = signature.num_experts > 0
        self._ops, self._num_topk = ops, num_topk
        row_bytes, scale_bytes, _ = self._columns.widths()
        num_words = relay.relay_record_words(topology.ranks_per_node, num_topk) if self._has_routing else 0
        self._widths = [row_bytes, scale_bytes, 4 * num_words]  # as rows cross
        step = ANNOUNCED if operation == "dispatch" else OFFERED
        self._terms = terms_of(signature, step, context.num_ranks)
        self._notifies: dict[torch.dtype, Handshaking] = {}  # by the word that a mask is looked at by
        exact = self._terms._replace(step=OFFERED)
        self._second_handshake = signals.handshake(exact, HandshakeForm(has_nodes=True, is_new=False))
        self._shape, rows = ops.shapes.for_put(signature.num_sms), rows_of(signature)
        # Records and slots are `route`'s; `put` moves rows and scales along the slots that it has found.
        self._put = Put(ops.aimed, self._shape, rows._replace(has_records=False, num_topk=0, idx_dtype=torch.int32))
        self._finish = Finish(ops.patient, READY, self._terms.operation)
        self._unpack = Unpack(context, self._shape.num_blocks, num_topk, rows.idx_dtype, has_ends=True)

    def route(self, scope: CudaScope, routing: Routing, num_channels: int, num_rows: int) -> TwoHopRoutes:
        """Allocate the routes, for as many relayed rows as there may be."""
        ops, most = self._ops, self._ops.guessed_forwarded
        if num_rows:
            # A rank relays rows for all ranks of its node: as many as they receive together, as far as memory goes.
            capacity = ops.remote.capacity(self._widths)
            most = max(num_rows, min(num_rows * ops.topology.ranks_per_node, capacity))
        routes = ops.router.of_routing(scope, routing, num_channels, most)
        if num_rows:
            routes.token_routes.forwarded.fill_(-1)  # how many rows there are, the host never knows
        return routes

    def follow(self, scope: CudaScope, handle: RailHandle) -> TwoHopRoutes:
        """Return the routes of a handle."""
        return self._ops.router.of_handle(handle)

    def _notify(
        self, scope: CudaScope, post: Post, payload: Payload, routing: Routing | None, routes: TwoHopRoutes
    ) -> None:
        """Number the tokens, and exchange counts and offers with all ranks of all nodes."""
        signals, token_routes = self._ops.signals, routes.token_routes
        word, counted, numbered = torch.uint8, None, None
        if routing is not None:
            assert token_routes.numbers is not None
            word = notify.node_word(signals.context, routing.is_token_in_rank)
            counted = Counted(self._ops.counts, routing.num_tokens_per_rank, routing.num_tokens_per_expert)
            numbered = Numbered(routing.is_token_in_rank, token_routes.numbers, token_routes.node_slots)
        launch = self._notifies.get(word)
        if launch is None:
            has = self._has_routing
            form = HandshakeForm(has_counts=has, has_prefix=has, has_nodes=True, is_numbered=has, word=word)
            launch = self._notifies[word] = signals.handshake(self._terms, form)
        post = self._with_remote_rows(post, payload, routes)
        if scope.reach is not None:
            scope.reach("handshake")
        signals.is_announced = True
        launch(post, counted, routes.prefix, routes.nodes, numbered)

    def _rows_to(self, routes: TwoHopRoutes) -> None:
        """Return None: a handle across nodes does not have the rows to each rank."""

    def _offer(self, post: Post, payload: Payload, routes: TwoHopRoutes) -> None:
        """Exchange offers a second time, now that the counts are known."""
        self._second_handshake(self._with_remote_rows(post, payload, routes), nodes=routes.nodes)

    def _with_remote_rows(self, post: Post, payload: Payload, routes: TwoHopRoutes) -> Post:
        capacity = self._ops.remote.capacity(self._widths)
        bound = max(routes.token_routes.forwarded.size(0), payload.x.size(0) * self._ops.topology.num_nodes)
        return post._replace(remote_rows=min(capacity, bound))

    def outputs(
        self, scope: CudaScope, routing: Routing, routes: TwoHopRoutes, sections: Sections, num_channels: int
    ) -> Unpacked:
        """Allocate the handle, ids and weights."""
        with scope.outputs:
            handle = self._ops.router.empty_handle(routing, routes, sections.num_rows, num_channels)
            unpacked = Unpacked(handle, *empty_topk(routing, sections.num_rows))
        scope.hold_unpacked(routing, unpacked)
        return unpacked

    def move(
        self,
        scope: CudaScope,
        payload: Payload,
        routing: Routing | None,
        routes: TwoHopRoutes,
        sections: Sections,
        unpacked: Unpacked | None,
    ) -> None:
        """Put the rows for this node, send those for other nodes, relay the rows that come from there, and split the
        records. There is no staging across nodes.
        """
        ops, widths = self._ops, self._widths
        signals, proxy, outbox = ops.signals, ops.remote.proxy, ops.remote.memory
        context, plan, shape, token_routes = signals.context, ops.plan, self._shape, routes.token_routes
        index, num_local = self._terms.operation, self._terms.num_local
        topk_idx = routing.topk_idx if routing is not None else None
        topk_weights = routing.topk_weights if routing is not None else None
        rows = ops.remote.rows(widths)
        proxy.await_left(index, OFFERED)
        if scope.reach is not None:
            scope.reach("put")
        where = (plan, ops.aimed.table, outbox.data_ptr(), rows.offsets)
        route.route_tokens(context, shape.num_blocks, token_routes, topk_idx, topk_weights, num_local, *where)
        self._put(payload.x, payload.scales, token_routes.slots)
        transfer = Transfer(outbox, rows, plan, index, shape.num_blocks)
        signals.mark("rail")
        for chunk in range(proxy.num_chunks):
            proxy.send(transfer, chunk)
        for chunk in range(proxy.num_chunks):
            if chunk:
                signals.mark("rail")
            proxy.await_arrived(transfer, chunk)
            if scope.reach is not None:
                scope.reach("forward")
            relay.forward(
                context, shape, plan, outbox[rows.recv_offset :], rows.offsets, widths[0], widths[1],
                token_routes.forwarded, routing is not None, self._num_topk, num_local, chunk, proxy.num_chunks,
                proxy.sources,
            )  # fmt: skip
        if scope.reach is not None:
            scope.reach("finish")
        self._finish()
        if unpacked is not None:
            assert routes.prefix is not None
            assert sections.records is not None
            handle, recv_idx, recv_weights = unpacked
            sources, ends = handle.recv_src_meta.view(torch.int32), handle.recv_gbl_rank_prefix_sum
            self._unpack(sections.records, sections.num_rows, routes.prefix, sources, recv_idx, recv_weights, ends)

    def grow(self, told: Counts) -> None:
        """Add a segment, and remote memory, if any rank lacks memory for its rows."""
        ops, columns = self._ops, self._columns
        num_forwarded = told.remote_rows[ops.topology.rank]
        ops.guessed_forwarded = num_forwarded + num_forwarded // 16 + 64
        ops.memory.grow_alike(told, columns, self._num_topk)
        most = max(max(told.remote_rows), max(told.num_tokens) * ops.topology.num_nodes)
        back_bytes = columns.back_bytes(self._num_topk, _LEAST_COMBINE_BYTES)
        ops.remote.reserve(most, max(sum(self._widths), back_bytes))

    def rerouted(self, scope: CudaScope, routes: TwoHopRoutes, told: Counts, routing: Routing) -> TwoHopRoutes:
        """Return the routes with memory for exactly the rows that this rank forwards."""
        num_forwarded = told.remote_rows[self._ops.topology.rank]
        return routes.with_forwarded(self._ops.router.empty_forwarded(scope, routing.is_token_in_rank, num_forwarded))

    def received(
        self, routes: TwoHopRoutes, sections: Sections, unpacked: Unpacked, num_rows: int, told: Counts | None
    ) -> DispatchResult:
        """Return the result, with as many rows as were received and as this rank forwards."""
        handle, forwarded = unpacked.handle, routes.token_routes.forwarded
        if told is not None:
            forwarded = forwarded[: told.remote_rows[self._ops.topology.rank]]
        handle = handle._replace(recv_src_meta=handle.recv_src_meta[:num_rows], send_nvl_head=forwarded)
        return received_of(sections, num_rows, unpacked.topk_idx, unpacked.topk_weights, handle)


class TwoHopCombine(DeviceCombine):
    """The steps of combines with one signature, see `ops.CombineSteps`."""

    def __init__(self, ops: TwoHopOps, signature: CombineSignature):
        super().__init__(ops.signals, ops.memory)
        self._ops = ops
        self._terms = combine_terms(signature)
        self._handshake = ops.signals.handshake(self._terms, HandshakeForm(has_nodes=True))
        self._shape = ops.shapes.for_pull(signature.num_sms)
        self._copy_shape = ops.shapes.for_copy(signature.num_sms)
        hidden, dtype, num_topk = signature.hidden, signature.dtype, signature.num_topk
        self._widths = [hidden * dtype.itemsize, 4 * num_topk][: 2 if num_topk else 1]
        self._finish = Finish(ops.patient, TAKEN, self._terms.operation)

    def _rows_from(self, handle: RailHandle) -> None:
        """Return None: a handle across nodes does not have the rows from each rank."""

    def _notify(self, scope: CudaScope, source: CombineSource, handle: RailHandle) -> None:
        """Copy rows into the window where that is needed, and exchange offers with all ranks of all nodes."""
        ops, ends = self._ops, handle.recv_gbl_rank_prefix_sum.contiguous()
        for region, part in source.copies:
            copy_in(ops.own, self._copy_shape, region, part, ends[-1:])
        if scope.reach is not None:
            scope.reach("handshake")
        ops.signals.is_announced = True
        post = source.post._replace(remote_rows=ops.remote.capacity(self._widths))
        self._handshake(post, nodes=ops.router.nodes_of(handle))

    def sum(
        self,
        scope: CudaScope,
        source: CombineSource,
        parts: Sequence[torch.Tensor],
        handle: RailHandle,
        sums: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor],
    ) -> None:
        """Sum this node's rows for every rank of the rail, and then the sums of the nodes."""
        ops, shape, index = self._ops, self._shape, self._terms.operation
        proxy, outbox = ops.remote.proxy, ops.remote.memory
        rows, capacity = ops.remote.rows(self._widths), ops.remote.capacity(self._widths)
        forwarded = handle.send_nvl_head.contiguous()
        proxy.await_left(index, OFFERED)
        transfer = Transfer(outbox, rows, ops.plan, index, shape.num_blocks, is_back=True)
        for chunk in range(proxy.num_chunks):
            if scope.reach is not None:
                scope.reach("pull")
            for section, part in enumerate(parts):
                out = _rows_of(outbox, rows, section, capacity, part)
                relay_sums.sum_for_rail(ops.node, shape, section, out, forwarded, chunk, proxy.num_chunks)
            ops.signals.mark("rail")
            proxy.send(transfer, chunk)
        proxy.await_arrived(transfer, 0, proxy.num_chunks)
        if scope.reach is not None:
            scope.reach("sum")
        recv_buffer = outbox.data_ptr() + rows.recv_offset if proxy.sources is None else 0
        node_slots = handle.send_rdma_head.contiguous()
        for section, out in enumerate(sums):
            remote = relay_sums.RemoteSums(recv_buffer + rows.offsets[section], proxy.sources)
            some = biases if section == 0 else ()
            relay_sums.sum_nodes(ops.node, remote, shape, section, out, node_slots, forwarded, some)
        if scope.reach is not None:
            scope.reach("finish")
        self._finish()
        if source.copies:
            self._release(source)


def _rows_of(
    memory: torch.Tensor, rows: RemoteRowLayout, section: int, capacity: int, part: torch.Tensor
) -> torch.Tensor:
    """The outbox as rows of a section, [capacity, columns], for sums of the type of `part`."""
    start = rows.offsets[section]
    return memory[start : start + capacity * rows.widths[section]].view(part.dtype).view(capacity, part.size(1))
