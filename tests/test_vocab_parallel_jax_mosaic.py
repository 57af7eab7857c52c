"""Losses whose vocabulary is split over devices, on the 'mosaic_gpu' backend, compared with plain JAX and a whole one.

A script like that of test_vocab_parallel_jax.py.  Stand-ins in plain JAX take the place of the kernels.
"""

from contextlib import contextmanager
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import lowered
import plain_kernels
import plain_rows
from linear_jsd import jsd_mosaic
from on_devices import adding_to, report_checks, run_checks
from onchip.jax import (
    TopK,
    cross_entropy,
    jsd,
    linear_cross_entropy,
    linear_jsd,
    linear_log_probs,
    log_probs,
    sharded_linear_cross_entropy,
    sharded_linear_jsd,
    sharded_linear_log_probs,
)
from onchip.ops.linear_jsd import mosaic_walk
from onchip.ops.linear_jsd.memory import JsdMosaicPlan
from onchip.vocab.mosaic import op as mosaic_op
from onchip.vocab.mosaic.memory import MosaicPlan
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


def rows(op, entries, tokens, *, size="vocab_size", stand_ins=plain_rows, **options):
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

    with kernels_of(stand_ins):
        found = step(split)
    assert_same(found, step(whole), scale=4)


EVERYTHING = {"label_smoothing": 0.2, "z_loss": 1e-3, "softcap": 3.0, "return_stats": True, "reduction": "none"}


def with_topk(logits, indices, values, **options):
    return cross_entropy(logits, TopK(indices, values, "probs", "truncated"), **options)


def of_labels(form, **options):
    entries, tokens, op = {"logits": draw(0, B, S, V, scale=2.0)}, labels(form), cross_entropy
    if form == "dense":
        entries["target"], tokens = tokens, {}
    elif form == "topk":
        tokens = {"indices": tokens.indices, "values": tokens.values}
        op = with_topk
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


# --------------------------------------------------------------------------------------------------------------- heads


def of_head(op, sharded, labels, plan=None, vocab=2160, layout="vh", **options):
    """On a mesh, and along an axis, where JAX tracks what varies."""
    h, w = draw(0, B, S * 16, 128).astype(jnp.bfloat16), (draw(1, 2176, 128) / 4).astype(jnp.bfloat16)
    how = {"vocab_size": vocab, "weight_layout": layout, "backend": "mosaic_gpu", **options}
    of_weight = P("model") if layout == "vh" else P(None, "model")

    def on_mesh(h, w):
        made = sharded(h, w, labels, vocab_axis="model", token_axes="data", mesh=mesh_of(), **how)
        return total(made)

    def along_axis(h, w):
        def on_device(h, w, labels):
            return op(h, w, labels, axis_name="model", **how)

        specs = P("data"), of_weight, P("data")
        return total(jax.shard_map(on_device, mesh=mesh_of(), in_specs=specs, out_specs=P("data"))(h, w, labels))

    def step(f):
        return jax.jit(jax.value_and_grad(f, (0, 1), has_aux=True))

    def whole(h, w):
        return total(op(h, w[:vocab], labels, **options))

    expected = step(whole)(*(x.astype(jnp.float32) for x in (h, w)))
    with kernels_of(plain_kernels), pytest.MonkeyPatch.context() as monkeypatch:
        if plan is not None:
            monkeypatch.setattr(mosaic_op, "plan", lambda *_: plan)
        for split in (on_mesh, along_axis):
            turned = (lambda h, w, split=split: split(h, w.T)) if layout == "hv" else split
            found = step(turned)(h, w)
            for x, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
                if jnp.issubdtype(e.dtype, jnp.integer):
                    assert (x == e).all()
                    continue
                assert jnp.linalg.norm(x.astype(jnp.float32) - e) <= 8e-3 * jnp.linalg.norm(e)


of_ids = partial(of_head, linear_log_probs, sharded_linear_log_probs)
of_loss = partial(of_head, linear_cross_entropy, sharded_linear_cross_entropy)


def ids_of_head(*more):
    return jnp.asarray(np.random.default_rng(5).integers(2160, size=(B, S * 16, *more)), jnp.int32)


@check
def linear_log_probs_of_one_id():
    of_ids(ids_of_head().at[0, :90].set(-100), **EVERY)


@check
def linear_log_probs_of_k_ids():
    of_ids(ids_of_head(3).at[0, :90, 1].set(-100), vocab=2176, softcap=5.0)


@slow
def linear_log_probs_by_their_plans():
    kept = MosaicPlan("stash", 192, kept_in_gradient=128, chunk=256, kept_in_scratch=128)
    of_ids(ids_of_head(), kept, entropy=True)
    of_ids(ids_of_head(), kept, layout="hv")
    of_ids(ids_of_head(2), layout="hv", entropy=True)


