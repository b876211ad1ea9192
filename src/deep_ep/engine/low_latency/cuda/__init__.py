"""Low-latency calls on a GPU: kernels that wait, launched in a stream."""
