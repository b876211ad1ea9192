"""`Config`: how many SMs and how large queues a call may use, and the defaults for every group size."""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass, fields

from deep_ep import env, sizing, tuning


@dataclass(frozen=True)
class Config:
    """Tuning of one `dispatch` or `combine`. Results never depend on it. Immutable, compared by value.

    Args:
        num_sms: SMs to use; two make a channel.
        num_max_nvl_chunked_send_tokens: tokens sent at once inside a node.
        num_max_nvl_chunked_recv_tokens: slots of a queue inside a node; more than are sent at once.
        num_max_rdma_chunked_send_tokens: tokens sent at once between nodes.
        num_max_rdma_chunked_recv_tokens: slots of a queue between nodes; at least twice what is sent at once.
            The attribute holds it rounded up to a multiple of `num_max_rdma_chunked_send_tokens`.

    Raises:
        TypeError: an argument is not an integer.
        ValueError: an argument is beyond its limit; the message names it, the limit and the value.
    """

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def __post_init__(self) -> None:
        for field in fields(self):
            # Tuning files bring NumPy integers too: keep plain ones, so that equality and repr stay simple.
            self._set(field.name, _integer("Config", field.name, getattr(self, field.name)))
        self._check_limits()
        rdma_send = self.num_max_rdma_chunked_send_tokens
        self._set("num_max_rdma_chunked_recv_tokens", sizing.align(self.num_max_rdma_chunked_recv_tokens, rdma_send))

    def _set(self, name: str, value: int) -> None:
        object.__setattr__(self, name, value)  # the class is frozen for everyone else

    def _check_limits(self) -> None:
        self._check_at_least("num_sms", 0)
        self._check_at_least("num_max_nvl_chunked_send_tokens", 1)
        self._check_at_least("num_max_rdma_chunked_send_tokens", 1)
        nvl_send, rdma_send = self.num_max_nvl_chunked_send_tokens, self.num_max_rdma_chunked_send_tokens
        self._check_at_least(
            "num_max_nvl_chunked_recv_tokens",
            nvl_send + 1,
            f"num_max_nvl_chunked_send_tokens ({nvl_send}) plus one",
        )
        self._check_at_least(
            "num_max_rdma_chunked_recv_tokens",
            2 * rdma_send,
            f"twice num_max_rdma_chunked_send_tokens ({rdma_send})",
        )

    def _check_at_least(self, name: str, limit: int, reason: str = "") -> None:
        value = getattr(self, name)
        if value < limit:
            because = f", {reason}" if reason else ""
            raise ValueError(f"Config: {name} must be at least {limit}{because}, got {value}")

    @property
    def num_channels(self) -> int:
        """Channels: one per two SMs, and always one."""
        return max(1, self.num_sms // 2)

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes to pass as `num_nvl_bytes` of a buffer.

        Args:
            hidden_bytes: bytes of one token's row.
            num_ranks: size of the group.

        Returns:
            Bytes, a multiple of 128.
        """
        return sizing.nvl_buffer_bytes(
            _integer("get_nvl_buffer_size_hint", "hidden_bytes", hidden_bytes),
            _integer("get_nvl_buffer_size_hint", "num_ranks", num_ranks),
            self.num_channels,
            self.num_max_nvl_chunked_recv_tokens,
        )

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes to pass as `num_rdma_bytes` of a buffer; 0 up to 8 ranks.

        Args:
            hidden_bytes: bytes of one token's row.
            num_ranks: size of the group.

        Returns:
            Bytes, a multiple of 128.
        """
        return sizing.rdma_buffer_bytes(
            _integer("get_rdma_buffer_size_hint", "hidden_bytes", hidden_bytes),
            _integer("get_rdma_buffer_size_hint", "num_ranks", num_ranks),
            self.num_channels,
            self.num_max_rdma_chunked_recv_tokens,
        )


# Group size -> the four chunk sizes of `Config`, ascending. The values are DeepEP's.
_DISPATCH_CHUNKS: dict[int, tuning.Chunks] = {
    2: (24, 256, 6, 128),
    4: (6, 256, 6, 128),
    8: (6, 256, 6, 128),
    16: (36, 288, 20, 128),
    24: (32, 288, 8, 128),
    32: (32, 288, 8, 128),
    48: (32, 288, 8, 128),
    64: (32, 288, 8, 128),
    96: (20, 480, 12, 128),
    128: (20, 560, 12, 128),
    144: (32, 720, 12, 128),
    160: (28, 720, 12, 128),
}
_COMBINE_CHUNKS: dict[int, tuning.Chunks] = {
    2: (10, 256, 6, 128),
    4: (9, 256, 6, 128),
    8: (4, 256, 6, 128),
    16: (4, 288, 12, 128),
    24: (1, 288, 8, 128),
    32: (1, 288, 8, 128),
    48: (1, 288, 8, 128),
    64: (1, 288, 8, 128),
    96: (1, 480, 8, 128),
    128: (1, 560, 8, 128),
    144: (2, 720, 8, 128),
    160: (2, 720, 8, 128),
}


def dispatch_config(num_ranks: int, num_sms: int) -> Config:
    """Return the default `Config` of `dispatch` for a group of `num_ranks`, whatever its size.

    A tuning file (`DEEP_EP_TUNING_FILE`) may say otherwise, also of `num_sms`.
    """
    return _default_config("dispatch_config", num_ranks, num_sms, env.TUNING_FILE.get())


def combine_config(num_ranks: int, num_sms: int) -> Config:
    """Return the default `Config` of `combine` for a group of `num_ranks`, as `dispatch_config` does of `dispatch`."""
    return _default_config("combine_config", num_ranks, num_sms, env.TUNING_FILE.get())


@functools.lru_cache(typed=True)  # True is as good a key as 1, and no number of ranks
def _default_config(where: str, num_ranks: int, num_sms: int, tuning_file: str) -> Config:
    """Take the row of the next larger listed size, or the last one."""
    num_ranks = _integer(where, "num_ranks", num_ranks)
    if num_ranks < 1:
        raise ValueError(f"{where}: num_ranks must be at least 1, got {num_ranks}")
    tuned = tuning.load_tuning(tuning_file)
    if where == "dispatch_config":
        table = {**_DISPATCH_CHUNKS, **tuned.dispatch_config}
    else:
        table = {**_COMBINE_CHUNKS, **tuned.combine_config}
    chunks = table[tuning.listed_size(table, num_ranks)]
    try:
        return Config(num_sms if tuned.num_sms is None else tuned.num_sms, *chunks)
    except ValueError as error:
        if not tuning_file:
            raise
        raise tuning.wrong_file(tuning_file, str(error)) from None


def _integer(where: str, name: str, value: object) -> int:
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"{where}: {name} must be an integer, got {value!r} ({type(value).__name__})")
    return number
