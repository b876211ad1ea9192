"""What goes into a case: the setting, random routes, and each rank's rows.

Letters as in `cases`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ...buffers.legacy import Buffer

CONTEXT_BYTES = 3 << 29  # about what a rank takes on a GPU before its own tensors: its context, the copy's two buffers


@dataclass(frozen=True)
class Setting:
    """The shape of the work, the same on every rank.

    Attributes:
        num_tokens: T, tokens of each rank.
        hidden: H.
        num_topk: K.
        num_experts: E, of all ranks together.
        num_groups: Groups that the experts are split into; 0: routing is not group-limited.
        num_topk_groups: Groups that a token may use.
        num_rounds: Rounds that are timed.
        num_in_row: On a GPU, calls in a row that are timed together.
        seed: Of rows and routes.
        device: Where tensors live, `cpu` or `cuda`.
        num_sms: On a GPU, blocks that a rank may use; 0: as many as the library likes.
        num_nodes: N, nodes that the ranks are on.
        link: Rate of the network between namespaces; empty: nodes are on one host, over loopback.
        transport: On a GPU, how ranks of different nodes reach each other, `message` or `nvshmem`.
    """

    num_tokens: int = 4096
    hidden: int = 7168
    num_topk: int = 8
    num_experts: int = 256
    num_groups: int = 0
    num_topk_groups: int = 0
    num_rounds: int = 15
    num_in_row: int = 20
    seed: int = 0
    device: str = "cpu"
    num_sms: int = 0
    num_nodes: int = 1
    link: str = ""
    transport: str = ""

    def check(self) -> None:
        """Refuse what cannot be routed, with `ValueError`."""
        for name in ("num_tokens", "hidden", "num_topk", "num_experts", "num_rounds", "num_in_row"):
            if getattr(self, name) < 1:
                raise ValueError(f"bench: `{name}` must be at least 1, got {getattr(self, name)}")
        if bool(self.num_groups) != bool(self.num_topk_groups):
            raise ValueError("bench: --groups and --topk-groups go together, got only one of them")
        if not self.num_groups:
            reachable = self.num_experts
        elif self.num_groups < 0 or self.num_experts % self.num_groups:
            raise ValueError(f"bench: --groups must divide the {self.num_experts} experts, got {self.num_groups}")
        elif not 1 <= self.num_topk_groups <= self.num_groups:
            raise ValueError(f"bench: --topk-groups must be within 1..{self.num_groups}, got {self.num_topk_groups}")
        else:
            reachable = self.num_experts // self.num_groups * self.num_topk_groups
        if self.num_topk > reachable:
            raise ValueError(f"bench: a token can reach {reachable} experts, too few for --topk {self.num_topk}")


def reason_to_skip(
    setting: Setting, num_ranks: int, free_bytes: int | None, rank_bytes: Callable[[Setting, int], int]
) -> str | None:
    """Why this group size cannot run here, or None.

    Args:
        setting: The setting.
        num_ranks: R.
        free_bytes: Memory that is free; None if that is not known.
        rank_bytes: What a rank of a group of so many needs of it.
    """
    if num_ranks < 1:
        return f"there is no group of {num_ranks} ranks"
    if setting.num_experts % num_ranks:
        return f"{setting.num_experts} experts cannot be shared by {num_ranks} ranks"
    needed = num_ranks * rank_bytes(setting, num_ranks)
    if free_bytes is not None and needed > free_bytes:
        return f"needs about {needed / 2**30:.1f} GiB of memory, {free_bytes / 2**30:.1f} are available"
    return None


def normal_bytes(setting: Setting, num_ranks: int) -> int:
    """About a rank's peak in the cases of normal mode.

    On the CPU that is the hungriest case, combine: six times the rows (gloo as written takes FP32 copies). Across nodes
    gloo is not measured as written: the window, gloo's two buffers, and some room. On a GPU: its context, the copy's
    two buffers, the window, its rows twice more.
    """
    rows = _mean_rows(setting, num_ranks)
    if setting.device == "cuda":
        return int(CONTEXT_BYTES + setting.hidden * 2 * (6 * rows + 8 * setting.num_tokens))
    times = 6.5 if setting.num_nodes == 1 else 4.0
    return int(setting.hidden * (times * 2 * rows + 16 * setting.num_tokens))


def _mean_rows(setting: Setting, num_ranks: int) -> float:
    """Rows that a rank receives, with random routes."""
    return setting.num_tokens * num_ranks * (1 - (1 - 1 / num_ranks) ** setting.num_topk)


def route(setting: Setting, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts by random scores; group-limited if the setting says so.

    Group-limited: of each token, only the groups with the best scores stay, judged by their best expert.

    Returns:
        `topk_idx` [T, K] int64 and `topk_weights` [T, K] float32.
    """
    device = generator.device
    scores = torch.rand(setting.num_tokens, setting.num_experts, generator=generator, device=device)
    if setting.num_groups:
        groups = scores.view(setting.num_tokens, setting.num_groups, -1)
        best = groups.amax(2).topk(setting.num_topk_groups).indices
        stays = torch.zeros(groups.shape[:2], dtype=torch.bool, device=device).scatter_(1, best, True)
        scores = groups.masked_fill(~stays.unsqueeze(2), -1.0).flatten(1)
    weights, idx = scores.topk(setting.num_topk)
    return idx, weights


