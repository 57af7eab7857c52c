"""The JAX op under JAX's transformations, its memory, and every way to call it wrongly."""

import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ce_common_jax import assert_same, quick_compilation, small_problem  # noqa: F401

from onchip.ops.cross_entropy import jax_op, jax_xla
from onchip.ops.cross_entropy.jax_op import cross_entropy
from onchip.vocab.rows import memory as row_memory
from shared import assert_refused
from shared_jax import plain_loss as plain


@pytest.mark.parametrize("wrap", [lambda f: f, lambda f: jax.jit(jax.checkpoint(f))], ids=["eager", "jit, checkpoint"])
def test_gradients(wrap):
    x, y = small_problem()
    got = jax.value_and_grad(wrap(lambda x: cross_entropy(jnp.tanh(x), y)))(x)
    assert_same(got, jax.value_and_grad(lambda x: plain(jnp.tanh(x), y))(x))


@pytest.mark.parametrize("order", ["vmap of grad", "grad of vmap"])
def test_vmap(order):
    x, y = small_problem()
    y = y.at[0, 2:9].set(-100)  # the examples differ in how many tokens count

    def run(op):
        if order == "vmap of grad":
            return jax.jit(jax.vmap(jax.grad(op)))(x, y)
        return jax.jit(jax.grad(lambda x: (jax.vmap(op)(x, y) * jnp.array([1.0, 3.0])).sum()))(x)

    assert_same(run(cross_entropy), run(plain))


def test_vmap_over_token_temperatures():
    x, y = small_problem()
    tau = jnp.linspace(0.5, 2, 24).reshape(2, 12)
    one = jax.jit(jax.grad(lambda x, y, t: cross_entropy(x, y, temperature=t)))
    assert_same(jax.jit(jax.vmap(one))(x, y, tau), jnp.stack([one(x[i], y[i], tau[i]) for i in range(2)]))


def test_scan():
    x, y = small_problem()

    def total(op, x):
        return jax.lax.scan(lambda c, z: (c + op(jnp.tanh(z[0]), z[1]), None), 0.0, (x, y))[0]

    got = jax.jit(jax.value_and_grad(partial(total, cross_entropy)))(x)
    assert_same(got, jax.jit(jax.value_and_grad(partial(total, plain)))(x))


def test_upstream_gradients():
    x, y = small_problem()
    y = y.at[0, 0].set(-100)
    scaled = jax.jit(jax.grad(lambda x, u: u * cross_entropy(x, y)))
    for upstream in (0.0, 0.3):
        assert_same(scaled(x, upstream), upstream * jax.grad(plain)(x, y))
    each = jnp.linspace(-1, 2, 24).reshape(2, 12)
    got = jax.jit(jax.grad(lambda x: (cross_entropy(x, y, reduction="none") * each).sum()))(x)
    assert_same(got, jax.grad(lambda x: (plain(x, y, reduction="none") * each).sum())(x))


def test_integer_labels_get_float0():
    x, y = small_problem()
    grads = jax.grad(cross_entropy, (0, 1), allow_int=True)(x, y)
    assert grads[1].dtype == jax.dtypes.float0
    assert grads[1].shape == y.shape
    assert jax.grad(cross_entropy, 1, allow_int=True)(x, y).dtype == jax.dtypes.float0


def test_constants_and_statistics_get_no_gradient():
    x, y = small_problem()
    names = ("token_weight", "temperature", "normalizer", "label_smoothing", "z_loss", "softcap", "logit_scale")
    shapes = ((2, 12), (2, 12), *[()] * 5)
    constants = {name: jnp.full(shape, 0.5) for name, shape in zip(names, shapes, strict=True)}
    grads = jax.grad(lambda c: cross_entropy(x, y, **c))(constants)
    assert not any(g.any() for g in jax.tree.leaves(grads))
    statistic = lambda x: sum(s.sum() for s in cross_entropy(x, y, return_stats=True)[1])  # noqa: E731
    assert not jax.grad(statistic)(x).any()


