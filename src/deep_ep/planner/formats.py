"""Bytes of a row on a link: values, scales, and what travels beside them."""

from __future__ import annotations

from ..sizing import CHANNELS_PER_SCALE, ceil_div

_SCALE_BYTES = 4
_ID_BYTES, _WEIGHT_BYTES = 8, 4  # int64 expert ids and FP32 weights of a token
_LOW_LATENCY_HEADER_BYTES = 16
# LogFMT: 10 bits a value, and the range of each 128 as two BF16 numbers.
_LOGFMT_BITS = 10

FORMATS = ("bf16", "fp8", "fp8-unscaled", "mxfp8", "int8", "nvfp4", "fp4", "logfmt")


def row_bytes(dtype: str, hidden: int) -> float:
    """Bytes of the values and scales of a row.

    Args:
        dtype: One of `FORMATS`: `fp8` and `logfmt` as DeepEP has them, with 4 bytes for each 128 channels; `mxfp8` and
            `fp4` with a byte for each 32; `nvfp4` with a byte for each 16; `int8` with 4 bytes a row.
        hidden: Channels.

    Raises:
        ValueError: There is no such format.
    """
    per_block = ceil_div(hidden, CHANNELS_PER_SCALE) * _SCALE_BYTES
    sizes = {
        "bf16": 2.0 * hidden,
        "fp8": hidden + per_block,
        "fp8-unscaled": hidden,
        "mxfp8": hidden + hidden / 32,
        "int8": hidden + _SCALE_BYTES,
        "nvfp4": hidden / 2 + hidden / 16,
        "fp4": hidden / 2 + hidden / 32,
        "logfmt": hidden * _LOGFMT_BITS / 8 + per_block,
    }
    if dtype not in sizes:
        raise ValueError(f"planner: there is no format {dtype!r} of rows. There are {', '.join(FORMATS)}")
    return sizes[dtype]


def metadata_bytes(mode: str, op: str, topk: int) -> int:
    """Bytes that travel beside a row: ids and weights of a full dispatch, the header of a low-latency one."""
    if op != "dispatch":
        return 0
    return _LOW_LATENCY_HEADER_BYTES if mode == "low_latency" else topk * (_ID_BYTES + _WEIGHT_BYTES)
