"""The time of a call from its work and eleven constants, each of which has a meaning.

    time = base + nodes [several nodes] + rank * R + expert * E + row * KB of a row + body + fill
    body = norm(link bytes, network bytes, SM work),  SM work = (token * KB of tokens + rows + KB of rows) of an SM
    fill = body * fill_us / (body + fill_us)

What runs beside each other overlaps: the norm (of order 3) of three times is hardly more than the largest of them, and
a little more where two are alike, as in real pipelines. `fill` is what a pipeline needs until it is full: nothing for a
call without rows, `fill_us` for a long one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .calls import Work

_ORDER = 3.0
_TINY_US = 1e-6
_STEP = 1e-4  # of the numerical derivative, in logarithms


class Constants(NamedTuple):
    """The constants of the model; all are positive.

    Attributes:
        base_us: What a call takes without rows.
        nodes_us: More, where ranks are on several nodes.
        rank_us: More, for each rank: counts and signals.
        expert_us: More, for each expert, in low latency.
        row_us: Passage of a single row, for each KB of it.
        fill_us: Until a long pipeline is full.
        link_share: Share of the nominal speed of the links inside a node that is reached.
        network_share: The same of the network.
        sm_token_us: An SM's time for each KB of the rank's own tokens.
        sm_row_us: An SM's time for each row.
        sm_KB_us: An SM's time for each KB of rows.
    """

    base_us: float
    nodes_us: float
    rank_us: float
    expert_us: float
    row_us: float
    fill_us: float
    link_share: float
    network_share: float
    sm_token_us: float
    sm_row_us: float
    sm_KB_us: float


NUM_CONSTANTS = len(Constants._fields)

# Where the fit starts, and how far (a factor, as a logarithm) a constant may differ before data must speak for it.
USUAL = Constants(10, 10, 0.3, 0.01, 0.3, 5, 0.6, 0.7, 0.03, 0.1, 0.03)
SPREAD = Constants(0.7, 0.7, 1, 1.5, 1, 1, 0.5, 0.5, 1, 1, 1)

BOUNDS = ("latency", "link", "network", "SMs")


def log_times(log_constants: np.ndarray, works: np.ndarray) -> np.ndarray:
    """The logarithm of the microseconds of calls.

    Args:
        log_constants: [11].
        works: [n, 9], `Work` of each call.
    """
    c = Constants(*np.exp(log_constants))
    w = Work(*works.T)
    body = _body(c, w)
    return np.log(_latency(c, w) + body + body * c.fill_us / (body + c.fill_us))


def slopes(log_constants: np.ndarray, works: np.ndarray, at: np.ndarray) -> np.ndarray:
    """The derivative of `log_times` by each logarithm: [n, 11]; `at` is its value here."""
    columns = []
    for index in range(NUM_CONSTANTS):
        moved = log_constants.copy()
        moved[index] += _STEP
        columns.append((log_times(moved, works) - at) / _STEP)
    return np.stack(columns, axis=1)


def _latency(c: Constants, w: Work) -> Any:
    return (
        c.base_us
        + c.nodes_us * w.is_multi_node
        + c.rank_us * w.num_ranks
        + c.expert_us * w.num_experts
        + c.row_us * w.row_KB
    )


def _parts(c: Constants, w: Work) -> tuple[Any, Any, Any]:
    sms = c.sm_token_us * w.sm_tokens_KB + c.sm_row_us * w.sm_rows + c.sm_KB_us * w.sm_rows_KB
    return w.link_us / c.link_share, w.network_us / c.network_share, sms


def _body(c: Constants, w: Work) -> Any:
    return (sum(part**_ORDER for part in _parts(c, w)) + _TINY_US**_ORDER) ** (1 / _ORDER)


def parts_of(constants: Constants, work: Work) -> dict[str, float]:
    """The microseconds of what may bound a call, by the names of `BOUNDS`."""
    latency, parts = _latency(constants, work), _parts(constants, work)
    return dict(zip(BOUNDS, (float(latency), *map(float, parts)), strict=True))
