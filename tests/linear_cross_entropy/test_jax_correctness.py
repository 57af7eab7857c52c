"""linear_cross_entropy and cross_entropy in JAX: labels of all kinds, shapes, special values, memory."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common_jax import STRATEGIES, assert_same, plain, small_problem

from onchip.jax import cross_entropy, linear_cross_entropy
from onchip.ops.linear_cross_entropy import checks
from onchip.ops.linear_cross_entropy.checks import CHECKER, Case, make_inputs
from onchip.oracle.checks import relative_error
from onchip.vocab.memory import Problem
from onchip.vocab.xla import memory as jax_spec
from shared_jax import plain_logits

both_strategies = pytest.mark.parametrize("strategy", STRATEGIES)


def loss_of_logits(h, w, y, b=0.0, **options):
    """cross_entropy as a loss of hidden states."""
    return cross_entropy(plain_logits(h, w, b), y, **options)


OPS = {s: partial(linear_cross_entropy, strategy=s) for s in STRATEGIES} | {"cross_entropy": loss_of_logits}
every_op = pytest.mark.parametrize("op", OPS.values(), ids=OPS)


def test_the_other_layout_is_not_transposed_in_memory():
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, 256), (256, 8192))]
    labels = jax.ShapeDtypeStruct((64,), jnp.int32)
    step = jax.value_and_grad(
        partial(linear_cross_entropy, weight_layout="hv", strategy="recompute", scratch_bytes="4MiB"), (0, 1)
    )
    temporary = jax.jit(step).lower(*shapes, labels).compile().memory_analysis().temp_size_in_bytes
    assert temporary < 4 * 256 * 8192


@pytest.mark.parametrize("kind", [jnp.uint8, np.int64])
def test_integer_dtypes_of_labels(kind):
    h, w, y, _ = small_problem()
    given_labels = np.asarray(y).astype(kind) if kind is np.int64 else y.astype(kind)
    expected = linear_cross_entropy(h, w, y)
    assert_same(linear_cross_entropy(h, w, given_labels), expected)


def test_labels_of_four_bits():
    h, w, y, _ = small_problem()
    y = jnp.where(y % 3 == 0, 15, y % 7)
    got = linear_cross_entropy(h, w, y.astype(jnp.uint4), ignore_index=15)
    assert_same(got, linear_cross_entropy(h, w, y, ignore_index=15))


def test_int8_labels_of_a_large_vocabulary_and_an_ignore_index_that_they_can_not_hold():
    h, w, _, _ = small_problem(vocab=300)
    y = jnp.full((2, 12), -56, jnp.int8)  # 200 as int8
    assert jnp.isnan(jax.jit(linear_cross_entropy)(h, w, y))
    y = jnp.full((2, 12), 156, jnp.uint8)  # -100 as uint8
    assert_same(linear_cross_entropy(h, w, y), plain(h, w, y.astype(jnp.int32)))


# What forward returns is the same in both strategies.
either_op = pytest.mark.parametrize("op", [linear_cross_entropy, loss_of_logits])


@pytest.mark.parametrize(
    ("shape", "op"), [((), linear_cross_entropy), ((2, 3, 4), loss_of_logits), ((2, 0), linear_cross_entropy)]
)
def test_leading_dimensions(shape, op):
    rng = np.random.default_rng(0)
    h, w = jnp.float32(rng.standard_normal((*shape, 16))), jnp.float32(rng.standard_normal((70, 16)))
    y = jnp.asarray(rng.integers(70, size=shape), jnp.int32)
    loss, stats = op(h, w, y, reduction="none", return_stats=True)
    assert stats._fields == ("lse", "log_prob", "entropy", "correct", "argmax", "target_logit")
    assert loss.shape == shape
    assert [x.shape for x in stats] == [shape] * 6
    assert [x.dtype for x in stats] == [jnp.float32] * 3 + [bool, jnp.int32, jnp.float32]
    assert_same(loss, plain(h, w, y, reduction="none"))


@either_op
def test_one_token_without_leading_dimensions_has_a_weight_and_a_temperature(op):
    h, w, y, _ = small_problem()
    one = jnp.float32(3)
    got = jax.value_and_grad(lambda h: op(h, w, y[0, 0], token_weight=one, temperature=one))(h[0, 0])
    same = jax.value_and_grad(lambda h: op(h[None], w, y[0, :1], token_weight=one[None], temperature=3.0))(h[0, 0])
    assert_same(got, same)


def test_64_bit_labels_from_numpy_do_not_wrap():
    h, w, y, _ = small_problem()
    wide = np.asarray(y).astype(np.int64)
    wide[0, 0] += 2**32
    with pytest.raises(ValueError, match=rf"target\[0, 0\] is {wide[0, 0]}, which is neither"):
        linear_cross_entropy(h, w, wide)


@pytest.mark.parametrize(
    ("masked", "strategy"),
    [(slice(0, 1500), "recompute"), (slice(1000, 2048), "stash")],
    ids=str,
)
def test_masked_vocabulary(masked, strategy):
    """-inf in all of the first block, and at the end; 'recompute' has blocks of 512."""
    rng = np.random.default_rng(0)
    h, w = jnp.float32(rng.standard_normal((70, 8))), jnp.float32(rng.standard_normal((2048, 8)))
    bias = jnp.zeros(2048).at[masked].set(-jnp.inf)
    y = np.flatnonzero(bias == 0)[rng.integers(500, size=70)]
    budget = jax_spec.scratch_at_least(Problem(70, 8, 2048, compacted=True, stats=True), strategy)
    op = partial(linear_cross_entropy, strategy=strategy, return_stats=True, scratch_bytes=budget)
    (loss, stats), grads = jax.value_and_grad(op, (0, 1), has_aux=True)(h, w, y, bias)
    oracle = checks.linear_cross_entropy(h, w, y, bias)
    assert_same((loss, *stats), oracle[:-3])
    assert_same(grads, oracle[-3:-1])
    assert not grads[1][masked].any()


@every_op
def test_small_losses_keep_their_digits(op):
    """p - 1 and log p of a p that float32 can hardly tell from 1, row by row."""
    case = Case("peaked", 64, 64, 500, target_prob=0.9999999, options={"reduction": "none"})
    inputs = make_inputs(case)
    arguments, _ = CHECKER.as_arguments(case, inputs, "float32")
    oracle = CHECKER.run_oracle(arguments, case.options, inputs)
    _, w, y, _ = arguments
    loss, pullback = jax.vjp(lambda h: op(h, w, y, reduction="none"), arguments[0])
    bound = 8 * np.finfo(np.float32).eps * float(np.abs(oracle.lse).max())
    assert np.max(np.abs(np.asarray(loss) / oracle.loss - 1)) < bound
    assert relative_error(np.asarray(pullback(jnp.asarray(inputs.grad_loss))[0]), oracle.grad_hidden) < bound


@both_strategies
def test_tiny_gradients_survive_float16(strategy):
    """1e-7 of a mean over many tokens is below float16's smallest number before it meets hidden and weight."""
    h, w, y, _ = small_problem(dtype="float16")
    run = jax.grad(partial(linear_cross_entropy, normalizer=1e5, strategy=strategy), (0, 1))
    scaled = jax.grad(lambda *x: 1e5 * linear_cross_entropy(*x, normalizer=1e5, strategy=strategy), (0, 1))(h, w, y)
    for small, large in zip(run(h, w, y), scaled, strict=True):
        # What float16 can resolve at the end, no worse: its spacing there is 6e-8.
        assert np.abs(np.asarray(small, np.float64) - np.asarray(large, np.float64) / 1e5).max() < 4e-8


