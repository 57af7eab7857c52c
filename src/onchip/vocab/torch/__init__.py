"""Tiles of logits with PyTorch's own products."""
