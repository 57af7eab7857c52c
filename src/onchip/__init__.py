"""Fused training operations for large language models whose big intermediates never reach device memory.

The public API is in `onchip.torch` and `onchip.jax`; this package itself imports no framework.
"""

__version__ = "0.1.0"
