"""The 'mosaic_gpu' backend on the CPU, with plain stand-ins for its kernels: everything that it does around them."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common_jax import assert_right, plain, small_problem

import plain_kernels
from onchip.jax import linear_cross_entropy
from onchip.ops.linear_cross_entropy.checks import Case
from onchip.vocab.mosaic import kernels, rebase
from onchip.vocab.mosaic import op as mosaic_op
from onchip.vocab.mosaic.memory import MosaicPlan
from stack import our_functions

# With 128 tokens kept in the gradient's memory, of 384 positions; the last tile of the vocabulary isn't full.
LONG = Case("long", 500, 128, 2112, zipf=True, ignored=0.3)
pytestmark = pytest.mark.usefixtures("on_the_cpu")


def in_forward(size, first=0, in_digits=0):
    """The first chunk may be larger: 128 tokens' exponentials are in the memory of the weight's gradient then, and so
    many with its digits."""
    plan = MosaicPlan("stash", size, chunk=2304, kept_in_scratch=size, by_tokens=True)
    room = max(first - 128 - in_digits, size)
    in_memory = {"kept_in_gradient": 128, "kept_in_digits": in_digits, "kept_in_scratch": room}
    return replace(plan, first_chunk=first, chunk=512, **in_memory) if first else plan


def kept(in_scratch, **more):
    return MosaicPlan("stash", 512, 128, 256, kept_in_scratch=in_scratch, **more)


AGAIN, ALL_KEPT = MosaicPlan("recompute", 512, chunk=512), MosaicPlan("stash", 512, chunk=2304, kept_in_scratch=512)
CAPPED, SMOOTHED = {"options": {"softcap": 5.0}}, {"options": {"label_smoothing": 0.1, "z_loss": 1e-3}}
SQUARED, EACH = {"options": {"z_loss": 1e-3}}, {"token_weight": True, "token_temperature": True}
CLASSES, WIDE = {"logit_std": 3.0, "class_weight": True, "token_weight": True}, {"vocab": 2368}
CALLS = {
    # Of 9 tiles of the vocabulary, which are computed again in one group or more, of whole ones and the rest.
    "kept in the gradient": (kept(0), "bfloat16", "vh", {}),
    "in halves, two together": (kept(0, halves=True, recompute_chunks=2), "bfloat16", "hv", {}),
    "in halves, three together": (kept(128, halves=True, recompute_chunks=3), "bfloat16", "vh", {}),
    "all kept, in both": (kept(384), "bfloat16", "hv", {}),
    "softcap": (kept(128), "bfloat16", "vh", {"logit_std": 3.0, "token_temperature": True} | CAPPED),
    "all kept in scratch": (ALL_KEPT, "bfloat16", "vh", {"token_temperature": True} | SMOOTHED),
    "all kept in scratch, none": (ALL_KEPT, "float16", "hv", EACH | {"options": {"reduction": "none"}}),
    # With a z-loss alone exponentials are kept; a bias's gradient leaves out tiles that nobody wrote.
    "classes, kept": (kept(128), "bfloat16", "hv", CLASSES | SQUARED),
    "classes, again": (
        AGAIN, "float16", "hv", CLASSES | {"bias": True, "options": SMOOTHED["options"] | CAPPED["options"]},
    ),
    "classes, in forward": (in_forward(384), "float16", "vh", CLASSES | SQUARED),
    "in forward": (in_forward(384), "bfloat16", "vh", EACH | SQUARED),
    "in forward, smaller chunks": (in_forward(128), "float16", "hv", EACH | SQUARED),
    # Its part of the weight's gradient is made in chunks of 256, three of 512, and the last 576.
    "first": (in_forward(128, first=256), "bfloat16", "vh", WIDE | SMOOTHED),
    "first, float16": (in_forward(128, first=256), "float16", "hv", WIDE | EACH),
    "first, softcap": (in_forward(256, first=384), "bfloat16", "hv", CAPPED),
    "first, large logits": (in_forward(128, first=384), "float16", "vh", {"logit_std": 60.0}),
    "first, all in the gradient": (in_forward(256, first=128), "bfloat16", "vh", {"ignored": 0.5}),
    "first, the last without tokens": (in_forward(128, first=256), "bfloat16", "vh", {"ignored": 0.4}),
    "first, fewer than it has room for": (in_forward(256, first=128), "bfloat16", "vh", {"tokens": 100}),
    "first, all without tokens": (in_forward(128, first=256), "bfloat16", "vh", {"ignored": 1.0}),
    "first, more than it says": (in_forward(128, first=256), "bfloat16", "vh", {"tokens": 700, "hidden": 192}),
    # With a tile of tokens' hidden gradient at a time.
    "digits": (in_forward(128, first=384, in_digits=128), "bfloat16", "vh", WIDE | SMOOTHED | {"hidden": 512}),
    "digits, float16": (
        in_forward(128, first=384, in_digits=256), "float16", "vh", WIDE | {"hidden": 512, "token_temperature": True},
    ),
    "digits, few tokens": (
        in_forward(128, first=256, in_digits=128), "bfloat16", "vh", {"hidden": 512, "ignored": 0.7},
    ),
    # Its own plans.
    "large logits": (None, "float16", "vh", {"logit_std": 60.0}),
    "everything": (None, "float16", "hv", {"bias": True, "token_weight": True, "options": {
        **SMOOTHED["options"], **CAPPED["options"]}}),
    "all ignored": (None, "bfloat16", "vh", {"ignored": 1.0}),
}  # fmt: skip
QUICK = ("in halves, two together", "softcap", "classes, kept", "classes, again", "digits", "large logits",
         "everything", "all ignored")  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.slow] * (x not in QUICK)) for x in CALLS])
def test_calls(name, monkeypatch):
    plan, dtype, layout, changes = CALLS[name]
    if plan is not None:
        monkeypatch.setattr(mosaic_op, "plan", lambda *_: plan)
    if "digits" in name:
        monkeypatch.setattr(mosaic_op, "hidden_step", lambda _: 128)
    case = LONG if plan else replace(LONG, tokens=200, hidden=192, vocab=1088)
    assert_right(replace(case, **changes), dtype, backend="mosaic_gpu", weight_layout=layout)


@pytest.mark.parametrize(
    ("options", "dtype", "first"),
    [
        ({"label_smoothing": 0.1}, "bfloat16", 384),
        pytest.param({}, "bfloat16", 0, marks=pytest.mark.slow),
        pytest.param({}, "float16", 384, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_another_upstream_gradient_than_1(options, dtype, first, monkeypatch):
    """The weight's gradient that forward rounded is made anew of all digits: as exact as the one it left."""
    monkeypatch.setattr(mosaic_op, "plan", lambda *_: in_forward(256, first=first))
    hidden, weight, labels, _ = small_problem(512, 128, 1088, dtype)

    def losses(f, hidden, weight):
        return f(hidden, weight, labels) * 0.3

    ours = jax.grad(partial(losses, partial(linear_cross_entropy, backend="mosaic_gpu", **options)), (0, 1))
    theirs = jax.grad(partial(losses, partial(linear_cross_entropy, backend="xla", **options)), (0, 1))
    expected = theirs(hidden.astype(jnp.float32), weight.astype(jnp.float32))
    for x, y in zip(ours(hidden, weight), expected, strict=True):
        assert jnp.linalg.norm(x.astype(jnp.float32) - y) <= 3e-3 * jnp.linalg.norm(y)


