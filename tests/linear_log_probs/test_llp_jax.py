"""The JAX op: against the float64 oracle, and under JAX's transformations."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common_llp_jax import small_problem

from onchip.ops.linear_log_probs import jax_op, reference, spec
from onchip.ops.linear_log_probs.cases import CHECK_CASES, Case
from onchip.ops.linear_log_probs.checks import check_case, plain_linear_log_probs
from onchip.ops.linear_log_probs.jax_op import LogProbs, linear_log_probs
from shared import assert_within_bounds
from shared_jax import assert_same, quick_compilation  # noqa: F401


def assert_right(case, dtype="float32", **how):
    """The op on `case` is within its bounds of the oracle, for every quantity."""
    assert_within_bounds(check_case(case, dtype, **how))


def objective(op, h, w, ids, b=None, **options):
    out = op(h, w, ids, b, entropy=True, **options)
    scale = jnp.linspace(-1, 2, out.log_prob.size).reshape(out.log_prob.shape)
    return (out.log_prob * scale).sum() + 0.3 * (out.entropy**2).sum()


loss, plain = partial(objective, linear_log_probs), partial(objective, plain_linear_log_probs)


# Compiling takes nearly all of the time: `onchip check` runs all cases in all dtypes.
@pytest.mark.parametrize(
    ("name", "dtype", "entropy"),
    [
        ("small logits", "float32", True),
        ("peaked among several", "float32", True),
        ("all ignored", "float32", True),
        ("everything", "float32", True),
        ("top-32", "float32", False),
        ("everything", "bfloat16", True),
    ],
    ids=str,
)
def test_check_cases(name, dtype, entropy):
    assert_right(next(c for c in CHECK_CASES if c.name == name), dtype, entropy=entropy)


@pytest.mark.parametrize("size", [(4097, 31, 123), (1, 31, 50257)], ids=str)
def test_sizes(size):
    assert_right(Case("size", *size))


@pytest.mark.parametrize(("layout", "dtype"), [("hv", "float16")])
def test_many_chunks(layout, dtype):
    """The smallest budget: several chunks of tokens and of vocabulary, the last of each ragged."""
    case = Case("chunks", 333, 40, 2500, bias=True, ignored=0.2, ids=3, ignored_ids=0.2, options={"softcap": 5.0})
    problem = spec.Problem(
        333, 40, 2500, 3, dtype, backend="xla", grad_bias=True, softcap=True, entropy=True, compacted=True
    )
    budget = max(spec.scratch_at_least(problem, s) for s in ("forward", "recompute"))
    config = spec.plan(problem, "recompute", budget)
    assert config.token_chunk < 333 / 2
    assert config.vocab_chunk < 2500 / 2
    assert_right(case, dtype, scratch_bytes=budget, weight_layout=layout)


def test_gradients_under_checkpoint():
    h, w, ids, b = small_problem()
    got = jax.value_and_grad(jax.checkpoint(lambda h, w, b: loss(jnp.tanh(h), w, ids, b)), (0, 1, 2))(h, w, b)
    assert_same(got, jax.value_and_grad(lambda h, w, b: plain(jnp.tanh(h), w, ids, b), (0, 1, 2))(h, w, b))


def test_vmap_and_scan():
    h, w, ids, _ = small_problem(2)
    ids = ids.at[0, 2:9].set(-100)  # the examples differ in how many tokens count
    mapped = [jax.vmap(jax.grad(op, (0, 1)), (0, None, 0))(h, w, ids) for op in (loss, plain)]
    assert_same(*mapped)

    def total(op, h, w):
        return jax.lax.scan(lambda c, x: (c + op(jnp.tanh(x[0]), w, x[1]), None), 0.0, (h, ids))[0]

    assert_same(*(jax.jit(jax.value_and_grad(partial(total, op), (0, 1)))(h, w) for op in (loss, plain)))


def test_integer_ids_get_float0_and_constants_zero():
    h, w, ids, _ = small_problem()
    grads = jax.grad(loss, (0, 2), allow_int=True)(h, w, ids)
    assert grads[1].dtype == jax.dtypes.float0
    x = {"temperature": jnp.ones((2, 12)), "softcap": jnp.float32(5), "logit_scale": jnp.float32(2)}
    assert not any(g.any() for g in jax.tree.leaves(jax.grad(lambda x: loss(h, w, ids, **x))(x)))
    assert not jax.grad(lambda h: linear_log_probs(h, w, ids, top1=True).top1.astype(float).sum())(h).any()


def test_a_new_value_does_not_trace_again():
    h, w, ids, _ = small_problem()
    traces = 0

    @jax.jit
    def step(h, x):
        nonlocal traces
        traces += 1
        return loss(h, w, ids, **x)

    for value in (0.5, 2.0):
        names = ("softcap", "logit_scale", "temperature")
        got = step(h, {name: jnp.float32(value) for name in names})
        assert_same(got, plain(h, w, ids, **dict.fromkeys(names, value)))
    assert traces == 1


def test_what_has_no_gradient_costs_no_product():
    h, w, ids, _ = small_problem()

    def products(*arguments):
        step = jax.grad(lambda h, w: linear_log_probs(h, w, ids).sum(), arguments)
        return str(jax.make_jaxpr(step)(h, w)).count("dot_general")

    assert products(0) == products(1) == 3
    assert products(0, 1) == 4
    assert str(jax.make_jaxpr(lambda h: linear_log_probs(h, w, ids))(h)).count("dot_general") == 1


def test_nothing_leaks_from_ignored_tokens_and_bad_ids_give_nan():
    h, w, ids, b = small_problem(2)
    ids = ids.at[0, 3].set(-100).at[1, 5].set(-100).at[0, 4, 0].set(-100)
    dirty, tau = h.at[0, 3].set(jnp.nan).at[1, 5].set(jnp.inf), jnp.ones((2, 12)).at[0, 3].set(jnp.nan)

    @jax.jit
    def run(h, ids, tau, upstream):
        def values(h, w, b):
            return linear_log_probs(h, w, ids, b, temperature=tau, entropy=True, lse=True)[:3]

        out, pullback = jax.vjp(values, h, w, b)
        return out, pullback(tuple(upstream.at[..., 0].get() if x.ndim == 2 else upstream for x in out))

    upstream = jnp.ones((2, 12, 2))
    out, grads = run(dirty, ids, tau, upstream.at[0, 3].set(jnp.nan))
    assert_same((out, grads), run(h, ids, jnp.ones((2, 12)), upstream))
    assert not any(x[0, 3].any() for x in (*out, grads[0]))
    for bad in (70, -1, 2**31 - 1):
        (log_prob, entropy, _), grads = run(h, ids.at[1, 7, 1].set(bad), jnp.ones((2, 12)), 0 * upstream)
        assert np.argwhere(np.isnan(log_prob)).tolist() == [[1, 7, 1]]
        assert np.isfinite(entropy).all()
        assert np.argwhere(np.isnan(grads[0]).any(-1)).tolist() == [[1, 7]]
    oracle = reference.linear_log_probs(h, w, ids.at[1, 7, 1].set(70), b)
    assert np.argwhere(np.isnan(oracle.grad_hidden).any(-1)).tolist() == [[1, 7]]


def test_what_is_returned():
    h, w, ids, _ = small_problem(3)
    assert linear_log_probs(h, w, ids).shape == (2, 12, 3)
    out = linear_log_probs(h, w, np.asarray(ids, np.int64), top1=True)
    assert isinstance(out, LogProbs)
    assert (out.entropy, out.lse) == (None, None)
    assert out.top1.tolist() == jnp.argmax(h @ w.T, -1).tolist()
    empty = linear_log_probs(h[:, :0], w, ids[:, :0], entropy=True, lse=True, top1=True)
    assert [x.shape for x in empty] == [(2, 0, 3), (2, 0), (2, 0), (2, 0)]
    assert linear_log_probs(h[0, 0], w, ids[0, 0, 0]).shape == ()


def test_differentiated_twice_and_forward_mode_raise():
    h, w, ids, _ = small_problem()
    with pytest.raises(NotImplementedError, match="linear_log_probs: differentiated twice"):
        jax.grad(lambda h: (jax.grad(loss)(h, w, ids) ** 2).sum())(h)
    with pytest.raises(TypeError, match="forward-mode autodiff"):
        jax.jvp(lambda h: loss(h, w, ids), (h,), (h,))


@pytest.mark.parametrize("options", [{}, {"entropy": True, "softcap": 5.0}], ids=str)
def test_the_memory_formula(options):
    jax.config.update("jax_disable_most_optimizations", False)
    h, w, ids = (jax.ShapeDtypeStruct(s, d) for s, d in (((512, 64), "float32"), ((8192, 64), "float32"), ((512,), "int32")))  # fmt: skip # noqa: E501
    problem = spec.Problem(
        512, 64, 8192, backend="xla", softcap="softcap" in options, entropy="entropy" in options, compacted=True
    )
    budget = spec.scratch_at_least(problem, "recompute") + (4 << 20)

    def step(h, w, ids):
        out = linear_log_probs(h, w, ids, scratch_bytes=budget, lse=True, **options)
        return out.log_prob.sum() + (out.entropy.sum() if options else 0)

    temporary = jax.jit(jax.grad(step, (0, 1))).lower(h, w, ids).compile().memory_analysis().temp_size_in_bytes
    jax.config.update("jax_disable_most_optimizations", True)
    assert temporary <= budget
    assert temporary >= spec.scratch_bytes(problem, spec.plan(problem, "recompute", budget)) / 3


def test_the_same_inputs_give_the_same_bits():
    h, w, ids, _ = small_problem(2, vocab=3000)
    step = jax.jit(jax.value_and_grad(loss, (0, 1)))
    first, second = (jax.tree.leaves(step(h, w, ids)) for _ in range(2))
    assert all(bool((a == b).all()) for a, b in zip(first, second, strict=True))
    assert jax_op.BACKENDS == ("xla",)
