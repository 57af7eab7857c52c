"""Every op of `onchip.jax` under JAX's transformations, and what all of them promise about ignored tokens."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from onchip.jax import cross_entropy, fp8_linear, linear_cross_entropy, linear_jsd, linear_log_probs, log_probs
from onchip.ops.cross_entropy import jax_op as ce_op
from onchip.ops.linear_cross_entropy import jax_op as lce_op
from onchip.ops.linear_jsd import jax_op as jsd_op
from onchip.ops.linear_log_probs import jax_op as llp_op
from onchip.ops.linear_log_probs.checks import plain_linear_log_probs, plain_log_probs
from shared_jax import assert_same, plain_logits, plain_loss


class Op(NamedTuple):
    """One op as (parameters, labels) -> loss, and the same written out; labels [2, 12] or [2, 12, K]."""

    loss: Callable[..., Any]
    plain: Callable[..., Any]
    parameters: tuple[tuple[int, ...], ...]  # shapes; those with 12 tokens are per example
    jitted: Any
    constants: tuple[str, ...] = ()  # options that may be arrays
    ids: int | None = None
    per_token: bool = True  # whether it has reduction="none"


def values(op, *given, **options):
    *layer, ids = given
    out = op(*layer[:2], ids, *layer[2:], entropy=True, **options)
    scale = jnp.linspace(-1, 2, out.log_prob.size, dtype=jnp.float32).reshape(out.log_prob.shape)
    # Mostly of one sign: of a small difference of large sums roundings would be a large part.
    return (out.log_prob * scale).sum() - 0.3 * (out.entropy**2).sum()


def plain_jsd(h, w, x, v, y, reduction="mean"):
    ls, lt = (jax.nn.log_softmax(plain_logits(*a)) for a in ((h, w), (x, v)))
    lm = jnp.logaddexp(ls, lt) - np.log(2)
    loss = jnp.where(y == -100, 0, (jnp.exp(ls) * (ls - lm) + jnp.exp(lt) * (lt - lm)).sum(-1) / 2)
    return loss if reduction == "none" else loss.sum() / jnp.maximum((y != -100).sum(), 1)


FEW = ("linear_cross_entropy stash", "cross_entropy")
LAYER = ((2, 12, 16), (70, 16), (70,))
NUMBERS = ("softcap", "logit_scale", "temperature")
LOSS = ("label_smoothing", "z_loss", *NUMBERS, "normalizer")
OPS = {
    f"linear_cross_entropy {strategy}": Op(
        lambda h, w, b, y, strategy=strategy, **o: linear_cross_entropy(h, w, y, b, strategy=strategy, **o),
        lambda h, w, b, y, **o: plain_loss(plain_logits(h, w, b), y, **o), LAYER, lce_op._op.jitted, LOSS,
    )
    for strategy in ("stash", "recompute")
} | {
    "cross_entropy": Op(cross_entropy, plain_loss, ((2, 12, 70),), ce_op._op.jitted, LOSS),
    "linear_log_probs": Op(
        partial(values, linear_log_probs), partial(values, plain_linear_log_probs), LAYER, llp_op.OPERATOR.jitted,
        NUMBERS,
        ids=2, per_token=False,
    ),
    "log_probs": Op(
        partial(values, log_probs), partial(values, plain_log_probs), ((2, 12, 70),), llp_op.OPERATOR.jitted, NUMBERS,
        ids=2, per_token=False,
    ),
    "linear_jsd": Op(
        lambda h, w, x, v, y, **o: linear_jsd(h, w, x, v, labels=y, teacher_grad=True, **o), plain_jsd,
        ((2, 12, 16), (70, 16), (2, 12, 24), (70, 24)), jsd_op._op.jitted,
    ),
}  # fmt: skip
# One with logits that exist and one with products: what a test is of stands in the adapter that all ops share.


def each(ops, *more, few=FEW):
    """Each of these, by name, and more of its parameters; those beyond a few are slow."""
    marks = {x: () if x in few else (pytest.mark.slow,) for x in ops}
    return [
        pytest.param(op, *(values[i % 2] for values in more), id=x, marks=marks[x])
        for i, (x, op) in enumerate(ops.items())
    ]


every_op = pytest.mark.parametrize("op", each(OPS))


def problem(op, tokens=12):
    rng = np.random.default_rng(0)
    shapes = [tuple(tokens if n == 12 else n for n in shape) for shape in op.parameters]
    parameters = [jnp.float32(rng.standard_normal(shape)) for shape in shapes]
    shape = (2, tokens) if op.ids is None else (2, tokens, op.ids)
    return parameters, jnp.asarray(rng.integers(70, size=shape), jnp.int32)


def per_example(op):
    return [0 if shape[:2] == (2, 12) else None for shape in op.parameters]


def gradients(f, op):
    return jax.value_and_grad(f, tuple(range(len(op.parameters))))


@pytest.mark.parametrize(("op", "jit"), each(OPS, (True, False), few=(*FEW, "linear_jsd")))
def test_gradients_also_of_zero_and_numpy(op, jit):
    wrap = (lambda f: jax.jit(jax.checkpoint(f))) if jit else (lambda f: f)
    parameters, labels = problem(op)
    run = gradients(wrap(lambda h, *rest: rest[-1] * op.loss(jnp.tanh(h), *rest[:-1])), op)
    got = run(*parameters, labels, 0.3)
    assert_same(got, gradients(lambda h, *rest: 0.3 * op.plain(jnp.tanh(h), *rest), op)(*parameters, labels))
    assert not any(x.any() for x in jax.tree.leaves(run(*parameters, labels, 0.0)))
    given = (*map(np.asarray, parameters), np.asarray(labels, np.int64))
    assert_same(op.loss(*given), op.plain(*parameters, labels))


@pytest.mark.parametrize(("op", "order"), each(OPS, ("vmap of grad", "grad of vmap")))
def test_vmap(op, order):
    parameters, labels = problem(op)
    labels = labels.at[0, 2:9].set(-100)  # the examples differ in how many tokens count
    axes = (*per_example(op), 0)

    def run(f):
        if order == "vmap of grad":
            return jax.jit(jax.vmap(gradients(f, op), axes))(*parameters, labels)
        scale = jnp.array([1.0, 3.0])
        return jax.jit(gradients(lambda *p: (jax.vmap(f, axes)(*p) * scale).sum(), op))(*parameters, labels)

    assert_same(run(op.loss), run(op.plain))


@every_op
def test_scan(op):
    parameters, labels = problem(op)
    axes = per_example(op)

    def total(f, *parameters):
        of_example = [x for x, axis in zip(parameters, axes, strict=True) if axis == 0]

        def step(sum_, xs):
            own, y = iter(xs[0]), xs[1]
            given = [x if axis is None else next(own) for x, axis in zip(parameters, axes, strict=True)]
            return sum_ + f(jnp.tanh(given[0]), *given[1:], y), None

        return jax.lax.scan(step, 0.0, (of_example, labels))[0]

    got, expected = (jax.jit(gradients(partial(total, f), op))(*parameters) for f in (op.loss, op.plain))
    assert_same(got, expected)


@pytest.mark.parametrize("op", each({x: op for x, op in OPS.items() if op.per_token}))
def test_upstream_gradients_per_token(op):
    parameters, labels = problem(op)
    labels = labels.at[0, 0].set(-100)
    each = jnp.linspace(-1, 2, 24).reshape(2, 12)

    def weighted(f, *x):
        return (f(*x, reduction="none") * each).sum()

    every = tuple(range(len(parameters)))
    expected = jax.jit(jax.grad(partial(weighted, op.plain), every))(*parameters, labels)
    for arguments in ((0,), every)[: len(parameters)]:  # the first alone can be made in forward
        got = jax.jit(jax.grad(partial(weighted, op.loss), arguments))(*parameters, labels)
        assert_same(got, expected[: len(arguments)])


@every_op
def test_integer_labels_get_float0_and_constants_zero(op):
    parameters, labels = problem(op)
    last = len(parameters)
    grads = jax.grad(op.loss, (0, last), allow_int=True)(*parameters, labels)
    assert (grads[1].dtype, grads[1].shape) == (jax.dtypes.float0, labels.shape)
    constants = {name: jnp.float32(0.5) for name in op.constants}
    constants |= {name: jnp.full((2, 12), 0.5) for name in ("temperature",) if name in constants}
    constants |= {"token_weight": jnp.ones((2, 12))} if op.per_token else {}
    f = lambda y, c: op.loss(*parameters, y, **c)  # noqa: E731
    of_labels, found = jax.grad(f, (0, 1), allow_int=True)(labels, constants)
    assert of_labels.dtype == jax.dtypes.float0
    assert not any(g.any() for g in jax.tree.leaves(found))


@pytest.mark.parametrize("op", each({x: op for x, op in OPS.items() if op.constants}))
def test_a_new_number_does_not_trace_or_compile_again(op):
    parameters, labels = problem(op)
    traces, sizes = 0, set()

    @jax.jit
    def step(h, numbers):
        nonlocal traces
        traces += 1
        return jax.value_and_grad(lambda h: op.loss(h, *parameters[1:], labels, **numbers))(h)

    for value in (0.1, 0.3):
        numbers = dict.fromkeys(op.constants, value)
        got = step(parameters[0], {name: jnp.float32(x) for name, x in numbers.items()})
        own = jax.value_and_grad(lambda h, n=numbers: op.loss(h, *parameters[1:], labels, **n))(parameters[0])
        assert_same(got, own, scale=4)
        sizes.add(tuple(x._cache_size() for x in op.jitted))
    assert traces == 1
    assert len(sizes) == 1


@every_op
def test_forward_mode_raises(op):
    parameters, labels = problem(op)
    h, *rest = parameters
    f = lambda h: op.loss(h, *rest, labels)  # noqa: E731
    with pytest.raises(NotImplementedError, match=r"^(linear_)?(cross_entropy|log_probs|jsd).*: differentiated twice"):
        jax.jit(jax.hessian(f))(h)
    with pytest.raises(TypeError, match="forward-mode autodiff"):
        jax.jvp(f, (h,), (h,))


def test_forward_mode_of_fp8_linear_raises():
    x, w = jnp.ones((16, 128)), jnp.ones((8, 128))
    with pytest.raises(TypeError, match="forward-mode autodiff"):
        jax.jvp(lambda x: fp8_linear(x, w), (x,), (x,))


@every_op
def test_64_bit_mode_changes_nothing_and_bits_are_the_same(op):
    parameters, labels = problem(op)
    run = gradients(op.loss, op)
    expected = run(*parameters, labels)
    assert all(
        bool((a == b).all()) for a, b in zip(*map(jax.tree.leaves, (run(*parameters, labels), expected)), strict=True)
    )
    with jax.enable_x64(True):
        got = jax.jit(run)(*parameters, labels.astype(jnp.int64))
        assert {g.dtype.name for g in jax.tree.leaves(got)} == {"float32"}
        assert_same(got, expected)


@pytest.mark.parametrize("op", each(OPS, few=(FEW[0], "linear_jsd")))
def test_nothing_leaks_from_ignored_tokens(op):
    """NaN and infinity in an ignored token's numbers, weight and temperature."""
    parameters, labels = problem(op)
    labels = labels.at[0, 3].set(-100).at[1, 11].set(-100)
    ones, options = jnp.ones((2, 12)), {}
    if op.per_token:
        options["token_weight"] = ones.at[0, 3].set(jnp.nan)
    if op.constants:
        options["temperature"] = ones.at[0, 3].set(jnp.nan).at[1, 11].set(0)
    clean = dict.fromkeys(options, ones)
    dirty = [x.at[0, 3].set(jnp.nan).at[1, 11].set(jnp.inf) if x.shape[:2] == (2, 12) else x for x in parameters]
    got = gradients(partial(op.loss, **options), op)(*dirty, labels)
    assert_same(got, gradients(partial(op.loss, **clean), op)(*parameters, labels))
    assert not any(g[[0, 1], [3, 11]].any() for g in got[1] if g.shape[:2] == (2, 12))
    if op.per_token:
        f = partial(op.loss, reduction="none")
        upstream = [x.at[0, 3].set(y) for x, y in ((ones, jnp.nan), (ones, 1))]
        got, expected = (jax.vjp(lambda *x: f(*x, labels), *parameters)[1](u) for u in upstream)
        assert_same(got, expected)


