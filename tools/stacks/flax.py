"""Flax: its linear layer as a head."""

from typing import Any

from stacks.common import Checked, agreed, tests, tokens


def flax() -> Checked:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx

    from onchip.integrations.flax import LinearHead

    hidden = jax.random.normal(jax.random.key(0), (2, 16, 32))
    labels = jnp.asarray(tokens().numpy())

    def loss(head: Any) -> Any:
        if isinstance(head, LinearHead):
            return head(hidden, labels, shift=False)
        return optax.softmax_cross_entropy_with_integer_labels(head(hidden), labels).mean()

    made = []
    for kind in (LinearHead, nnx.Linear):
        value = nnx.value_and_grad(loss)(kind(32, 96, rngs=nnx.Rngs(0)))
        made.append([np.asarray(x) for x in jax.tree.leaves(value)])
    how = f"`LinearHead` and `nnx.Linear` with optax, loss and gradients: {agreed(*made):.0e}; {tests('flax')}"
    return "`nnx.Linear`, `nnx.Embed`, `linen.Dense`", how
