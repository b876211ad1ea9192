"""Kernels of low-latency mode (`docs/low-latency.md`)."""
