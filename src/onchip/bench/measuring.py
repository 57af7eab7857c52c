"""What a framework measures with, by the framework's name."""

from importlib import import_module
from typing import Any

MODULES = {"torch": "onchip.bench.measure", "jax": "onchip.bench.measure_jax"}


def measuring(framework: str) -> Any:
    """`onchip.bench.measure` for "torch", `onchip.bench.measure_jax` for "jax": the two have the same names."""
    return import_module(MODULES[framework])
