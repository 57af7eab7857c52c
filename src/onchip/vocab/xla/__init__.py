"""Tiles of logits with XLA's own products."""
