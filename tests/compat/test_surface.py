"""Names, signatures and attributes that DeepEP's callers rely on."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deep_ep
from common import OneRank, run_ranks
from deep_ep import Buffer, Config, EPError, EPUnsupported, EventHandle, EventOverlap

pytestmark = pytest.mark.usefixtures("device")

REQUIRED = inspect.Parameter.empty


def parameters(function: Callable, kind: Any = inspect.Parameter.POSITIONAL_OR_KEYWORD) -> list[tuple[str, Any]]:
    """Name and default of every parameter of a kind, in order, without `self`."""
    found = inspect.signature(function).parameters.values()
    return [(one.name, one.default) for one in found if one.kind is kind and one.name != "self"]


def required(*names: str) -> list[tuple[str, Any]]:
    return [(name, REQUIRED) for name in names]


# Importable names ----------------------------------------------------------------------------------------------------

NAMES = {
    "deep_ep": [
        "Buffer",
        "Config",
        "EPHandle",
        "ElasticBuffer",
        "EventHandle",
        "EventOverlap",
        "__version__",
        "get_logical_domain_size",
        "get_physical_domain_size",
        "topk_idx_t",
    ],
    "deep_ep.buffers.elastic": ["EPHandle", "ElasticBuffer"],
    "deep_ep.buffers.legacy": ["Buffer"],
    "deep_ep.buffer": ["Buffer"],
    "deep_ep_cpp": ["Config", "EventHandle", "topk_idx_t"],
    "deep_ep._C": [
        "Config",
        "EventHandle",
        "get_low_latency_rdma_size_hint",
        "init_jit",
        "is_sm90_compiled",
        "topk_idx_t",
    ],
    "deep_ep.utils": ["EventHandle", "EventOverlap"],
    "deep_ep.utils.event": ["EventHandle", "EventOverlap"],
    "deep_ep.utils.comm": ["NCCLCommHandle", "destroy_all_managed_nccl_comm", "get_nccl_comm_handle"],
    "deep_ep.utils.envs": [
        "check_fast_rdma_atomic_support",
        "check_nvlink_connections",
        "check_torch_deterministic",
        "dist_print",
        "get_global_seed",
        "get_local_seed",
        "get_logical_domain_size",
        "get_nvlink_gbs",
        "get_physical_domain_size",
        "get_rdma_gbs",
        "init_dist",
        "init_seed",
    ],
    "deep_ep.utils.find_pkgs": ["find_nccl_root", "find_nvshmem_root", "find_pkg_root"],
    "deep_ep.utils.gate": [
        "generate_rank_count",
        "generate_topk_idx",
        "get_precise_unbalanced_scores",
        "get_random_unbalanced_scores",
        "get_scores_by_factor",
        "get_unbalanced_scores",
        "map_unbalanced_ratio_to_factor",
    ],
    "deep_ep.utils.math": [
        "align",
        "calc_diff",
        "ceil_div",
        "count_bytes",
        "create_grouped_scores",
        "hash_tensor",
        "hash_tensors",
        "inplace_unique",
        "per_token_cast_back",
        "per_token_cast_to_fp8",
        "safe_div",
    ],
    "deep_ep.utils.refs": ["combine", "dispatch", "generate_pre_combine_data", "ordered_accumulate"],
    "deep_ep.utils.semantic": ["value_or", "weak_lru"],
    "deep_ep.utils.testing": ["bench", "bench_kineto", "empty_suppress", "flush_l2_cache", "suppress_stdout_stderr"],
}


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in NAMES.items() for name in names])
def test_a_name_is_importable(module: str, name: str):
    assert getattr(importlib.import_module(module), name) is not None


def test_modules_are_attributes_of_the_package():
    """Behind `import deep_ep` alone, in a process that has imported nothing else of it."""
    named = [name.removeprefix("deep_ep.") for name in NAMES if name.startswith("deep_ep.")]
    program = f"import deep_ep, operator\nfor name in {named}: operator.attrgetter(name)(deep_ep)"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("name", ["find_cuda_home", "check_nccl_so", "init_jit"])
def test_plumbing_of_the_package_is_importable(name: str):
    assert callable(getattr(deep_ep, name))


def test_one_thing_has_one_identity_under_all_its_names():
    for module, name in [(module, name) for module, names in NAMES.items() for name in names]:
        if name in deep_ep.__all__:
            assert getattr(importlib.import_module(module), name) is getattr(deep_ep, name), f"{module}.{name}"


@pytest.mark.parametrize("name", ["EPBuffer", "HybridEPBuffer", "ReductionMode"])
def test_a_name_that_callers_probe_for_is_absent(name: str):
    with pytest.raises(ImportError):
        exec(f"from deep_ep import {name}", {})
    assert not hasattr(deep_ep, name)


def test_version_and_id_type():
    assert tuple(int(part) for part in deep_ep.__version__.split(".")[:2]) >= (0, 1)
    assert deep_ep.topk_idx_t is torch.int64


def test_errors_of_the_world_are_runtime_errors():
    assert issubclass(EPError, RuntimeError)
    for name in ("EPTimeout", "EPTransportError", "EPUnsupported", "EPClosed"):
        assert issubclass(getattr(deep_ep, name), EPError)


# Signatures ----------------------------------------------------------------------------------------------------------

EVENT_ARGUMENTS = [("previous_event", None), ("async_finish", False), ("allocate_on_comm_stream", False)]
SIZE_HINT = required("num_max_dispatch_tokens_per_rank", "hidden", "num_ranks", "num_experts")
SIGNATURES: dict[str, tuple[Callable, list[tuple[str, Any]]]] = {
    "Buffer": (
        Buffer.__init__,
        [
            ("group", REQUIRED),
            ("num_nvl_bytes", 0),
            ("num_rdma_bytes", 0),
            ("low_latency_mode", False),
            ("num_qps_per_rank", 24),
            ("allow_nvlink_for_low_latency_mode", True),
            ("allow_mnnvl", False),
            ("explicitly_destroy", False),
            ("enable_shrink", False),
            ("comm", None),
        ],
    ),
    "set_num_sms": (Buffer.set_num_sms, required("new_num_sms")),
    "is_sm90_compiled": (Buffer.is_sm90_compiled, []),
    "capture": (Buffer.capture, []),
    "get_low_latency_rdma_size_hint": (Buffer.get_low_latency_rdma_size_hint, SIZE_HINT),
    "get_dispatch_config": (Buffer.get_dispatch_config, required("num_ranks")),
    "get_combine_config": (Buffer.get_combine_config, required("num_ranks")),
    "_unpack_bias": (Buffer._unpack_bias, required("bias")),
    "destroy": (Buffer.destroy, []),
    "get_comm_stream": (Buffer.get_comm_stream, []),
    "get_local_buffer_tensor": (
        Buffer.get_local_buffer_tensor,
        [*required("dtype"), ("size", None), ("offset", 0), ("use_rdma_buffer", False)],
    ),
    "get_dispatch_layout": (Buffer.get_dispatch_layout, [*required("topk_idx", "num_experts"), *EVENT_ARGUMENTS]),
    "dispatch": (
        Buffer.dispatch,
        [
            ("x", REQUIRED),
            ("handle", None),
            ("num_tokens_per_rank", None),
            ("num_tokens_per_rdma_rank", None),
            ("is_token_in_rank", None),
            ("num_tokens_per_expert", None),
            ("topk_idx", None),
            ("topk_weights", None),
            ("expert_alignment", 1),
            ("num_worst_tokens", 0),
            ("config", None),
            *EVENT_ARGUMENTS,
        ],
    ),
    "combine": (
        Buffer.combine,
        [*required("x", "handle"), ("topk_weights", None), ("bias", None), ("config", None), *EVENT_ARGUMENTS],
    ),
    "low_latency_dispatch": (
        Buffer.low_latency_dispatch,
        [
            *required("x", "topk_idx", "num_max_dispatch_tokens_per_rank", "num_experts"),
            ("cumulative_local_expert_recv_stats", None),
            ("dispatch_wait_recv_cost_stats", None),
            ("use_fp8", True),
            ("round_scale", False),
            ("use_ue8m0", False),
            ("async_finish", False),
            ("return_recv_hook", False),
        ],
    ),
    "low_latency_combine": (
        Buffer.low_latency_combine,
        [
            *required("x", "topk_idx", "topk_weights", "handle"),
            ("use_logfmt", False),
            ("zero_copy", False),
            ("async_finish", False),
            ("return_recv_hook", False),
            ("out", None),
            ("combine_wait_recv_cost_stats", None),
        ],
    ),
    "get_next_low_latency_combine_buffer": (Buffer.get_next_low_latency_combine_buffer, required("handle")),
    "clean_low_latency_buffer": (
        Buffer.clean_low_latency_buffer,
        required("num_max_dispatch_tokens_per_rank", "hidden", "num_experts"),
    ),
    "low_latency_update_mask_buffer": (
        Buffer.low_latency_update_mask_buffer,
        [("rank_to_mask", REQUIRED), ("mask", False)],
    ),
    "low_latency_query_mask_buffer": (Buffer.low_latency_query_mask_buffer, required("mask_status")),
    "low_latency_clean_mask_buffer": (Buffer.low_latency_clean_mask_buffer, []),
    "Config": (
        Config,
        [
            ("num_sms", 20),
            ("num_max_nvl_chunked_send_tokens", 6),
            ("num_max_nvl_chunked_recv_tokens", 256),
            ("num_max_rdma_chunked_send_tokens", 6),
            ("num_max_rdma_chunked_recv_tokens", 256),
        ],
    ),
    "get_nvl_buffer_size_hint": (Config.get_nvl_buffer_size_hint, required("hidden_bytes", "num_ranks")),
    "get_rdma_buffer_size_hint": (Config.get_rdma_buffer_size_hint, required("hidden_bytes", "num_ranks")),
    "EventHandle.current_stream_wait": (EventHandle.current_stream_wait, []),
    "EventOverlap": (EventOverlap, [("event", None), ("extra_tensors", None)]),
    "EventOverlap.current_stream_wait": (EventOverlap.current_stream_wait, [("release_handle", False)]),
    "EventOverlap.__call__": (EventOverlap.__call__, [("release_handle", False)]),
    "get_physical_domain_size": (deep_ep.get_physical_domain_size, required("group")),
    "get_logical_domain_size": (
        deep_ep.get_logical_domain_size,
        [("group", REQUIRED), ("allow_hybrid_mode", True)],
    ),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_signature_is_deepeps(name: str):
    function, expected = SIGNATURES[name]
    assert parameters(function) == expected


def test_calls_across_nodes_take_what_those_inside_one_take():
    assert parameters(Buffer.internode_dispatch) == parameters(Buffer.dispatch)
    assert parameters(Buffer.internode_combine) == parameters(Buffer.combine)


def test_keyword_only_arguments_of_the_constructor():
    assert parameters(Buffer.__init__, inspect.Parameter.KEYWORD_ONLY) == [
        ("use_fabric", False),
        ("device", None),
        ("num_cpu_timeout_secs", None),
        ("num_gpu_timeout_secs", None),
        ("trace", None),
    ]


def test_methods_without_an_instance_are_static():
    for name in (
        "set_num_sms",
        "is_sm90_compiled",
        "capture",
        "get_low_latency_rdma_size_hint",
        "get_dispatch_config",
        "get_combine_config",
        "_unpack_bias",
    ):
        assert isinstance(inspect.getattr_static(Buffer, name), staticmethod), name


UTILS_SIGNATURES = {
    "envs.init_seed": required("global_seed"),
    "envs.get_local_seed": [],
    "envs.get_global_seed": [],
    "envs.dist_print": [("s", ""), ("once_in_node", False)],
    "envs.init_dist": [*required("local_rank", "num_local_ranks"), ("seed", 0)],
    "envs.check_nvlink_connections": required("group"),
    "envs.check_torch_deterministic": [],
    "envs.get_nvlink_gbs": [("factor", 0.9)],
    "comm.NCCLCommHandle": required("nccl_comm", "managed"),
    "comm.get_nccl_comm_handle": [("group", REQUIRED), ("force_new_comm", False)],
    "comm.destroy_all_managed_nccl_comm": [],
    "find_pkgs.find_pkg_root": [("name", REQUIRED), ("lib_name", None), ("optional", False)],
    "find_pkgs.find_nccl_root": [("optional", False)],
    "find_pkgs.find_nvshmem_root": [("optional", False)],
    "semantic.value_or": required("value", "default"),
    "semantic.weak_lru": [("maxsize", 128), ("typed", False)],
    "math.calc_diff": required("x", "y"),
    "math.safe_div": required("a", "b"),
    "math.ceil_div": required("x", "y"),
    "math.align": required("x", "y"),
    "math.per_token_cast_to_fp8": required("x"),
    "math.inplace_unique": required("x", "num_slots"),
    "math.create_grouped_scores": required("scores", "group_idx", "num_groups"),
    "math.hash_tensor": required("t"),
    "testing.flush_l2_cache": [("enabled", True)],
    "testing.bench": [
        ("fn", REQUIRED),
        ("num_warmups", 50),
        ("num_tests", 50),
        ("post_fn", None),
        ("flush_l2", True),
    ],
    "testing.bench_kineto": [
        ("fn", REQUIRED),
        ("kernel_names", REQUIRED),
        ("num_tests", 30),
        ("suppress_kineto_output", False),
        ("trace_path", None),
        ("flush_l2", True),
        ("barrier_comm_profiling", False),
        ("num_kernels_per_period", 1),
        ("barrier", None),
    ],
}


@pytest.mark.parametrize("name", UTILS_SIGNATURES)
def test_a_signature_of_utils_is_deepeps(name: str):
    module, _, function = name.partition(".")
    found = parameters(getattr(importlib.import_module(f"deep_ep.utils.{module}"), function))
    assert found == UTILS_SIGNATURES[name]


# SPEC names these by letters; what callers pass is positional.
@pytest.mark.parametrize(
    ("name", "num_required"),
    [
        ("math.per_token_cast_back", 2),
        ("gate.generate_rank_count", 5),
        ("gate.generate_topk_idx", 5),
        ("gate.get_precise_unbalanced_scores", 5),
        ("gate.get_scores_by_factor", 4),
        ("gate.map_unbalanced_ratio_to_factor", 5),
        ("gate.get_random_unbalanced_scores", 5),
        ("gate.get_unbalanced_scores", 6),
        ("refs.dispatch", 5),
        ("refs.generate_pre_combine_data", 4),
        ("refs.combine", 8),
        ("envs.check_fast_rdma_atomic_support", 0),
        ("envs.get_rdma_gbs", 0),
    ],
)
def test_number_of_required_arguments_of_utils(name: str, num_required: int):
    module, _, function = name.partition(".")
    found = parameters(getattr(importlib.import_module(f"deep_ep.utils.{module}"), function))
    assert sum(default is REQUIRED for _, default in found) == num_required


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("comm.NCCLCommHandle", (0, True)),
        ("comm.get_nccl_comm_handle", (None,)),
        ("comm.destroy_all_managed_nccl_comm", ()),
        ("find_pkgs.find_pkg_root", ("nccl",)),
        ("find_pkgs.find_nccl_root", ()),
        ("find_pkgs.find_nvshmem_root", ()),
    ],
)
def test_plumbing_of_utils_says_that_there_is_none(name: str, args: tuple):
    module, _, function = name.partition(".")
    with pytest.raises(EPUnsupported, match=function):
        getattr(importlib.import_module(f"deep_ep.utils.{module}"), function)(*args)


# What is not there yet -----------------------------------------------------------------------------------------------

X, IDS = torch.zeros(1, 128, dtype=torch.bfloat16), torch.zeros(1, 1, dtype=torch.int64)


@pytest.mark.parametrize(
    ("name", "args", "kwargs"),
    [
        ("internode_dispatch", (X,), {"config": Config()}),
        ("internode_combine", (X, ()), {"config": Config()}),
    ],
)
def test_what_is_not_there_yet_says_so(name: str, args: tuple, kwargs: dict[str, Any]):
    buffer = Buffer(None, 0, 1024, low_latency_mode=True, comm=OneRank())
    with pytest.raises(EPUnsupported, match=name):
        getattr(buffer, name)(*args, **kwargs)


# A constructed buffer ------------------------------------------------------------------------------------------------


def test_attributes_of_a_buffer(device: str):
    comm = OneRank()
    buffer = Buffer(None, 1024, 0, explicitly_destroy=True, comm=comm)
    assert (buffer.rank, buffer.group_size, buffer.group) == (0, 1, comm)
    assert (buffer.num_nvl_bytes, buffer.num_rdma_bytes) == (1024, 0)
    assert buffer.low_latency_mode is False
    assert buffer.explicitly_destroy is True
    assert buffer.enable_shrink is False
    assert not hasattr(buffer, "nvshmem_qp_depth")
    assert buffer.device.type == device
    assert "solo" in buffer.transport
    buffer.destroy()
    assert buffer.runtime is None


def test_what_the_runtime_tells():
    runtime = Buffer(None, comm=OneRank()).runtime
    assert runtime.is_available() is True
    assert runtime.get_num_rdma_ranks() == 1
    assert runtime.get_rdma_rank() == 0
    assert runtime.get_root_rdma_rank(True) == 0
    assert runtime.get_local_device_id() == 0


def test_low_latency_mode_has_a_queue_depth(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("NVSHMEM_QP_DEPTH", raising=False)
    buffer = Buffer(None, 0, 1024, True, 24, enable_shrink=True, comm=OneRank())
    assert buffer.nvshmem_qp_depth == 1024
    assert buffer.low_latency_mode is True
    assert buffer.enable_shrink is True


def test_the_queue_depth_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NVSHMEM_QP_DEPTH", "2048")
    assert Buffer(None, 0, 1024, low_latency_mode=True, comm=OneRank()).nvshmem_qp_depth == 2048


def test_static_answers():
    assert Buffer.num_sms == 20
    assert Buffer.is_sm90_compiled() is True
    assert Buffer.get_low_latency_rdma_size_hint(128, 7168, 8, 288) == 2146961792
    assert deep_ep._C.get_low_latency_rdma_size_hint(128, 7168, 8, 288) == 2146961792
    assert deep_ep._C.get_elastic_buffer_alignment() == 2097152
    assert Buffer.get_dispatch_config(8) == Config(20, 6, 256, 6, 128)
    assert Buffer.get_combine_config(8) == Config(20, 4, 256, 6, 128)
    assert Buffer.get_dispatch_config(3) == Buffer.get_dispatch_config(4)
    assert isinstance(Buffer.get_dispatch_config(1), Config)
    assert isinstance(Buffer.get_combine_config(1000), Config)


def test_unpack_bias():
    one, two = torch.zeros(1), torch.ones(1)
    assert Buffer._unpack_bias(None) == (None, None)
    assert Buffer._unpack_bias(one) == (one, None)
    assert Buffer._unpack_bias((one, two)) == (one, two)
    assert Buffer._unpack_bias((None, two)) == (None, two)


@pytest.mark.cpu_only
def test_the_comm_stream_offers_what_a_cuda_stream_does():
    buffer = Buffer(None, comm=OneRank())
    stream = buffer.get_comm_stream()
    assert stream is buffer.get_comm_stream()
    assert stream is not Buffer(None, comm=OneRank()).get_comm_stream()
    stream.wait_event(EventHandle())
    stream.wait_event(Buffer.capture())
    stream.wait_stream(Buffer(None, comm=OneRank()).get_comm_stream())
    stream.record_event().current_stream_wait()
    stream.synchronize()
    assert stream.query() is True


def test_the_local_buffer_is_real_memory_whose_length_ignores_the_offset():
    buffer = Buffer(None, 1024, 512, low_latency_mode=True, comm=OneRank())
    bytes_ = buffer.get_local_buffer_tensor(torch.int8)
    assert bytes_.shape == (1024,)
    bytes_.copy_(torch.arange(1024) % 127)
    again = buffer.get_local_buffer_tensor(torch.int8, offset=128)
    assert again.shape == (1024,)
    assert torch.equal(again[:896], bytes_[128:])
    words = buffer.get_local_buffer_tensor(torch.int32, torch.Size([2, 3]), offset=8)
    assert words.shape == (2, 3)
    assert torch.equal(words.flatten().view(torch.int8), bytes_[8:32])
    across = buffer.get_local_buffer_tensor(dtype=torch.int8, use_rdma_buffer=True)
    assert across.shape == (512,)
    before = bytes_.clone()
    across.zero_()
    assert torch.equal(bytes_, before)


def test_no_process_group_is_needed_for_one_rank():
    assert not dist.is_initialized()
    topk_idx = torch.tensor([[0, 1], [-1, 3]])
    buffer = Buffer(None, comm=OneRank())
    per_rank, per_node, per_expert, mask, event = buffer.get_dispatch_layout(topk_idx, 4)
    assert per_rank.tolist() == [2]
    assert per_node is None
    assert per_expert.tolist() == [1, 1, 0, 1]
    assert mask.tolist() == [[True], [True]]
    assert isinstance(event, EventOverlap)
    assert event.event is None


# Several ranks -------------------------------------------------------------------------------------------------------


def domain_sizes(rank: int, num_ranks: int) -> list[Any]:
    group = dist.new_group(list(range(num_ranks)))
    buffer = Buffer(group, 1024)
    attributes = [buffer.rank, buffer.group_size, buffer.group is group, hasattr(buffer, "nvshmem_qp_depth")]
    return [
        *attributes,
        buffer.runtime.get_num_rdma_ranks(),
        deep_ep.get_physical_domain_size(group),
        deep_ep.get_logical_domain_size(group),
        deep_ep.get_logical_domain_size(group, allow_hybrid_mode=False),
    ]


def test_domain_sizes_of_one_node():
    expected = [3, True, False, 1, (1, 3), (1, 3), (1, 3)]
    assert run_ranks(domain_sizes, 3, limit_secs=90) == [[rank, *expected] for rank in range(3)]


def test_domain_sizes_of_two_nodes():
    answers = run_ranks(domain_sizes, 4, limit_secs=90, env={"DEEP_EP_RANKS_PER_NODE": "2"})
    assert [answer[:7] for answer in answers] == [[rank, 4, True, True, 2, (2, 2), (2, 2)] for rank in range(4)]


# A fresh interpreter -------------------------------------------------------------------------------------------------


def run_fresh(program: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)


def test_importing_does_no_work():
    program = """