@every_op
def test_no_tokens_and_all_ignored(op):
    for tokens in (0, 12):
        parameters, labels = problem(op, tokens)
        parameters[0] *= jnp.nan
        options = {"normalizer": jnp.float32(0)} if "normalizer" in op.constants else {}
        f = jax.jit(gradients(partial(op.loss, **options), op))
        assert not any(x.any() for x in jax.tree.leaves(f(*parameters, jnp.full_like(labels, -100))))


@pytest.mark.parametrize("op", each({x: op for x, op in OPS.items() if op.per_token}))
def test_normalizer_makes_accumulated_gradients_those_of_the_whole_batch(op):
    parameters, labels = problem(op)
    labels = labels.at[0, :5].set(-100)
    whole = gradients(op.loss, op)(*parameters, labels)[1]
    count = int((labels != -100).sum())
    axes = per_example(op)
    parts = []
    for i in (0, 1):
        given = [x if axis is None else x[i] for x, axis in zip(parameters, axes, strict=True)]
        parts.append(gradients(partial(op.loss, normalizer=np.int64(count)), op)(*given, labels[i])[1])
    made = [a + b if axis is None else jnp.stack([a, b]) for a, b, axis in zip(*parts, axes, strict=True)]
    assert_same(made, list(whole))


HEADS = {
    "linear_cross_entropy": lambda h, w, b, y: linear_cross_entropy(h, w, y, b),
    "linear_cross_entropy, soft": lambda h, w, b, y: linear_cross_entropy(h, w, jax.nn.one_hot(y, 70) * 0.9, b),
    "linear_log_probs": lambda h, w, b, y: linear_log_probs(h, w, y, b).sum(),
    "linear_jsd": lambda h, w, b, y: linear_jsd(h, w, h * 0 + 0.1, w * 0.5, student_bias=b),
}


