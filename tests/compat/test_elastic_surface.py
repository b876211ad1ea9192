"""Names, signatures and attributes of DeepEP V2's buffer that its callers rely on."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from common import error_of, run_ranks
from deep_ep import ElasticBuffer, EPHandle, EventHandle

pytestmark = pytest.mark.usefixtures("device")

REQUIRED = inspect.Parameter.empty
MIB = 1 << 20


def parameters(function: Callable, kind: Any = inspect.Parameter.POSITIONAL_OR_KEYWORD) -> list[tuple[str, Any]]:
    found = inspect.signature(function).parameters.values()
    return [(one.name, one.default) for one in found if one.kind is kind and one.name != "self"]


def required(*names: str) -> list[tuple[str, Any]]:
    return [(name, REQUIRED) for name in names]


STREAM = [
    ("num_sms", 0),
    ("num_qps", 0),
    ("previous_event", None),
    ("previous_event_before_epilogue", None),
    ("async_with_compute_stream", False),
    ("allocate_on_comm_stream", False),
]
SIGNATURES: dict[str, list[tuple[str, Any]]] = {
    "__init__": [
        ("group", REQUIRED),
        ("num_bytes", None),
        ("num_cpu_bytes", 0),
        ("num_max_tokens_per_rank", 0),
        ("hidden", 0),
        ("num_topk", 0),
        ("use_fp8_dispatch", False),
        ("deterministic", False),
        ("allow_hybrid_mode", True),
        ("allow_multiple_reduction", True),
        ("prefer_overlap_with_compute", True),
        ("sl_idx", 3),
        ("num_allocated_qps", 0),
        ("num_cpu_timeout_secs", 300),
        ("num_gpu_timeout_secs", 100),
        ("explicitly_destroy", False),
    ],
    "get_buffer_size_hint": [
        *required("group", "num_max_tokens_per_rank", "hidden"),
        ("num_topk", 0),
        ("use_fp8_dispatch", False),
        ("allow_hybrid_mode", True),
        ("allow_multiple_reduction", True),
    ],
    "get_engram_storage_size_hint": [
        *required("num_entries", "hidden", "num_max_tokens_per_rank"),
        ("dtype", torch.bfloat16),
    ],
    "get_pp_buffer_size_hint": required("num_max_tensor_bytes", "num_max_inflight_tensors"),
    "get_agrs_num_max_session_bytes": required("group", "shapes", "dtype"),
    "get_agrs_buffer_size_hint": required("group", "num_max_session_bytes"),
    "capture": [],
    "destroy": [],
    "barrier": [("use_comm_stream", True), ("with_cpu_sync", False), ("sequential", True)],
    "get_comm_stream": [],
    "get_physical_domain_size": [],
    "get_logical_domain_size": [],
    "get_theoretical_num_sms": [
        *required("num_experts", "num_topk"),
        ("num_scaleout_topk", 0),
        ("rdma_gbs", 0),
        ("nvlink_gbs", 0),
        ("sm_read_gbs", 200),
        ("sm_write_gbs", 50),
    ],
    "get_theoretical_num_qps": required("num_sms"),
    "dispatch": [
        ("x", REQUIRED),
        ("topk_idx", None),
        ("topk_weights", None),
        ("cumulative_local_expert_recv_stats", None),
        ("num_experts", None),
        ("num_max_tokens_per_rank", None),
        ("expert_alignment", None),
        *STREAM,
        ("handle", None),
        ("do_handle_copy", True),
        ("do_cpu_sync", None),
        ("do_expand", False),
        ("do_zero_padding", False),
        ("use_tma_aligned_col_major_sf", False),
    ],
    "combine": [*required("x", "handle"), ("topk_weights", None), ("bias", None), *STREAM],
    "pp_set_config": required("num_max_tensor_bytes", "num_max_inflight_tensors"),
    "pp_send": [*required("t", "dst_rank_idx"), ("num_sms", 0)],
    "pp_recv": [*required("t", "src_rank_idx"), ("num_sms", 0)],
    "agrs_set_config": required("num_max_session_bytes", "num_max_all_gathers_per_session"),
    "create_agrs_session": [],
    "destroy_agrs_session": [],
    "agrs_new_session": [("enabled", True)],
    "agrs_get_inplace_tensor": required("shapes", "dtype"),
    "all_gather": required("t"),
    "engram_write": [("storage", REQUIRED), ("sf", None)],
    "engram_fetch": [("indices", REQUIRED), ("num_qps", 0), ("use_tma_aligned_col_major_sf", False)],
}
STATIC = [name for name in SIGNATURES if name.endswith(("size_hint", "session_bytes"))] + ["capture"]
HANDLE = [
    "do_expand",
    "num_experts",
    "expert_alignment",
    "num_max_tokens_per_rank",
    "num_sms",
    "topk_idx",
    "num_recv_tokens",
    "num_expanded_tokens",
    "num_recv_tokens_per_expert_list",
    "psum_num_recv_tokens_per_scaleup_rank",
    "psum_num_recv_tokens_per_expert",
    "num_unaligned_recv_tokens_per_expert",
    "recv_src_metadata",
    "dst_buffer_slot_idx",
    "token_metadata_at_forward",
    "channel_linked_list",
]


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_signature_is_deepeps(name: str):
    assert parameters(getattr(ElasticBuffer, name)) == SIGNATURES[name]


def test_methods_without_an_instance_are_static():
    for name in STATIC:
        assert isinstance(inspect.getattr_static(ElasticBuffer, name), staticmethod), name


def test_the_extras_of_the_constructor_are_keywords():
    assert parameters(ElasticBuffer.__init__, inspect.Parameter.KEYWORD_ONLY) == [("device", None), ("trace", None)]


def test_the_handle_takes_what_deepeps_takes():
    assert [name for name, _ in parameters(EPHandle.__init__)] == HANDLE


def test_sizes_of_the_other_families():
    assert ElasticBuffer.get_engram_storage_size_hint(524288, 128, 512 * 24) == (4 * MIB, 128 * MIB)
    assert ElasticBuffer.get_engram_storage_size_hint(3, 33, 5, torch.float8_e4m3fn) == (2 * MIB, 2 * MIB)
    assert ElasticBuffer.get_pp_buffer_size_hint(4096 * 7168 * 2, 4) == 896 * MIB
    assert ElasticBuffer.get_pp_buffer_size_hint(33, 1) == 2 * MIB
    assert ElasticBuffer.get_agrs_buffer_size_hint(None, 2 * MIB + 1) == 4 * MIB


def attributes_and_families(rank: int, num_ranks: int) -> Any:
    group = dist.group.WORLD
    session = ElasticBuffer.get_agrs_num_max_session_bytes
    assert session(group, (32, 64, 2048), torch.bfloat16) == num_ranks * 32 * 64 * 2048 * 2
    assert session(group, [(3,), (5, 1)], torch.int8) == 32 + 32
    assert ElasticBuffer.get_buffer_size_hint(group, 128, 7168, 8) == 4194304
    assert isinstance(ElasticBuffer.capture(), EventHandle)
    buffer = ElasticBuffer(group, num_max_tokens_per_rank=128, hidden=7168, num_topk=8, explicitly_destroy=True)
    assert (buffer.group, buffer.rank_idx, buffer.num_ranks) == (group, rank, num_ranks)
    assert (buffer.num_bytes, buffer.num_max_tokens_per_rank) == (4194304, 128)
    assert (buffer.allow_hybrid_mode, buffer.allow_multiple_reduction, buffer.deterministic) == (True, True, False)
    assert (buffer.prefer_overlap_with_compute, buffer.explicitly_destroy) == (True, True)
    assert buffer.nccl_comm_handle is None
    assert (buffer.num_allocated_qps, buffer.get_theoretical_num_qps(4)) == (129, 65)
    assert (buffer.num_scaleout_ranks, buffer.num_scaleup_ranks) == (1, num_ranks)
    assert (buffer.scaleout_rank_idx, buffer.scaleup_rank_idx) == (0, rank)
    assert (buffer.num_rdma_ranks, buffer.num_nvlink_ranks) == (1, num_ranks)
    with buffer.agrs_new_session(enabled=False):
        pass
    tensor = torch.zeros(8)
    calls: dict[str, tuple] = {
        "pp_set_config": (32, 1),
        "pp_send": (tensor, 0),
        "pp_recv": (tensor, 0),
        "agrs_set_config": (32, 1),
        "create_agrs_session": (),
        "destroy_agrs_session": (),
        "agrs_new_session": (),
        "agrs_get_inplace_tensor": ((8,), torch.float32),
        "all_gather": (tensor,),
        "engram_write": (tensor.view(1, 8),),
        "engram_fetch": (torch.zeros(1, 1, dtype=torch.int32),),
    }
    seen = {name: error_of(getattr(buffer, name), *args) for name, args in calls.items()}
    buffer.barrier()
    buffer.destroy()
    return seen, error_of(ElasticBuffer, group), error_of(ElasticBuffer, group, MIB, num_cpu_bytes=2 * MIB)


def test_attributes_and_what_is_not_built():
    for seen, unsized, too_large in run_ranks(attributes_and_families, 2):
        for name, (kind, text) in seen.items():
            assert kind == "EPUnsupported", name
            assert text.startswith(f"{name}: ")
            assert "Use torch.distributed" in text
        assert unsized[0] == "ValueError"
        assert "num_bytes" in unsized[1]
        assert too_large[0] == "ValueError"
        assert "num_cpu_bytes" in too_large[1]
