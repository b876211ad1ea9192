"""Benchmarks: `python -m deep_ep bench`.

`core` times and does statistics. `cases` says what is timed, with `inputs` to work on and `peers` to compare with.
`report` and `plot` write it down, `progress` shows how far it is, `cli` joins them.
"""
