"""Losses whose vocabulary is split over devices, on the 'mosaic_gpu' backend, compared with plain JAX and a whole one: a
script like that of test_vocab_parallel_jax.py.  Stand-ins in plain JAX take the place of the kernels.
"""

from contextlib import contextmanager
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import plain_rows
from on_devices import adding_to, report_checks, run_checks
from onchip.jax import TopK, cross_entropy, log_probs
from shared_jax import assert_same
from test_vocab_parallel_jax import EVERY, mesh_of, total

CHECKS, SLOW = {}, {}
check, slow = adding_to(CHECKS), adding_to(SLOW)
B, S, V, PADDED = 4, 6, 315, 320


@contextmanager
def kernels_of(module):
    """With this module's stand-ins."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        module.stand_in(monkeypatch)
        yield
    module.forget()


def draw(i, *shape, scale=1.0):
    return jnp.asarray(np.random.default_rng(i).standard_normal(shape) * scale, jnp.float32)


def integers(i, *shape):
    return jnp.asarray(np.random.default_rng(i).integers(V, size=shape), jnp.int32)


def labels(form):
    """By token."""
    if form == "ids":
        return integers(1, B, S).at[0, :5].set(-100).at[2].set(-100)
    if form == "dense":
        return jnp.abs(draw(2, B, S, V)) / V
    return TopK(integers(3, B, S, 4), jnp.abs(draw(4, B, S, 4)) / 4, "probs", "truncated")


def padded(x):
    """Arrays that have a dimension for the vocabulary at the end, with padding that would show if it counted."""
    return jnp.pad(x, [*[(0, 0)] * (x.ndim - 1), (0, PADDED - x.shape[-1])], constant_values=9.0)


# --------------------------------------------------------------------------------------------------- logits that exist


def rows(op, entries, tokens, *, size="vocab_size", **options):
    """The loss, with arrays by entry and by token, is that of a whole vocabulary."""
    spec = P("data", None, "model")

    def split(entries):
        def on_device(entries, tokens):
            return op(**entries, **tokens, axis_name="model", backend="mosaic_gpu", **{size: V}, **options)

        run = jax.shard_map(on_device, mesh=mesh_of(), in_specs=(spec, P("data")), out_specs=P("data"))
        return total(run({name: padded(x) for name, x in entries.items()}, tokens))

    def whole(entries):
        return total(op(**entries, **tokens, backend="xla", **options))

    def step(f):
        return jax.jit(jax.value_and_grad(f, has_aux=True, allow_int=True))(entries)

    with kernels_of(plain_rows):
        found = step(split)
    assert_same(found, step(whole), scale=4)


EVERYTHING = {"label_smoothing": 0.2, "z_loss": 1e-3, "softcap": 3.0, "return_stats": True, "reduction": "none"}


def of_labels(form, **options):
    entries, tokens, op = {"logits": draw(0, B, S, V, scale=2.0)}, labels(form), cross_entropy
    if form == "dense":
        entries["target"], tokens = tokens, {}
    elif form == "topk":
        tokens = {"indices": tokens.indices, "values": tokens.values}
        op = lambda logits, indices, values, **o: cross_entropy(
            logits, TopK(indices, values, "probs", "truncated"), **o
        )  # noqa: E731
    else:
        tokens = {"target": tokens}
    tokens["temperature"] = jnp.linspace(0.5, 2, B * S).reshape(B, S)
    rows(op, entries, tokens, **EVERYTHING, **options)


@check
def cross_entropy_of_ids():
    of_labels("ids", class_weight=jnp.linspace(0, 2, V))


@check
def cross_entropy_of_every_entry():
    of_labels("dense", class_weight=jnp.linspace(0, 2, V))


@slow
def cross_entropy_of_k_ids():
    for form in ("topk", "ids", "dense"):
        of_labels(form)


@check
def log_probs_of_ids():
    rows(log_probs, {"logits": draw(0, B, S, V)}, {"ids": integers(1, B, S, 3).at[0, :2, 1].set(-100)}, **EVERY)


@slow
def log_probs_of_one_id():
    rows(log_probs, {"logits": draw(0, B, S, V)}, {"ids": labels("ids")}, softcap=3.0, **EVERY)


@pytest.mark.parametrize("which", ["checks", pytest.param("slow", marks=pytest.mark.slow)])
def test_split_vocabulary_on_kernels(which):
    run_checks(__file__, which, {"checks": CHECKS, "slow": SLOW}[which])


if __name__ == "__main__":
    report_checks(CHECKS, SLOW)
