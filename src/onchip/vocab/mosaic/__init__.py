"""Mosaic GPU kernels over tiles of logits, for JAX on Hopper."""
