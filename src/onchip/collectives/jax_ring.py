"""A ring of exchanges for JAX, inside jax.shard_map: at each step a device sends to the next one on an axis.

Steps are written out, not looped over: the exchange of one and the product of the next depend on nothing of each other,
so that XLA can run them at the same time.
"""

from collections.abc import Callable, Iterator

from jax import Array, lax


def blocks(x: Array, axis: str, ranks: int) -> Iterator[tuple[Array, Array]]:
    """Each device's index and its block x: one's own first, then that of the device before, and so on."""
    own = lax.axis_index(axis)
    for step in range(ranks):
        yield (own - step) % ranks, x
        if step < ranks - 1:
            x = _from_before(x, axis, ranks)


def reduced(product: Callable[[Array], Array], axis: str, ranks: int) -> Array:
    """The sum over all devices of product(this device's index).

    product(index) is this device's addend for another.  The sum for a device begins at the one after it and goes
    around, so it is added up in the same order every time.
    """
    own = lax.axis_index(axis)
    total = product((own - 1) % ranks)
    for step in range(1, ranks):
        total = _from_before(total, axis, ranks) + product((own - 1 - step) % ranks)
    return total


def _from_before(x: Array, axis: str, ranks: int) -> Array:
    arrived: Array = lax.ppermute(x, axis, [(i, (i + 1) % ranks) for i in range(ranks)])
    return arrived
