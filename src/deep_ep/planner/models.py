"""Models by shape: what of a Mixture-of-Experts model its layers' times depend on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Model:
    """The shape of a model.

    Attributes:
        hidden: Channels of a token.
        topk: Experts of a token.
        num_experts: Of a layer.
        intermediate: Inner size of an expert.
        shared_intermediate: Inner size of the shared expert; 0: none.
        num_layers: With experts.
        num_dense_layers: Without.
        dense_intermediate: Inner size of these.
        attention_params: Weights of a layer's attention.
        score_channels: Channels of all heads that a query meets a key and a value with, in training and prefill.
        decode_channels: The same in decoding; more where keys and values stay compressed.
        kv_bytes: Of the cache, for each token and layer.
        num_groups: Groups of experts; 1: routing is not limited.
        topk_groups: Groups of a token.
    """

    hidden: int
    topk: int
    num_experts: int
    intermediate: int
    shared_intermediate: int
    num_layers: int
    num_dense_layers: int
    dense_intermediate: int
    attention_params: int
    score_channels: int
    decode_channels: int
    kv_bytes: int
    num_groups: int = 1
    topk_groups: int = 1

    def weight_bytes(self, num_ranks: int, num_replicas: int = 0) -> float:
        """Of the weights of a rank, a byte each: all of attention, its share of the experts."""
        experts = (self.num_experts + num_replicas) / num_ranks * 3 * self.hidden * self.intermediate
        shared = 3 * self.hidden * self.shared_intermediate
        dense = self.num_dense_layers * (self.attention_params + 3 * self.hidden * self.dense_intermediate)
        return self.num_layers * (self.attention_params + shared + experts) + dense


MODELS: dict[str, Model] = {
    "deepseek-v3": Model(
        7168, 8, 256, 2048, 2048, 58, 3, 18432, 187_000_000, 40960, 139264, 1152, num_groups=8, topk_groups=4
    ),
    "kimi-k2": Model(7168, 8, 384, 2048, 2048, 60, 1, 18432, 101_000_000, 20480, 69632, 1152),
    "qwen3-235b": Model(4096, 8, 128, 1536, 0, 94, 0, 0, 71_300_000, 16384, 16384, 2048),
    "mixtral-8x7b": Model(4096, 2, 8, 14336, 0, 32, 0, 0, 41_900_000, 8192, 8192, 4096),
}
"""Models by the names that `plan --model` takes."""
