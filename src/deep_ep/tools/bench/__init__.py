"""Benchmarks: `python -m deep_ep bench`.

`core` times and does statistics. `cases` says what is timed on the CPU, with `inputs` to work on and `peers` to compare
with; `gpu_cases` what on a GPU, with the clocks of `gpu`. `normal` runs them. `low_latency` and the files of its name
do the same for low-latency calls. `suite` is what both share. `report`, `plot` and `results` write it down, `progress`
shows how far it is. `tune` and `tune_report` find launch shapes. `cli` joins all.
"""
