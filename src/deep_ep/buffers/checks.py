"""Checks of the arguments of callers.

They are made before anything is sent, and their messages say what to do instead.
"""

from __future__ import annotations

import functools
import operator
import warnings
from collections.abc import Iterable
from typing import Any

import torch

from .. import env
from ..config import Config
from ..engine.payload import Payload, Routing
from ..event import EventHandle, EventOverlap, event_of
from ..tensors import is_lazy, ordinary
from ..transport import MAX_EXPERTS
from .usual import loses_gradients

COMBINE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
IDX_DTYPES = (torch.int32, torch.int64)
# Torch makes no tensor of these dtypes over memory that it is given: it ends the process instead. A tensor that is
# viewed as one of them is not what torch calls quantized, so `ordinary` takes it for a plain one.
_QUANTIZED = {
    torch.qint8: "int8",
    torch.quint8: "uint8",
    torch.qint32: "int32",
    torch.quint4x2: "uint8",
    torch.quint2x4: "uint8",
}
MOST_ROWS = (1 << 31) - 1  # rows are counted and numbered in int32


def check_tensor(
    where: str,
    name: str,
    value: Any,
    shape: tuple[int | str, ...],
    dtypes: tuple[torch.dtype, ...] = (),
    contiguous: bool = True,
    is_written: bool = False,
    *,
    device: torch.device,
) -> torch.Tensor:
    """Check one tensor argument, and make it ordinary (`tensors.py`): callers go on with what is returned.

    Args:
        where: The method.
        name: The argument.
        value: What was passed.
        shape: What its shape must be; a name: any size there.
        dtypes: What its dtype may be; none given: any that is not quantized.
        contiguous: Whether it must be contiguous.
        is_written: Whether the method writes into it.
        device: The buffer's.
    """
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{where}: `{name}` must be a tensor, got {type(value).__name__}")
    if value.device != device:
        raise ValueError(f"{where}: `{name}` must be on the buffer's device {device}, it is on {value.device}")
    value = ordinary(where, name, value, is_written)
    if not _is_shaped(value.shape, shape):
        expected = ", ".join(str(size) for size in shape)
        raise ValueError(f"{where}: `{name}` must have shape [{expected}], it has {list(value.shape)}")
    if dtypes and value.dtype not in dtypes:
        names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
        remedy = "Make it so, it is written" if is_written else f"Pass `{name}.to(torch.{names[0]})`"
        raise ValueError(
            f"{where}: `{name}` must be {' or '.join(names)}, it is {str(value.dtype).removeprefix('torch.')}. {remedy}"
        )
    if value.dtype in _QUANTIZED:
        raise ValueError(
            f"{where}: `{name}` must not have a quantized dtype, it is {str(value.dtype).removeprefix('torch.')}. Pass "
            f"`{name}.view(torch.{_QUANTIZED[value.dtype]})`"
        )
    if contiguous and not value.is_contiguous():
        remedy = "Make it so, it is written" if is_written else f"Pass `{name}.contiguous()`"
        raise ValueError(f"{where}: `{name}` must be contiguous, its strides are {value.stride()}. {remedy}")
    return value


def _is_shaped(shape: torch.Size, wanted: tuple[int | str, ...]) -> bool:
    """Whether a shape is the wanted one; a name: any size there. A loop, as every call asks it of every tensor."""
    if len(shape) != len(wanted):
        return False
    for size, want in zip(shape, wanted, strict=False):  # noqa: SIM110 (`all` of a generator takes longer)
        if size != want and not isinstance(want, str):
            return False
    return True


