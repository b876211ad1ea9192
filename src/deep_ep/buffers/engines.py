"""Which engine a buffer gets: by its device, its group and what the environment asks for."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.distributed as dist

from .. import env
from ..control import Control, NodeControl
from ..engine.direct import DirectEngine
from ..engine.low_latency.direct import DirectLowLatency
from ..errors import EPUnsupported
from ..stream import CommStream, CudaStream, LaunchStream
from ..topology import Topology
from ..transport import MAX_EXPERTS, MESSAGE, WindowSizes, choose
from ..transport.device import DeviceMemory, DeviceWindow
from ..transport.interpreted import InterpretedMemory
from ..transport.symm import SymmMemory, why_not

if TYPE_CHECKING:
    from ..engine.streamed import StreamedEngine

INTERPRETED = "interpreted"  # the name of the transport of CPU ranks that run the GPU's kernels

Engine: TypeAlias = "DirectEngine | StreamedEngine"

_LEAST_ARENA_BYTES = 16 << 20  # room for small calls of a buffer that was made with no size at all


def find_device(device: torch.device | str | None) -> torch.device:
    """The device of a new buffer: as asked for, else `DEEP_EP_DEVICE`, else a GPU if there is one."""
    wish = device or env.DEVICE.get() or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(wish)
    except RuntimeError as error:
        raise ValueError(f"Buffer: `device` {wish!r} is none ({error}). Pass device='cpu' or 'cuda'") from None
    except TypeError:
        raise TypeError(f"Buffer: `device` must be a device or its name, got {type(device).__name__}") from None
    if chosen.type == "cpu":
        return torch.device("cpu")
    if chosen.type != "cuda" or not torch.cuda.is_available():
        raise EPUnsupported(f"Buffer: device {chosen} is not there. Pass device='cpu', or run where torch sees a GPU")
    return chosen if chosen.index is not None else torch.device("cuda", torch.cuda.current_device())


def forced_ranks_per_node(device: torch.device) -> int | None:
    """Ranks of a node where `DEEP_EP_TRANSPORT` decides it: CPU ranks that use messages alone are a node each."""
    return 1 if device.type == "cpu" and env.TRANSPORT.get() == MESSAGE else None


def make_engine(
    control: Control,
    group: dist.ProcessGroup | None,
    device: torch.device,
    sizes: WindowSizes,
    device_limit_secs: float,
    enable_shrink: bool = False,
    topology: Topology | None = None,
) -> tuple[Engine | None, str]:
    """The engine of a buffer, and a line that says how it reaches its peers. All ranks call it.

    Args:
        control: The group.
        group: The same, as torch knows it.
        device: Where tensors live.
        sizes: Of the window.
        device_limit_secs: Seconds that a wait on a GPU may take.
        enable_shrink: Low-latency calls mask ranks that stay silent.
        topology: Where this rank stands; None: all ranks are one node.

    Returns:
        The engine (None: there is none across nodes for this device), and the line.
    """
    if topology is not None and topology.num_nodes > 1:
        if device.type != "cpu" or env.TRANSPORT.get() == INTERPRETED:
            return None, f"none ({topology.num_nodes} nodes; across nodes only the CPU's engine works)"
        return _rails(control, topology, sizes, enable_shrink)
    if device.type == "cuda":
        reason = why_not(group, control.num_ranks)
        if reason is not None:
            raise EPUnsupported(f"transport symm: {reason}")
        memory: DeviceMemory = SymmMemory(control, group, device)
        how = "solo (a group of one rank)" if control.num_ranks == 1 else "symm (CUDA symmetric memory of one node)"
        return _streamed(control, memory, CudaStream(device), sizes, device_limit_secs, enable_shrink), how
    if env.TRANSPORT.get() == INTERPRETED:
        memory, how = InterpretedMemory(control), f"{INTERPRETED} ({env.TRANSPORT.name}={INTERPRETED})"
        return _streamed(control, memory, LaunchStream(), sizes, device_limit_secs, enable_shrink), how
    choice = choose(control.num_ranks)
    engine = DirectEngine(choice.make_window(control, sizes), CommStream(f"deep_ep-comm-{control.rank}"))
    if sizes.low_latency_bytes:
        engine.low_latency = DirectLowLatency(engine.chain, engine.stream, sizes.low_latency_bytes, enable_shrink)
    return engine, f"{choice.name} ({choice.reason})"


def _rails(control: Control, topology: Topology, sizes: WindowSizes, enable_shrink: bool) -> tuple[Engine, str]:
    """The engine across nodes: a window inside the node, messages on the rail, and on the mesh for low latency."""
    # Not before a buffer needs them: other systems have no such sockets.
    from ..engine.rails.engine import RailsEngine
    from ..transport.mesh import make_mesh
    from ..transport.message import make_rail

    size, low_latency_bytes = topology.ranks_per_node, sizes.low_latency_bytes
    said = control.gather((secrets.randbits(32), low_latency_bytes), "numbering the buffer")
    # All ranks must divide this memory alike, also those of other nodes: the largest wish is everybody's.
    sizes = replace(sizes, low_latency_bytes=max(wish for _, wish in said))
    choice = choose(size)
    window = choice.make_window(NodeControl(control, topology.node * size, size), sizes)
    rail = make_rail(control, topology)
    mesh = make_mesh(control, topology) if sizes.low_latency_bytes else None
    engine = RailsEngine(window, rail, topology, said[0][0], CommStream(f"deep_ep-comm-{control.rank}"), mesh)
    if low_latency_bytes:
        engine.low_latency = DirectLowLatency(engine.chain, engine.stream, low_latency_bytes, enable_shrink, mesh)
    inside = f"{choice.name} inside a node ({'CPU ranks of one host' if size > 1 else 'one rank each'})"
    how = "TCP on the rail, and straight for low latency" if mesh is not None else "TCP on the rail"
    reason = f"{env.TRANSPORT.name}={MESSAGE}" if env.TRANSPORT.get() == MESSAGE else "they share no memory"
    return engine, f"{inside}, {MESSAGE} between {topology.num_nodes} nodes ({how}: {reason})"


def _streamed(
    control: Control,
    memory: DeviceMemory,
    stream: LaunchStream,
    sizes: WindowSizes,
    limit_secs: float,
    enable_shrink: bool,
) -> StreamedEngine:
    # Not before a buffer needs them: they import Triton, and importing us must not.
    from ..engine.low_latency.streamed import StreamedLowLatency
    from ..engine.room import staging_bytes
    from ..engine.shapes import load_shapes
    from ..engine.signals import Signals
    from ..engine.streamed import StreamedEngine
    from ..kernels import _triton, exchange, staging

    device_type = "cpu" if stream.raw is None else "cuda"
    if not _triton.is_usable(device_type):
        what = "Triton is not installed" if not _triton.HAS_TRITON else f"TRITON_INTERPRET does not fit {device_type}"
        raise EPUnsupported(f"Buffer: kernels cannot run on {device_type}: {what}")
    # Memory is symmetric: the largest wish is everybody's, and a limit of one rank is a limit of all.
    wish = (sizes.arena_bytes, sizes.arena_limit_bytes, sizes.low_latency_bytes)
    wishes = control.gather(wish, "comparing sizes")
    limits = [limit for _, limit, _ in wishes if limit]
    window = DeviceWindow(
        control.rank,
        control.num_ranks,
        memory,
        Signals.board_bytes(control.num_ranks, MAX_EXPERTS),
        max(_LEAST_ARENA_BYTES, *(arena for arena, _, _ in wishes)),
        min(limits, default=0),
        staging_bytes(control.num_ranks),
    )
    shapes = load_shapes(control.num_ranks)
    is_pushed = env.COMBINE.get() == "push"
    engine = StreamedEngine(window, stream, limit_secs, MAX_EXPERTS, shapes, sizes.scratch_bytes, is_pushed)
    for kernels in (exchange, staging):
        kernels.prepare_all(engine.signals.places)
    low_latency_bytes = max(size for _, _, size in wishes)
    if low_latency_bytes:
        engine.low_latency = StreamedLowLatency(engine.signals, window, stream, low_latency_bytes, enable_shrink)
    control.gather(None, "compiling kernels")
    return engine
