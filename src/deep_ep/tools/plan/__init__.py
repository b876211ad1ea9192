"""`python -m deep_ep plan`: the planner as a command, with measurements of this machine."""
