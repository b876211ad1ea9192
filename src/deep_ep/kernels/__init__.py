"""Primitives: small operations on rows of bytes, each a launcher over a plain-torch twin and, on CUDA, a Triton kernel.

They take tensors and tables of peers' rows, never a process group. The twin is the CPU product and the kernel's
reference.
"""
