"""What ranks do in the benchmark of two hops: on the CPU its kernels run in Triton's interpreter, with tiny sizes."""

from __future__ import annotations

from multiprocessing import Pipe

import pytest

from deep_ep.kernels import _triton, relay
from deep_ep.launch import RankFailed, run_ranks
from deep_ep.tools import cli
from deep_ep.tools.bench.cases import Note
from deep_ep.tools.bench.core import FLOOR, ONE_HOP, PRODUCT
from deep_ep.tools.bench.hop_cases import HOP_CASES, HopMeasured, join_hop_cases, run_hop_cases
from deep_ep.tools.bench.inputs import Setting, draw
from deep_ep.tools.bench.internode import gpu_variables

NUM_TOKENS, HIDDEN, NUM_TOPK, NUM_EXPERTS = 4, 128, 2, 4
ROW, FP8_ROW = 2 * HIDDEN, HIDDEN + 4

needs_kernels = pytest.mark.skipif(not _triton.HAS_TRITON, reason="Triton is not installed")


@pytest.fixture(params=["message", "nvshmem"])
def transport(request: pytest.FixtureRequest, device: str) -> str:
    if request.param == "nvshmem":
        if device == "cpu":
            pytest.skip("NVSHMEM needs a GPU")
        from deep_ep.transport.nvshmem import is_built_in

        if not is_built_in():
            pytest.skip("torch comes without NVSHMEM")
    return request.param


def num_rounds(device: str) -> int:
    """A call takes a second in the interpreter, and a full dispatch five."""
    return 1 if device == "cpu" else 2


def names_of(device: str) -> tuple[str, ...]:
    return ("cached-fp8", "combine-window") if device == "cpu" else HOP_CASES


def setting(device: str, transport: str) -> Setting:
    sizes = (NUM_TOKENS, HIDDEN, NUM_TOPK, NUM_EXPERTS)
    return Setting(*sizes, num_rounds=num_rounds(device), device=device, num_sms=1, num_nodes=2, transport=transport)


def env(given: Setting, num_ranks: int) -> dict[str, str]:
    on_cpu = {"DEEP_EP_TRANSPORT": "interpreted", "TRITON_INTERPRET": "1"} if given.device == "cpu" else {}
    return {**gpu_variables(given, num_ranks, num_gpus=1), **on_cpu}


def tokens_to(given: Setting, source: int, num_ranks: int, ranks: range) -> int:
    """Tokens of a rank that go to one of some ranks."""
    owners = draw(given, source, given.device).topk_idx // (NUM_EXPERTS // num_ranks)
    return int(((owners >= ranks.start) & (owners < ranks.stop)).any(1).sum())


@needs_kernels
@pytest.mark.slow
@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_cases(device: str, transport: str, ranks_per_node: int) -> None:
    if device == "cpu" and ranks_per_node > 1:
        pytest.skip("it takes minutes in the interpreter")
    given, num_ranks, names = setting(device, transport), 2 * ranks_per_node, names_of(device)
    here, there = Pipe(duplex=False)
    with here, there:
        results: list[list[HopMeasured]] = run_ranks(
            run_hop_cases, num_ranks, given, names, there, 1 << 20, env=env(given, num_ranks)
        )
        notes = []
        while here.poll():
            notes.append(here.recv())
    assert notes == [Note(num_ranks, name, done) for name in names for done in range(1 + given.num_rounds)]
    parts = {name: [result[index] for result in results] for index, name in enumerate(names)}
    for name, of_ranks in parts.items():
        measured = join_hop_cases(2, name, of_ranks)
        assert (measured.num_ranks, measured.num_nodes) == (num_ranks, 2)
        assert set(measured.times) == {PRODUCT, ONE_HOP, FLOOR}
        assert all(len(times) == given.num_rounds for times_of in measured.times.values() for times in times_of)
    for rank in range(num_ranks):
        _check_bytes(given, rank, num_ranks, {name: of_ranks[rank] for name, of_ranks in parts.items()})


def _check_bytes(given: Setting, rank: int, num_ranks: int, parts: dict[str, HopMeasured]) -> None:
    """Floors, and what crossed, from the routes."""
    size = num_ranks // 2
    near = rank // size * size
    other = (rank + size) % num_ranks  # of this rail
    far = other // size * size
    num_rows = sum(tokens_to(given, source, num_ranks, range(rank, rank + 1)) for source in range(num_ranks))
    num_out = tokens_to(given, rank, num_ranks, range(far, far + size))
    num_in = tokens_to(given, other, num_ranks, range(near, near + size))
    record, ids = 4 * relay.relay_record_words(size, NUM_TOPK), NUM_TOPK * (8 + 4)
    dispatched, combined = (NUM_TOKENS + num_rows + 2 * arrived for arrived in (num_in, num_out))
    expected = {
        "cached-bf16": (dispatched * ROW, num_out * ROW, num_out * ROW),
        "dispatch-bf16": (dispatched * (ROW + ids), num_out * ROW, num_out * (ROW + record)),
        "cached-fp8": (dispatched * FP8_ROW, num_out * FP8_ROW, num_out * FP8_ROW),
        "combine-window": (combined * ROW, num_in * ROW, num_in * ROW),
    }
    for name, part in parts.items():
        seen = (part.measured.memory_bytes, part.traffic["needed"], part.traffic["rail"])
        assert seen == expected[name], name


@needs_kernels
@pytest.mark.slow
@pytest.mark.parametrize("what", ["two", "one"])
def test_wrong_rows_of_either_buffer_are_not_timed(device: str, what: str) -> None:
    given = setting(device, "message")
    here, there = Pipe(duplex=False)
    with here, there, pytest.raises(RankFailed, match=r"cached-bf16: what was delivered is wrong"):
        run_ranks(_run_with_wrong_rows, 2, given, there, what, env=env(given, 2))


def _run_with_wrong_rows(rank: int, num_ranks: int, given: Setting, news: object, what: str) -> None:
    from deep_ep.kernels.put import Put

    make, right = Put.__init__, Put.__call__

    def made(self, places, *rest) -> None:
        make(self, places, *rest)
        self.is_wrong = places.num_nodes == (2 if what == "two" else 1)

    def wrong(self, x, *rest) -> None:
        right(self, x.roll(1, 0) if self.is_wrong else x, *rest)

    Put.__init__, Put.__call__ = made, wrong
    run_hop_cases(rank, num_ranks, given, ["cached-bf16"], news, 1 << 20)


def test_what_cannot_be_met_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    on_gpu = ["--device", "cuda"]
    for words, said in (
        (["--transport", "nvshmem"], "--transport is for a GPU"),
        ([*on_gpu, "--link", "1gbit"], "--link is for the CPU"),
        ([*on_gpu, "--cases", "dispatch-fp8"], "dispatch-fp8 is no case here"),
        (["--cases", "cached-fp8"], "cached-fp8 is no case here"),
        ([*on_gpu, "--nodes", "1"], "--nodes must be at least 2"),
    ):
        assert cli.main(["bench", "internode", *words]) == 2
        assert said in capsys.readouterr().err
