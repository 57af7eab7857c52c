"""Attention's kernels: for Hopper in Gluon, for other GPUs in plain Triton, with what both need around them."""
