"""The rest of `deep_ep.utils`: `envs`, `refs`, `semantic`, and the names that only refuse.

One pair of processes runs everything that needs a group; each writes down what it saw, and the tests look at that.
"""

import contextlib
import gc
import io
import math
import os
import random
import socket
import subprocess
import sys
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

import deep_ep.event
import deep_ep.utils
import deep_ep.utils.event
from deep_ep.errors import EPUnsupported
from deep_ep.utils import comm, envs, find_pkgs, refs, semantic

# ---- names and imports


def test_events_are_reexported():
    for module in (deep_ep.utils, deep_ep.utils.event):
        assert module.EventHandle is deep_ep.event.EventHandle
        assert module.EventOverlap is deep_ep.event.EventOverlap


def test_importing_does_no_work():
    code = (
        "import torch, deep_ep.utils\n"
        "from deep_ep.utils import comm, envs, event, find_pkgs, gate, math, refs, semantic, testing\n"
        "assert not torch.cuda.is_initialized() and not torch.distributed.is_initialized()\n"
        "assert torch.get_default_dtype() == torch.float32 and torch.get_default_device().type == 'cpu'\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=60)


@pytest.mark.parametrize(
    "call",
    [
        lambda: comm.NCCLCommHandle(None, True),
        lambda: comm.get_nccl_comm_handle(None),
        lambda: comm.get_nccl_comm_handle(None, force_new_comm=True),
        comm.destroy_all_managed_nccl_comm,
        lambda: find_pkgs.find_pkg_root("nccl", lib_name=None, optional=True),
        find_pkgs.find_nccl_root,
        lambda: find_pkgs.find_nvshmem_root(optional=True),
    ],
)
def test_raw_communicators_and_libraries_are_refused(call):
    with pytest.raises(EPUnsupported, match=r"utils\.\w+\.\w+: .*\. \w+"):
        call()


# ---- semantic


def test_value_or():
    assert semantic.value_or(None, 3) == 3
    assert semantic.value_or(0, 3) == 0
    assert semantic.value_or("", "x") == ""


class Counter:
    def __init__(self):
        self.calls = []

    @semantic.weak_lru(maxsize=2)
    def square(self, x, scale=1):
        """Squared."""
        self.calls.append(x)
        return x * x * scale

    @semantic.weak_lru(typed=True)
    def name_of(self, x):
        return type(x).__name__


def test_weak_lru_caches_by_object_and_arguments():
    one, two = Counter(), Counter()
    assert [one.square(3), one.square(3), two.square(3), one.square(3, scale=2)] == [9, 9, 9, 18]
    assert one.calls == [3, 3]
    assert two.calls == [3]
    assert Counter.square.__doc__ == "Squared."


def test_weak_lru_evicts_the_least_recently_used():
    counter = Counter()
    for x in (1, 2, 1, 3, 1, 2):
        counter.square(x)
    assert counter.calls == [1, 2, 3, 2]


def test_weak_lru_typed():
    counter = Counter()
    assert [counter.name_of(1), counter.name_of(1.0)] == ["int", "float"]


def test_weak_lru_lets_the_object_die():
    counter = Counter()
    counter.square(3)
    seen = weakref.ref(counter)
    del counter
    gc.collect()
    assert seen() is None


# ---- envs in one process


@pytest.fixture
def _fresh_envs(monkeypatch):
    monkeypatch.setattr(envs, "_state", envs._State())
    envs.get_nvlink_gbs.cache_clear()
    envs._ibstat.cache_clear()
    yield
    envs.get_nvlink_gbs.cache_clear()
    envs._ibstat.cache_clear()


@pytest.mark.usefixtures("_fresh_envs")
def test_init_seed_without_a_group():
    assert (envs.get_global_seed(), envs.get_local_seed()) == (0, 0)
    envs.init_seed(41)
    assert (envs.get_global_seed(), envs.get_local_seed()) == (41, 41)
    drawn = torch.rand(4), random.random()
    envs.init_seed(41)
    assert torch.equal(torch.rand(4), drawn[0])
    assert random.random() == drawn[1]


@pytest.mark.usefixtures("_fresh_envs")
def test_dist_print_wants_init_dist_first():
    with pytest.raises(ValueError, match="init_dist"):
        envs.dist_print("too early")


def test_check_torch_deterministic():
    module = torch.utils.deterministic
    was = torch.are_deterministic_algorithms_enabled(), module.fill_uninitialized_memory
    try:
        for enabled, fill, fails in [(False, True, False), (True, False, False), (True, True, True)]:
            torch.use_deterministic_algorithms(enabled)
            module.fill_uninitialized_memory = fill
            with pytest.raises(AssertionError) if fails else contextlib.nullcontext():
                envs.check_torch_deterministic()
    finally:
        torch.use_deterministic_algorithms(was[0])
        module.fill_uninitialized_memory = was[1]


NVLINK_STATUS = """\
GPU 0: NVIDIA Something (UUID: GPU-0a)
\t Link 0: 26.5 GB/s
\t Link 1: <inactive>
\t Link 2: 13.5 GB/s
GPU 1: NVIDIA Something (UUID: GPU-0b)
\t Link 0: 26.5 GB/s
"""

IBSTAT = """\
CA 'mlx5_0'
\tCA type: MT4131
\tNumber of ports: 2
\tPort 1:
\t\tState: Active
\t\tRate: 400
\tPort 2:
\t\tState: Down
\t\tRate: 10
"""


def answer_with(monkeypatch, text, asked):
    def output_of(*command):
        asked.append(command)
        if isinstance(text, Exception):
            raise text
        return text

    monkeypatch.setattr(envs, "_output_of", output_of)


@pytest.mark.usefixtures("_fresh_envs")
def test_nvlink_gbs_of_the_first_gpu(monkeypatch):
    asked = []
    answer_with(monkeypatch, NVLINK_STATUS, asked)
    assert envs.get_nvlink_gbs() == pytest.approx(36)
    assert envs.get_nvlink_gbs(factor=1.0) == pytest.approx(40)
    assert envs.get_nvlink_gbs() == pytest.approx(36)
    assert asked == [("nvidia-smi", "nvlink", "-s")] * 2, "cached"


@pytest.mark.usefixtures("_fresh_envs")
@pytest.mark.parametrize("answer", ["", OSError("no such program"), subprocess.CalledProcessError(9, "nvidia-smi")])
def test_unknown_bandwidth_is_zero_and_said_so(monkeypatch, capsys, answer):
    answer_with(monkeypatch, answer, [])
    assert envs.get_nvlink_gbs() == 0
    assert "get_nvlink_gbs" in capsys.readouterr().out
    assert envs.get_rdma_gbs() == 0
    assert "get_rdma_gbs" in capsys.readouterr().out
    assert envs.check_fast_rdma_atomic_support() is False


@pytest.mark.usefixtures("_fresh_envs")
def test_rdma_probes(monkeypatch):
    asked = []
    monkeypatch.delenv("EP_NIC_NAME", raising=False)
    answer_with(monkeypatch, IBSTAT, asked)
    assert envs.get_rdma_gbs() == 50
    assert envs.check_fast_rdma_atomic_support() is True
    monkeypatch.setenv("EP_NIC_NAME", "mlx5_7")
    answer_with(monkeypatch, IBSTAT.replace("MT4131", "MT4129"), asked)
    assert envs.check_fast_rdma_atomic_support() is False
    assert envs.check_fast_rdma_atomic_support("mlx5_0") is True
    assert asked == [("ibstat", "mlx5_0"), ("ibstat", "mlx5_7")]


P2P_STATUS = """\
 \t\x1b[4mGPU0\tGPU1\tGPU2\x1b[0m
 GPU0\tX\tOK\tCNS
 GPU1\tOK\tX\tCNS
 GPU2\tCNS\tCNS\tX

Legend:

  X    = Self
  OK   = Status Ok
"""


def test_p2p_matrix():
    assert envs._p2p_matrix(P2P_STATUS) == {0: ["X", "OK", "CNS"], 1: ["OK", "X", "CNS"], 2: ["CNS", "CNS", "X"]}


@pytest.mark.parametrize(
    ("name", "gpus", "message"),
    [
        ("NVIDIA A100-PCIE-40GB", ["aa", "bb"], None),
        ("NVIDIA A100-PCIE-40GB", ["aa", "aa", "bb", "bb"], None),
        ("NVIDIA A100-PCIE-40GB", ["aa", "cc"], "no NVLink between"),
        ("NVIDIA A100-PCIE-40GB", ["aa", "bb", "cc"], "in pairs, the group has 3"),
        ("NVIDIA H200", ["aa", "bb", "cc"], None),
    ],
)
def test_check_nvlink_connections(monkeypatch, name, gpus, message):
    def gather(gathered, mine, group):
        gathered[:] = gpus

    def output_of(*command):
        return P2P_STATUS if "topo" in command else "0, GPU-aa\n1, GPU-bb\n2, GPU-cc\n"

    class Group:
        def size(self):
            return len(gpus)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(envs, "_gpu_id", lambda _: gpus[0])
    monkeypatch.setattr(envs, "_output_of", output_of)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    with pytest.raises(EPUnsupported, match=message) if message else contextlib.nullcontext():
        envs.check_nvlink_connections(Group())


@pytest.mark.parametrize(
    ("gpu_ids", "own_gpus"), [(["a", "b"], True), (["a", "a"], False), (["a", ""], False), (["", ""], False)]
)
def test_gpu_per_rank_is_judged_by_uuid(monkeypatch, gpu_ids, own_gpus):
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert envs._is_gpu_per_rank(gpu_ids) is own_gpus


# ---- refs in one process


def bf16(*values):
    return torch.tensor(values, dtype=torch.bfloat16)


def test_ordered_accumulate_rounds_once():
    # 257 is no bfloat16 (the neighbours are 256 and 258); in float32 the three terms make 258
    data = bf16(256, 1, 1).view(1, 3, 1)
    assert refs.ordered_accumulate(data).item() == 258
    assert refs.ordered_accumulate(data[:, :2]).item() == 256
    assert refs.ordered_accumulate(data[:, :2], initial_value=bf16(1).view(1, 1)).item() == 258


def test_ordered_accumulate_goes_in_ascending_order():
    # in float32 2**24 + 1 is 2**24 again
    assert refs.ordered_accumulate(bf16(2**24, 1, -(2**24)).view(1, 3, 1)).item() == 0
    assert refs.ordered_accumulate(bf16(2**24, -(2**24), 1).view(1, 3, 1)).item() == 1


def test_ordered_accumulate_leaves_its_inputs():
    data, start = torch.ones(2, 3, 4), torch.ones(2, 4)
    assert refs.ordered_accumulate(data, start).tolist() == torch.full((2, 4), 4.0).tolist()
    assert torch.equal(start, torch.ones(2, 4))


def test_grouped_reduce_of_worked_example():
    reduced = refs._grouped_reduce(bf16(1, 2, 4).view(1, 3, 1), torch.tensor([[7, 5, 7]]))
    assert reduced.flatten().tolist() == [0, 2, 5]


def combine_one(values, topk_idx, bias=None, reduce_in_local=False, reduce_in_scaleup=False):
    """One token, hidden 1, 8 experts on 2 nodes of 2 ranks: expert e on rank e // 2 and node e // 4."""
    y = bf16(*values).view(1, -1, 1)
    return refs.combine(y, torch.tensor([topk_idx]), 2, 2, 8, bias, reduce_in_local, reduce_in_scaleup).item()


def test_combine_rounds_where_it_is_told_to():
    values = (256, 1, 1)
    assert combine_one(values, [0, 1, 4]) == 258
    # rank 0 rounds 257 to 256, and 256 + 1 rounds to 256 again
    assert combine_one(values, [0, 1, 4], reduce_in_local=True) == 256
    # three ranks: nothing to add inside one
    assert combine_one(values, [0, 2, 4], reduce_in_local=True) == 258
    # experts 0 and 2 are on node 0
    assert combine_one(values, [0, 2, 4], reduce_in_local=True, reduce_in_scaleup=True) == 256
    assert combine_one(values, [0, 4, 6], reduce_in_local=True, reduce_in_scaleup=True) == 258


def test_combine_puts_a_group_at_its_last_column():
    values = (2**24, 1, -(2**24))
    assert combine_one(values, [0, 4, 2]) == 0
    assert combine_one(values, [0, 4, 1], reduce_in_local=True) == 1
    assert combine_one(values, [0, 4, 2], reduce_in_scaleup=True) == 1


def test_combine_skips_negative_ids_and_starts_from_the_biases():
    assert combine_one((3, 100, 4), [5, -1, 0], reduce_in_local=True, reduce_in_scaleup=True) == 7
    one = bf16(1).view(1, 1)
    assert combine_one((256,), [0], bias=one) == 256
    assert combine_one((256,), [0], bias=(one, one)) == 258
    assert combine_one((256,), [0], bias=(one, None)) == 256
    assert combine_one((5, 5), [-1, -1], bias=one) == 1


def combine_slowly(y, topk_idx, num_scaleup_ranks, num_local_experts, bias, by_rank, by_node):
    """SPEC 5.7 read literally: lists of (column, value), grouped by dictionaries."""

    def rounded(value):
        return value.to(torch.bfloat16).float()

    def reduce(terms, key_of):
        groups = {}
        for k, value in terms:
            _, total = groups.get(key_of(k), (None, torch.zeros_like(value)))
            groups[key_of(k)] = (k, total + value)
        return sorted((k, rounded(total)) for k, total in groups.values())

    rows = []
    for t, ids in enumerate(topk_idx.tolist()):
        terms = [(k, y[t, k].float()) for k, e in enumerate(ids) if e >= 0]
        if by_rank:
            terms = reduce(terms, lambda k, ids=ids: ids[k] // num_local_experts)
        if by_node:
            terms = reduce(terms, lambda k, ids=ids: ids[k] // num_local_experts // num_scaleup_ranks)
        total = bias[t].float()
        for _, value in terms:
            total = total + value
        rows.append(total.to(torch.bfloat16))
    return torch.stack(rows)


@pytest.mark.parametrize("by_rank", [False, True])
@pytest.mark.parametrize("by_node", [False, True])
def test_combine_against_the_definition(by_rank, by_node):
    torch.manual_seed(3)
    y = torch.randn(40, 6, 8).to(torch.bfloat16)
    topk_idx = torch.rand(40, 24).topk(6, dim=1).indices.masked_fill(torch.rand(40, 6) < 0.2, -1)
    bias = torch.randn(40, 8).to(torch.bfloat16)
    expected = combine_slowly(y, topk_idx, 3, 4, bias, by_rank, by_node)
    assert torch.equal(refs.combine(y, topk_idx, 2, 3, 24, bias, by_rank, by_node), expected)


# ---- two ranks

SEED = 5
TOPK_IDX = [[[0, 1], [0, 2], [3, -1]], [[2, 3], [1, 3]]]
"""For each rank, its tokens' experts: 4 experts on 2 ranks."""
EXPECTED_DISPATCH = [
    {"idx": [[0, 1], [0, -1], [1, -1]], "src": [0, 1, 5], "counts": [2, 1]},
    {"idx": [[-1, 0], [1, -1], [0, 1], [-1, 1]], "src": [1, 2, 4, 5], "counts": [2, 2]},
]


def plain(value):
    """Tensors as lists, whatever device they are on."""
    if isinstance(value, torch.Tensor):
        return value.float().tolist() if value.is_floating_point() else value.tolist()
    return value


def see_defaults(seen, rank, num_ranks, group):
    seen["ranks"] = (rank, num_ranks, dist.get_rank(group), group.size())
    seen["defaults"] = (torch.get_default_dtype(), torch.get_default_device().type, torch.cuda.is_available())
    seen["seeds"] = (envs.get_global_seed(), envs.get_local_seed())
    seen["draw"] = plain(torch.rand(3)), random.random()
    seen["domains"] = (envs.get_physical_domain_size(group), envs.get_logical_domain_size(group))


def see_collectives(seen, rank, group):
    mine = torch.full((2,), rank + 1.0)
    reduced = mine.clone()
    dist.all_reduce(reduced, group=group)
    parts = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(parts, mine, group=group)
    gathered = torch.empty(4)
    dist.all_gather_into_tensor(gathered, mine, group=group)
    exchanged = torch.empty(2)
    dist.all_to_all_single(exchanged, torch.tensor([10.0 * rank, 10.0 * rank + 1]), group=group)
    dist.barrier(group=group)
    group.barrier().wait()
    seen["collectives"] = [plain(t) for t in (reduced, torch.cat(parts), gathered, exchanged)]


def see_prints(seen):
    for once in (False, True):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            envs.dist_print("hello", once_in_node=once)
        seen["print", once] = out.getvalue()


def see_dispatch(seen, rank):
    topk_idx = torch.tensor(TOPK_IDX[rank])
    num_tokens = topk_idx.size(0)
    tokens = torch.arange(num_tokens) + 10 * rank
    x = tokens.to(torch.bfloat16).unsqueeze(1).repeat(1, 4)
    weights = torch.stack((tokens + 0.25, tokens + 0.5), dim=1).float()
    seen["dispatch"] = [plain(t) for t in refs.dispatch(x, topk_idx, weights, 4, 4)]

    # the scales column by column, as a caller may have them
    quantized = x.to(torch.float8_e4m3fn), torch.stack((tokens, -tokens)).float().t()
    recv_x, recv_idx, *_, recv_src, recv_counts = refs.dispatch(quantized, topk_idx.int(), weights, 4, 4)
    seen["fp8"] = [plain(t) for t in recv_x]
    seen["dtypes"] = [t.dtype for t in (*recv_x, recv_idx, recv_src, recv_counts)]

    nothing = refs.dispatch(x, torch.full_like(topk_idx, 2), weights, 4, 4)
    seen["one side"] = [tuple(t.shape) for t in nothing]


def see_pre_combine_data(seen):
    whole = refs.generate_pre_combine_data(torch.arange(8), 4, 2, 37)
    seen["data"] = (whole.dtype, tuple(whole.shape), whole[5, 1, 2].item())
    picked = torch.tensor([6, 1, 5], dtype=torch.int32)
    seen["data of a token"] = torch.equal(refs.generate_pre_combine_data(picked, 4, 2, 37), whole[picked])
    seen["distinct"] = whole[:, :, 0].unique().numel()


def see_stacked_gathers(seen, rank, group):
    """DeepEP's scripts gather [T, K] into [R, T, K]."""
    stacked = torch.empty(2, 3, 2, dtype=torch.int64)
    dist.all_gather_into_tensor(stacked, torch.full((3, 2), rank), group=group)
    seen["stacked"] = stacked.tolist()


def rank_main(local_rank, port, folder):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE="1", RANK="0")
    torch.set_num_threads(1)
    rank, num_ranks, group = envs.init_dist(local_rank, 2, seed=SEED)
    seen = {}
    see_defaults(seen, rank, num_ranks, group)
    see_collectives(seen, rank, group)
    see_stacked_gathers(seen, rank, group)
    see_prints(seen)
    see_dispatch(seen, rank)
    see_pre_combine_data(seen)
    torch.save(seen, os.path.join(folder, f"{rank}.pt"))
    dist.barrier()
    dist.destroy_process_group()


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("ranks"))
    torch.multiprocessing.spawn(rank_main, (free_port(), folder), nprocs=2)
    return [torch.load(os.path.join(folder, f"{rank}.pt"), weights_only=False) for rank in range(2)]


def test_init_dist_ranks_and_defaults(two_ranks):
    for rank, seen in enumerate(two_ranks):
        assert seen["ranks"] == (rank, 2, rank, 2)
        dtype, device, has_gpu = seen["defaults"]
        assert dtype == torch.bfloat16
        assert device == ("cuda" if has_gpu else "cpu")
        assert seen["domains"] == ((1, 2), (1, 2))


def test_init_dist_seeds_each_rank_by_itself(two_ranks):
    assert [seen["seeds"] for seen in two_ranks] == [(SEED, SEED), (SEED, SEED + 1)]
    assert two_ranks[0]["draw"] != two_ranks[1]["draw"]
    assert two_ranks[0]["draw"][1] == random.Random(SEED).random()


def test_group_of_init_dist_has_the_collectives(two_ranks):
    assert two_ranks[0]["collectives"] == [[3, 3], [1, 1, 2, 2], [1, 1, 2, 2], [0, 10]]
    assert two_ranks[1]["collectives"] == [[3, 3], [1, 1, 2, 2], [1, 1, 2, 2], [1, 11]]


def test_gathers_into_stacked_tensors(two_ranks):
    for seen in two_ranks:
        assert seen["stacked"] == [[[0, 0]] * 3, [[1, 1]] * 3]


def test_dist_print_on_all_ranks_or_one_of_a_node(two_ranks):
    assert [seen["print", False] for seen in two_ranks] == ["hello\n", "hello\n"]
    assert [seen["print", True] for seen in two_ranks] == ["hello\n", ""]


@pytest.mark.parametrize("rank", [0, 1])
def test_reference_dispatch(two_ranks, rank):
    recv_x, recv_idx, recv_weights, recv_src, recv_counts = two_ranks[rank]["dispatch"]
    expected = EXPECTED_DISPATCH[rank]
    assert recv_idx == expected["idx"]
    assert recv_src == expected["src"]
    assert recv_counts == expected["counts"]
    values = [10 * (src // 4) + src % 4 for src in expected["src"]]
    assert recv_x == [[value] * 4 for value in values]
    assert recv_weights == [[value + 0.25, value + 0.5] for value in values], "not masked"


@pytest.mark.parametrize("rank", [0, 1])
def test_reference_dispatch_of_fp8_with_scales(two_ranks, rank):
    values = [10 * (src // 4) + src % 4 for src in EXPECTED_DISPATCH[rank]["src"]]
    assert two_ranks[rank]["fp8"] == [[[value] * 4 for value in values], [[value, -value] for value in values]]
    assert two_ranks[rank]["dtypes"] == [torch.float8_e4m3fn, torch.float32, torch.int32, torch.int32, torch.int32]


def test_reference_dispatch_of_nothing_to_one_side(two_ranks):
    assert two_ranks[0]["one side"] == [(0, 4), (0, 2), (0, 2), (0,), (2,)]
    assert two_ranks[1]["one side"] == [(5, 4), (5, 2), (5, 2), (5,), (2,)]


def test_pre_combine_data_of_worked_example(two_ranks):
    # s = 5 * 2 + 1 = 11 of S = 2 * 4 * 2 = 16; 131071 is -1 mod 16, so the rate is (5 + 1) / 16
    expected = math.sin(6 / 16 * 3 + math.sin(SEED))
    for seen in two_ranks:
        dtype, shape, value = seen["data"]
        assert dtype == torch.bfloat16
        assert shape == (8, 2, 37)
        assert value == torch.tensor(expected).to(torch.bfloat16).item()
        assert seen["data of a token"], "the row depends on the token alone, not on its place"
        assert seen["distinct"] > 8, "tokens and columns differ"
