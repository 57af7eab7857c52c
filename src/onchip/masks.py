"""Attention masks for PyTorch and JAX: what each query sees, as a few integers per token."""

from onchip.attention.masks import (
    Blocked,
    Blocks,
    Causal,
    Chunked,
    Documents,
    Full,
    Intervals,
    Mask,
    PrefixLM,
    Tree,
    Window,
)

__all__ = [
    "Blocked",
    "Blocks",
    "Causal",
    "Chunked",
    "Documents",
    "Full",
    "Intervals",
    "Mask",
    "PrefixLM",
    "Tree",
    "Window",
]
