"""Products over groups of rows in plain JAX, on any device, and what JAX's kernels leave to XLA."""
