"""Two hops on GPUs: rows cross once to a node, and are relayed to its ranks."""
