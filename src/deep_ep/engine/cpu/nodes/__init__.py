"""The two-hop engine: over the rail to a node, and through its window to the ranks there."""