def check_int(where: str, name: str, value: Any, least: int | None = None, most: int | None = None) -> int:
    """Check one integer argument, and return it."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"{where}: `{name}` must be an integer, got {value!r} ({type(value).__name__})")
    if least is not None and number < least:
        raise ValueError(f"{where}: `{name}` must be at least {least}, got {number}")
    if most is not None and number > most:
        raise ValueError(f"{where}: `{name}` must be at most {most}, got {number}")
    return number


def check_bytes(where: str, name: str, value: Any) -> int:
    """Check a size of the window, in bytes."""
    num_bytes = check_int(where, name, value, 0)
    if num_bytes > env.MOST_BYTES:
        raise ValueError(
            f"{where}: `{name}` must be at most {env.MOST_BYTES}, got {num_bytes}. The window grows by itself: "
            "pass what get_nvl_buffer_size_hint, get_rdma_buffer_size_hint or get_low_latency_rdma_size_hint say"
        )
    if num_bytes % 128:
        raise ValueError(f"{where}: `{name}` must be a multiple of 128, got {num_bytes}")
    return num_bytes


def check_secs(where: str, name: str, value: Any) -> float:
    """Check a limit in seconds; None: `DEEP_EP_TIMEOUT_SECS`."""
    if value is None:
        return env.TIMEOUT_SECS.get()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{where}: `{name}` must be a number of seconds, got {value!r} ({type(value).__name__})")
    if not value > 0:
        raise ValueError(f"{where}: `{name}` must be greater than 0, got {value}")
    if value > env.MOST_SECS:
        raise ValueError(
            f"{where}: `{name}` must be at most {env.MOST_SECS}, got {value}. Every wait has a limit; "
            f"pass {name}={env.MOST_SECS} for one that will not be met"
        )
    return float(value)


def check_shape(where: str, name: str, value: Any) -> torch.Size:
    """Check a shape."""
    if isinstance(value, str) or not hasattr(value, "__iter__"):
        raise TypeError(f"{where}: `{name}` must be a shape, got {value!r} ({type(value).__name__})")
    return torch.Size([check_int(where, name, size, 0, env.MOST_BYTES) for size in value])


def check_num_experts(where: str, name: str, num_experts: Any, num_ranks: int) -> int:
    """Check the number of experts, which is `name`, or its length."""
    num_experts = check_int(where, name, num_experts, 1)
    if num_experts % num_ranks:
        raise ValueError(
            f"{where}: `{name}`: the experts must be a multiple of the {num_ranks} ranks, there are {num_experts}"
        )
    if num_experts > MAX_EXPERTS:
        raise ValueError(
            f"{where}: `{name}`: at most {MAX_EXPERTS} experts, got {num_experts}. Split them over several buffers"
        )
    return num_experts


def check_payload(where: str, x: Any, device: torch.device) -> Payload:
    """Check `x`: a tensor, or a tuple of a tensor and its scales."""
    scales = None
    if isinstance(x, (tuple, list)):
        if len(x) != 2:
            raise TypeError(f"{where}: `x` must be a tensor or a tuple (x, scales), got {len(x)} items")
        x, scales = x
    x = check_tensor(where, "x", x, ("tokens", "hidden"), device=device)
    if x.shape[1] == 0:
        raise ValueError(f"{where}: `x` must have a hidden size of at least 1, its shape is {list(x.shape)}")
    if scales is not None:
        scales = check_tensor(where, "scales", scales, (x.size(0), "scales"), contiguous=False, device=device)
        if scales.size(1) == 0:
            raise ValueError(f"{where}: `scales` must have at least one column. Pass `x` alone where there are none")
    warn_of_lost_gradients(where, x, 2)
    return Payload(x, scales)


def warn_of_lost_gradients(where: str, x: torch.Tensor, depth: int = 1) -> None:
    """Warn, once for each method, that no gradient flows through a buffer, if autograd would follow `x`.

    Args:
        where: The method.
        x: What it was given.
        depth: How many functions were called since the method was, this one included.
    """
    if loses_gradients(x):
        _warn_of_lost_gradients(where, depth)


@functools.cache
def _warn_of_lost_gradients(where: str, depth: int) -> None:
    way = "Use `deep_ep.moe.dispatch` and `deep_ep.moe.combine`, which do; or pass"
    warnings.warn(
        f"Buffer.{where}: `x` requires gradients, and what the call returns does not: a buffer does not know autograd. "
        f"{'Pass' if where.startswith('low_latency') else way} `x.detach()`, if that is meant",
        UserWarning,
        stacklevel=depth + 4,  # the caller of the buffer's method, around which is `calling.call`
    )


def check_routing(
    where: str,
    num_tokens: int,
    num_ranks: int,
    num_tokens_per_rank: Any,
    is_token_in_rank: Any,
    num_tokens_per_expert: Any,
    topk_idx: Any,
    topk_weights: Any,
    device: torch.device,
    num_nodes: int = 1,
    num_tokens_per_rdma_rank: Any = None,
) -> Routing:
    """Check what a dispatch without a handle needs."""
    if (
        num_tokens_per_rank is None
        or is_token_in_rank is None
        or num_tokens_per_expert is None
        or (num_nodes > 1 and num_tokens_per_rdma_rank is None)
    ):
        layout = {
            "num_tokens_per_rank": num_tokens_per_rank,
            **({"num_tokens_per_rdma_rank": num_tokens_per_rdma_rank} if num_nodes > 1 else {}),
            "is_token_in_rank": is_token_in_rank,
            "num_tokens_per_expert": num_tokens_per_expert,
        }
        missing = ", ".join(f"`{name}`" for name, value in layout.items() if value is None)
        raise ValueError(f"{where}: without a handle, {missing} must be given. `get_dispatch_layout` makes them")
    per_rank = check_tensor(
        where, "num_tokens_per_rank", num_tokens_per_rank, (num_ranks,), (torch.int32,), device=device
    )
    per_node = None
    if num_nodes > 1:
        name = "num_tokens_per_rdma_rank"
        per_node = check_tensor(where, name, num_tokens_per_rdma_rank, (num_nodes,), (torch.int32,), device=device)
    shape = (num_tokens, num_ranks)
    mask = check_tensor(where, "is_token_in_rank", is_token_in_rank, shape, (torch.bool,), device=device)
    per_expert = check_tensor(
        where, "num_tokens_per_expert", num_tokens_per_expert, ("experts",), (torch.int32,), device=device
    )
    check_num_experts(where, "num_tokens_per_expert", per_expert.shape[0], num_ranks)
    if (topk_idx is None) != (topk_weights is None):
        raise ValueError(f"{where}: `topk_idx` and `topk_weights` must be given together, or neither")
    if topk_idx is not None:
        topk_idx = check_tensor(where, "topk_idx", topk_idx, (num_tokens, "top-k"), IDX_DTYPES, device=device)
        topk_weights = check_tensor(
            where, "topk_weights", topk_weights, (num_tokens, topk_idx.shape[1]), (torch.float32,), device=device
        )
    return Routing(per_rank, per_expert, mask, topk_idx, topk_weights, per_node)


def check_biases(where: str, bias: Any, like: torch.Tensor, num_tokens: int) -> list[torch.Tensor]:
    """Check `bias`: None, a tensor, or a pair of which either may be None. Returns those that are there.

    Args:
        where: The method.
        bias: What was passed.
        like: [n, H], whose H, dtype and device they must have.
        num_tokens: T.
    """
    if bias is None:
        return []
    if isinstance(bias, (tuple, list)):
        if len(bias) != 2:
            raise ValueError(f"{where}: `bias` must be a tensor or a pair of tensors, got {len(bias)} items")
        biases = list(bias)
    else:
        biases = [bias]
    shape = (num_tokens, like.size(1))
    return [
        check_tensor(where, "bias", one, shape, (like.dtype,), device=like.device) for one in biases if one is not None
    ]


def check_combine_rows(
    where: str, hidden: Any, dtype: torch.dtype | None, last_rows: tuple[int, torch.dtype] | None
) -> tuple[int, torch.dtype]:
    """Check hidden size and dtype of rows that will be combined; None: those of the last dispatch, if combine takes
    them.
    """
    if hidden is None and last_rows is None:
        raise ValueError(f"{where}: `hidden` must be given where no dispatch came before")
    last_hidden, last_dtype = last_rows or (0, torch.bfloat16)
    hidden = last_hidden if hidden is None else check_int(where, "hidden", hidden, 1, MOST_ROWS)
    dtype = dtype or (last_dtype if last_dtype in COMBINE_DTYPES else torch.bfloat16)
    if dtype not in COMBINE_DTYPES:
        raise ValueError(f"{where}: `dtype` must be one that combine takes, got {dtype}")
    return hidden, dtype


def check_config(where: str, config: Any) -> Config | None:
    """Check the `config` argument."""
    if config is not None and not isinstance(config, Config):
        raise TypeError(f"{where}: `config` must be a deep_ep.Config, got {type(config).__name__}")
    return config


def check_event(
    where: str, previous_event: Any, async_finish: bool, allocate_on_comm_stream: bool, *arguments: Any
) -> EventHandle | None:
    """Check the stream arguments.

    Args:
        where: The method.
        previous_event: What was passed.
        async_finish: What was passed.
        allocate_on_comm_stream: What was passed.
        arguments: Tensors, or tuples of them, or anything else, that the method will check next. Making a lazy one
            ordinary reads it, which has to come after `previous_event`: so the caller's stream waits for it here.

    Returns:
        The event to wait for, None where none was given.
    """
    if previous_event is not None and not isinstance(previous_event, (EventOverlap, EventHandle)):
        raise TypeError(f"{where}: `previous_event` must be an EventOverlap, got {type(previous_event).__name__}")
    if previous_event is None and not allocate_on_comm_stream:
        return None
    event = event_of(previous_event)
    assert not allocate_on_comm_stream or (event is not None and async_finish), (
        f"{where}: `allocate_on_comm_stream` needs a previous event and `async_finish=True`"
    )
    if event is not None and _has_lazy(arguments):
        event.current_stream_wait()
        return None  # the call then comes behind the caller's stream, on which the copies are made next
    return event


def _has_lazy(arguments: Iterable[Any]) -> bool:
    return any(_has_lazy(value) if isinstance(value, (tuple, list)) else is_lazy(value) for value in arguments)
