"""Products over groups of rows in plain JAX, on any device, and what the kernels of JAX leave to XLA."""
