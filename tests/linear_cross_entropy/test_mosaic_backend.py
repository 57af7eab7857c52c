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


@pytest.mark.parametrize(
    ("in_scratch", "halves", "together", "layout"),
    [
        pytest.param(0, False, 1, "vh", marks=pytest.mark.slow),
        (0, True, 2, "hv"),
        pytest.param(128, True, 3, "vh", marks=pytest.mark.slow),
        pytest.param(384, False, 1, "hv", marks=pytest.mark.slow),
    ],
)
def test_every_kind_of_plan(in_scratch, halves, together, layout, monkeypatch):
    # Of 9 tiles of the vocabulary; with 'together' 1 to 3 there is one group or more, of whole ones and the rest.
    plan = MosaicPlan("stash", 512, 128, 256, kept_in_scratch=in_scratch, halves=halves, recompute_chunks=together)
    monkeypatch.setattr(mosaic_op, "plan", lambda *_: plan)
    assert_right(LONG, "bfloat16", backend="mosaic_gpu", weight_layout=layout)


@pytest.mark.parametrize(
    ("dtype", "layout", "options", "by_tokens"),
    [
        ("bfloat16", "vh", {"softcap": 5.0}, False),
        pytest.param("float16", "hv", {"label_smoothing": 0.1, "z_loss": 1e-3}, False, marks=pytest.mark.slow),
        pytest.param("bfloat16", "vh", {"softcap": 5.0}, True, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_softcap_and_smoothing_keep_exponentials(dtype, layout, options, by_tokens, monkeypatch):
    kept = MosaicPlan("stash", 512, kept_in_gradient=128, chunk=256, kept_in_scratch=128)
    monkeypatch.setattr(mosaic_op, "plan", lambda *_: in_forward(384) if by_tokens else kept)
    case = replace(LONG, logit_std=3.0, token_temperature=True, options=options)
    assert_right(case, dtype, backend="mosaic_gpu", weight_layout=layout)


WEIGHED = {"label_smoothing": 0.1, "z_loss": 1e-3}


@pytest.mark.parametrize(
    ("dtype", "layout", "options", "kept", "by_tokens"),
    [
        pytest.param("bfloat16", "vh", WEIGHED, False, False, marks=pytest.mark.slow),
        ("float16", "hv", WEIGHED | {"softcap": 5.0}, False, False),
        ("bfloat16", "hv", {"z_loss": 1e-3}, True, False),
        pytest.param("float16", "vh", {"z_loss": 1e-3}, False, True, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_class_weights(dtype, layout, options, kept, by_tokens, monkeypatch):
    """With label smoothing nothing is kept; with a z-loss alone exponentials are."""
    plan = MosaicPlan("recompute", 512, chunk=512)
    plan = MosaicPlan("stash", 512, kept_in_gradient=128, chunk=256, kept_in_scratch=128) if kept else plan
    plan = in_forward(384) if by_tokens else plan
    monkeypatch.setattr(mosaic_op, "plan", lambda *_: plan)
    bias = plan.strategy == "recompute"
    case = replace(LONG, logit_std=3.0, class_weight=True, token_weight=True, bias=bias, options=options)
    assert_right(case, dtype, backend="mosaic_gpu", weight_layout=layout)


def in_forward(size, tokens=512, first=0, in_digits=0):
    """The first chunk may be larger: 128 tokens' exponentials are in the memory of the weight's gradient then, and so
    many with its digits."""
    plan = MosaicPlan("stash", size, chunk=2304, kept_in_scratch=tokens, by_tokens=True)
    in_memory = {"kept_in_gradient": 128, "kept_in_digits": in_digits, "kept_in_scratch": tokens - 128 - in_digits}
    return replace(plan, first_chunk=first, chunk=512, **in_memory) if first else plan


@pytest.mark.parametrize(
    ("dtype", "layout", "options"),
    [
        ("bfloat16", "vh", {"label_smoothing": 0.1, "z_loss": 1e-3}),
        pytest.param("float16", "hv", {"reduction": "none"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_all_kept_in_scratch(dtype, layout, options, monkeypatch):
    plan = MosaicPlan("stash", 512, chunk=2304, kept_in_scratch=512)
    monkeypatch.setattr(mosaic_op, "plan", lambda *_: plan)
    case = replace(LONG, token_temperature=True, options=options)
    assert_right(case, dtype, backend="mosaic_gpu", weight_layout=layout)


@pytest.mark.parametrize(
    ("dtype", "layout", "size"),
    [("bfloat16", "vh", 384), pytest.param("float16", "hv", 128, marks=pytest.mark.slow)],
)
def test_gradients_made_in_forward(size, dtype, layout, monkeypatch):
    monkeypatch.setattr(mosaic_op, "plan", lambda *_: in_forward(size))
    case = replace(LONG, token_weight=True, token_temperature=True, options={"z_loss": 1e-3})
    assert_right(case, dtype, backend="mosaic_gpu", weight_layout=layout)


@pytest.mark.parametrize(
    ("dtype", "layout", "size", "first", "changes"),
    [
        ("bfloat16", "vh", 128, 256, {"vocab": 2368, "options": {"z_loss": 1e-3, "label_smoothing": 0.1}}),
        pytest.param(
            "float16",
            "hv",
            128,
            256,
            {"vocab": 2368, "token_weight": True, "token_temperature": True},
            marks=pytest.mark.slow,
        ),
        pytest.param("bfloat16", "hv", 256, 384, {"options": {"softcap": 5.0}}, marks=pytest.mark.slow),
        pytest.param("float16", "vh", 128, 384, {"logit_std": 60.0}, marks=pytest.mark.slow),
        # All of its exponentials are in the gradient's memory.
        pytest.param("bfloat16", "vh", 256, 128, {"ignored": 0.5}, marks=pytest.mark.slow),
        # Of the chunks the second has few tokens, and the last none; or all have none.
        pytest.param("bfloat16", "vh", 128, 256, {"ignored": 0.4}, marks=pytest.mark.slow),
        pytest.param("bfloat16", "hv", 128, 256, {"ignored": 0.9}, marks=pytest.mark.slow),
        pytest.param("bfloat16", "vh", 128, 256, {"ignored": 1.0}, marks=pytest.mark.slow),
        pytest.param("bfloat16", "vh", 128, 256, {"tokens": 700, "hidden": 192}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_larger_first_chunk(dtype, layout, size, first, changes, monkeypatch):
    """Of 2368 entries its part of the weight's gradient is made in chunks of 256, three of 512, and the last 576."""
    monkeypatch.setattr(mosaic_op, "plan", lambda *_: in_forward(size, first=first))
    assert_right(replace(LONG, **changes), dtype, backend="mosaic_gpu", weight_layout=layout)


@pytest.mark.parametrize(
    ("dtype", "first", "in_digits", "changes"),
    [
        ("bfloat16", 384, 128, {"vocab": 2368, "options": {"z_loss": 1e-3, "label_smoothing": 0.1}}),
        pytest.param("float16", 384, 256, {"vocab": 2368, "token_temperature": True}, marks=pytest.mark.slow),
        pytest.param("bfloat16", 256, 128, {"ignored": 0.7}, marks=pytest.mark.slow),
        pytest.param("bfloat16", 384, 128, {"ignored": 0.0, "tokens": 700}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_exponentials_with_the_digits(dtype, first, in_digits, changes, monkeypatch):
    """Of a larger first chunk, with a tile of tokens' hidden gradient at a time."""
    monkeypatch.setattr(mosaic_op, "hidden_step", lambda _: 128)
    monkeypatch.setattr(mosaic_op, "plan", lambda *_: in_forward(128, first=first, in_digits=in_digits))
    assert_right(replace(LONG, hidden=512, **changes), dtype, backend="mosaic_gpu")


@pytest.mark.parametrize(
    ("options", "dtype", "first"),
    [
        ({"label_smoothing": 0.1}, "bfloat16", 384),
        pytest.param({}, "bfloat16", 0, marks=pytest.mark.slow),
        pytest.param({}, "float16", 384, marks=pytest.mark.slow),
        pytest.param({}, "bfloat16", 384, marks=pytest.mark.slow),
        pytest.param({"label_smoothing": 0.1}, "bfloat16", 0, marks=pytest.mark.slow),
        pytest.param({"label_smoothing": 0.1}, "float16", 384, marks=pytest.mark.slow),
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


@pytest.mark.parametrize("layout", ["vh", pytest.param("hv", marks=pytest.mark.slow)])
def test_bias_gradient_leaves_out_tiles_that_nobody_wrote(layout, monkeypatch):
    monkeypatch.setattr(mosaic_op, "plan", lambda *_: MosaicPlan("recompute", 512, chunk=512))
    assert_right(replace(LONG, bias=True), "bfloat16", backend="mosaic_gpu", weight_layout=layout)


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
    monkeypatch.setattr(mosaic_op, "plan", lambda *_: in_forward(128, 256, first))
    assert jnp.linalg.norm(gradient() - expected) <= 1e-2 * jnp.linalg.norm(expected)


@pytest.mark.parametrize(
    ("case", "dtype", "layout"),
    [
        (Case("large logits", 200, 192, 1088, logit_std=60.0), "float16", "vh"),
        (Case("per token", 200, 192, 1088, token_weight=True, token_temperature=True, options={"reduction": "none"}),
         "bfloat16", "vh"),
        (Case("everything", 200, 192, 1088, bias=True, token_weight=True, ignored=0.2,
              options={"label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 5.0}), "float16", "hv"),
        (Case("all ignored", 200, 192, 1088, ignored=1.0), "bfloat16", "vh"),
    ],
    ids=str,
)  # fmt: skip
def test_cases(case, dtype, layout):
    assert_right(case, dtype, backend="mosaic_gpu", weight_layout=layout)


@pytest.mark.parametrize("kept", [pytest.param(128, marks=pytest.mark.slow), 0])
def test_labels_out_of_range_and_ignored(kept, monkeypatch):
    """Positions are in the order of labels, of which these have none: NaN for the one, nothing for the other."""
    plan = MosaicPlan("stash" if kept else "recompute", 256, kept_in_gradient=kept, chunk=512)
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
