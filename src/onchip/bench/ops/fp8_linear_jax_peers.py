"""Functions for the same layer in JAX, of this package and plain, for `onchip bench`."""

from collections.abc import Callable
from functools import partial
from typing import Any

from onchip.bench.peers import always, optional
from onchip.ops.fp8_linear.checks import plain_refusals
from onchip.ops.fp8_linear.jax_op import fp8_linear

Layer = Callable[[Any, Any], Any]
"""x [M, K] and weight [N, K] to [M, N]."""
PRODUCT = "XLA, unquantised product"


def _own(backend: str) -> Layer:
    return partial(fp8_linear, backend=backend)


def _product() -> Layer:
    return lambda x, weight: x @ weight.T


def _refusal(backend: str, device: str, dtype: str) -> str | None:
    return plain_refusals(device, dtype, "jax")[backend]


# 'auto' is one of the two.
OWN = tuple(
    optional(f"onchip {name}", "onchip", _own, partial(_refusal, name), backend=name) for name in ("mosaic_gpu", "xla")
)
PEERS = (optional(PRODUCT, "jax", _product, always),)
