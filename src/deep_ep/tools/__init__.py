"""The tools: what `python -m deep_ep` runs. Nothing of the library imports them."""
