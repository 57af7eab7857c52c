"""Fused training operations for large language models whose big intermediates never reach device memory.

The public API is in `onchip.torch` and `onchip.jax`; this package itself imports no framework.
"""

from pathlib import Path

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """Raise for a missing name; if it is in the public API, say where to import it from."""
    here = Path(__file__).parent
    places = [x for x in ("torch", "jax") if f'\n    "{name}",\n' in (here / x / "__init__.py").read_text("utf-8")]
    if places:
        raise ImportError(f"onchip: {name} is imported from {' or '.join(f'onchip.{x}' for x in places)}")
    raise AttributeError(f"module 'onchip' has no attribute {name!r}")
