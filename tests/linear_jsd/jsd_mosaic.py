"""What the tests of linear_jsd's Mosaic kernels share: what the kernels compute, in plain JAX, and the backend on a
CPU."""

import jax
import jax.numpy as jnp
import numpy as np

from onchip.jax import jsd
from onchip.ops.linear_jsd import jax_op, mosaic_kernels, mosaic_walk
from onchip.ops.linear_jsd.divergence import nearly_equal
from onchip.ops.linear_jsd.mosaic_kernels import LN2, LOG2E, JsdSoftmax, JsdTerms


def floats(logits, end):
    """-inf for padding."""
    x = logits.astype(jnp.float32)
    return x if end is None else jnp.where(jnp.arange(x.shape[1])[None] < end[0], x, -jnp.inf)


def softmax(logits, token, label, temperature, *, end=None, ids=None):
    """What isn't written is NaN."""
    x, scale, others = floats(logits, end), LOG2E / temperature, None
    if ids is not None:
        x = x.at[jnp.arange(len(x))[:, None], jnp.where(ids < 0, x.shape[1], ids)].set(-jnp.inf, mode="drop")
    top = jnp.maximum(x.max(1), mosaic_kernels.LOWEST)
    below = x - top[:, None]
    log_sum = jnp.log2(jnp.exp2(below * scale).sum(1))
    if label is not None:
        others = jnp.where(jnp.arange(x.shape[1])[None] == label[:, None], 0, jnp.exp(below)).sum(1)
    return JsdSoftmax(*_counted(token, top, log_sum, others))


def _counted(token, *numbers):
    return [None if x is None else jnp.where(token < 0, jnp.nan, x) for x in numbers]


def _both(student, teacher, softmaxes, options, end):
    return [mosaic_kernels._log2_probs(floats(x, end), s.maximum[:, None], s.log_sum[:, None],
                                       LOG2E / options.temperature)
            for x, s in zip((student, teacher), softmaxes, strict=False)]  # fmt: skip


def terms(student, teacher, token, softmaxes, options, *, means=(True, True), end=None, summed=None):
    beta = options.beta
    made = mosaic_kernels._terms(*_both(student, teacher, softmaxes, options, end), beta, nearly_equal(beta))
    made = [x.sum(1) for x in made]
    term, by_s, by_t, s, t = made if summed is None else summed(made)
    of_means = (jnp.where(term == jnp.inf, term, by / p) if want else None
                for by, p, want in ((by_s, s, means[0]), (by_t, t, means[1])))  # fmt: skip
    return JsdTerms(*_counted(token, term * LN2, *of_means))


def gradients(student, teacher, token, softmaxes, means, scales, hard, options, into=(None, None), first=None,
              dtypes=None, *, end=None):  # fmt: skip
    log_s, log_t = (*_both(student, teacher, softmaxes, options, end), None)[:2]
    both, made = ((log_s, log_t, options.beta), (log_t, log_s, 1 - options.beta)), []
    for k, (own, other, weight) in enumerate(both):
        if scales[k] is None:
            made.append(None)
            continue
        mean = None if means[k] is None else means[k][:, None]
        g = jnp.exp2(own) if teacher is None else mosaic_kernels._gradient(own, other, mean, weight)
        g *= scales[k][:, None]
        if k == 0 and hard is not None:
            soft = hard.factor[:, None] * jnp.exp(floats(student, end) - hard.shift[:, None])
            g += jnp.where(jnp.arange(g.shape[1])[None] == hard.label[:, None], hard.at_label[:, None], soft)
        g = jnp.where(token[:, None] < 0, 0, g)
        if into[k] is None:
            made.append(g.astype(dtypes[k]))
            continue
        into[k][...] = into[k][...].at[jnp.arange(len(g)) + first[0]].set(g.astype(into[k].dtype))
        made.append(None)
    return tuple(made)


def forget():
    for function in jax_op._op.jitted:
        function.clear_cache()


def stand_in(monkeypatch, **kernels):
    """Let the 'mosaic_gpu' backend run on the CPU, with these or the kernels above in the place of its own."""
    monkeypatch.setattr(jax_op, "platform", lambda: "gpu")
    monkeypatch.setattr(mosaic_walk, "hopper_refusal", lambda: None)
    for name, kernel in ({"softmax": softmax, "terms": terms, "gradients": gradients} | kernels).items():
        monkeypatch.setattr(mosaic_kernels, name, kernel)
    forget()


def assert_certain_models(backend):
    """Where both are certain, of different tokens, nearly all of a gradient cancels: it is exact to float32's precision
    of what cancels, as it is in plain float32."""
    z, u = jax.random.normal(jax.random.key(0), (2, 24, 4096)) * 30
    made = jax.grad(lambda *a: jsd(*a, teacher_grad=True, reduction="sum", backend=backend), (0, 1))(z, u)
    s, t = (np.exp(x - np.logaddexp.reduce(x, 1, keepdims=True)) for x in (np.float64(z), np.float64(u)))
    for p, g in ((s, made[0]), (t, made[1])):
        terms = p / 2 * np.log(np.maximum(p, 1e-300) / np.maximum((s + t) / 2, 1e-300))
        right = terms - p * terms.sum(1, keepdims=True)
        assert np.linalg.norm(right) < 1e-3 * np.linalg.norm(terms)
        assert np.linalg.norm(g - right) < 2**-23 * np.linalg.norm(terms)