class GlooRoutes(NamedTuple):
    """Where rows go, as gloo needs to know it.

    Attributes:
        token_idx: [m] int64, the tokens to send, by destination and then in order.
        send_splits: R numbers of rows to send.
        recv_splits: R numbers of rows to receive.
    """

    token_idx: torch.Tensor
    send_splits: list[int]
    recv_splits: list[int]

    @property
    def num_sent(self) -> int:
        """m."""
        return sum(self.send_splits)

    @property
    def num_recv(self) -> int:
        """n."""
        return sum(self.recv_splits)


@dataclass(frozen=True)
class Inputs:
    """What one rank brings to every case.

    Attributes:
        setting: The setting.
        rank: This rank.
        num_ranks: R.
        x: [T, H] bfloat16.
        topk_idx: [T, K] int64.
        topk_weights: [T, K] float32.
        is_token_in_rank: [T, R] bool.
        layout: The layout arguments of a full dispatch.
        routes: The same for gloo.
    """

    setting: Setting
    rank: int
    num_ranks: int
    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    is_token_in_rank: torch.Tensor
    layout: dict[str, Any]
    routes: GlooRoutes


class Drawn(NamedTuple):
    """What chance gives a rank. Every rank can draw every rank's.

    Attributes:
        x: [T, H] bfloat16.
        topk_idx: [T, K] int64.
        topk_weights: [T, K] float32.
    """

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor


def draw(setting: Setting, rank: int, device: torch.device | str = "cpu") -> Drawn:
    """Draw a rank's rows and routes."""
    generator = torch.Generator(device).manual_seed(setting.seed * 1000 + rank)
    x = torch.randn(setting.num_tokens, setting.hidden, generator=generator, device=device).bfloat16()
    return Drawn(x, *route(setting, generator))


def find_layout(drawn: Drawn, num_experts: int, buffer: Buffer) -> dict[str, Any]:
    """The layout arguments of a full dispatch."""
    per_rank, per_node, per_expert, mask, _ = buffer.get_dispatch_layout(drawn.topk_idx, num_experts)
    return {
        "num_tokens_per_rank": per_rank,
        "num_tokens_per_rdma_rank": per_node,
        "is_token_in_rank": mask,
        "num_tokens_per_expert": per_expert,
    }


def make_inputs(setting: Setting, rank: int, num_ranks: int, buffer: Buffer) -> Inputs:
    """Draw rows and routes, and tell all ranks the counts."""
    drawn = draw(setting, rank)
    layout = find_layout(drawn, setting.num_experts, buffer)
    mask = layout["is_token_in_rank"]
    return Inputs(setting, rank, num_ranks, *drawn, mask, layout, find_routes(mask))


def find_routes(is_token_in_rank: torch.Tensor) -> GlooRoutes:
    """Index by destination and exchange the counts."""
    by_rank = [column.nonzero().view(-1) for column in is_token_in_rank.t()]
    counts = torch.tensor([tokens.numel() for tokens in by_rank])
    recv_counts = torch.empty_like(counts)
    dist.all_to_all_single(recv_counts, counts)
    return GlooRoutes(torch.cat(by_rank), counts.tolist(), recv_counts.tolist())


def make_buffer(setting: Setting, num_ranks: int) -> Buffer:
    """A buffer of the size that DeepEP's users give it."""
    num_bytes = Buffer.get_dispatch_config(num_ranks).get_nvl_buffer_size_hint(2 * setting.hidden, num_ranks)
    return Buffer(dist.group.WORLD, num_bytes, 0, explicitly_destroy=True, device=setting.device)
