"""Attention for Hopper in Pallas Mosaic GPU."""
