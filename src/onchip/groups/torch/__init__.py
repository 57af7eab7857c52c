"""Grouped products in PyTorch: what a call is made of, and the plain path, one group after the other."""
