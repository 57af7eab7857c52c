"""Grouped products in PyTorch: the arguments of a call, and the plain path, one group after the other."""
