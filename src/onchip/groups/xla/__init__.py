"""Products over groups of rows in plain JAX, on any device, and the parts that JAX's kernels leave to XLA."""
