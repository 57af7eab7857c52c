"""Grouped products by Triton kernels: tiles, kernels, their launches, and the operator that uses them."""
