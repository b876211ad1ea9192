"""The choice of a buffer's engine: by its device, its group and the environment."""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from .. import env
from ..control import Control, NodeControl
from ..engine.cpu.engine import CpuEngine
from ..engine.engine import Engine
from ..engine.low_latency.cpu.engine import CpuLowLatency
from ..errors import EPUnsupported
from ..stream import CommStream, CudaStream, LaunchStream
from ..topology import Topology
from ..transport import MAX_EXPERTS, MESSAGE, WindowSizes, choose, service
from ..transport.device import DeviceMemory, DeviceWindow
from ..transport.interpreted import InterpretedMemory
from ..transport.symm import NodeMemory, SymmMemory, node_group, why_not

if TYPE_CHECKING:
    from ..engine.cuda.engine import CudaEngine

NVSHMEM = "nvshmem"
INTERPRETED = "interpreted"  # the name of the transport of CPU ranks that run the GPU's kernels
INTERPRETED_MEMORY = "interpreted-memory"  # the same, where nodes share the memory of a host

_LEAST_ARENA_BYTES = 16 << 20  # room for small calls of a buffer that was made with no size at all
_LEAST_REMOTE_BYTES = 2 << 20  # likewise, between nodes
_COMPILE_SECS = 300.0  # a second or two for each of some dozens of kernels, where none has been compiled before


def find_device(device: torch.device | str | None) -> torch.device:
    """Return the device of a new buffer: the one that is requested, else `DEEP_EP_DEVICE`, else a GPU if there is
    one.
    """
    variable = "" if device else env.DEVICE.get()
    remedy = f"Set {env.DEVICE.name}=cpu" if variable else "Pass device='cpu'"
    wish = device or variable or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(wish)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"Buffer: device {wish!r} is none ({reason}). {remedy} or 'cuda'") from None
    except TypeError:
        raise TypeError(f"Buffer: `device` must be a device or its name, got {type(device).__name__}") from None
    if chosen.type == "cpu":
        return torch.device("cpu")
    if chosen.type != "cuda" or not torch.cuda.is_available():
        raise EPUnsupported(f"Buffer: device {chosen} is not there. {remedy}, or run where torch sees a GPU")
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
    topology: Topology,
    enable_shrink: bool = False,
) -> tuple[Engine, str]:
    """Make the engine of a buffer, and a line that describes how it reaches its peers.

    All ranks call it, in a joint step.

    Args:
        control: The group.
        group: The same, as torch knows it.
        device: Where tensors live.
        sizes: Of the window.
        device_limit_secs: Seconds that a wait on a GPU may take.
        topology: Where this rank stands.
        enable_shrink: Low-latency calls mask ranks that stay silent.

    Returns:
        The engine, and the line.
    """
    if topology.num_nodes > 1:
        if device.type == "cuda":
            if control.generation:
                raise EPUnsupported(
                    "Buffer: GPU ranks of several nodes cannot be replaced: NVSHMEM, and memory of a node, are made "
                    "over a process group. Make a new group and a new Buffer over it, or restart the job"
                )
            # Before NVSHMEM starts, since it reads its environment then.
            service.pass_on(service.service_level(is_low_latency=bool(sizes.low_latency_bytes)))
        if device.type != "cpu" or env.TRANSPORT.get() in (INTERPRETED, INTERPRETED_MEMORY):
            return _cuda_nodes(control, group, device, sizes, device_limit_secs, topology, enable_shrink)
        return _cpu_nodes(control, topology, sizes, enable_shrink)
    if device.type == "cuda":
        reason = why_not(group, control.num_ranks, control.store is not None)
        if reason is not None:
            raise EPUnsupported(f"transport symm: {reason}")
        memory: DeviceMemory = SymmMemory(control, group, device)
        how = "solo (a group of one rank)" if control.num_ranks == 1 else "symm (CUDA symmetric memory of one node)"
        return _cuda(control, memory, CudaStream(device), sizes, device_limit_secs, enable_shrink), how
    wish = env.TRANSPORT.get()
    if wish in (INTERPRETED, INTERPRETED_MEMORY):
        memory, how = InterpretedMemory(control), f"{INTERPRETED} ({env.TRANSPORT.name}={wish})"
        return _cuda(control, memory, LaunchStream(), sizes, device_limit_secs, enable_shrink), how
    choice = choose(control.num_ranks)
    engine = CpuEngine(choice.make_window(control, sizes), CommStream(f"deep_ep-comm-{control.rank}"))
    if sizes.low_latency_bytes:
        engine.low_latency = CpuLowLatency(engine.chain, engine.stream, sizes.low_latency_bytes, enable_shrink)
    return engine, f"{choice.name} ({choice.reason})"