@check
def linear_cross_entropy_along_an_axis():
    kept = MosaicPlan("stash", 192, kept_in_gradient=128, chunk=256, kept_in_scratch=128)
    of_loss(ids_of_head().at[0, :90].set(-100), kept, reduction="none", z_loss=1e-3)


def of_dense(op):
    """Inside of a `shard_map` labels come with all entries, of which a device takes its own."""

    def call(h, w, q, axis_name=None, weight_layout="vh", **options):
        if axis_name is not None:
            size = w.shape[0]
            q = jax.lax.dynamic_slice_in_dim(q, jax.lax.axis_index(axis_name) * size, size, 2)
            options["axis_name"] = axis_name
        return op(h, w, q, **options)

    return call


def of_topk(op):
    return lambda h, w, given, **options: op(h, w, TopK(*given, "probs", "truncated"), **options)


@check
def linear_cross_entropy_of_every_entry():
    q = jnp.abs(draw(6, B, S * 16, 2176)) / 2176
    options = {"label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 5.0, "class_weight": jnp.linspace(0, 2, 2176)}
    of_head(of_dense(linear_cross_entropy), of_dense(sharded_linear_cross_entropy), q, vocab=2176, reduction="none",
            return_stats=True, **options)  # fmt: skip


@slow
def linear_cross_entropy_of_k_ids():
    given = ids_of_head(4), jnp.abs(draw(6, B, S * 16, 4)) / 4
    of_head(
        of_topk(linear_cross_entropy), of_topk(sharded_linear_cross_entropy), given, reduction="none", return_stats=True
    )


# ------------------------------------------------------------------------------------------------------ linear_jsd, jsd


@check
def jsd_of_a_mixture():
    entries = {"student_logits": draw(0, B, S, V), "teacher_logits": draw(1, B, S, V)}
    tokens = {"target": labels("ids"), "token_weight": jnp.linspace(0, 2, B * S).reshape(B, S)}
    options = {"hard_weight": 0.3, "temperature": 2.0, "teacher_grad": True, "reduction": "none", "size": "vocab"}
    rows(jsd, entries, tokens, beta=0.3, stand_ins=jsd_mosaic, **options)


@slow
def jsd_at_the_ends():
    entries = {"student_logits": draw(0, B, S, V), "teacher_logits": draw(1, B, S, V)}
    for beta in (0.0, 1.0):
        rows(jsd, entries, {}, beta=beta, teacher_grad=True, reduction="none", size="vocab", stand_ins=jsd_mosaic)


def heads():
    """Both models' hidden states, weights and biases, in bfloat16."""
    shapes = (B, S, 16), (V, 16), (V,), (B, S, 24), (V, 24), (V,)
    return [x.astype(jnp.bfloat16) for x in (draw(i, *s) for i, s in enumerate(shapes))]


def topk_teacher(rest):
    """Distinct ids, of which both devices have some; several of a token are labels."""
    ids = np.argsort(np.random.default_rng(7).random((B, S, V)), -1)[..., :6].astype(np.int32)
    ids[0, :, 0] = labels("ids")[0].clip(0)
    ids[1, 0] = np.arange(6)  # of one device alone
    return TopK(jnp.asarray(ids), -2 - jnp.abs(draw(8, B, S, 6)), "log_probs", rest)


def jsd_of_heads(way, layout="vh", rest=None, **options):
    """On a mesh, and along an axis, where JAX tracks what varies."""
    names = "student_hidden", "student_weight", "student_bias", "teacher_hidden", "teacher_weight", "teacher_bias"
    given = dict(zip(names, heads(), strict=True))
    tokens = {"target": labels("ids"), "token_weight": jnp.linspace(0, 2, B * S).reshape(B, S)}
    options = {"hard_weight": 0.3, "temperature": 2.0, "teacher_grad": rest is None, "reduction": "sum", **options}
    if rest is not None:
        given = {name: x for name, x in given.items() if name.startswith("student")}
        tokens["topk"] = topk_teacher(rest)[:2]

    def with_padding(given):
        made = {}
        for name, x in given.items():
            x = x.T if name.endswith("weight") else x
            x = x if name.endswith("hidden") else padded(x)
            made[name] = x.T if name.endswith("weight") and layout == "vh" else x
        return made

    how = {"vocab": V, "weight_layout": layout, "backend": "mosaic_gpu", **options}

    def call(op, topk=None, **given):
        return op(**given, teacher_topk=None if topk is None else TopK(*topk, "log_probs", rest))

    def on_mesh(given):
        of_mesh = {"vocab_axis": "model", "token_axes": "data", "mesh": mesh_of()}
        return call(sharded_linear_jsd, **with_padding(given), **tokens, **of_mesh, **how)

    def along_axis(given):
        def on_device(given, tokens):
            return jax.lax.psum(call(linear_jsd, **given, **tokens, axis_name="model", **how), "data")

        of_weight = P("model") if layout == "vh" else P(None, "model")
        specs = {name: P("data") if name.endswith("hidden") else P("model") for name in given}
        specs |= {name: of_weight for name in given if name.endswith("weight")}
        run = jax.shard_map(on_device, mesh=mesh_of(), in_specs=(specs, P("data")), out_specs=P())
        return run(with_padding(given), tokens)

    wide = {name: x.astype(jnp.float32) for name, x in given.items()}
    expected = jax.jit(jax.value_and_grad(lambda given: call(linear_jsd, **given, **tokens, **options)))(wide)
    with kernels_of(jsd_mosaic), pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(mosaic_walk, "plan", lambda *_: way)
        for split in (on_mesh, along_axis):
            found = jax.jit(jax.value_and_grad(split))(given)
            for x, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
                x = x.astype(jnp.float32)
                assert jnp.linalg.norm(x - e) <= 8e-3 * jnp.linalg.norm(e)


@check
def linear_jsd_that_keeps_gradients():
    jsd_of_heads(JsdMosaicPlan("kept", 4), beta=0.3)


@check
def linear_jsd_of_sums():
    jsd_of_heads(JsdMosaicPlan("summed", 4), beta=0.0)


@check
def linear_jsd_of_a_tail():
    jsd_of_heads(JsdMosaicPlan("kept", 4), rest="tail", beta=0.3)


@slow
def linear_jsd_of_other_topk_teachers():
    jsd_of_heads(JsdMosaicPlan("again", 4, 128), "hv", "tail", beta=0.0)
    jsd_of_heads(JsdMosaicPlan("summed", 4), rest="truncated", beta=1.0)
    jsd_of_heads(JsdMosaicPlan("kept", 4), rest="renormalised", beta=0.3)


def with_topk_teacher(student_logits, indices, values, rest, **options):
    return jsd(student_logits, teacher_topk=TopK(indices, values, "log_probs", rest), **options)


@slow
def jsd_of_topk_teachers():
    for rest in ("tail", "truncated", "renormalised"):
        ids, values, *_ = topk_teacher(rest)
        tokens = {"indices": ids, "values": values, "target": labels("ids")}
        options = {"beta": 0.3, "hard_weight": 0.3, "reduction": "none", "size": "vocab"}
        op = partial(with_topk_teacher, rest=rest)
        rows(op, {"student_logits": draw(0, B, S, V, scale=2.0)}, tokens, stand_ins=jsd_mosaic, **options)


@slow
def linear_jsd_that_makes_logits_again():
    jsd_of_heads(JsdMosaicPlan("again", 4, 128), "hv", beta=0.3)


@slow
def linear_jsd_at_the_ends():
    for way in (JsdMosaicPlan("kept", 4), JsdMosaicPlan("again", 4, 128), JsdMosaicPlan("summed", 16)):
        jsd_of_heads(way, beta=1.0)


# ---------------------------------------------------------------------------------------------------- the real kernels


@slow
def kernels_lower():
    """For CUDA, inside of a `shard_map` that tracks what varies, with padding."""
    z, y = jax.ShapeDtypeStruct((300, 2048), jnp.bfloat16), jax.ShapeDtypeStruct((300,), jnp.int32)
    h, w = jax.ShapeDtypeStruct((300, 128), jnp.bfloat16), jax.ShapeDtypeStruct((2048, 128), jnp.bfloat16)
    by_entry, by_row = P(None, "model"), P("model")
    cases = [
        (cross_entropy, "vocab_size", (z, y), (by_entry, P()), 1),
        (log_probs, "vocab_size", (z, y), (by_entry, P()), 1),
        (jsd, "vocab", (z, z), (by_entry, by_entry), 2),
        (linear_jsd, "vocab", (h, w, h, w), (P(), by_row) * 2, 2),
        (linear_cross_entropy, "vocab_size", (h, w, y), (P(), by_row, P()), 1),
        (linear_log_probs, "vocab_size", (h, w, y), (P(), by_row, P()), 1),
    ]
    for op, size, given, specs, gathers in cases:
        run = lambda *x, op=op, size=size: op(*x, axis_name="model", backend="mosaic_gpu", **{size: 2000}).sum()  # noqa: E731
        step = jax.grad(jax.shard_map(run, mesh=mesh_of(), in_specs=specs, out_specs=P()))
        with lowered.on_h100():
            text = jax.jit(step).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("custom_call @mosaic_gpu") >= 2, op
        assert text.count('"stablehlo.all_gather"') == gathers, op


@pytest.mark.parametrize("which", ["checks", pytest.param("slow", marks=pytest.mark.slow)])
def test_split_vocabulary_on_kernels(which):
    run_checks(__file__, which, {"checks": CHECKS, "slow": SLOW}[which])


if __name__ == "__main__":
    report_checks(CHECKS, SLOW)
