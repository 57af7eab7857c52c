"""Losses whose vocabulary is split over devices, on the 'mosaic_gpu' backend, compared with plain JAX and a whole one.

A script like that of test_vocab_parallel_jax.py.  Stand-ins in plain JAX take the place of the kernels.
"""

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
from onchip.jax import cross_entropy, jsd, linear_cross_entropy, linear_jsd, linear_log_probs, log_probs
from onchip.ops.linear_jsd import mosaic_walk
from onchip.ops.linear_jsd.memory import JsdMosaicPlan
from onchip.vocab.mosaic import op as mosaic_op
from onchip.vocab.mosaic.memory import MosaicPlan
from split_vocab import EVERY, B, S, compare, draw, ids, kernels_of, mesh_of, per_token, split, topk

CHECKS, SLOW = {}, {}
check, slow = adding_to(CHECKS), adding_to(SLOW)
DOORS = "mesh", "axis"


# --------------------------------------------------------------------------------------------------- logits that exist

V = 315
LOGITS = {"logits": draw(0, B, S, V, scale=2.0)}
STUDENT = {"student_logits": draw(0, B, S, V, scale=2.0)}
BOTH = STUDENT | {"teacher_logits": draw(1, B, S, V)}
LABELS = {"ids": ids(V), "every entry": jnp.abs(draw(2, B, S, V)) / V, "K ids": topk(V, k=4)}
EVERYTHING = {"label_smoothing": 0.2, "z_loss": 1e-3, "softcap": 3.0, "return_stats": True, "reduction": "none"}
CLASSES = EVERYTHING | {"class_weight": jnp.linspace(0, 2, V)}
HARD = {"hard_weight": 0.3, "temperature": 2.0, "reduction": "none"}
TARGET = {"target": ids(V)} | per_token("token_weight")


def of_labels(form):
    return LOGITS | {"target": LABELS[form]} | per_token("temperature")


def of_rows(op, given, **options):
    stand_ins = jsd_mosaic if op is jsd else plain_rows
    compare(op, given, V, "axis", size=320, scale=4, kernels=stand_ins, **options)


CHECKS |= {f"cross_entropy of {x}": partial(of_rows, cross_entropy, of_labels(x), **CLASSES) for x in [*LABELS][:2]}
CHECKS["log_probs of ids"] = partial(of_rows, log_probs, LOGITS | {"ids": ids(V, 3)}, **EVERY)
CHECKS["jsd of a mixture"] = partial(of_rows, jsd, BOTH | TARGET, beta=0.3, teacher_grad=True, **HARD)
SLOW |= {f"cross_entropy of {x}": partial(of_rows, cross_entropy, of_labels(x), **EVERYTHING) for x in LABELS}
SLOW["log_probs of one id"] = partial(of_rows, log_probs, LOGITS | {"ids": ids(V)}, softcap=3.0, **EVERY)
for _beta in (0.0, 1.0):
    SLOW[f"jsd, beta={_beta}"] = partial(of_rows, jsd, BOTH, beta=_beta, teacher_grad=True, reduction="none")
for _rest in ("tail", "truncated", "renormalised"):
    _given = STUDENT | {"target": ids(V), "teacher_topk": topk(V, _rest, "log_probs")}
    SLOW[f"jsd of a top-k teacher, {_rest}"] = partial(
        of_rows, jsd, _given, beta=0.3, hard_weight=0.3, reduction="none"
    )


# --------------------------------------------------------------------------------------------------------------- heads

TOKENS = B, 96
KEPT = MosaicPlan("stash", 192, kept_in_gradient=128, chunk=256, kept_in_scratch=128)


def of_head(op, labels, *, vocab=2160, plan=None, doors=DOORS, **options):
    """In bfloat16, of 384 tokens; `plan`: the kernels', else their own."""
    given = {"hidden": draw(0, *TOKENS, 128), "weight": draw(1, vocab, 128, scale=0.25)} | labels
    how = {"dtype": jnp.bfloat16, "bound": 8e-3, "kernels": plain_kernels}
    compare(op, given, vocab, *doors, size=2176, plan=plan and (mosaic_op, plan), **how, **options)


of_ids, of_loss = partial(of_head, linear_log_probs), partial(of_head, linear_cross_entropy)


def one_id(vocab=2160, name="ids"):
    return {name: ids(vocab, tokens=TOKENS)}


def several(vocab=2160, k=3):
    return {"ids": ids(vocab, k, tokens=TOKENS)}


@check
def linear_log_probs_of_one_id():
    of_ids(one_id(), doors=["mesh"], **EVERY)


@slow
def linear_log_probs_of_k_ids():
    of_ids(several(2176), vocab=2176, softcap=5.0)


