"""The JAX backends compiled for a GPU: what the CPU can't show."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common_jax import assert_right

from onchip.jax import linear_cross_entropy
from onchip.ops.linear_cross_entropy.checks import CHECK_CASES, Case
from onchip.vocab.memory import Problem
from onchip.vocab.mosaic import memory as mosaic_spec
from onchip.vocab.mosaic import op as mosaic_op
from onchip.vocab.mosaic.memory import MosaicPlan
from shared import alternating

pytestmark = pytest.mark.gpu
HALF = ["bfloat16", "float16"]
LAYOUTS = ["vh", "hv"]
TERMS = {"label_smoothing": 0.1, "z_loss": 1e-3}
# What the Mosaic kernels take under either layout, more tokens than H among them.
MOSAIC_CASES = (
    Case("long", 1000, 256, 4096, zipf=True, ignored=0.3),
    Case("full last tile", 512, 512, 8192),
    Case("ragged vocab", 700, 320, 1088, logit_std=3.0),
    Case("several tiles for each program", 300, 384, 41024),
    Case("large logits", 500, 192, 2112, logit_std=60.0),
    Case("bias, ignored", 1000, 256, 4096, bias=True, ignored=0.5),
    Case("options", 300, 192, 1088, bias=True, options=TERMS | {"softcap": 5.0}),
    Case("class weights", 1000, 256, 2112, class_weight=True, bias=True, ignored=0.3, options=TERMS),
    Case("class weights, softcap", 1000, 256, 2112, class_weight=True, bias=True, ignored=0.3,
         options=TERMS | {"softcap": 5.0}),
)  # fmt: skip


@alternating(
    case=[replace(c, hidden=128) for c in CHECK_CASES if c.vocab % 8 == 0],
    strategy=["stash", "recompute"],
    dtype=HALF,
)
def test_check_cases_of_mosaic(case, strategy, dtype):
    assert_right(case, dtype, device="gpu", strategy=strategy, backend="mosaic_gpu")


@alternating(case=MOSAIC_CASES, layout=LAYOUTS, dtype=HALF)
def test_mosaic(case, layout, dtype):
    assert_right(case, dtype, device="gpu", backend="mosaic_gpu", weight_layout=layout)


# Of 1024 tokens the first 256 are kept in the gradient's memory and some in scratch, or all in scratch; or
# a chunk of tokens, of which the first may be larger and keep some with the digits, with gradients made in forward.
KEPT = MosaicPlan("stash", 1024, kept_in_gradient=256, chunk=512, kept_in_scratch=256)
AGAIN = replace(KEPT, recompute_chunks=2)
IN_FORWARD = MosaicPlan("stash", 384, chunk=4096, kept_in_scratch=384, by_tokens=True)
LARGER = MosaicPlan("stash", 384, kept_in_gradient=256, chunk=768, kept_in_scratch=384, by_tokens=True, first_chunk=256)
IN_DIGITS = MosaicPlan("stash", 256, kept_in_gradient=512, chunk=768, kept_in_scratch=256, by_tokens=True,
                       first_chunk=640, kept_in_digits=128)  # fmt: skip
MORE_IN_DIGITS = replace(IN_DIGITS, first_chunk=768, kept_in_digits=256)
SOFTCAP, SMOOTHING = {"softcap": 5.0}, {"label_smoothing": 0.1}
WEIGHED = {"logit_std": 3.0, "class_weight": True, "options": {"z_loss": 1e-3}}
PLANS = {
    "none in scratch": (replace(AGAIN, kept_in_scratch=0), {}),
    "in halves": (replace(AGAIN, halves=True), {}),
    "more in scratch": (replace(KEPT, kept_in_scratch=768), {}),
    "all in scratch": (MosaicPlan("stash", 1024, chunk=4096, kept_in_scratch=1024), {}),
    "class weights": (KEPT, WEIGHED),
    "class weights in forward": (IN_FORWARD, WEIGHED),
    "softcap": (KEPT, {"logit_std": 3.0, "options": SOFTCAP}),
    "smoothing in forward": (IN_FORWARD, {"logit_std": 3.0, "options": SMOOTHING}),
    "few in a larger chunk": (LARGER, {"logit_std": 3.0, "ignored": 0.8}),
    "softcap, larger": (replace(LARGER, first_chunk=640), {"logit_std": 3.0, "options": SOFTCAP | {"z_loss": 1e-3}}),
    "smoothing, larger": (LARGER, {"logit_std": 3.0, "ignored": 0.0, "options": SMOOTHING}),
    "in digits": (IN_DIGITS, {"logit_std": 3.0, "ignored": 0.0}),
    "softcap, in digits": (MORE_IN_DIGITS, {"logit_std": 3.0, "options": SOFTCAP | {"z_loss": 1e-3}}),
    "few in digits": (IN_DIGITS, {"logit_std": 3.0, "ignored": 0.9, "options": SMOOTHING}),
}


def take(plan, monkeypatch):
    """Plan calls so, but for gradients that are made of statistics alone, as where JAX sees several devices."""
    made = mosaic_op.plan
    monkeypatch.setattr(mosaic_op, "plan", lambda p, how, *more: made(p, how, *more) if how == "recompute" else plan)


@alternating(name=list(PLANS), layout=LAYOUTS, dtype=HALF)
def test_plans(name, layout, dtype, monkeypatch):
    """Whatever keeps exponentials; of digits, hidden's gradient is made of two tiles of tokens at a time."""
    plan, changes = PLANS[name]
    take(plan, monkeypatch)
    if plan.kept_in_digits:
        layout, changes = "vh", changes | {"hidden": 1024}
        monkeypatch.setattr(mosaic_op, "hidden_step", lambda _: 256)
    assert_right(replace(MOSAIC_CASES[0], **changes), dtype, device="gpu", backend="mosaic_gpu", weight_layout=layout)


