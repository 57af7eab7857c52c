"""Grouped products in PyTorch: the fields of a call, and the plain path, one group after the other."""
