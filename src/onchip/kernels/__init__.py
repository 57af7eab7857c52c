"""Parts that the kernels of several ops are made of, by language."""
