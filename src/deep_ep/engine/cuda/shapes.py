"""How many blocks, of what size, the bulk kernels are launched with. Results never depend on it.

The defaults are the best of `python -m deep_ep bench tune` on an H200 that 8 ranks share (hidden 7168, BF16). Each
rank reads its own `DEEP_EP_TUNING_FILE`; ranks need not agree.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

import torch

from ... import env
from ...kernels.put import LaunchShape
from ...transport.device import DeviceMemory
from ...tuning import listed_size, load_tuning, wrong_file

_FREE = LaunchShape(num_blocks=264, words=4096, num_warps=16, num_registers=64)
_BOUNDED = LaunchShape(num_blocks=20, words=4096, num_warps=16)
_BOUNDED_PUT = LaunchShape(num_blocks=20, words=4096, num_warps=32)
_BOUNDED_PULL = LaunchShape(num_blocks=20, words=4096, num_warps=32, num_registers=64)
_MOST_WARPS = 32  # of a block, on all GPUs
_UNLIMITED = 1 << 30


@dataclass(frozen=True)
class Shapes:
    """The launch shapes of a buffer. `Buffer.set_num_sms` and configs bound the number of blocks.

    Attributes:
        put: The shape of dispatch, if the number of blocks is not bounded.
        pull: The shape of combine, if the number of blocks is not bounded.
        copy: The shape of the copy into the window that may come before a combine.
        bounded_put: The shape of dispatch with few blocks, each of which must then keep more bytes in flight. Its own
            number of blocks is not used, as in the next two.
        bounded_pull: The shape of combine with few blocks.
        bounded_copy: The shape of the copy with few blocks.
        most_blocks: Most blocks of a rank, if their number is bounded and ranks share a GPU: as many as have an SM for
            themselves. A rank whose blocks had to wait for those of others would hold all up.
    """

    put: LaunchShape = _FREE
    pull: LaunchShape = _FREE
    copy: LaunchShape = _FREE
    bounded_put: LaunchShape = _BOUNDED_PUT
    bounded_pull: LaunchShape = _BOUNDED_PULL
    bounded_copy: LaunchShape = _BOUNDED
    most_blocks: int = field(default=_UNLIMITED, kw_only=True)

    def for_put(self, num_sms: int | None) -> LaunchShape:
        """Return the shape of dispatch. A config may bound the number of blocks."""
        return self._choose(self.put, self.bounded_put, num_sms)

    def for_pull(self, num_sms: int | None) -> LaunchShape:
        """Return the shape of combine. A config may bound the number of blocks."""
        return self._choose(self.pull, self.bounded_pull, num_sms)

    def for_copy(self, num_sms: int | None) -> LaunchShape:
        """Return the shape of the copy into the window. A config may bound the number of blocks."""
        return self._choose(self.copy, self.bounded_copy, num_sms)

    def _choose(self, free: LaunchShape, bounded: LaunchShape, num_sms: int | None) -> LaunchShape:
        return free if num_sms is None else _with_blocks(bounded, min(num_sms, self.most_blocks))


@functools.cache
def _with_blocks(shape: LaunchShape, num_blocks: int) -> LaunchShape:
    """Return the same shape with another number of blocks. Cached, as every call needs it."""
    return replace(shape, num_blocks=max(1, num_blocks))


def load_shapes(num_ranks: int, most_blocks: int = _UNLIMITED) -> Shapes:
    """Return the shapes of a group: those of the tuning file, and the defaults for shapes that it does not have.

    Args:
        num_ranks: Ranks of the group. If the file does not list this number, the shapes of the next larger group are
            used, or those of the largest.
        most_blocks: See `Shapes`.

    Raises:
        ValueError: There is something wrong with the file that `DEEP_EP_TUNING_FILE` names.
    """
    tuning = load_tuning(env.TUNING_FILE.get())
    if not tuning.shapes:
        return Shapes(most_blocks=most_blocks)
    listed = tuning.shapes[listed_size(tuning.shapes, num_ranks)]
    known = {one.name for one in fields(Shapes)} - {"most_blocks"}
    if not set(listed) <= known:
        raise wrong_file(tuning.path, f"shapes must be of {sorted(known)}, got {sorted(set(listed) - known)}")
    shapes = {name: _parse(tuning.path, name, numbers) for name, numbers in listed.items()}
    return Shapes(**shapes, most_blocks=most_blocks)


def most_blocks_of(memory: DeviceMemory, device: torch.device) -> int:
    """Return `Shapes.most_blocks` for ranks that may share a GPU."""
    if memory.num_sharing == 1:
        return _UNLIMITED
    return torch.cuda.get_device_properties(device).multi_processor_count // memory.num_sharing


def _parse(path: str, name: str, numbers: Mapping[str, int]) -> LaunchShape:
    wanted = {one.name for one in fields(LaunchShape)}
    if {*numbers, "num_registers"} != wanted:
        raise wrong_file(path, f"shape `{name}` must have {sorted(wanted)}, it has {sorted(numbers)}")
    shape = LaunchShape(**numbers)
    if shape.num_blocks < 1:
        raise wrong_file(path, f"shape `{name}`: num_blocks must be at least 1, got {shape.num_blocks}")
    if not _is_power_of_2(shape.words):
        raise wrong_file(path, f"shape `{name}`: words must be a power of 2, got {shape.words}")
    if not _is_power_of_2(shape.num_warps) or shape.num_warps > _MOST_WARPS:
        raise wrong_file(
            path, f"shape `{name}`: num_warps must be a power of 2 up to {_MOST_WARPS}, got {shape.num_warps}"
        )
    return shape


def _is_power_of_2(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0
