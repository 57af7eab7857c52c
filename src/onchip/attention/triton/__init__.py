"""Attention's kernels: for Hopper, in Gluon, with two of Triton's around them."""