def _cpu_nodes(control: Control, topology: Topology, sizes: WindowSizes, enable_shrink: bool) -> tuple[Engine, str]:
    """Make the engine across nodes: a window inside the node, messages on the rail, and on the mesh for low latency."""
    # Not before a buffer needs them: other systems have no such sockets.
    from ..engine.cpu.nodes.engine import CpuNodesEngine
    from ..transport.mesh import make_mesh
    from ..transport.message import make_rail

    size, low_latency_bytes = topology.ranks_per_node, sizes.low_latency_bytes
    # The number of the first rank counts for all: rails tell buffers apart by it, in the marks of handles.
    said = control.gather((secrets.randbits(32), low_latency_bytes), "numbering the buffer")
    # All ranks must divide this memory alike, also those of other nodes: the largest request counts for all.
    sizes = replace(sizes, low_latency_bytes=max(wish for _, wish in said))
    choice = choose(size)
    window = choice.make_window(NodeControl(control, topology.node * size, size), sizes)
    rail = make_rail(control, topology)
    mesh = make_mesh(control, topology) if sizes.low_latency_bytes else None
    engine = CpuNodesEngine(window, rail, topology, said[0][0], CommStream(f"deep_ep-comm-{control.rank}"), mesh)
    # Memory and links are there if any rank has asked for them, the calls only if this one has.
    if low_latency_bytes:
        engine.low_latency = CpuLowLatency(engine.chain, engine.stream, low_latency_bytes, enable_shrink, mesh)
    inside = f"{choice.name} inside a node ({'CPU ranks of one host' if size > 1 else 'one rank each'})"
    how = "TCP on the rail, and straight for low latency" if mesh is not None else "TCP on the rail"
    reason = f"{env.TRANSPORT.name}={MESSAGE}" if env.TRANSPORT.get() == MESSAGE else "they share no memory"
    return engine, f"{inside}, {MESSAGE} between {topology.num_nodes} nodes ({how}: {reason})"


