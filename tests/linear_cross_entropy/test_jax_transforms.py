"""The JAX op under JAX's transformations."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common_jax import STRATEGIES, assert_same, plain, quick_compilation, small_problem  # noqa: F401

from onchip.jax import linear_cross_entropy
from onchip.ops.linear_cross_entropy import jax_op

both_strategies = pytest.mark.parametrize("strategy", STRATEGIES)


@both_strategies
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint, lambda f: jax.jit(jax.checkpoint(f))],
                         ids=["eager", "jit", "checkpoint", "both"])  # fmt: skip
def test_gradients(wrap, strategy):
    h, w, y, b = small_problem()
    op = wrap(lambda h, w, b: linear_cross_entropy(jnp.tanh(h), w, y, b, strategy=strategy))
    got = jax.value_and_grad(op, (0, 1, 2))(h, w, b)
    assert_same(got, jax.value_and_grad(lambda h, w, b: plain(jnp.tanh(h), w, y, b), (0, 1, 2))(h, w, b))


@both_strategies
@pytest.mark.parametrize("order", ["vmap of grad", "grad of vmap"])
@pytest.mark.parametrize("per_example_weights", [False, True])
def test_vmap(per_example_weights, order, strategy):
    h, w, y, _ = small_problem()
    y = y.at[0, 2:9].set(-100)  # the examples differ in how many tokens count
    axes = (0, 0 if per_example_weights else None, 0)
    w = jnp.stack([w, 2 * w]) if per_example_weights else w

    def run(op):
        if order == "vmap of grad":
            return jax.vmap(jax.grad(op, (0, 1)), axes)(h, w, y)
        return jax.grad(lambda h, w: (jax.vmap(op, axes)(h, w, y) * jnp.array([1.0, 3.0])).sum(), (0, 1))(h, w)

    assert_same(run(partial(linear_cross_entropy, strategy=strategy)), run(plain))


@both_strategies
def test_vmap_over_token_temperatures(strategy):
    h, w, y, _ = small_problem()
    tau = jnp.linspace(0.5, 2, 24).reshape(2, 12)
    op = partial(linear_cross_entropy, strategy=strategy)
    one_by_one = [jax.grad(lambda h, i=i: op(h, w, y[i], temperature=tau[i]))(h[i]) for i in range(2)]
    got = jax.vmap(jax.grad(lambda h, y, t: op(h, w, y, temperature=t)))(h, y, tau)
    assert_same(got, jnp.stack(one_by_one))


@both_strategies
def test_scan(strategy):
    h, w, y, _ = small_problem()

    def total(op, h, w):
        return jax.lax.scan(lambda c, x: (c + op(jnp.tanh(x[0]), w, x[1]), None), 0.0, (h, y))[0]

    got = jax.jit(jax.value_and_grad(partial(total, partial(linear_cross_entropy, strategy=strategy)), (0, 1)))(h, w)
    assert_same(got, jax.value_and_grad(partial(total, plain), (0, 1))(h, w))


@both_strategies
@pytest.mark.parametrize("upstream", [0.0, 0.3])
def test_an_upstream_gradient(upstream, strategy):
    h, w, y, _ = small_problem()
    got = jax.grad(lambda h, w: upstream * linear_cross_entropy(h, w, y, strategy=strategy), (0, 1))(h, w)
    assert_same(got, jax.grad(lambda h, w: upstream * plain(h, w, y), (0, 1))(h, w))


@pytest.mark.parametrize("arguments", [(0,), (0, 1)], ids=["stash", "recompute"])
def test_an_upstream_gradient_per_token(arguments):
    h, w, y, _ = small_problem()
    y = y.at[0, 0].set(-100)
    upstream = jnp.linspace(-1, 2, 24).reshape(2, 12)

    def run(op):
        return jax.grad(lambda h, w: (op(h, w, y, reduction="none") * upstream).sum(), arguments)(h, w)

    assert_same(run(partial(linear_cross_entropy, strategy="stash")), run(plain))


@both_strategies
def test_integer_labels_get_float0(strategy):
    h, w, y, _ = small_problem()
    op = partial(linear_cross_entropy, strategy=strategy)
    grads = jax.grad(op, (0, 2), allow_int=True)(h, w, y)
    assert grads[1].dtype == jax.dtypes.float0
    assert grads[1].shape == y.shape
    assert jax.grad(op, 2, allow_int=True)(h, w, y).dtype == jax.dtypes.float0


@both_strategies
def test_constants_and_statistics_get_no_gradient(strategy):
    h, w, y, _ = small_problem()
    x = {"token_weight": jnp.ones((2, 12)), "temperature": jnp.ones((2, 12)), "normalizer": jnp.float32(5)}
    x |= {"label_smoothing": jnp.float32(0.1), "z_loss": jnp.float32(0.1), "softcap": jnp.float32(5)}
    x["logit_scale"] = jnp.float32(2)
    op = partial(linear_cross_entropy, strategy=strategy, return_stats=True)
    assert not any(g.any() for g in jax.tree.leaves(jax.grad(lambda x: op(h, w, y, **x)[0])(x)))
    statistic = lambda h: sum(s.sum() for s in op(h, w, y)[1])  # noqa: E731
    assert not jax.grad(statistic)(h).any()


def test_a_new_value_does_not_trace_or_compile_again():
    h, w, y, _ = small_problem()
    traces = 0

    @jax.jit
    def step(h, w, y, x):
        nonlocal traces
        traces += 1
        return jax.value_and_grad(lambda h: linear_cross_entropy(h, w, y, **x))(h)

    names = ("label_smoothing", "z_loss", "softcap", "logit_scale", "temperature", "normalizer")
    for value in (0.1, 0.3, 0.9):
        numbers = dict.fromkeys(names, value)
        got = step(h, w, y, {name: jnp.float32(x) for name, x in numbers.items()})
        assert_same(got, jax.value_and_grad(lambda h, x=numbers: linear_cross_entropy(h, w, y, **x))(h))
    assert traces == 1


def test_a_new_python_number_does_not_compile_again_outside_of_jit():
    h, w, y, _ = small_problem(tokens=26)
    compiled = []
    for value in (0.1, 0.2, 0.3):
        jax.grad(linear_cross_entropy)(h, w, y, label_smoothing=value, temperature=1 + value, normalizer=value)
        compiled.append((jax_op._jit_forward._cache_size(), jax_op._jit_backward._cache_size()))
    assert compiled[1] == compiled[0] == compiled[2]


@both_strategies
@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_differentiated_twice_raises(jit, strategy):
    h, w, y, _ = small_problem()
    op = partial(linear_cross_entropy, strategy=strategy)

    def norm(h):
        return (jax.grad(op)(h, w, y) ** 2).sum()

    with pytest.raises(NotImplementedError, match="linear_cross_entropy: differentiated twice"):
        jit(jax.grad(norm))(h)
    with pytest.raises(NotImplementedError, match="differentiated twice"):
        jit(jax.hessian(op))(h, w, y)


def test_forward_mode_raises():
    h, w, y, _ = small_problem()
    with pytest.raises(TypeError, match="forward-mode autodiff"):
        jax.jvp(lambda h: linear_cross_entropy(h, w, y), (h,), (h,))


@both_strategies
def test_what_has_no_gradient_costs_no_product(strategy):
    h, w, y, _ = small_problem(tokens=64, hidden=256, vocab=512)

    def products(*arguments):
        step = jax.grad(lambda h, w: linear_cross_entropy(h, w, y, strategy=strategy), arguments)
        return str(jax.make_jaxpr(step)(h, w)).count("dot_general")

    logits = 1 if strategy == "stash" else 2
    assert products(0) == products(1) == logits + 1
    assert products(0, 1) == logits + 2
    assert str(jax.make_jaxpr(lambda h: linear_cross_entropy(h, w, y))(h)).count("dot_general") == 1


def test_half_ignored_is_half_the_chunks():
    """The loop's trip count, seen through what it wrote: rows behind the kept tokens keep their zeros."""
    from onchip.frontend.jax_call import Needs, Static, Tensors
    from onchip.vocab.chunks import Config
    from onchip.vocab.xla import walk as jax_xla

    h, w, y, _ = small_problem(tokens=40)
    labels = jnp.where(jnp.arange(40) % 2 == 0, -1, y.reshape(-1))
    static = Static("xla", "cpu", "float32", "vh", "mean", "recompute", None, False)
    _, residuals = jax_xla.forward(
        static, Config("recompute", 5, 70), Tensors(h.reshape(40, -1), w, labels), Needs(True, True, False)
    )
    assert (np.asarray(residuals.lse) != 0).tolist() == [True] * 20 + [False] * 20


def test_numpy_inputs():
    h, w, y, b = map(np.asarray, small_problem())
    assert_same(linear_cross_entropy(h, w, y, b), plain(h, w, y, b))


def test_64_bit_mode_changes_nothing():
    h, w, y, b = small_problem()
    expected = jax.value_and_grad(linear_cross_entropy, (0, 1, 3))(h, w, y, b)
    with jax.enable_x64(True):
        got = jax.value_and_grad(linear_cross_entropy, (0, 1, 3))(h, w, y.astype(jnp.int64), b)
        assert {x.dtype.name for x in jax.tree.leaves(got)} == {"float32"}
        for strategy in STRATEGIES:
            got = jax.jit(jax.value_and_grad(partial(linear_cross_entropy, strategy=strategy, return_stats=True), (0, 1, 3), has_aux=True))(h, w, y, b)  # noqa: E501 # fmt: skip
            assert_same((got[0][0], got[1]), expected)