@pytest.mark.parametrize(
    ("narrow", "name"),
    [
        pytest.param(narrow, name, marks=[pytest.mark.slow] * ((i + j) % 2))
        for i, narrow in enumerate(("hidden", "weight"))
        for j, name in enumerate(HEADS)
    ],
)
def test_hidden_and_weight_of_different_dtypes(name, narrow):
    """The product has 16 bits, as if the other were cast before, and each gradient its array's dtype."""
    rng = np.random.default_rng(0)
    h, w, b = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in LAYER)
    y = jnp.asarray(rng.integers(70, size=(2, 12)), jnp.int32)
    given = [h, w, b]
    given[narrow == "weight"] = given[narrow == "weight"].astype(jnp.bfloat16)
    given[2] = b.astype(jnp.bfloat16).astype(jnp.float32)

    def cast(h, w, b, y):
        return HEADS[name](*(x.astype(jnp.bfloat16) for x in (h, w, b)), y)

    steps = [jax.jit(jax.value_and_grad(f, (0, 1, 2))) for f in (HEADS[name], cast)]
    (loss, found), (expected, others) = (f(*given, y) for f in steps)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    assert [g.dtype for g in found] == [x.dtype for x in given]
    for g, other in zip(found, others, strict=True):
        g, other = (np.asarray(x, np.float64) for x in (g, other))
        assert np.linalg.norm(g - other) <= 2**-8 * np.linalg.norm(other)