import sys, threading, torch
known = set(sys.modules)
import deep_ep, deep_ep_cpp, deep_ep.buffer, deep_ep._C, deep_ep.utils
roots = {name.partition(".")[0] for name in set(sys.modules) - known}
print(sorted(roots & {"triton", "matplotlib", "rich", "nvshmem", "mpi4py", "numpy"}))
print(torch.cuda.is_initialized(), torch.distributed.is_initialized(), threading.active_count())
"""
    assert run_fresh(program).stdout.splitlines() == ["[]", "False False 1"]


@pytest.mark.cpu_only
def test_the_cpu_does_without_triton():
    program = """
import sys
sys.modules["triton"] = None
import torch, deep_ep
from deep_ep.kernels import _triton, counts, exchange, notify, pull, put
class OneRank:
    Get_rank, Get_size, allgather = (lambda self: 0), (lambda self: 1), (lambda self, value: [value])
buffer = deep_ep.Buffer(None, comm=OneRank(), device="cpu")
x, mask = torch.ones(2, 4), torch.ones(2, 1, dtype=torch.bool)
counts = torch.tensor([2], dtype=torch.int32)
recv_x, _, _, _, handle, _ = buffer.dispatch(
    x, num_tokens_per_rank=counts, is_token_in_rank=mask, num_tokens_per_expert=counts
)
print(_triton.HAS_TRITON, _triton.is_usable("cuda"), torch.equal(buffer.combine(recv_x, handle)[0], x))
"""
    assert run_fresh(program).stdout.splitlines() == ["False False True"]


def test_a_buffer_that_should_have_been_destroyed_says_so():
    program = """
import deep_ep
class OneRank:
    Get_rank, Get_size, allgather = (lambda self: 0), (lambda self: 1), (lambda self, value: [value])
deep_ep.Buffer(None, comm=OneRank(), explicitly_destroy=True)
"""
    done = run_fresh(program)
    assert "destroy" in done.stdout + done.stderr