@slow
def linear_log_probs_by_their_plans():
    of_ids(one_id(), plan=KEPT, entropy=True)
    of_ids(one_id(), plan=KEPT, weight_layout="hv")
    of_ids(several(k=2), weight_layout="hv", entropy=True)


@check
def linear_cross_entropy_that_keeps_exponentials():
    of_loss(one_id(name="target"), doors=["axis"], plan=KEPT, reduction="none", z_loss=1e-3)


@slow
def linear_cross_entropy_by_its_plans():
    for vocab, options in (
        (2176, {"softcap": 5.0, "z_loss": 1e-3}),
        (2176, {"label_smoothing": 0.1, "weight_layout": "hv"}),
        (2176, {"label_smoothing": 0.1, "class_weight": jnp.linspace(0, 2, 2176)}),
        (2100, {"strategy": "recompute", "weight_layout": "hv"}),
    ):
        of_loss(one_id(vocab, "target"), vocab=vocab, doors=["mesh"], **options)


@check
def linear_cross_entropy_of_every_entry():
    q = {"target": jnp.abs(draw(6, *TOKENS, 2176)) / 2176}
    options = {"label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 5.0, "class_weight": jnp.linspace(0, 2, 2176)}
    of_loss(q, vocab=2176, doors=["mesh"], reduction="none", return_stats=True, **options)


@slow
def linear_cross_entropy_of_k_ids():
    of_loss({"target": topk(2160, k=4, tokens=TOKENS)}, reduction="none", return_stats=True)


@slow
def statistics_in_several_parts():
    """Without gradients: still one exchange."""
    given = {"hidden": draw(0, *TOKENS, 128).astype(jnp.bfloat16), "weight": draw(1, 2170, 128).astype(jnp.bfloat16)}
    given |= one_id(2170, "target")
    options = {"reduction": "none", "return_stats": True}
    with kernels_of(plain_kernels, (mosaic_op, MosaicPlan("forward", 128))):
        of_parts = {"door": "mesh", "mesh": mesh_of(), "backend": "mosaic_gpu"}
        run = jax.jit(split(linear_cross_entropy, given, 2170, 2176, **of_parts, **options))
        assert run.lower(given).as_text().count('"stablehlo.all_gather"') == 1
        loss, stats = run(given)
    wide = {name: x.astype(jnp.float32) if name != "target" else x for name, x in given.items()}
    expected, of_whole = linear_cross_entropy(**wide, **options)
    for x, e in zip((loss, *stats), (expected, *of_whole), strict=True):
        np.testing.assert_allclose(x, e, rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------------------------------------------------- linear_jsd


def jsd_of_heads(way, rest=None, doors=DOORS, **options):
    sizes = {"student": 16, "teacher": 24} if rest is None else {"student": 16}
    given = TARGET | ({} if rest is None else {"teacher_topk": topk(V, rest, "log_probs")})
    for who, size in sizes.items():
        shapes = {"hidden": (B, S, size), "weight": (V, size), "bias": (V,)}
        given |= {f"{who}_{name}": draw(size + i, *shape) for i, (name, shape) in enumerate(shapes.items())}
    how = {"dtype": jnp.bfloat16, "bound": 8e-3, "kernels": jsd_mosaic, "plan": (mosaic_walk, way)}
    options = HARD | {"teacher_grad": rest is None, "reduction": "sum"} | options
    compare(linear_jsd, given, V, *doors, size=320, **how, **options)


CHECKS |= {
    "linear_jsd that keeps gradients": partial(jsd_of_heads, JsdMosaicPlan("kept", 4), beta=0.3, doors=["axis"]),
}
AGAIN, TURNED = JsdMosaicPlan("again", 4, 128), {"weight_layout": "hv"}
SLOW |= {
    "linear_jsd of a tail": partial(jsd_of_heads, JsdMosaicPlan("kept", 4), "tail", beta=0.3),
    "linear_jsd of sums": partial(jsd_of_heads, JsdMosaicPlan("summed", 4), beta=0.0),
    "linear_jsd of a tail, again": partial(jsd_of_heads, AGAIN, "tail", beta=0.0, **TURNED),
    "linear_jsd of a truncated teacher": partial(jsd_of_heads, JsdMosaicPlan("summed", 4), "truncated", beta=1.0),
    "linear_jsd of a renormalised teacher": partial(jsd_of_heads, JsdMosaicPlan("kept", 4), "renormalised", beta=0.3),
    "linear_jsd that makes logits again": partial(jsd_of_heads, AGAIN, beta=0.3, **TURNED),
}
for _way in (JsdMosaicPlan("kept", 4), AGAIN, JsdMosaicPlan("summed", 16)):
    SLOW[f"linear_jsd, beta=1, {_way.way}"] = partial(jsd_of_heads, _way, beta=1.0)


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