@alternating(size=[(4096, 256), (2120, 320), (2112, 576)], layout=LAYOUTS, dtype=HALF)
def test_another_upstream_gradient_than_1(size, layout, dtype, monkeypatch):
    """The weight's gradient that forward rounded is made anew of all digits; the last tiles aren't full."""
    vocab, hidden = size
    vocab = vocab if layout == "vh" else vocab // 64 * 64
    plan = MosaicPlan("stash", 384, chunk=4096, kept_in_scratch=384, by_tokens=True)
    take(plan, monkeypatch)
    given = inputs(1000, hidden, vocab, layout)
    given = (given[0].astype(dtype), given[1].astype(dtype), given[2])

    def gradients(backend):
        def loss(hidden, weight, labels, scale):
            return scale * linear_cross_entropy(hidden, weight, labels, backend=backend, weight_layout=layout)

        return jax.jit(jax.grad(loss, (0, 1)))

    wide = (given[0].astype(jnp.float32), given[1].astype(jnp.float32), given[2])
    kernels, plain = gradients("mosaic_gpu"), gradients("xla")
    for scale in (1.0, 0.3, -4.0):
        found, expected = kernels(*given, scale), plain(*wide, scale)
        for x, y in zip(found, expected, strict=True):
            assert jnp.linalg.norm(x.astype(jnp.float32) - y) <= 3e-3 * jnp.linalg.norm(y)


@alternating(
    name=["ragged", "everything", "masked vocab", "large logits", "all ignored"],
    strategy=["stash", "recompute"],
    dtype=["float32", "bfloat16", "float16"],
)
def test_xla(name, strategy, dtype):
    (case,) = (c for c in CHECK_CASES if c.name == name)
    assert_right(case, dtype, device="gpu", strategy=strategy, backend="xla")


def inputs(tokens, hidden, vocab, layout="vh"):
    keys = jax.random.split(jax.random.key(0), 3)
    weight = jax.random.normal(keys[1], (vocab, hidden) if layout == "vh" else (hidden, vocab), jnp.bfloat16)
    labels = jax.random.randint(keys[2], (tokens,), 0, vocab)
    return jax.random.normal(keys[0], (tokens, hidden), jnp.bfloat16), weight * hidden**-0.5, labels


