"""The compiled module of DeepEP V1, by the names that its callers import."""

from deep_ep._C import Config, EventHandle, get_low_latency_rdma_size_hint, is_sm90_compiled, topk_idx_t

__all__ = ["Config", "EventHandle", "get_low_latency_rdma_size_hint", "is_sm90_compiled", "topk_idx_t"]
