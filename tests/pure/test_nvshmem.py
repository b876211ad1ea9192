"""NVSHMEM's memory: why a process cannot have it, and where its pieces are."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from deep_ep.transport import nvshmem, symm

GROUP = SimpleNamespace(rank=lambda: 0, size=lambda: 4)


@pytest.fixture
def ready(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A process that could have it: a job of four ranks that has chosen nothing yet."""
    from torch.distributed._symmetric_memory import _nvshmem_triton

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(nvshmem, "is_built_in", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(_nvshmem_triton.NvshmemLibFinder, "find_device_library", lambda: "/somewhere")
    monkeypatch.setattr(symm, "backend", lambda: "CUDA")
    monkeypatch.setattr(symm, "used_backend", lambda: None)
    return monkeypatch


@pytest.mark.cpu_only
def test_without_a_gpu_it_says_so() -> None:
    assert nvshmem.why_not(None, 2) == "there is no CUDA device"


def test_where_all_is_there_nothing_is_said(ready: pytest.MonkeyPatch) -> None:
    assert nvshmem.why_not(GROUP, 4) is None
    ready.setattr(symm, "backend", lambda: "NVSHMEM")
    ready.setattr(symm, "used_backend", lambda: "NVSHMEM")
    assert nvshmem.why_not(GROUP, 4) is None


def test_torch_must_have_it(ready: pytest.MonkeyPatch) -> None:
    ready.setattr(nvshmem, "is_built_in", lambda: False)
    assert nvshmem.why_not(GROUP, 4) == f"torch {torch.__version__} comes without NVSHMEM, or cannot load it"


def test_a_communicator_does_not_do(ready: pytest.MonkeyPatch) -> None:
    reason = "it needs a torch.distributed process group, a communicator alone does not do"
    assert nvshmem.why_not(None, 4) == reason


def test_a_part_of_the_job_does_not_do(ready: pytest.MonkeyPatch) -> None:
    """Memory is made by all ranks of the job together: a group of half of them would wait for the others for good."""
    assert nvshmem.why_not(GROUP, 2) == "it needs all 4 ranks of the job in the group, which has 2"
    ready.setattr(symm, "backend", lambda: "NVSHMEM")
    seen = symm.why_not(GROUP, 2)
    assert seen == "this process has it from NVSHMEM, which needs all 4 ranks of the job in the group, which has 2"
    assert symm.why_not(GROUP, 4) is None


def test_a_missing_library_is_named_with_its_variable(ready: pytest.MonkeyPatch) -> None:
    from torch.distributed._symmetric_memory import _nvshmem_triton

    def find() -> str:
        raise RuntimeError("NVSHMEM device library not found\nat all")

    ready.setattr(_nvshmem_triton.NvshmemLibFinder, "find_device_library", find)
    reason = "its device library is missing (NVSHMEM device library not found); NVSHMEM_LIB_DIR may name its folder"
    assert nvshmem.why_not(GROUP, 4) == reason


def test_a_process_has_one_kind_of_symmetric_memory(ready: pytest.MonkeyPatch) -> None:
    ready.setattr(symm, "backend", lambda: "NCCL")
    reason = "this process has chosen NCCL for its symmetric memory, and torch allows one kind"
    assert nvshmem.why_not(GROUP, 4) == reason
    ready.setattr(symm, "used_backend", lambda: "CUDA")
    reason = "this process has symmetric memory from CUDA already, and torch allows one kind"
    assert nvshmem.why_not(GROUP, 4) == reason


def test_a_piece_may_begin_inside_an_allocation_and_be_out_of_reach() -> None:
    memory = torch.zeros(16, dtype=torch.uint8)
    bases = [1 << 20, memory.data_ptr() - 512, 0]
    assert symm._addresses(memory, bases, 1) == ((1 << 20) + 512, memory.data_ptr(), 0)
