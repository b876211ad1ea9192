"""Which rows of expanded results the selections of a rank take."""

from __future__ import annotations

import pytest
import torch

from deep_ep import reference
from deep_ep.engine.cpu.expanded import fill_plan
from deep_ep.engine.payload import SendPlan
from deep_ep.kernels.rows import put_blocks


def test_worked_example() -> None:
    plan, rows = SendPlan(), torch.empty(3, 1, dtype=torch.int32)
    fill_plan(plan, [[1, 2], [3, 0]], torch.zeros(3, 1, dtype=torch.int64), 1, 4, rows)
    assert plan.first_rows == [1, 2]
    assert plan.num_rows == [4, 4]
    assert [tokens.tolist() for tokens in plan.token_idx] == [[0, 1, 2], []]
    assert (plan.rows_to, plan.rows_from) == ([3, 0], [2, 0])
    assert rows.flatten().tolist() == [1, 2, 3]


@pytest.mark.parametrize("alignment", [1, 4])
def test_all_ranks_together_fill_what_the_oracle_says(alignment: int) -> None:
    generator = torch.Generator().manual_seed(alignment)
    num_ranks, num_local, num_topk = 3, 4, 5
    num_experts = num_ranks * num_local
    ids = [torch.randint(-2, num_experts + 2, (7 - rank, num_topk), generator=generator) for rank in range(num_ranks)]
    counts = [[int((idx == expert).sum()) for expert in range(num_experts)] for idx in ids]
    told = [
        reference.elastic_dispatch(ids, rank, num_experts, 8, alignment, is_expanded=True) for rank in range(num_ranks)
    ]
    for rank, idx in enumerate(ids):
        plan, rows = SendPlan(), torch.empty(idx.shape, dtype=torch.int32)
        fill_plan(plan, counts, idx, rank, alignment, rows)
        assert plan.num_rows == [len(one.rows) for one in told]
        for expert, (tokens, first) in enumerate(zip(plan.token_idx, plan.first_rows, strict=True)):
            owner = told[expert // num_local]
            assert [(rank, token) for token in tokens.tolist()] == owner.rows[first : first + tokens.numel()]
        for token, selected in enumerate(idx.tolist()):
            for column, expert in enumerate(selected):
                row = int(rows[token, column])
                if 0 <= expert < num_experts:
                    owner = told[expert // num_local]
                    assert (owner.rows[row], owner.columns[row]) == ((rank, token), column)
                else:
                    assert row == -1


@pytest.mark.parametrize("num_tokens", [0, 3, 3000])
def test_blocks_of_rows(num_tokens: int) -> None:
    """In one tile, and in several."""
    generator = torch.Generator().manual_seed(num_tokens)
    rows = torch.arange(num_tokens * 64).view(num_tokens, 64)
    chosen = [torch.randint(0, max(1, num_tokens), (count,), generator=generator).sort()[0] for count in (900, 0, 40)]
    chosen = [tokens if num_tokens else tokens[:0] for tokens in chosen]
    targets = [torch.zeros(tokens.numel(), 64, dtype=torch.int64) for tokens in chosen]
    put_blocks(rows, targets, chosen)
    for target, tokens in zip(targets, chosen, strict=True):
        assert torch.equal(target, rows[tokens])
