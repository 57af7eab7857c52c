"""Losses whose vocabulary is split over all of the machine's GPUs, on the 'mosaic_gpu' backend: as plain JAX computes a
whole one.  On one GPU that is one part, with padding.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from onchip.jax import TopK, cross_entropy, jsd, linear_cross_entropy, linear_jsd, linear_log_probs, log_probs
from split_vocab import total

pytestmark = pytest.mark.gpu
TOKENS, HIDDEN, PADDING = 300, 256, 40


def draw(i, *shape, dtype="bfloat16"):
    return jax.random.normal(jax.random.key(i), shape).astype(dtype)


def sizes():
    vocab = 4096 * jax.device_count()
    return vocab, vocab - PADDING


def ids(*more):
    return jax.random.randint(jax.random.key(9), (TOKENS, *more), 0, sizes()[1])


def teacher(rest):
    likeliest = jax.lax.top_k(draw(7, TOKENS, sizes()[1], dtype="float32"), 16)[1]
    return TopK(likeliest, -3 - jnp.abs(draw(8, TOKENS, 16, dtype="float32")), "log_probs", rest)


def head():
    return {"hidden": draw(0, TOKENS, HIDDEN), "weight": draw(1, sizes()[0], HIDDEN) / 8}


def student():
    return {f"student_{name}": x for name, x in head().items()}


def logits(name="logits"):
    return {name: draw(2, TOKENS, sizes()[0]) * 3}


def labels():
    return ids().at[::7].set(-100)


CASES = {
    "cross_entropy": lambda: (cross_entropy, logits(), {"target": labels(), "label_smoothing": 0.1, "softcap": 9.0}),
    "log_probs": lambda: (log_probs, logits(), {"ids": ids(4), "entropy": True, "mean_logits": True}),
    "jsd": lambda: (jsd, logits("student_logits") | {"teacher_logits": draw(3, TOKENS, sizes()[0])}, {"beta": 0.3}),
    "jsd, top-k": lambda: (
        jsd, logits("student_logits"), {"teacher_topk": teacher("tail"), "target": labels(), "hard_weight": 0.3}
    ),
    "linear_cross_entropy": lambda: (linear_cross_entropy, head(), {"target": labels(), "return_stats": True}),
    "linear_cross_entropy, K ids": lambda: (
        linear_cross_entropy, head(), {"target": teacher("truncated")._replace(kind="log_probs")}
    ),
    "linear_log_probs": lambda: (linear_log_probs, head(), {"ids": labels(), "entropy": True, "top1": True}),
    "linear_jsd": lambda: (
        linear_jsd,
        student() | {"teacher_hidden": draw(5, TOKENS, HIDDEN), "teacher_weight": draw(6, sizes()[0], HIDDEN) / 8},
        {"teacher_grad": True, "target": labels(), "hard_weight": 0.2},
    ),
    "linear_jsd, top-k": lambda: (linear_jsd, student(), {"teacher_topk": teacher("tail"), "beta": 0.0}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_parts_are_as_a_whole(name):
    op, arrays, how = CASES[name]()
    count = sizes()[1]
    mesh = jax.make_mesh((jax.device_count(),), ("model",), axis_types=(AxisType.Auto,))
    axes = {
        n: P() if n.endswith("hidden") else P("model") if n.endswith("weight") else P(None, "model") for n in arrays
    }
    of_count = {"vocab" if "jsd" in name else "vocab_size": count}

    def split(arrays):
        def on_device(arrays):
            return op(**arrays, **how, **of_count, axis_name="model", backend="mosaic_gpu")

        return total(jax.shard_map(on_device, mesh=mesh, in_specs=(axes,), out_specs=P())(arrays))

    def whole(arrays):
        own = {n: x if n.endswith("hidden") else x[:count] if n.endswith("weight") else x[:, :count]
               for n, x in arrays.items()}  # fmt: skip
        return total(op(**own, **how, backend="xla"))

    found = jax.jit(jax.value_and_grad(split, has_aux=True))(arrays)
    with jax.default_matmul_precision("highest"):
        wide = jax.tree.map(lambda x: x.astype(jnp.float32), arrays)
        right = jax.jit(jax.value_and_grad(whole, has_aux=True))(wide)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        if jnp.issubdtype(y.dtype, jnp.floating):
            x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
            assert np.linalg.norm(x - y) <= 8e-3 * np.linalg.norm(y)
        else:
            assert (x == y).mean() > 0.99