def test_a_new_value_does_not_trace_or_compile_again():
    x, y = small_problem()
    traces = 0

    @jax.jit
    def step(x, y, numbers):
        nonlocal traces
        traces += 1
        return jax.value_and_grad(lambda x: cross_entropy(x, y, **numbers))(x)

    names = ("label_smoothing", "z_loss", "softcap", "logit_scale", "temperature", "normalizer")
    sizes = set()
    for value in (0.1, 0.3):
        numbers = dict.fromkeys(names, value)
        got = step(x, y, {name: jnp.float32(n) for name, n in numbers.items()})
        assert_same(got, jax.value_and_grad(lambda x, n=numbers: cross_entropy(x, y, **n))(x))
        sizes.add((jax_op._jit_forward._cache_size(), jax_op._jit_backward._cache_size()))
    assert traces == 1
    assert len(sizes) == 1


def test_differentiated_twice_raises():
    x, y = small_problem()
    with pytest.raises(NotImplementedError, match=r"^cross_entropy: differentiated twice"):
        jax.grad(lambda x: (jax.grad(cross_entropy)(x, y) ** 2).sum())(x)
    with pytest.raises(NotImplementedError, match="differentiated twice"):
        jax.jit(jax.hessian(cross_entropy))(x, y)


def test_forward_mode_raises():
    x, y = small_problem()
    with pytest.raises(TypeError, match="forward-mode autodiff"):
        jax.jvp(lambda x: cross_entropy(x, y), (x,), (x,))


def test_ignored_tokens_are_not_computed():
    """The loop's trip count, seen through what it wrote: rows behind the kept tokens keep their zeros."""
    x, y = small_problem(tokens=40)
    labels = jnp.where(jnp.arange(40) % 2 == 0, -1, y.reshape(-1))
    tensors = jax_xla.Tensors(x.reshape(40, -1), jnp.zeros((70, 0)), labels)
    static = jax_xla.Static("xla", "cpu", "float32", "vh", "mean", "recompute", None, False)
    _, residuals = jax.jit(jax_xla.forward, static_argnums=(0, 1))(static, 5, tensors)
    assert (np.asarray(residuals.lse) != 0).tolist() == [True] * 20 + [False] * 20


def test_numpy_inputs_64_bit_mode_and_the_same_bits():
    x, y = small_problem()
    run = jax.value_and_grad(cross_entropy)
    expected = run(x, y)
    assert_same(cross_entropy(np.asarray(x), np.asarray(y)), plain(x, y))
    assert all(bool((a == b).all()) for a, b in zip(run(x, y), expected, strict=True))
    with jax.enable_x64(True):
        got = run(x, y.astype(jnp.int64))
        assert {g.dtype.name for g in got} == {"float32"}
        assert_same(got, expected)


# ----------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize(
    ("shape", "changes", "options"),
    [
        ((1024, 8192), {}, {}),
        ((777, 5001), {"softcap": True}, {"softcap": 5.0}),
        ((777, 5001), {"stats": True, "grad": False}, {"return_stats": True}),
        ((777, 5001), {"dtype": "bfloat16", "softcap": True}, {"softcap": 5.0, "label_smoothing": 0.1}),
        ((777, 5001), {"dtype": "float16", "stats": True}, {"return_stats": True}),
    ],
    ids=str,
)
def test_the_formula_holds(shape, changes, options):
    problem = row_memory.Problem(*shape, xla=True, **changes)
    formula = row_memory.scratch_bytes(problem, row_memory.plan(problem))
    step = partial(cross_entropy, **options)
    if problem.grad:
        step = jax.value_and_grad(step, has_aux=problem.stats)
    arguments = jax.ShapeDtypeStruct(shape, problem.dtype), jax.ShapeDtypeStruct(shape[:1], jnp.int32)
    measured = jax.jit(step).lower(*arguments).compile().memory_analysis().temp_size_in_bytes
    assert measured <= formula
    assert measured >= formula / 2, "the formula promises far more than is used"


# ------------------------------------------------------------------------------------------------------ wrong calls