SIZES = [
    (4096, 1024, None),
    (4096, 1024, 64 << 20),
    (4096, 1024, 160 << 20),
    (4096, 2048, 160 << 20),  # one chunk after a larger first one
    (4096, 1024, 1 << 40),
    (16384, 512, None),
    (8192, 2048, 210 << 20),  # a larger first chunk
]


@alternating(size=SIZES, wanted=[(0,), (0, 1), (0, 1), (0, 1)], layout=LAYOUTS)
def test_memory_is_what_the_formula_says(size, wanted, layout):
    """And the same inputs give the same bits."""
    (tokens, hidden, budget), vocab = size, 32768
    arguments = inputs(tokens, hidden, vocab, layout)
    op = partial(linear_cross_entropy, scratch_bytes=budget, backend="mosaic_gpu", weight_layout=layout)
    step = jax.jit(jax.value_and_grad(op, argnums=wanted)).lower(*arguments).compile()
    problem = Problem(tokens, hidden, vocab, "bfloat16", device="cuda", grad_weight=1 in wanted, compacted=True)
    plan = mosaic_spec.plan(problem, "auto", budget)
    taken = step.memory_analysis().temp_size_in_bytes
    assert taken <= mosaic_spec.scratch_bytes(problem, plan)
    first, second = step(*arguments), step(*arguments)
    for x, y in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.mark.parametrize(
    ("size", "dtype", "smoothing", "budget"),
    [
        ((4096, 2560, 262144), jnp.float16, 0.0, None),  # logits again, in three groups, each of its own size
        ((4096, 2048, 128256), jnp.float16, 0.0, 300 << 20),
        ((3000, 4096, 128256), jnp.bfloat16, 0.1, None),
        ((8192, 4096, 128256), jnp.bfloat16, 0.1, 400 << 20),
    ],
    ids=str,
)
def test_memory_of_a_step_that_is_only_compiled(size, dtype, smoothing, budget):
    tokens, hidden, vocab = size
    shapes = ((tokens, hidden), dtype), ((vocab, hidden), dtype), ((tokens,), jnp.int32)
    op = partial(linear_cross_entropy, label_smoothing=smoothing, scratch_bytes=budget, backend="mosaic_gpu")
    step = jax.jit(jax.value_and_grad(op, argnums=(0, 1))).lower(*(jax.ShapeDtypeStruct(*x) for x in shapes)).compile()
    name = jnp.dtype(dtype).name
    problem = Problem(*size, name, device="cuda", smoothing=smoothing, compacted=True)
    plan = mosaic_spec.plan(problem, "auto", budget)
    assert step.memory_analysis().temp_size_in_bytes <= mosaic_spec.scratch_bytes(problem, plan)


@pytest.mark.parametrize("transform", ["checkpoint", "scan", "heads", "vmap"])
def test_transforms(transform):
    hidden, weight, labels = inputs(512, 256, 4096)
    op = partial(linear_cross_entropy, backend="mosaic_gpu")

    def plain(hidden, weight, labels):
        log_p = jax.nn.log_softmax((hidden @ weight.T).astype(jnp.float32))
        return -jnp.take_along_axis(log_p, labels[:, None], 1).mean()

    def loss(f, hidden, weight):
        if transform == "checkpoint":
            return jax.checkpoint(f)(hidden, weight, labels)
        h, y = hidden.reshape(2, 256, 256), labels.reshape(2, 256)
        if transform == "vmap":
            return jax.vmap(f, in_axes=(0, None, 0))(h, weight, y).mean()
        if transform == "heads":
            given = h, weight.reshape(2, 2048, 256), y % 2048
            return jax.lax.scan(lambda total, x: (total + f(*x), None), 0.0, given)[0] / 2
        return jax.lax.scan(lambda total, x: (total + f(x[0], weight, x[1]), None), 0.0, (h, y))[0] / 2

    found, expected = (jax.jit(jax.value_and_grad(partial(loss, f), (0, 1)))(hidden, weight) for f in (op, plain))
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert np.linalg.norm(x - y) <= 2e-2 * np.linalg.norm(y)
