"""What the Mosaic kernels for rows of logits compute, in plain JAX: stand-ins with the launchers' signatures, for the
CPU.  What the kernels leave unwritten is NaN here.
"""

import jax.numpy as jnp

from onchip.ops.cross_entropy import jax_op
from onchip.ops.linear_log_probs import jax_op as log_probs_op
from onchip.vocab.rows import mosaic, mosaic_once, mosaic_op
from onchip.vocab.xla.tiles import Wanted


def unscaled(logits, inner_scale):
    x = logits.astype(jnp.float32)
    return x if inner_scale is None else jnp.tanh(x * inner_scale[0])


def weighed(value, class_weight):
    return value if class_weight is None else jnp.where(class_weight[None] > 0, value * class_weight[None], 0)


def counts(x, end):
    """[1, V]: the entries that aren't padding."""
    return jnp.arange(x.shape[1])[None] < (x.shape[1] if end is None else end[0])


def statistics(logits, kept, factor, inner_scale, class_weight, *, wanted, labels=None, end=None):
    x, counted = unscaled(logits, inner_scale), counts(logits, end)
    x = jnp.where(counted, x, -jnp.inf)
    best = jnp.maximum(x.max(1), mosaic.LOWEST)
    below = (x - best[:, None]) * factor[:, None]
    e = jnp.exp(below)
    others = jnp.where(e > mosaic.LEADING, 0, e)
    made = {"best": best, "total": e.sum(1), "below": others.sum(1)}
    if wanted.even:
        made["offset_sum"] = jnp.where(counted, weighed(below, class_weight), 0).sum(1)
    if wanted.entropy:
        made["moment"] = (e * jnp.maximum(below, mosaic.NOTHING)).sum(1)
    if wanted.argmax:
        made["argmax"] = jnp.where(x.max(1) == -jnp.inf, mosaic.NO_COLUMN, x.argmax(1).astype(jnp.int32))
    if wanted.sum_sq:
        made |= {"squares": (e * e).sum(1), "squares_below": (others * others).sum(1)}
    if labels is not None:
        q = jnp.where(counted, labels.astype(jnp.float32), 0)
        plain = wanted.entropy and class_weight is not None
        for which, each in [("", weighed(q, class_weight)), ("plain_", q)][: 1 + plain]:
            made[f"{which}cost"] = jnp.where(each == 0, 0, -each * below).sum(1)
            made[f"{which}mass"] = each.sum(1)
    unwritten = {name: 7 if value.dtype == jnp.int32 else jnp.nan for name, value in made.items()}
    return {name: jnp.where(kept != 0, value, unwritten[name]) for name, value in made.items()}


def gradients(logits, kept, factor, inner_scale, class_weight, ids, gradient, *, labels=None, end=None):
    x = unscaled(logits, inner_scale)
    a = type(gradient)(*(None if x is None else x[:, None] for x in gradient))
    offset = x * factor[:, None] - a.center
    if a.entropy is None:
        g = jnp.exp(offset) * a.factor
    else:
        g = jnp.exp(offset - a.width) * (a.factor + a.entropy * jnp.maximum(offset, -128))
    if labels is not None:
        g -= weighed(a.labels * labels.astype(jnp.float32), class_weight)
    if a.even is not None:
        g -= a.even * (1 if class_weight is None else class_weight[None])
    if ids is not None:
        g = jnp.where(jnp.arange(x.shape[1])[None] == ids[:, None], a.at_id, g)
    g = g if inner_scale is None else g * (1 - x * x)
    return jnp.where((kept[:, None] != 0) & counts(x, end), g, 0).astype(logits.dtype)


def losses(logits, kept, factor, loss):
    made = statistics(logits, kept, factor, None, None, wanted=Wanted())
    x = logits.astype(jnp.float32)
    e = jnp.exp((x - made["best"][:, None]) * factor[:, None])
    own = jnp.arange(x.shape[1])[None] == loss.ids[:, None]
    lse = made["best"] * factor + jnp.log(made["total"])
    more = None if loss.slope is None else loss.slope * lse
    p = jnp.where(own, e, 0).sum(1)
    of_p, at_id = mosaic_once.row_terms(p, made["total"], made["below"], loss.scale, more)
    g = jnp.where(own, at_id[:, None], of_p[:, None] * e)
    return made, jnp.where(kept[:, None] != 0, g, 0).astype(logits.dtype)


def forget():
    """What was compiled for other kernels."""
    for function in (*jax_op._op.jitted, *log_probs_op.OPERATOR.jitted):
        function.clear_cache()


def stand_in(monkeypatch):
    """Let the 'mosaic_gpu' backend run on the CPU, with these in the place of its kernels."""
    for op in (jax_op, log_probs_op):
        monkeypatch.setattr(op, "platform", lambda: "gpu")
    monkeypatch.setattr(mosaic_op, "hopper_refusal", lambda: None)
    for name in ("statistics", "gradients"):
        monkeypatch.setattr(mosaic, name, globals()[name])
    monkeypatch.setattr(mosaic_once, "losses", losses)
    forget()