@pytest.mark.parametrize(
    ("wanted", "reduction", "first"),
    [
        ((0,), "none", 0),
        *(pytest.param(*x, 0, marks=pytest.mark.slow) for x in (((1,), "mean"), ((0,), "mean"), ((1,), "none"))),
        pytest.param((1,), "mean", 128, marks=pytest.mark.slow),
    ],
)
def test_one_gradient_made_in_forward(wanted, reduction, first, monkeypatch):
    """The same as that of logits that are recomputed; hidden's also of losses by token."""
    hidden, weight, labels, _ = small_problem(256, 128, 1088, "bfloat16")
    labels = labels.at[0, :9].set(-100)
    op = partial(linear_cross_entropy, backend="mosaic_gpu", reduction=reduction)

    def gradient():
        plain_kernels.forget()
        return jax.grad(lambda *x: (jnp.square(op(*x, labels))).sum(), wanted)(hidden, weight)[0].astype(jnp.float32)

    if wanted == (1,) and reduction == "none":
        return
    monkeypatch.setattr(mosaic_op, "plan", lambda *_: MosaicPlan("recompute", 256, chunk=512))
    expected = gradient()
    monkeypatch.setattr(mosaic_op, "plan", lambda *_: in_forward(128, first))
    assert jnp.linalg.norm(gradient() - expected) <= 1e-2 * jnp.linalg.norm(expected)


