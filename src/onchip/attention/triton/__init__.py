"""Attention's kernels, in Gluon for Hopper and in plain Triton for other GPUs, and the code around them."""
