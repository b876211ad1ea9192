"""What moves and sums rows: Triton's kernels on a GPU, loops of torch's operators on the CPU.

They take tensors and tables of peers' rows, never a process group. Of the CPU are `rows.py`, `reduce.py`, `blocks.py`,
`script.py` and `low_latency/rows.py`; everything else is of a GPU, and runs in Triton's interpreter, too.
"""
