"""Losses of logits that exist, a row at a time."""
