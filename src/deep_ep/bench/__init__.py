"""Benchmarks: `python -m deep_ep bench`.

`core` times and does statistics, `cases` says what is timed, `report` writes it down, `cli` joins them.
"""
