"""Soft labels, and existing logits, with a vocabulary that is split over devices in JAX: a script like that of
test_vocab_parallel_jax.py, whose arrays it uses.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from losses import CE, LCE
from on_devices import adding_to, report_checks, run_checks
from onchip.jax import (
    TopK,
    cross_entropy,
    jsd,
    linear_cross_entropy,
    log_probs,
    sharded_linear_cross_entropy,
)
from shared_jax import assert_same
from soft_labels import everything as everything_soft
from soft_labels import oracle, right_stats
from soft_labels import problem as soft_problem
from test_soft_labels_jax import OPS as JAX_OPS
from test_soft_labels_jax import as_jax, in_jax
from test_vocab_parallel_jax import EVERY, B, S, V, arrays, everything, mesh_of, padded, total

CHECKS, SLOW = {}, {}
check, slow = adding_to(CHECKS), adding_to(SLOW)


def soft_labels(loss, form, devices, reduction="none", dtype=torch.float32, all_options=True, bound=2e-6):
    """Along an axis, against the oracle, with padding where the devices' parts aren't as large otherwise."""
    options = everything_soft(reduction, vocab=V) if all_options else {}
    given = soft_problem(loss, form, vocab=V, dtype=dtype)
    parameters, labels = in_jax(given)
    numbers = {name: as_jax(x) for name, x in options.items()}
    more, op = -V % devices, JAX_OPS[loss]

    def split(x, axis=0):
        return jnp.pad(x, [(0, more if i == axis % x.ndim else 0) for i in range(x.ndim)], constant_values=0.5)

    by_entry = P(None, None, "model")
    specs = {name: P("model") if name in ("weight", "bias") else P() for name in parameters} | {"logits": by_entry}
    of_labels = by_entry if form == "dense" else P()
    axes = {name: -1 if name == "logits" else 0 for name in ("weight", "bias", "logits")}
    arrays, words = (labels, None) if form == "dense" else (labels[:2], labels[2:])

    @partial(
        jax.shard_map,
        mesh=jax.make_mesh((devices,), ("model",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices]),
        in_specs=({name: specs[name] for name in parameters}, of_labels),
        out_specs=P(),
    )
    def on_devices(parameters, arrays):
        labels = arrays if words is None else TopK(*arrays, *words)
        how = {"axis_name": "model", "vocab_size": V, "reduction": reduction, "return_stats": True, **numbers}
        return op(**parameters, labels=labels, **how)

    @jax.jit
    def run(parameters):
        parameters = {name: split(x, axes[name]) if name in axes else x for name, x in parameters.items()}
        return on_devices(parameters, split(arrays, -1) if words is None else arrays)

    made, pullback, stats = jax.vjp(run, parameters, has_aux=True)
    upstream = np.linspace(-1, 2, made.size, dtype=np.float32).reshape(made.shape)
    (grads,) = pullback(jnp.asarray(upstream))
    right = oracle(loss, given, torch.from_numpy(upstream), reduction=reduction, **options)
    assert_same(made, right.loss, scale=2)
    for name, g in grads.items():
        expected = getattr(right, f"grad_{name}")
        assert g.dtype == parameters[name].dtype
        assert np.linalg.norm(np.float64(g) - expected) <= bound * np.linalg.norm(expected), name
    for name, x in right_stats(loss, given, **options).items():
        found, x = getattr(stats, name), x.detach().numpy()
        assert np.array_equal(found, x) if name in ("correct", "argmax") else np.allclose(found, x, 3e-6, 3e-6), name


@check
def soft_labels_of_a_head_for_every_entry():
    soft_labels(LCE, "dense", 4)


@check
def soft_labels_of_a_head_for_some_ids():
    soft_labels(LCE, "log_probs", 2)


@check
def soft_labels_of_logits():
    soft_labels(CE, "dense", 2, "mean")
    soft_labels(CE, "probs", 4)


@slow
def soft_labels_in_16_bits():
    for loss, form in ((LCE, "dense"), (LCE, "probs"), (CE, "dense")):
        soft_labels(loss, form, 2, "mean", torch.float16, False, 1e-3)


@check
def soft_labels_on_a_mesh():
    """And shifted; labels that are padding don't count."""
    for form, shift in (("dense", True), ("probs", False)):
        parameters, labels = in_jax(soft_problem(LCE, form, (4, 6), vocab=V))
        _, _, tokens, _, classes = arrays()
        options = {"class_weight": classes, "label_smoothing": 0.2, "shift": shift, "return_stats": True, **tokens}
        given = tuple(parameters.values())
        whole = lambda h, w, b: linear_cross_entropy(h, w, labels, b, **options)  # noqa: E731, B023
        split = partial(
            sharded_linear_cross_entropy, vocab_axis="model", token_axes="data", mesh=mesh_of(), vocab_size=V, **options
        )
        of_labels = padded(labels, -1) if form == "dense" else labels
        run = lambda h, w, b: split(h, padded(w), of_labels, padded(b))  # noqa: E731, B023
        expected = jax.jit(everything(lambda *x: total(whole(*x))))(*given)  # noqa: B023
        assert_same(jax.jit(everything(lambda *x: total(run(*x))))(*given), expected, 2)  # noqa: B023


@check
def logits_along_an_axis():
    """Every loss of logits that exist, with targets that are ids."""
    _, y, tokens, ids, classes = arrays()
    z, u = jnp.asarray(np.random.default_rng(3).standard_normal((2, B, S, V)), jnp.float32)
    smoothed = {"class_weight": classes, "label_smoothing": 0.2, "z_loss": 1e-3, "softcap": 3.0, "return_stats": True}
    cases = [
        (partial(cross_entropy, reduction="none", **smoothed), {"target": y, **tokens}, {}),
        (partial(log_probs, **EVERY), {"ids": ids}, {}),
        (partial(jsd, beta=0.3, teacher_grad=True, reduction="none"), {}, {"teacher_logits": u}),
    ]
    for op, of_tokens, of_entries in cases:
        size = "vocab" if of_entries else "vocab_size"

        def split(z, u, op=op, of_tokens=of_tokens, of_entries=of_entries, size=size):
            spec = P("data", None, "model")
            run = lambda z, others, given: op(z, **others, **given, axis_name="model", **{size: V})  # noqa: E731
            call = jax.shard_map(run, mesh=mesh_of(), in_specs=(spec, spec, P("data")), out_specs=P("data"))
            return total(call(padded(z, -1), {name: padded(u, -1) for name in of_entries}, of_tokens))

        def whole(z, u, op=op, of_tokens=of_tokens, of_entries=of_entries):
            return total(op(z, **of_tokens, **dict.fromkeys(of_entries, u)))

        found, expected = (jax.jit(jax.value_and_grad(f, (0, 1), has_aux=True))(z, u) for f in (split, whole))
        assert_same(found, expected)


@pytest.mark.parametrize("which", ["checks", pytest.param("slow", marks=pytest.mark.slow)])
def test_labels_of_a_split_vocabulary(which):
    run_checks(__file__, which, {"checks": CHECKS, "slow": SLOW}[which])


if __name__ == "__main__":
    report_checks(CHECKS, SLOW)
