"""Losses of logits that exist already, computed a row at a time."""