ones = jnp.ones
WRONG = {
    "logits is 0-d": ({"logits": ones(())}, ValueError, "logits must be [..., V]"),
    "V is 0": ({"logits": ones((2, 12, 0))}, ValueError, "logits must be [..., V] with V >= 1"),
    "labels too short": ({"labels": jnp.zeros((2, 11), int)}, ValueError, "labels has shape [2, 11] but logits"),
    "labels are flat": ({"labels": jnp.zeros(24, int)}, ValueError, "must have logits' leading dimensions, [2, 12]"),
    "token_weight is flat": ({"token_weight": ones(24)}, ValueError, "it must have labels' shape, [2, 12]"),
    "temperature is flat": ({"temperature": ones(24)}, ValueError, "temperature has shape [24]"),
    "normalizer is 1-d": ({"normalizer": ones(1)}, ValueError, "normalizer must be a number or a 0-d array"),
    "z_loss is 1-d": ({"z_loss": ones(24)}, ValueError, "z_loss must be a number or a 0-d array"),
    "logits is a list": ({"logits": [1.0]}, TypeError, "logits must be a jax.Array or numpy.ndarray; got list"),
    "labels is None": ({"labels": None}, TypeError, "labels must be a jax.Array"),
    "token_weight is a number": ({"token_weight": 1.0}, TypeError, "token_weight must be a jax.Array"),
    "logits is int": ({"logits": ones((2, 12, 70), int)}, TypeError, "logits must be float32"),
    "labels are float": ({"labels": ones((2, 12))}, TypeError, "labels must hold integers; got float32"),
    "token_weight is complex": ({"token_weight": ones((2, 12), "complex64")}, TypeError, "token_weight must be real"),
    "normalizer is complex": ({"normalizer": ones((), "complex64")}, TypeError, "normalizer must be a real number"),
    "softcap is a bool array": ({"softcap": ones((), bool)}, TypeError, "softcap must be a real number; got bool"),
    "ignore_index is a float": ({"ignore_index": -100.0}, TypeError, "ignore_index must be an int"),
    "return_stats is 1": ({"return_stats": 1}, TypeError, "return_stats must be True or False"),
    "label_smoothing 1.1": ({"label_smoothing": 1.1}, ValueError, "label_smoothing must be in [0, 1]; got 1.1"),
    "z_loss is nan": ({"z_loss": math.nan}, ValueError, "z_loss must be finite"),
    "softcap 0": ({"softcap": 0.0}, ValueError, "softcap must be above 0; got 0.0; pass None for no softcap"),
    "temperature 0": ({"temperature": 0.0}, ValueError, "temperature must be above 0"),
    "normalizer 0": ({"normalizer": 0}, ValueError, "normalizer must be above 0"),
    "normalizer with sum": ({"normalizer": 3, "reduction": "sum"}, ValueError, "is what reduction='mean' divides by"),
    "reduction": ({"reduction": "avg"}, ValueError, "reduction must be one of 'mean', 'sum', 'none'; got 'avg'"),
    "backend": ({"backend": "triton"}, ValueError, "backend must be one of 'auto', 'xla'; got 'triton'"),
    "scratch_bytes too small": ({"scratch_bytes": 100}, ValueError, "scratch_bytes=100 is too small for T=24, V=70"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_call(name):
    changes, kind, message = WRONG[name]
    x, y = small_problem()
    arguments = {"logits": x, "labels": y} | changes
    arrays = {name: x for name, x in arguments.items() if isinstance(x, jax.Array)}
    rest = {name: x for name, x in arguments.items() if name not in arrays}
    function = lambda arrays: cross_entropy(**arrays, **rest)  # noqa: E731
    for run in (function, lambda arrays: jax.eval_shape(function, arrays)):
        assert_refused("cross_entropy", partial(run, arrays), kind, message)


def test_a_refused_backend_says_why(monkeypatch):
    monkeypatch.setattr(jax_xla, "refusal", lambda problem: f"not in {problem.dtype}")
    with pytest.raises(ValueError, match=re.escape("no backend can run this call (xla: not in float32)")):
        cross_entropy(*small_problem())
