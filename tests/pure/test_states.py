"""The explorer of `soak --states`, the models in the sizes that take seconds, and defects that they must find."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from deep_ep.tools import cli
from deep_ep.tools.soak.states import command, low_latency, one_hop, two_hops
from deep_ep.tools.soak.states.explore import Label, Model, SearchResult, State, Step, Violation, explore, is_path
from deep_ep.tools.soak.states.low_latency import SILENT, LowLatencyModel
from deep_ep.tools.soak.states.one_hop import COMBINE, FULL, WORST_CASE, OneHopModel, draws, memories
from deep_ep.tools.soak.states.ranks import DIRECT, GIVE_UP, KILL, RAISE, DrawnCall
from deep_ep.tools.soak.states.steps import step_label
from deep_ep.tools.soak.states.suites import MODELS, SearchCase, cases_of
from deep_ep.tools.soak.states.two_hops import TwoHopsModel

# The explorer --------------------------------------------------------------------------------------------------------


class Locks:
    """Two ranks that each take two locks, in one order or in two; a state is how many each has taken, and who has them.

    Args:
        orders: For each rank the locks in its order.
        is_careless: A rank does not look whether a lock is taken.
    """

    name, num_ranks, num_calls = "locks", 2, 1

    def __init__(self, orders: tuple[tuple[int, int], tuple[int, int]], is_careless: bool = False):
        self._orders = orders
        self._is_careless = is_careless

    def initial(self) -> list[State]:
        return [(0, 0)]

    def held(self, state: State, rank: int) -> set[int]:
        return set(self._orders[rank][: state[rank]]) if state[rank] < 3 else set()

    def steps(self, state: State) -> Iterator[Step]:
        for rank in (0, 1):
            count = state[rank]
            if count == 3:
                continue
            after = (count + 1, state[1]) if rank == 0 else (state[0], count + 1)
            if count == 2:
                yield Label(rank, "release", 1), after
                continue
            lock = self._orders[rank][count]
            is_taken = lock in self.held(state, 1 - rank)
            if is_taken and not self._is_careless:
                continue
            yield Label(rank, f"take {lock}", 1), Violation("two ranks have a lock") if is_taken else after

    def blocked(self, state: State) -> list[str]:
        return [f"rank {rank} has taken {count}" for rank, count in enumerate(state) if count < 3]

    def check_end(self, state: State) -> None:
        if state != (3, 3):
            raise Violation("somebody has not ended")


def texts(result: SearchResult) -> list[str]:
    return [str(label) for label in result.path]


def test_all_states_are_seen_once() -> None:
    result = explore(Locks(((0, 1), (0, 1))))
    assert (result.verdict, result.num_states, result.depth) == ("holds", 12, 6)


def test_a_deadlock_is_found_by_a_shortest_path() -> None:
    result = explore(Locks(((0, 1), (1, 0))))
    assert result.violation == "nobody can go on: rank 0 has taken 1; rank 1 has taken 1"
    assert sorted(texts(result)) == ["rank 0: take 0 of call 1", "rank 1: take 1 of call 1"]


def test_a_step_that_must_not_be_is_the_last_of_its_path() -> None:
    result = explore(Locks(((0, 1), (0, 1)), is_careless=True))
    assert result.violation == "two ranks have a lock"
    assert texts(result) == ["rank 0: take 0 of call 1", "rank 1: take 0 of call 1"]


def test_a_search_that_is_cut_short_says_so() -> None:
    result = explore(Locks(((0, 1), (0, 1))), most_states=3)
    assert (result.verdict, result.is_complete) == ("holds so far", False)


def test_traces_are_interleaved() -> None:
    model, whole = Locks(((0, 1), (0, 1))), [("take 0", 1), ("take 1", 1), ("release", 1)]
    assert is_path(model, [whole, whole]) is None
    told = is_path(model, [whole, whole[:2]])
    assert told == ("no path of locks: rank 0 gets to its end (step 4 of 3); rank 1 gets to its end (step 3 of 2)")
    told = is_path(model, [[whole[1], whole[0], whole[2]], whole])
    assert told is not None
    assert "rank 0 gets to take 1 of call 1 (step 1 of 3)" in told


def test_steps_are_named_as_in_the_code() -> None:
    assert [step_label(step) for step in (1, 2, 3, 4, 5, 8)] == [
        "ANNOUNCED",
        "OFFERED",
        "READY(0)",
        "TAKEN(0)",
        "READY(1)",
        "TAKEN(2)",
    ]


# The models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_the_protocol_holds(name: str) -> None:
    for case in cases_of(name, 2, 1, is_quick=True):
        result = explore(case.make())
        assert result.violation is None, (case.title, texts(result))
        assert result.num_states > 1000, case.title


def find(model: Model) -> SearchResult:
    result = explore(model)
    assert result.violation is not None, "the defect is not found"
    assert result.path
    return result


@pytest.mark.parametrize("defect", one_hop.DEFECTS)
def test_defects_of_one_hop_are_found(defect: str) -> None:
    is_about_failure, is_about_leaving = "failure" in defect, "closed" in defect
    few = [memory for memory in memories(2) if not is_about_leaving or memory == (DIRECT, DIRECT)]
    calls = 1 if is_about_leaving else 3
    choices = [draws((FULL, WORST_CASE, COMBINE), few)] * calls
    find(OneHopModel(2, choices, (RAISE,) if is_about_failure else (), defect))


@pytest.mark.parametrize("defect", low_latency.DEFECTS)
def test_defects_of_low_latency_are_found(defect: str) -> None:
    is_about_masks = any(word in defect for word in ("mask", "said", "agreed", "verdict", "silence"))
    kinds, num_ranks = "cccc" if "slot" in defect else "dddddd", 2
    if "not in posts" in defect:
        kinds = "dd"
    elif "agreed" in defect:
        kinds = "dbd"
    elif "silence" in defect:
        kinds, num_ranks = "db", 3
    elif "at once" in defect or "verdict" in defect:
        kinds, num_ranks = "dd", 3
    faults = (SILENT, KILL) if is_about_masks else ()
    find(LowLatencyModel(num_ranks, [low_latency.KIND_OF[kind] for kind in kinds], faults, is_about_masks, defect))


@pytest.mark.parametrize("defect", two_hops.DEFECTS)
def test_defects_of_two_hops_are_found(defect: str) -> None:
    if defect in ("failure not looked at behind the sum", "caller does not wait for the comm stream"):
        kind = COMBINE if "sum" in defect else FULL
        model = TwoHopsModel(2, 1, [[DrawnCall(kind, (DIRECT, DIRECT))]], (GIVE_UP,), defect)
        model.waits_for_comm_stream = False  # nodes of one rank have no peer whose rows are summed and overwritten
        find(model)
        return
    choices = [draws((FULL, WORST_CASE), [(DIRECT, DIRECT)])]
    find(TwoHopsModel(2, 1, choices, (RAISE,) if "told" in defect else (), defect))


def test_a_defect_is_told_step_by_step() -> None:
    result = find(OneHopModel(2, [[DrawnCall(FULL, (DIRECT, DIRECT))]], (), "signal before data"))
    assert "rank 1: signal READY(0) of call 1" in texts(result)
    assert texts(result)[-1] == "rank 0: wait READY(0) of call 1"
    assert result.violation == "rank 0 ends call 1 well, with rows that are nobody's in its result"


# The command ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "cases_of", lambda *args: cases_of(*args, is_quick=True)[1:2])


@pytest.mark.usefixtures("_quick")
def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["soak", "--states", "low-latency"]) == 0
    title, *rows = capsys.readouterr().out.splitlines()
    assert title.split() == ["model", "what", "ranks", "calls", "states", "steps", "deepest", "seconds", "verdict"]
    assert [row.split()[-1] for row in rows] == ["holds"]


@pytest.mark.usefixtures("_quick")
def test_the_command_writes_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["soak", "--states", "two-hops", "--ranks-per-node", "1", "--json", str(tmp_path / "x.json")]) == 0
    rows = json.loads((tmp_path / "x.json").read_text())
    assert [(row["model"], row["num_ranks"], row["verdict"]) for row in rows] == [("two-hops", 2, "holds")]
    capsys.readouterr()
    assert cli.main(["soak", "--states", "low-latency", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["num_states"] > 1000


def test_the_command_shows_the_path_to_a_violation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = SearchCase("wrong", lambda: LowLatencyModel(2, [low_latency.DISPATCH], (), defect="signal before data"))
    monkeypatch.setattr(command, "cases_of", lambda *_: [wrong, wrong])
    assert cli.main(["soak", "--states", "low-latency"]) == 1
    out = capsys.readouterr().out
    assert "rank 0 ends call 1 with rows of rank 1 that are not those of the call, after 8 steps:" in out
    assert out.count("violated") == 1
    assert "  rank 1: publish of call 1" in out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["three-hops"], "--states must be one of one-hop, low-latency, two-hops or all, got three-hops"),
        (["all", "--ranks", "1"], "--states needs at least 2 --ranks, got 1"),
        (["two-hops", "--ranks", "3", "--ranks-per-node", "2"], "--ranks-per-node must divide the 3 ranks"),
        (["one-hop", "--ranks-per-node", "1"], "--ranks-per-node is for --states two-hops"),
        (["all", "--minutes", "1"], "--minutes makes real calls; leave it out with --states"),
        (["all", "--plan", "KILL"], "--plan makes real calls; leave it out with --states"),
        (["all", "--low-latency"], "--states needs no device. Leave --device and --low-latency out"),
    ],
)
def test_wrong_options(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["soak", "--states", *options]) == 2
    assert said in capsys.readouterr().err
