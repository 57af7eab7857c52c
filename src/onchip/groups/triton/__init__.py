"""Grouped products by Triton kernels: tiles, kernels, their launches, and what the operator computes with them."""
