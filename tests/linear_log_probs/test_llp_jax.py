"""The JAX op: against the float64 oracle, and under JAX's transformations."""

import jax
import jax.numpy as jnp
import numpy as np

from onchip.jax import LogProbs, linear_log_probs, log_probs
from onchip.ops.linear_log_probs import checks
from shared_jax import assert_same, small_problem


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


def test_labels_is_another_name_of_ids():
    hidden, weight, ids = (jnp.asarray(x) for x in (np.eye(4, 8), np.eye(16, 8), np.arange(4)))
    logits = hidden @ weight.T
    np.testing.assert_array_equal(linear_log_probs(hidden, weight, labels=ids), linear_log_probs(hidden, weight, ids))
    np.testing.assert_array_equal(log_probs(logits, labels=ids), log_probs(logits, ids))