@either_op
def test_a_masked_label_costs_infinity_and_ties_go_to_the_first(op):
    h, w, y, _ = small_problem()
    bias = jnp.zeros(70).at[y[0, 0]].set(-jnp.inf)
    loss, stats = op(h, w, y, bias, reduction="none", return_stats=True)
    assert loss[0, 0] == jnp.inf
    assert stats.log_prob[0, 0] == -jnp.inf
    tied = op(jnp.zeros((3, 4)), jnp.ones((9, 4)), jnp.array([0, 1, 8]), return_stats=True)[1]
    assert tied.correct.tolist() == [True, False, False]
    assert tied.argmax.tolist() == [0, 0, 0]
    assert jnp.isnan(op(h.at[0, 0, 0].set(jnp.nan), w, y))


@pytest.mark.parametrize("count", [2**33, np.int64(2**33), np.asarray(2**33)], ids=["int", "scalar", "array"])
def test_a_normalizer_beyond_32_bits(count):
    h, w, y, _ = small_problem()
    assert_same(linear_cross_entropy(h, w, y, normalizer=count), plain(h, w, y, reduction="sum") / 2.0**33)


def test_label_smoothing_of_one_ignores_the_label():
    h, w, y, _ = small_problem()
    log_p = jax.nn.log_softmax(jnp.matmul(h, w.T, precision="highest"))
    for one in (1, 1.0, jnp.float32(1)):
        assert_same(linear_cross_entropy(h, w, y, label_smoothing=one), -log_p.mean())


@every_op
def test_a_traced_label_smoothing_of_zero_changes_nothing(op):
    """Nor does it where an entry is masked: an infinite mean of logits counts 0 times."""
    h, w, y, _ = small_problem()
    bias = jnp.zeros(70).at[jnp.setdiff1d(jnp.arange(70), y)[:3]].set(-jnp.inf)
    run = jax.jit(jax.value_and_grad(lambda h, w, y, **o: op(h, w, y, bias, **o), (0, 1)))
    assert_same(run(h, w, y, label_smoothing=0.0), run(h, w, y))
