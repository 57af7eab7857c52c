"""The JAX op against the float64 oracle: sizes, dtypes, options; special values are in linear_cross_entropy's tests."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ce_common_jax import assert_right, assert_same, small_problem
from hypothesis import given, settings
from hypothesis import strategies as st

from onchip.ops.cross_entropy import reference
from onchip.ops.cross_entropy.cases import CHECK_CASES, CrossEntropyCase
from onchip.ops.cross_entropy.jax_op import cross_entropy
from onchip.vocab.rows import memory as row_memory

CASES = {c.name: c for c in CHECK_CASES}


# Compiling takes nearly all of the time: these leave out what only other numbers tell from the rest.
@pytest.mark.parametrize(
    "name",
    [
        "large logits", "offset 1e4", "one class", "sum", "per token", "half ignored", "masked vocab", "temperature",
        "everything",
    ],
)  # fmt: skip
def test_check_cases(name):
    assert_right(CASES[name])


@pytest.mark.parametrize(("name", "dtype"), [("peaked", "float16"), ("everything", "bfloat16")])
def test_check_cases_in_16_bits(name, dtype):
    assert_right(CASES[name], dtype)


@pytest.mark.parametrize("size", [(4097, 123), (1, 1), (2, 262144)], ids=str)
def test_sizes(size):
    assert_right(CrossEntropyCase("size", *size))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_many_chunks(dtype):
    """A budget for eight rows: many chunks, the last of them ragged."""
    options = {"softcap": 5.0, "label_smoothing": 0.1}
    case = CrossEntropyCase("chunks", 101, 700, ignored=0.2, class_weight=dtype == "float32", options=options)
    problem = row_memory.RowsProblem(101, 700, dtype, softcap=True, stats=True, xla=True)
    budget = row_memory.scratch_bytes(problem, 8)
    assert row_memory.plan(problem, "", budget) == 8
    assert_right(case, dtype, scratch_bytes=budget)


@settings(max_examples=2, deadline=None)
@given(st.integers(1, 39), st.sampled_from(["mean", "none"]))
def test_chunk_sizes_change_nothing(rows, reduction):
    x, y = small_problem(tokens=40, vocab=90)
    y = y.at[0, ::3].set(-100)

    @partial(jax.jit, static_argnums=0)
    def run(chunk):
        budget = row_memory.scratch_bytes(row_memory.RowsProblem(40, 90, stats=True, xla=True), chunk)
        op = partial(cross_entropy, reduction=reduction, return_stats=True, scratch_bytes=budget)
        loss, pullback, stats = jax.vjp(lambda x: op(x, y), x, has_aux=True)
        return loss, stats, pullback(jnp.ones_like(loss))

    assert_same(run(rows), run(40))


def test_the_largest_logit_counts_once():
    """XLA may compute a logit twice, by other instructions: here its division by the temperature."""
    rng = np.random.default_rng(0)
    x, y = jnp.float32(rng.standard_normal((64, 129))), jnp.asarray(rng.integers(129, size=64))
    temperature = jnp.float32(rng.uniform(0.3, 3, 64))
    loss = cross_entropy(x, y, temperature=temperature, reduction="none")
    assert_same(loss, reference.cross_entropy(x, y, temperature=temperature, reduction="none").loss)


def test_a_position_predicts_the_next_label():
    x, y = small_problem(tokens=24, vocab=90)
    x, y = x.reshape(2, 12, 90).at[:, -1].set(jnp.nan), y.reshape(2, 12).astype(jnp.uint8)
    weights = jnp.linspace(0, 1, 24).reshape(2, 12)
    moved = {"token_weight": jnp.roll(weights, -1, 1), "class_weight": jnp.linspace(0, 2, 90)}
    target = jnp.pad(jnp.int32(y)[:, 1:], ((0, 0), (0, 1)), constant_values=-100)
    expected = jax.value_and_grad(partial(cross_entropy, **moved))(x, target)
    made = jax.value_and_grad(partial(cross_entropy, shift=True, **moved | {"token_weight": weights}))(x, y)
    assert_same(made, expected)
    assert not made[1][:, -1].any()


_value_and_grad = jax.jit(jax.value_and_grad(cross_entropy))


@settings(max_examples=3, deadline=None)
@given(st.floats(-100, 100), st.randoms(use_true_random=False))
def test_shifted_and_permuted_logits(shift, random):
    x, y = small_problem()
    x, y = x.reshape(24, 70), y.reshape(24)
    run = _value_and_grad
    loss, grad = run(x, y)
    tokens, vocab = list(range(24)), list(range(70))
    random.shuffle(tokens)
    random.shuffle(vocab)
    tokens, vocab = np.array(tokens), np.array(vocab)
    permuted = run(x[tokens][:, vocab] + shift, jnp.asarray(np.argsort(vocab))[y[tokens]])
    assert_same(permuted, (loss, grad[tokens][:, vocab]), scale=abs(shift) + 1)


def test_classes_that_weigh_nothing():
    x, y = small_problem()
    loss, grad = jax.value_and_grad(partial(cross_entropy, class_weight=jnp.zeros(70)))(x, y)
    assert loss == 0
    assert not grad.any()
    x, y, weight = x.at[..., :40].set(-jnp.inf), jnp.maximum(y, 40), jnp.ones(70).at[:40].set(0)
    oracle = reference.cross_entropy(x, y, class_weight=weight, label_smoothing=0.1)
    assert_same(cross_entropy(x, y, class_weight=weight, label_smoothing=0.1), oracle.loss)


def test_masked_columns():
    x, y = small_problem()
    x, y = x.at[..., :40].set(-jnp.inf), jnp.maximum(y, 40)
    run = jax.jit(jax.value_and_grad(partial(cross_entropy, return_stats=True), has_aux=True))
    (loss, stats), grad = run(x, y)
    oracle = reference.cross_entropy(x, y)
    assert_same((loss, stats, grad), (oracle.loss, oracle[1:-1], oracle.grad_logits))
    assert not grad[..., :40].any()
