"""Low-latency calls on the CPU: publish rows in one's own memory, fetch from the peers'."""
