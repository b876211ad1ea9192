"""The two-hop engine on GPUs: dispatch and combine across nodes, as kernels in a stream (`docs/protocol.md`).

Inside a node everything is as in `streamed.py`. A token that goes to another node crosses once, to the rank of this
rank's rail there, which relays it to the ranks of its node; on the way back it sums what they have. A call is

    dispatch   positions, meet (all ranks of all nodes)
               steer, put (this node's ranks, and the outbox for others)
               for each chunk: ring                           | the courier carries
               for each chunk: wait for it to land, forward   | or: meet the rail, forward
               finish (this node), unpack
    combine    copy in unless the rows lie in the window, meet
               for each chunk: sum this node's rows, ring     | the courier carries, or: meet the rail
               wait for all chunks, sum what the nodes have, finish (this node)

Letters: R ranks are N nodes of P; T tokens, n rows received, F rows that this rank passes on inside its node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ...errors import EPTransportError
from ...event import EventHandle
from ...handle import RailHandle
from ...kernels import exchange, put, relay, relay_sums, staging, steer
from ...kernels.exchange import Post
from ...kernels.rail import FarRows
from ...stream import LaunchStream
from ...topology import Topology
from ...transport.device import DeviceWindow
from ..call import ANNOUNCED, OFFERED, OPERATIONS, READY
from ..direct import Order
from ..parcel import Payload, Received, Routing
from ..room import NO_SECTIONS, Frame, Sections
from ..shapes import Shapes
from ..streamed import StreamedEngine, check_scales
from .couriers import Freight
from .far import Far
from .routes import Router, Routes

_BACK_BYTES = 2  # of an element that a combine brings back, at least: BF16, also where FP8 was dispatched


class RelayedEngine(StreamedEngine):
    """Dispatch and combine across nodes, by kernels.

    Args:
        topology: Where this rank stands.
        far: The far memory; its courier comes with `start`.
        window: The node's window.
        stream: Where the kernels are launched.
        limit_secs: Seconds that a wait on the device may take.
        max_experts: Most experts of a call.
        shapes: How bulk kernels are launched.
        num_local_bytes: What the caller may see of the raw buffer.
    """

    def __init__(
        self,
        topology: Topology,
        far: Far,
        window: DeviceWindow,
        stream: LaunchStream,
        limit_secs: float,
        max_experts: int,
        shapes: Shapes,
        num_local_bytes: int = 0,
    ):
        nodes = topology.num_nodes
        super().__init__(window, stream, limit_secs, max_experts, shapes, num_local_bytes, num_nodes=nodes)
        self._topology = topology
        self.far = far
        places, device = self._places, self.window.device
        self._router = Router(topology, self._room, device)
        # The same calls as inside a node, over other tables: of this node's ranks, and of what `steer` aims at.
        near = places.table[:, self._router.near]
        self._node = relay_sums.Node(topology.node, near, self._router.plan, places.state)
        self._aimed = replace(places, table=torch.zeros_like(places.table))
        self._own = replace(places, rank=0, num_ranks=1, num_nodes=1)  # for a count of this rank alone
        self._guessed_passed_on = 0
        self._nothing = torch.zeros(1, dtype=torch.int32, device=device)

    def prepare(self) -> None:
        """Know the courier, and compile and load what signals: no peer's limit passes while a kernel is compiled."""
        self._point_to_far()
        courier = self.far.courier
        self.signals.tell_failure, self.signals.carry = courier.tell_failure, courier.carry_words
        is_whole = courier.carry_words is None
        exchange.prepare_nodes(self._places, [(True, True)] if is_whole else [(True, False), (False, True)])
        courier.prepare(self._router.plan)
        staging.prepare_all(self._places)

    def _point_to_far(self) -> None:
        """Have kernels say what is for a far rank on its board, or to its mirror, and look for what it says here."""
        layout, base, boards = self.far.layout, self.far.places.words.data_ptr(), self.far.courier.boards
        near = range(self._router.near.start, self._router.near.stop)
        for rank in (rank for rank in range(self._topology.num_ranks) if rank not in near):
            self._places.windows[0, rank] = base + 8 * layout.mirror(rank) if boards is None else boards[rank]
            self._places.homes[rank] = base
        self.signals.far_board = self.far.places.words

    # Calls -----------------------------------------------------------------------------------------------------------

    def dispatch(
        self, payload: Payload, routing: Routing, num_channels: int, order: Order, num_sms: int | None = None
    ) -> tuple[Received, list[int], EventHandle | None]:
        """A full dispatch. The host waits for the counts, also if it is asynchronous."""
        self._refuse_capture()
        check_scales(payload)
        operation, frame = "dispatch", Frame(order, self.stream.caller())
        with self._calling(operation, order):
            self._hold_inputs(frame, payload, routing)
            sections = self._guess(payload, routing)
            routes, num_tokens = self._router.of_routing(frame, routing, num_channels, self._guessed_passed_on)
            assert routes.prefix is not None
            post = self._far_post(operation, ANNOUNCED, payload, routing, sections, routes)
            free_bytes = self.window.arena.largest_free_bytes()
            post = post._replace(free_bytes=free_bytes, num_tokens=payload.x.size(0))
            self._reach(operation, "meet")
            given = (routing.num_tokens_per_rank, routing.num_tokens_per_expert)
            self.signals.announce(post, num_tokens, *given, routes.prefix, routes.nodes)
            self._relay(operation, payload, routing, routes, NO_SECTIONS, num_sms)
            told = self.signals.wait_for_counts(routing.num_experts)
            num_rows, num_passed_on = told.num_rows[self.window.rank], told.far_rows[self.window.rank]
            self._guessed_rows = num_rows + num_rows // 16 + 64
            self._guessed_passed_on = num_passed_on + num_passed_on // 16 + 64
            if not told.fits:
                sections = NO_SECTIONS
            self._room.grow_alike(told, payload, routing, False)
            most = max(max(told.far_rows), max(told.num_tokens) * self._topology.num_nodes)
            self.far.make_room(most, self._most_row_bytes(payload, routing))
            if sections.parts[0] is None:
                sections = self._sections(frame, payload, routing, num_rows)
            if not told.fits:
                passed_on = self._router.empty_passed_on(frame, routing.is_token_in_rank, num_passed_on)
                routes = routes.with_passed_on(passed_on)
                self._reach(operation, "offer")
                post = self._far_post(operation, OFFERED, payload, routing, sections, routes)
                self.signals.meet(post, nodes=routes.nodes, is_new=False)
                self._relay(operation, payload, routing, routes, sections, num_sms)
            routes = routes.with_passed_on(routes.course.passed_on[:num_passed_on])
            received = self._receive(frame, routing, routes, sections, num_rows, num_channels, num_sms)
        return self._dispatched(routing, received, frame), told.expert_counts, self.stream.leave(order.is_async)

    def worst_case_dispatch(
        self,
        payload: Payload,
        routing: Routing,
        num_rows: int,
        num_channels: int,
        order: Order,
        num_sms: int | None = None,
    ) -> tuple[Received, EventHandle | None]:
        """A dispatch into room for `num_rows` rows; the host waits for nothing."""
        check_scales(payload)
        operation, frame = "worst-case dispatch", Frame(order, self.stream.caller())
        with self._calling(operation, order):
            self._hold_inputs(frame, payload, routing)
            sections = self._sections(frame, payload, routing, num_rows)
            # A rank relays rows for all ranks of its node: as many as they receive together, as far as memory goes.
            capacity = self.far.capacity(self._widths(payload, routing))
            most = max(num_rows, min(num_rows * self._topology.ranks_per_node, capacity))
            routes, num_tokens = self._router.of_routing(frame, routing, num_channels, most)
            routes.course.passed_on.fill_(-1)  # how many rows there are, the host never knows
            assert routes.prefix is not None
            self._reach(operation, "meet")
            post = self._far_post(operation, OFFERED, payload, routing, sections, routes)
            given = (routing.num_tokens_per_rank, routing.num_tokens_per_expert)
            self.signals.meet(post, num_tokens, *given, routes.prefix, nodes=routes.nodes)
            self._relay(operation, payload, routing, routes, sections, num_sms)
            received = self._receive(frame, routing, routes, sections, num_rows, num_channels, num_sms)
        return self._dispatched(routing, received, frame), self.stream.leave(order.is_async)

    def cached_dispatch(
        self, payload: Payload, handle: RailHandle, order: Order, num_sms: int | None = None
    ) -> tuple[Received, EventHandle | None]:
        """A dispatch along the slots of an earlier one."""
        check_scales(payload)
        operation, frame = "cached dispatch", Frame(order, self.stream.caller())
        with self._calling(operation, order):
            self._room.hold_inputs(frame, payload.x, payload.scales, *handle)
            sections = self._sections(frame, payload, None, handle.num_rows)
            routes = self._router.of_handle(handle)
            self._reach(operation, "meet")
            post = self._far_post(operation, OFFERED, payload, None, sections, routes)
            self.signals.meet(post, nodes=routes.nodes)
            self._relay(operation, payload, None, routes, sections, num_sms)
            received = self._room.received(sections, None, handle, handle.num_rows)
        return self._dispatched(None, received, frame), self.stream.leave(order.is_async)

    # Dispatch --------------------------------------------------------------------------------------------------------

    def _far_post(
        self,
        operation: str,
        step: int,
        payload: Payload,
        routing: Routing | None,
        sections: Sections,
        routes: Routes,
    ) -> Post:
        """What a rank says in a dispatch."""
        capacity = self.far.capacity(self._widths(payload, routing))
        bound = max(routes.course.passed_on.size(0), payload.x.size(0) * self._topology.num_nodes)
        return self._post(operation, step, payload, routing, sections)._replace(far_rows=min(capacity, bound))

    def _widths(self, payload: Payload, routing: Routing | None) -> list[int]:
        """Bytes of a row of each section, as it crosses."""
        x, scales = payload.x, payload.scales
        num_words = relay.relay_record_words(self._topology.ranks_per_node, routing.num_topk) if routing else 0
        scale_bytes = scales.size(1) * scales.element_size() if scales is not None else 0
        return [x.size(1) * x.element_size(), scale_bytes, 4 * num_words]

    def _most_row_bytes(self, payload: Payload, routing: Routing) -> int:
        """Bytes of a row on its way there, or back, whichever is more."""
        x = payload.x
        back = x.size(1) * max(x.element_size(), _BACK_BYTES) + 4 * routing.num_topk
        return max(sum(self._widths(payload, routing)), back)

    def _relay(
        self,
        operation: str,
        payload: Payload,
        routing: Routing | None,
        routes: Routes,
        sections: Sections,
        num_sms: int | None,
    ) -> None:
        """Put rows for this node, send those for others, and relay what comes from there."""
        index, num_near, courier = OPERATIONS.index(operation), self._topology.ranks_per_node, self.far.courier
        topk_idx = routing.topk_idx if routing is not None else None
        topk_weights = routing.topk_weights if routing is not None else None
        num_local = routing.num_experts // self._topology.num_ranks if routing is not None else 0
        sent, shape, plan = (payload.x, payload.scales), self.shapes.for_put(num_sms), self._router.plan
        widths, outbox, course = self._widths(payload, routing), self.far.memory, routes.course
        rows = self.far.rows(widths)
        courier.await_left(index, OFFERED)
        self._reach(operation, "put")
        where = (plan, self._aimed.table, outbox.data_ptr(), rows.offsets)
        steer.steer(self._places, shape.num_blocks, course, topk_idx, topk_weights, num_local, *where)
        put.put(self._aimed, shape, *sent, course.slots, None, None, None, 0)
        freight = Freight(outbox, rows, plan, index, shape.num_blocks)
        self.signals.mark("rail")
        for chunk in range(courier.num_chunks):
            courier.send(freight, chunk)
        for chunk in range(courier.num_chunks):
            if chunk:
                self.signals.mark("rail")
            courier.await_landed(freight, chunk)
            self._reach(operation, "forward")
            relay.forward(
                self._places, shape, plan, outbox[rows.landing :], rows.offsets, widths[0], widths[1],
                course.passed_on, self._places.table, self._router.near.start, num_near, self._topology.node,
                routing is not None, routing.num_topk if routing is not None else 0, num_local, chunk,
                courier.num_chunks, courier.sources,
            )  # fmt: skip
        self._reach(operation, "finish")
        outgoing = staging.Outgoing(*sent, course.slots, topk_idx, topk_weights, num_local, routing is not None)
        prefix = routes.prefix if routes.prefix is not None else course.slots
        staging.finish_dispatch(self._places, READY, index, outgoing, prefix, sections.parts)

    def _receive(
        self,
        frame: Frame,
        routing: Routing,
        routes: Routes,
        sections: Sections,
        num_rows: int,
        num_channels: int,
        num_sms: int | None,
    ) -> Received:
        """Take the records apart, and make the handle."""
        assert routes.prefix is not None
        with self._room.outputs(frame):
            handle = self._router.empty_handle(routing, routes, num_rows, num_channels)
            received = self._room.received(sections, routing, handle, num_rows)
        sources, ends = handle.recv_src_meta.view(torch.int32), handle.recv_gbl_rank_prefix_sum
        self._unpack(received, routes.prefix, sources, num_sms, ends)
        return received

    # Combine ---------------------------------------------------------------------------------------------------------

    def _pull(
        self,
        parts: list[torch.Tensor],
        handle: RailHandle,
        sums: list[torch.Tensor],
        biases: Sequence[torch.Tensor],
        num_sms: int | None,
    ) -> str:
        """Sum this node's rows for every rank of the rail, and then what the nodes have. Returns the path it took."""
        operation, courier = "combine", self.far.courier
        index = OPERATIONS.index(operation)
        ends = handle.recv_gbl_rank_prefix_sum.contiguous()
        supply = self._supply(parts, self._own, ends[-1:], num_sms)
        widths = [part.size(1) * part.element_size() for part in parts]
        rows, capacity = self.far.rows(widths), self.far.capacity(widths)
        post = self._combine_post(operation, parts, handle)._replace(num_rows=parts[0].size(0))
        self._reach(operation, "meet")
        self.signals.meet(post._replace(bases=supply.bases, far_rows=capacity), nodes=self._router.nodes_of(handle))
        passed_on, shape, outbox = handle.send_nvl_head.contiguous(), self.shapes.for_pull(num_sms), self.far.memory
        courier.await_left(index, OFFERED)
        freight = Freight(outbox, rows, self._router.plan, index, shape.num_blocks, is_back=True)
        for chunk in range(courier.num_chunks):
            self._reach(operation, "pull")
            for section, part in enumerate(parts):
                out = _rows_of(outbox, rows, section, capacity, part)
                relay_sums.sum_for_rail(self._node, shape, section, out, passed_on, chunk, courier.num_chunks)
            self.signals.mark("rail")
            courier.send(freight, chunk)
        courier.await_landed(freight, 0, courier.num_chunks)
        self._reach(operation, "sum")
        landing = outbox.data_ptr() + rows.landing if courier.sources is None else 0
        node_slots = handle.send_rdma_head.contiguous()
        for section, out in enumerate(sums):
            far = relay_sums.FarSums(landing + rows.offsets[section], courier.sources)
            some = biases if section == 0 else ()
            relay_sums.sum_nodes(self._node, far, shape, section, out, node_slots, passed_on, some)
        self._reach(operation, "finish")
        nothing = (self._nothing,) * 3  # of use only where somebody is staged
        staging.finish_combine(self._places, READY, index, parts, sums, biases, *nothing)
        return supply.path

    # Memory ----------------------------------------------------------------------------------------------------------

    def _sections(self, frame: Frame, payload: Payload, routing: Routing | None, num_rows: int) -> Sections:
        """Room for exactly so many rows.

        Raises:
            EPTransportError: There is none. Across nodes there is no staging.
        """
        del frame
        sections = self._room.sections(payload, routing, num_rows)
        if sections is None:
            raise self._lack("dispatch")
        return sections

    def _staged_supply(self, parts: list[torch.Tensor], taken: list[torch.Tensor]) -> Any:
        del parts, taken
        raise self._lack("combine")

    def _lack(self, operation: str) -> EPTransportError:
        sizes = self.window.arena.num_bytes()
        return EPTransportError(
            f"{operation}: the arena has no room for the rows ({sizes['used']} of {sizes['reserved']} bytes are in "
            f"use, rank {self.window.rank}/{self.window.num_ranks}). Drop received tensors, or make the buffer with a "
            "larger num_nvl_bytes; it grows by itself only in a dispatch without handle or num_worst_tokens"
        )

    def numbers(self) -> dict[str, Any]:
        """What was counted so far."""
        rows_bytes = int(self._places.host[exchange.STATE_RAIL_BYTES])
        return {**super().numbers(), "rail": {**self.far.courier.numbers(), "rows_bytes_sent": rows_bytes}}

    def stop(self) -> None:
        """Wait for everything that was launched, and for the courier."""
        super().stop()
        self.far.courier.close()


def _rows_of(memory: torch.Tensor, rows: FarRows, section: int, capacity: int, part: torch.Tensor) -> torch.Tensor:
    """The outbox as rows of a section, [capacity, columns], for sums of the type of `part`."""
    start = rows.offsets[section]
    return memory[start : start + capacity * rows.widths[section]].view(part.dtype).view(capacity, part.size(1))