@pytest.mark.parametrize("tokens", [pytest.param(128, marks=pytest.mark.slow), 0])
def test_labels_out_of_range_and_ignored(tokens, monkeypatch):
    """Positions are in the order of labels, of which these have none: NaN for the one, nothing for the other."""
    plan = MosaicPlan("stash" if tokens else "recompute", 256, kept_in_gradient=tokens, chunk=512)
    monkeypatch.setattr(mosaic_op, "plan", lambda *_: plan)
    hidden, weight, labels, _ = small_problem(256, 128, 1088, "bfloat16")
    bad, ignored = (0, 3), (0, 100)
    labels = labels.at[bad].set(1088).at[ignored].set(-100)
    losses = partial(linear_cross_entropy, backend="mosaic_gpu", reduction="none")

    @jax.jit
    def run(hidden, weight, labels):
        per_token, pullback = jax.vjp(lambda h, w: losses(h, w, labels), hidden, weight)
        return per_token, pullback(jnp.ones_like(per_token))

    per_token, (grad_hidden, _) = run(hidden, weight, labels)
    good = jnp.ones(labels.shape, bool).at[bad].set(False)
    assert jnp.isnan(per_token[bad])
    assert per_token[ignored] == 0
    expected = losses(hidden, weight, labels.at[bad].set(-100))
    np.testing.assert_allclose(per_token[good], expected[good], rtol=1e-5, atol=1e-6)
    assert jnp.isnan(grad_hidden[bad]).all()
    assert (grad_hidden[ignored] == 0).all()
    assert jnp.isfinite(grad_hidden[good]).all()


@pytest.mark.parametrize("differentiate", [True, False])
def test_functions_from_the_public_one_to_a_kernel(differentiate, monkeypatch):
    found = []

    def recorded(kernel):
        return lambda *x, **y: found.append(our_functions()) or kernel(*x, **y)

    for module, name in ((kernels, "softmax_tiles"), (rebase, "rebase_exponentials")):
        monkeypatch.setattr(module, name, recorded(getattr(module, name)))
    hidden, weight, labels, _ = small_problem(256, 128, 1088, "bfloat16")
    op = partial(linear_cross_entropy, backend="mosaic_gpu")
    jax.eval_shape(jax.grad(op, (0, 1)) if differentiate else op, hidden, weight, labels)
    rule = "call_forward" if differentiate else "call"
    assert found
    # Where exponentials are kept, a fifth, which a chunk of tokens shares, and what traces a kernel once.
    keeping = ("_keeping", "written", "_written", "<lambda>") if differentiate else ()
    functions = "with_kernels", "linear_cross_entropy", "_call", "by_tokens", rule, "forward", "forward", *keeping
    assert {tuple(x) for x in found} == {functions}


def test_forward_in_chunks_of_tokens(monkeypatch):
    """One of which is smaller."""
    hidden, weight, labels, _ = small_problem(640, 128, 1088, "bfloat16")
    labels = labels.at[0, :100].set(-100)
    op = partial(linear_cross_entropy, hidden, weight, labels, backend="mosaic_gpu", return_stats=True)
    whole = op()
    monkeypatch.setattr(mosaic_op, "plan", lambda *_: MosaicPlan("forward", 256))
    plain_kernels.forget()
    in_chunks = op()
    for x, y in zip(jax.tree.leaves(in_chunks), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("transform", ["scan", "vmap"])
def test_transforms(transform, monkeypatch):
    plan = MosaicPlan("stash", 256, kept_in_gradient=128, chunk=512)
    monkeypatch.setattr(mosaic_op, "plan", lambda *_: plan)
    hidden, weight, labels, _ = small_problem(512, 128, 1088, "bfloat16")

    def loss(f, hidden, weight):
        if transform == "vmap":
            return jax.vmap(f, in_axes=(0, None, 0))(hidden, weight, labels).mean()
        return jax.lax.scan(lambda total, x: (total + f(x[0], weight, x[1]), None), 0.0, (hidden, labels))[0]

    def expected(hidden, weight, labels):
        return plain(hidden.astype(jnp.float32), weight.astype(jnp.float32), labels)

    ours, theirs = (
        jax.jit(jax.value_and_grad(partial(loss, f), (0, 1)))(hidden, weight)
        for f in (partial(linear_cross_entropy, backend="mosaic_gpu"), expected)
    )
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert np.linalg.norm(x - y) <= 1e-2 * np.linalg.norm(y)
