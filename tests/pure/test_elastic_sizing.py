"""The figures of DeepEP V2, and a worked example of its layout."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deep_ep import reference
from deep_ep.elastic_sizing import Domains, Rates, elastic_buffer_bytes, theoretical_num_sms
from deep_ep.engine.elastic import Form, count_experts, expanded_rows

EIGHT, TWO_NODES, FOUR_NODES = Domains(8, 8), Domains(16, 8), Domains(32, 8)


@pytest.mark.parametrize(
    ("domains", "sizes", "options", "expected"),
    [
        (EIGHT, (4096, 7168, 8), {}, 473956352),
        (EIGHT, (4096, 7168, 0), {}, 484442112),
        (EIGHT, (4096, 7168, 8), {"use_fp8": True}, 471859200),
        (EIGHT, (4096, 7168, 8), {"has_multiple_reduction": False}, 473956352),
        (EIGHT, (8192, 7168, 8), {"use_fp8": True}, 943718400),
        (TWO_NODES, (4096, 7168, 8), {}, 1218445312),
        (Domains(2, 2), (128, 7168, 8), {}, 4194304),
        (Domains(1, 1), (16, 256, 0), {}, 2097152),
        (Domains(4, 4), (16, 256, 0), {}, 2097152),
    ],
)
def test_sizes(domains: Domains, sizes: tuple[int, int, int], options: dict, expected: int) -> None:
    assert elastic_buffer_bytes(domains, *sizes, **options) == expected


@pytest.mark.parametrize(
    ("domains", "nvlink_gbs", "device_sms", "prefers_overlap", "expected"),
    [
        (EIGHT, 405, 132, True, 12),
        (TWO_NODES, 405, 132, True, 12),
        (FOUR_NODES, 405, 132, True, 6),
        (EIGHT, 810, 148, True, 24),
        (EIGHT, 405, 132, False, 64),
        (Domains(1, 1), 405, 132, True, 132),
    ],
)
def test_sms(domains: Domains, nvlink_gbs: float, device_sms: int, prefers_overlap: bool, expected: int) -> None:
    rates = Rates(50, nvlink_gbs, 200, 50)
    assert theoretical_num_sms(domains, 256, 8, rates, device_sms, prefers_overlap) == expected


def test_without_hybrid_mode_nodes_are_one() -> None:
    assert Domains(16, 8, is_hybrid=False).logical == (1, 16)
    assert Domains(16, 8, is_hybrid=False).physical == (2, 8)


def test_worked_example_of_expanded_rows() -> None:
    ids = torch.tensor([[0, 2], [0, -1], [0, 0], [2, 0]])
    counts = torch.empty(3, dtype=torch.int32)
    count_experts(ids, counts)
    assert counts.tolist() == [5, 0, 2]
    selections, rows = expanded_rows(ids, counts.numpy(), np.array([0, 8, 8]))
    assert selections.tolist() == [0, 2, 4, 5, 7, 1, 6]
    assert rows.tolist() == [0, 1, 2, 3, 4, 8, 9]
    assert Form(3, 2, 16, 4, True).most_expanded(2) == 76


def test_worked_example_of_the_oracle() -> None:
    """Four columns, two ranks, L = 2, the token of the contract."""
    first = torch.tensor([[0, 1, -1, -1]])
    second = torch.full((7, 4), -1)
    second[6] = torch.tensor([0, 3, -1, 1])
    told = reference.elastic_dispatch([first, second], 0, 4, 16, is_expanded=True)
    assert told.sources[-1].tolist() == [22, 7, 1, -1, -1, 3]
    assert told.rank_ends == [1, 2]


def test_worked_example_of_a_combine() -> None:
    y = torch.tensor([[[1.0], [256.0], [9.0], [1.0]]]).bfloat16()
    topk_idx = torch.tensor([[0, 3, -1, 1]])
    bias = torch.tensor([[0.5]]).bfloat16()
    # (bias + y1) + round(y0 + y3): rank 1 first, although rank 0 has the lower number.
    expected = ((bias.float() + 256.0) + 2.0).bfloat16()
    assert torch.equal(reference.elastic_combine(y, topk_idx, 4, 2, [bias]), expected)
