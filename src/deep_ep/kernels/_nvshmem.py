"""NVSHMEM's device functions, for kernels that put bytes into memory that has no address here.

All threads of a block call these functions together, with the same arguments. Triton's interpreter does not have them:
tests substitute their own.

Addresses are this rank's own: NVSHMEM translates them to the same offset in the memory of a PE (its number of a
process).
"""

from __future__ import annotations

from ._triton import HAS_TRITON, INTERPRETED, Library, tl, triton

SIGNAL_SET = 9  # NVSHMEM_SIGNAL_SET of its headers (nvshmem_common_transport.h)

_SIGNAL_SET = tl.constexpr(SIGNAL_SET)


def _find() -> str:
    from torch.distributed._symmetric_memory._nvshmem_triton import NvshmemLibFinder

    return NvshmemLibFinder.find_device_library()


def _on_load(module: int) -> None:
    """Set the addresses of all PEs' heaps in a module.

    NVSHMEM must have been started: a first piece of memory must exist.
    """
    from torch._C._distributed_c10d import _nvshmemx_cumodule_init  # not in every torch

    _nvshmemx_cumodule_init(module)


DEVICE_LIBRARY = Library("libnvshmem_device", _find, _on_load)


if HAS_TRITON and not INTERPRETED:
    _core = tl.core

    def _call(symbol, args, types, semantic):
        # The functions return nothing; Triton requires a result, which is not used.
        kinds = tuple(_core.dtype(kind) for kind in types)
        named = {kinds: (symbol, _core.dtype("int32"))}
        return _core.extern_elementwise("", "", args, named, is_pure=False, _semantic=semantic)

    @_core.extern
    def _put(target, source, num_bytes, pe, _semantic=None):
        return _call("nvshmemx_putmem_block", [target, source, num_bytes, pe], _PUT, _semantic)

    @_core.extern
    def _put_signal(target, source, num_bytes, word, value, operation, pe, _semantic=None):
        args = [target, source, num_bytes, word, value, operation, pe]
        return _call("nvshmemx_putmem_signal_block", args, _PUT_SIGNAL, _semantic)

    @_core.extern
    def _signal(word, value, operation, pe, _semantic=None):
        return _call("nvshmemx_signal_op", [word, value, operation, pe], _SIGNAL, _semantic)

    @_core.extern
    def fence(_semantic=None):
        """Order puts: those before this arrive at a PE before those that follow."""
        return _call("nvshmem_fence", [], (), _semantic)

    @_core.extern
    def quiet(_semantic=None):
        """Wait until everything that this PE has put has arrived."""
        return _call("nvshmem_quiet", [], (), _semantic)

    _PUT = ("int64", "int64", "int64", "int32")
    _PUT_SIGNAL = ("int64", "int64", "int64", "int64", "int64", "int32", "int32")
    _SIGNAL = ("int64", "int64", "int32", "int32")

else:

    def _missing(*_):
        raise NotImplementedError("kernels with NVSHMEM run on GPUs only")

    _put = _put_signal = _signal = fence = quiet = _missing


@triton.jit
def put(target, source, num_bytes, pe):
    """Copy bytes to a PE. On return the source may be overwritten, but the bytes may not have arrived yet."""
    _put(target, source, num_bytes, pe)


@triton.jit
def put_then_set(target, source, num_bytes, word, value, pe):
    """Copy bytes to a PE, and then store a word there, which is visible only after the bytes."""
    _put_signal(target, source, num_bytes, word, value, _SIGNAL_SET, pe)


@triton.jit
def set_word(word, value, pe):
    """Store a word at a PE, which may overtake earlier puts.

    For tensors, each element is a word that is stored once.
    """
    _signal(word, value, _SIGNAL_SET, pe)