def _cuda_nodes(
    control: Control,
    group: dist.ProcessGroup | None,
    device: torch.device,
    sizes: WindowSizes,
    limit_secs: float,
    topology: Topology,
    enable_shrink: bool,
) -> tuple[Engine, str]:
    """Make the engine across nodes whose kernels wait: a window inside the node, and a proxy between nodes."""
    # Not before a buffer needs them: they import Triton, and importing us must not.
    from ..engine.cuda.engine import CudaEngine
    from ..engine.cuda.memory import Memory
    from ..engine.cuda.nodes.proxies import Proxy, ThreadProxy, make_nvshmem_proxy
    from ..engine.cuda.nodes.remote import RemoteMemory
    from ..engine.cuda.nodes.two_hops import TwoHopOps
    from ..engine.cuda.shapes import load_shapes, most_blocks_of
    from ..engine.cuda.signals import Signals
    from ..engine.low_latency.cuda.copies import RemoteRanks
    from ..engine.low_latency.cuda.engine import CudaLowLatency
    from ..kernels.exchange import Context
    from ..transport.proxy import make_proxy
    from ..transport.remote import RemoteLayout

    _require_kernels(device.type)
    num_nodes, size = topology.num_nodes, topology.ranks_per_node
    whole, pes, why = _whole_memory(control, group, device)
    local = NodeMemory(whole, topology) if whole is not None else _node_memory(control, group, device, topology)
    window, sizes = _device_window(control, local, sizes, num_nodes)
    layout = RemoteLayout(
        topology.num_ranks, num_nodes, Context.num_header_words(control.num_ranks, MAX_EXPERTS, num_nodes)
    )
    if whole is not None:
        part = whole.grow(8 * layout.num_words)
        words = part.memory.view(torch.int64)
    else:
        words = torch.zeros(layout.num_words, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    remote = RemoteMemory(layout, words, max(_LEAST_REMOTE_BYTES, sizes.remote_bytes))
    stream: LaunchStream = LaunchStream() if device.type == "cpu" else CudaStream(device)
    signals = Signals(window, stream, limit_secs, MAX_EXPERTS, num_nodes)
    memory = Memory(window, stream, can_stage=False)
    context = signals.context
    if whole is not None:
        proxy: Proxy = make_nvshmem_proxy(control, whole, part, layout, topology, context, remote.context, pes)
    else:
        proxy = ThreadProxy(make_proxy(control, topology, layout, words), context, remote.context, control)
    remote.start(proxy)
    control.renew_deadline("compiling kernels", _COMPILE_SECS)
    ops = TwoHopOps(topology, remote, signals, memory, load_shapes(size, most_blocks_of(local, device)))
    engine = CudaEngine(window, stream, signals, ops, sizes.scratch_bytes)
    num_bytes = sizes.low_latency_bytes
    made = (signals, window, stream, num_bytes, enable_shrink)
    if num_bytes and whole is not None and proxy.boards is not None:  # all memory can be addressed
        engine.low_latency = CudaLowLatency(*made, memory=whole)
    elif num_bytes and pes:
        engine.low_latency = CudaLowLatency(*made, RemoteRanks(topology, pes, proxy.tell_failure))
    elif num_bytes:
        engine.why_no_low_latency = why
    if whole is not None:
        how = "its puts and signals between nodes" if proxy.boards is None else "one memory, in which rows are fetched"
        name = NVSHMEM if pes else INTERPRETED_MEMORY
        return engine, f"{name} ({num_nodes} nodes of {size}, {how})"
    inside = "symm" if device.type == "cuda" else INTERPRETED
    return engine, f"{inside} inside a node, {MESSAGE} between {num_nodes} nodes (TCP by way of host memory: {why})"


class _Whole(NamedTuple):
    """Memory that the ranks of all nodes have.

    Attributes:
        memory: Where it comes from; None: there is none.
        pes: NVSHMEM's number of each rank; empty: it is not NVSHMEM's.
        why_not: Why it is not.
    """

    memory: DeviceMemory | None
    pes: Sequence[int] = ()
    why_not: str = ""


def _whole_memory(control: Control, group: dist.ProcessGroup | None, device: torch.device) -> _Whole:
    """Return NVSHMEM's memory, if it is wanted and available on all ranks."""
    from ..transport import nvshmem

    wish = env.TRANSPORT.get()
    why_not = f"{env.TRANSPORT.name}={wish}"
    if device.type == "cpu" and wish == INTERPRETED_MEMORY:
        return _Whole(InterpretedMemory(control), why_not=why_not)
    if device.type == "cpu" or wish == MESSAGE:
        return _Whole(None, why_not=why_not)
    if wish not in ("auto", NVSHMEM):
        raise ValueError(
            f"{env.TRANSPORT.name}: {wish!r} is not one of auto, {MESSAGE}, {NVSHMEM}, for GPUs of several nodes"
        )
    # Ranks that share a GPU need settings for it that only a caller can make: there it must be asked for.
    uuids = control.gather(str(torch.cuda.get_device_properties(device).uuid), "finding the GPUs")
    reason = nvshmem.why_not(group, control.num_ranks)
    if reason is None and wish != NVSHMEM and len(set(uuids)) < len(uuids):
        reason = f"ranks share a GPU; {env.TRANSPORT.name}={NVSHMEM} asks for it"
    reasons = [one for one in control.gather(reason, "looking for NVSHMEM") if one is not None]
    if reasons:
        if wish == NVSHMEM:
            warnings.warn(f"transport {NVSHMEM}: {reasons[0]}. {MESSAGE} is used instead", RuntimeWarning, stacklevel=5)
        return _Whole(None, why_not=f"no {NVSHMEM}: {reasons[0]}")
    assert group is not None
    pes = [nvshmem.pe_of(group, rank) for rank in range(control.num_ranks)]
    return _Whole(nvshmem.NvshmemMemory(control, group, device), pes)


def _node_memory(
    control: Control, group: dist.ProcessGroup | None, device: torch.device, topology: Topology
) -> DeviceMemory:
    """Return memory that the ranks of a node share."""
    size = topology.ranks_per_node
    local = NodeControl(control, topology.node * size, size)
    if device.type == "cpu":
        return NodeMemory(InterpretedMemory(local), topology)
    reason = why_not(group, size)
    if reason is not None:
        raise EPUnsupported(f"transport symm: {reason}")
    control.gather(None, "meeting to make the group of a node")  # a collective of torch's, which has no limit of ours
    local_group = node_group(group, topology) if group is not None and size > 1 else None
    return NodeMemory(SymmMemory(local, local_group, device), topology)


def _device_window(
    control: Control, memory: DeviceMemory, sizes: WindowSizes, num_nodes: int = 1
) -> tuple[DeviceWindow, WindowSizes]:
    """Make a window for kernels.

    Memory is symmetric: the largest request counts for all, and a limit of one rank is one of all.

    Returns:
        The window, and the sizes with what all ranks have beside it.
    """
    from ..engine.cuda.memory import staging_bytes
    from ..engine.cuda.signals import Signals

    wish = (sizes.arena_bytes, sizes.arena_limit_bytes, sizes.low_latency_bytes, sizes.remote_bytes)
    wishes = control.gather(wish, "comparing sizes")
    arenas, limits, low_latency_bytes, remote_bytes = zip(*wishes, strict=True)
    window = DeviceWindow(
        control.rank,
        control.num_ranks,
        memory,
        Signals.board_bytes(control.num_ranks, MAX_EXPERTS, num_nodes),
        max(_LEAST_ARENA_BYTES, *arenas),
        min((limit for limit in limits if limit), default=0),
        staging_bytes(control.num_ranks),
    )
    return window, replace(sizes, low_latency_bytes=max(low_latency_bytes), remote_bytes=max(remote_bytes))


def _require_kernels(device_type: str) -> None:
    from ..kernels import _triton

    if not _triton.is_usable(device_type):
        what = "Triton is not installed"
        if _triton.HAS_TRITON:
            wish = "Set" if device_type == "cpu" else "Unset"
            what = f"Triton compiles or interprets them. {wish} TRITON_INTERPRET=1 before deep_ep is imported"
        raise EPUnsupported(f"Buffer: kernels cannot run on {device_type}: {what}")


def _cuda(
    control: Control,
    memory: DeviceMemory,
    stream: LaunchStream,
    sizes: WindowSizes,
    limit_secs: float,
    enable_shrink: bool,
) -> CudaEngine:
    # Not before a buffer needs them: they import Triton, and importing us must not.
    from ..engine.cuda.engine import CudaEngine
    from ..engine.cuda.memory import Memory
    from ..engine.cuda.one_hop import OneHopOps
    from ..engine.cuda.shapes import load_shapes, most_blocks_of
    from ..engine.cuda.signals import Signals
    from ..engine.low_latency.cuda.engine import CudaLowLatency
    from ..kernels import notify

    _require_kernels("cpu" if stream.raw is None else "cuda")
    window, sizes = _device_window(control, memory, sizes)
    signals, call_memory = Signals(window, stream, limit_secs, MAX_EXPERTS), Memory(window, stream)
    shapes = load_shapes(control.num_ranks, most_blocks_of(memory, window.device))
    ops = OneHopOps(signals, call_memory, shapes)
    control.renew_deadline("compiling kernels", _COMPILE_SECS)
    notify.prepare_all(signals.context)
    engine = CudaEngine(window, stream, signals, ops, sizes.scratch_bytes)
    num_bytes = sizes.low_latency_bytes
    if num_bytes:
        engine.low_latency = CudaLowLatency(signals, window, stream, num_bytes, enable_shrink)
    return engine
