"""Attention in PyTorch, on its own matrix products."""
