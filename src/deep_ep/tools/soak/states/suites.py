"""What is explored: which models, of which sizes, with which calls and faults."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from . import low_latency
from .explore import Model
from .low_latency import SILENT, LowLatencyModel
from .one_hop import COMBINE, FULL, KINDS, WORST_CASE, OneHopModel, draws, memories
from .ranks import DIRECT, FAULTS, POSTED, STAGED, DrawnCall
from .two_hops import TwoHopsModel, two_hop_memories

MODELS = ("one-hop", "low-latency", "two-hops")

# A cached dispatch takes the steps of a worst-case one whose rows fit, so inside a node it is explored with that.
_NODE_KINDS = (FULL, WORST_CASE, COMBINE)


FAULTS_OF_MASKS = (*low_latency.FAULTS, SILENT)


class SearchCase(NamedTuple):
    """One exploration.

    Attributes:
        title: What is explored, for a table.
        make: Makes the model.
    """

    title: str
    make: Callable[[], Model]


def cases_of(name: str, num_ranks: int, ranks_per_node: int, is_quick: bool = False) -> list[SearchCase]:
    """The explorations of a model.

    Args:
        name: One of `MODELS`.
        num_ranks: R.
        ranks_per_node: P, across nodes.
        is_quick: Only those that take a few seconds each with 2 ranks: what the tests run.
    """
    if name == "one-hop":
        return _one_hop(num_ranks, is_quick)
    if name == "low-latency":
        return _low_latency(num_ranks, is_quick)
    return _two_hops(num_ranks, ranks_per_node, is_quick)


def _one_hop(num_ranks: int, is_quick: bool) -> list[SearchCase]:
    first, others = memories(num_ranks, is_first=True), memories(num_ranks)
    # Rows of all posted, of all straight, of one staged: enough to come behind a call that went wrong.
    few = [(POSTED,) * num_ranks, (DIRECT,) * num_ranks, (STAGED, *[DIRECT] * (num_ranks - 1))]
    most_calls = 3 if num_ranks == 2 else 2
    whole = [draws(_NODE_KINDS, first), *[draws(_NODE_KINDS, others)] * (most_calls - 1)]
    if is_quick:
        whole[-1] = draws((FULL, COMBINE), few)
    refused = [[one._replace(is_refused=True) for one in draws((FULL, COMBINE), few)], draws((FULL,), few)]
    cases = [
        SearchCase("any calls", lambda: OneHopModel(num_ranks, whole, ())),
        SearchCase("a call that all refuse first", lambda: OneHopModel(num_ranks, refused, ())),
    ]
    faulty = [draws(_NODE_KINDS, first), draws((FULL, COMBINE), few)]
    if num_ranks == 2 and not is_quick:
        faulty = whole[:2]
    elif num_ranks > 2:
        faulty = [draws(_NODE_KINDS, first)]
        small = [draws((FULL, COMBINE), few), draws((FULL,), few[:1])]
        cases.append(SearchCase("one fault anywhere, then posted", lambda: OneHopModel(num_ranks, small)))
    cases.append(SearchCase("one fault anywhere", lambda: OneHopModel(num_ranks, faulty)))
    if num_ranks == 2:
        # Three calls, the one in the middle with a single wait: the furthest that ranks can be apart.
        posted = [draws((FULL, COMBINE), few), draws((FULL,), few[:1]), draws((FULL, COMBINE), few)]
        cases.append(SearchCase("one fault anywhere, posted between", lambda: OneHopModel(num_ranks, posted)))
    return cases


def _low_latency(num_ranks: int, is_quick: bool) -> list[SearchCase]:
    def case(title: str, kinds: str, faults: tuple[str, ...], can_mask: bool = False) -> SearchCase:
        calls = [low_latency.KIND_OF[letter] for letter in kinds]
        return SearchCase(title, lambda: LowLatencyModel(num_ranks, calls, faults, can_mask))

    # One more than there are sets, or slots, so that one is written again.
    is_short = is_quick or num_ranks > 2
    cases = [
        case("two dispatches in flight", "ddddd" if is_short else "dddddd", ()),
        case("two micro-batches", "ddccd" if is_short else "ddccddcc", ()),
        case("combines in a row", "cccc", ()),
        case("two in flight, one fault", "dddd" if is_short else "ddddd", low_latency.FAULTS),
        case("two in flight, one fault, masks", "ddc" if num_ranks == 2 else "dd", FAULTS_OF_MASKS, True),
        case("a rank leaves and comes back", "dbd" if num_ranks == 2 else "db", (SILENT,), True),
    ]
    if not is_quick and num_ranks == 2:
        cases += [
            case("two micro-batches, one fault", "ddccd", low_latency.FAULTS),
            case("two micro-batches, one fault, masks", "ddcc", FAULTS_OF_MASKS, True),
            case("a rank leaves and comes back, twice", "dbdb", (SILENT,), True),
        ]
    return cases


def _two_hops(num_ranks: int, ranks_per_node: int, is_quick: bool) -> list[SearchCase]:
    def case(
        title: str, choices: list[list[DrawnCall]], faults: tuple[str, ...] = (), num_chunks: int = 2
    ) -> SearchCase:
        return SearchCase(title, lambda: TwoHopsModel(num_ranks, ranks_per_node, choices, faults, None, num_chunks))

    straight = [(DIRECT,) * num_ranks]
    if num_ranks == 2:
        ways = two_hop_memories(num_ranks)
        cases = [
            case("any call, one fault", [draws(KINDS, ways)], FAULTS),
            case("two calls", [draws(KINDS, straight), draws(KINDS, ways)]),
        ]
        if not is_quick:
            cases.append(case("two calls, one fault", [draws(KINDS, ways)] * 2, FAULTS))
        return cases
    staged = [(STAGED, *[DIRECT] * (num_ranks - 1))]
    return [
        *(case(f"{kind}, no fault", [draws((kind,), straight + staged)], (), 1) for kind in KINDS),
        *(case(f"{kind}, one fault", [draws((kind,), straight)], FAULTS, 1) for kind in KINDS),
    ]
