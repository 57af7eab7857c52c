"""Triton kernels over tiles of logits: statistics, exponentials that are kept, gradients."""
