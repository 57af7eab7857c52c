"""The JAX op: against the float64 oracle, and under JAX's transformations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from onchip.jax import LogProbs, linear_log_probs, log_probs
from onchip.ops.linear_log_probs import checks
from onchip.vocab.memory import Problem
from onchip.vocab.xla import memory
from shared_jax import assert_same, small_problem, temporary_bytes

MORE = {"mean_logits": True, "log_sum_sq_probs": True}


def test_nothing_leaks_from_ignored_tokens_and_bad_ids_give_nan():
    h, w, ids, b = small_problem(ids=2)
    ids = ids.at[0, 3].set(-100).at[1, 5].set(-100).at[0, 4, 0].set(-100)
    dirty, tau = h.at[0, 3].set(jnp.nan).at[1, 5].set(jnp.inf), jnp.ones((2, 12)).at[0, 3].set(jnp.nan)

    @jax.jit
    def run(h, ids, tau, upstream):
        def values(h, w, b):
            return linear_log_probs(h, w, ids, b, temperature=tau, entropy=True, lse=True)[:3]

        out, pullback = jax.vjp(values, h, w, b)
        return out, pullback(tuple(upstream.at[..., 0].get() if x.ndim == 2 else upstream for x in out))

    upstream = jnp.ones((2, 12, 2))
    out, grads = run(dirty, ids, tau, upstream.at[0, 3].set(jnp.nan))
    assert_same((out, grads), run(h, ids, jnp.ones((2, 12)), upstream))
    assert not any(x[0, 3].any() for x in (*out, grads[0]))
    for bad in (70, -1, 2**31 - 1):
        (log_prob, entropy, _), grads = run(h, ids.at[1, 7, 1].set(bad), jnp.ones((2, 12)), 0 * upstream)
        assert np.argwhere(np.isnan(log_prob)).tolist() == [[1, 7, 1]]
        assert np.isfinite(entropy).all()
        assert np.argwhere(np.isnan(grads[0]).any(-1)).tolist() == [[1, 7]]
    oracle = checks.linear_log_probs(h, w, ids.at[1, 7, 1].set(70), b)
    assert np.argwhere(np.isnan(oracle.grad_hidden).any(-1)).tolist() == [[1, 7]]


def test_what_is_returned():
    h, w, ids, _ = small_problem(ids=3)
    assert linear_log_probs(h, w, ids).shape == (2, 12, 3)
    out = linear_log_probs(h, w, np.asarray(ids, np.int64), top1=True)
    assert isinstance(out, LogProbs)
    assert (out.entropy, out.lse) == (None, None)
    assert out.top1.tolist() == jnp.argmax(h @ w.T, -1).tolist()
    everything = dict.fromkeys(("entropy", "lse", "top1", "mean_logits", "log_sum_sq_probs"), True)
    empty = linear_log_probs(h[:, :0], w, ids[:, :0], **everything)
    assert [x.shape for x in empty] == [(2, 0, 3), *[(2, 0)] * 5]
    detached = jax.grad(lambda h: sum(x.sum() for x in linear_log_probs(h, w, ids, **everything)[4:]))(h)
    assert not detached.any()
    assert linear_log_probs(h[0, 0], w, ids[0, 0, 0]).shape == ()


@pytest.mark.parametrize("options", [{}, {"entropy": True, "softcap": 5.0}, MORE], ids=str)
def test_the_memory_formula(options):
    h, w, ids = (jax.ShapeDtypeStruct(s, d) for s, d in (((512, 64), "float32"), ((8192, 64), "float32"), ((512,), "int32")))  # fmt: skip # noqa: E501
    wanted = {"softcap": "softcap" in options, "stats": "entropy" in options}
    problem = Problem(512, 64, 8192, compacted=True, ids=1, more_stats=len(MORE) * (options is MORE), **wanted)
    budget = memory.scratch_at_least(problem, "recompute") + (4 << 20)

    def step(h, w, ids):
        out = linear_log_probs(h, w, ids, scratch_bytes=budget, lse=True, **options)
        return out.log_prob.sum() + (out.entropy.sum() if "entropy" in options else 0), out[4:]

    temporary = temporary_bytes(jax.grad(step, (0, 1), has_aux=True), h, w, ids)
    assert temporary <= budget
    assert temporary >= memory.scratch_bytes(problem, memory.plan(problem, "recompute", budget)) / 3


def test_labels_is_another_name_of_ids():
    hidden, weight, ids = (jnp.asarray(x) for x in (np.eye(4, 8), np.eye(16, 8), np.arange(4)))
    logits = hidden @ weight.T
    np.testing.assert_array_equal(linear_log_probs(hidden, weight, labels=ids), linear_log_probs(hidden, weight, ids))
    np.testing.assert_array_equal(log_probs(logits, labels=ids), log_probs(logits, ids))
