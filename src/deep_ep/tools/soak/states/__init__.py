"""The protocol as models, and a search through all their states: `python -m deep_ep soak --states`.

`explore` is the search. `node` has what ranks of a node are made of, `one_hop` and `two_hops` their calls,
`low_latency` those of the low-latency mode; `steps` the names that models and code share. `suites` says what is
explored, `command` is the command, and `trace` compares the steps of real ranks with the models.
"""
