"""The JAX ops under `jax.shard_map` on two devices, compared with one: a script, whose process has two from the
start.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from on_devices import report_checks, run_checks
from onchip.jax import cross_entropy, grouped_matmul, linear_cross_entropy, linear_jsd, linear_log_probs
from shared_jax import assert_same


def routed(h, w, y):
    """Each token's logits over the entries that its label chooses, by groups that differ from device to device."""
    group = y % 4
    order = jnp.argsort(group)
    where = {"rows": order, "scatter_rows": order, "num_rows": len(h), "row_scale": jnp.full(len(h), 0.5)}
    return jnp.square(grouped_matmul(h, w.reshape(4, -1, 16), jnp.bincount(group, length=4), **where)).sum()


OPS = {
    "grouped_matmul": routed,
    "linear_cross_entropy, stash": partial(linear_cross_entropy, reduction="sum", strategy="stash"),
    "linear_cross_entropy, recompute": partial(
        linear_cross_entropy, reduction="sum", strategy="recompute", scratch_bytes=450_000
    ),
    "linear_log_probs": lambda h, w, y: linear_log_probs(h, w, y, scratch_bytes=450_000).sum(),
    "linear_jsd": lambda h, w, y: linear_jsd(h, w, h, w[::-1], labels=y, hard_weight=0.5, reduction="sum"),
    "cross_entropy": lambda h, w, y: cross_entropy(jnp.matmul(h, w.T, precision="highest"), y, reduction="sum"),
}


def test_shard_map():
    run_checks(__file__, "checks", OPS, devices=2)


def tokens_are_split(op):
    rng = np.random.default_rng(0)
    h, w = jnp.float32(rng.standard_normal((128, 16))), jnp.float32(rng.standard_normal((1100, 16)))
    y = jnp.asarray(rng.integers(1100, size=128), jnp.int32).at[:50].set(-100)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    split = partial(jax.shard_map, mesh=mesh, in_specs=(P("data"), P(), P("data")))
    expected = jax.jit(jax.value_and_grad(op, (0, 1)))(h, w, y)

    def step(h, w, y):
        loss, grads = jax.value_and_grad(op, (0, 1))(h, w, y)
        return jax.lax.psum(loss, "data"), grads

    # JAX itself sums the gradient of weight, which all devices have, over them.
    assert_same(jax.jit(split(step, out_specs=(P(), (P("data"), P()))))(h, w, y), expected)


if __name__ == "__main__":
    report_checks({name: partial(tokens_are_split, op) for name, op in OPS.items()}, {})
