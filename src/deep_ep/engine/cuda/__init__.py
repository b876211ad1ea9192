"""The engine on a GPU: kernels move rows and wait, the host launches them."""
