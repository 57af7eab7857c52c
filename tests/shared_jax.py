"""What the tests of the JAX front ends of several ops share."""

import jax
import jax.numpy as jnp
import numpy as np

# What the conftest.py beside pyproject.toml spares tests: fusions differ with it, and so does memory.
AS_USERS_COMPILE = {
    "xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False, "xla_cpu_use_fusion_emitters": True
}  # fmt: skip


def temporary_bytes(step, *arguments):
    """What XLA allocates for `step`, beside its arguments and results."""
    compiled = jax.jit(step).lower(*arguments).compile(AS_USERS_COMPILE)
    return compiled.memory_analysis().temp_size_in_bytes


def small_problem(tokens=24, hidden=16, vocab=70, dtype="float32", seed=0, ids=None):
    """(hidden [2, T/2, H], weight [V, H], labels [2, T/2] or of so many `ids` each [2, T/2, K], bias [V])."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    shape = (2, tokens // 2) if ids is None else (2, tokens // 2, ids)
    labels = jnp.asarray(rng.integers(vocab, size=shape), jnp.int32)
    return normal(2, tokens // 2, hidden), normal(vocab, hidden), labels, normal(vocab)


def assert_same(a, b, scale=1.0):
    """Two float32 computations of one thing: ||a - b|| is a few roundings of ||b||.  Infinities must agree."""
    a, b = jax.tree.leaves(a), jax.tree.leaves(b)
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert x.shape == y.shape
        assert (np.isinf(x) == np.isinf(y)).all()
        x, y = np.where(np.isinf(x), 0, x), np.where(np.isinf(y), 0, y)
        bound = 32 * np.finfo(np.float32).eps * scale * max(1.0, np.linalg.norm(y))
        assert np.linalg.norm(x - y) <= bound, (x, y)


def plain_logits(hidden, weight, bias=0.0):
    """[..., V]; bias is [V] or a number."""
    wide = jnp.broadcast_to(bias, (*[1] * (hidden.ndim - 1), len(weight)))
    return jnp.matmul(hidden, weight.T, precision="highest") + wide


def plain_loss(logits, labels, ignore_index=-100, reduction="mean"):
    """The cross-entropy written out."""
    kept = labels != ignore_index
    log_p = jax.nn.log_softmax(logits)
    loss = jnp.where(kept, -jnp.take_along_axis(log_p, jnp.where(kept, labels, 0)[..., None], -1)[..., 0], 0)
    return loss if reduction == "none" else loss.sum() / jnp.maximum(kept.sum(), 1)
