"""Kernels of low-latency mode (`docs/low-latency.md`): those of the CPU in `rows.py`, the others in Triton.

In a profile the send and the receive kernel of a dispatch are both `low_latency::dispatch`, those of a combine
`low_latency::combine`: DeepEP's scripts expect `dispatch` in exactly one name, and take the runs of `::dispatch` for
the two phases of calls with a hook. Kernels that wait, signal, or copy to other nodes have other names.
"""
