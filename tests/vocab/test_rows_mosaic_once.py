"""A mean or sum of losses and its gradient from one read, in JAX on the CPU: which calls are made so, what becomes of
the gradient, with a stand-in for the kernel; and the kernel, lowered for CUDA."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import plain_rows
from onchip.jax import TopK, cross_entropy
from onchip.ops.cross_entropy.checks import cross_entropy as oracle
from onchip.vocab.rows import mosaic, mosaic_once
from onchip.vocab.rows.mosaic_once import RowLoss, ring_of

TOKENS, VOCAB = 12, 32008


@pytest.fixture
def launched(monkeypatch):
    """The names of the kernels that calls were traced with."""
    found = []
    plain_rows.stand_in(monkeypatch)

    def noted(name, real, *given, **how):
        found.append(name)
        return real(*given, **how)

    for module, name in ((mosaic, "statistics"), (mosaic, "gradients"), (mosaic_once, "losses")):
        monkeypatch.setattr(module, name, partial(noted, name, getattr(module, name)))
    yield found
    plain_rows.forget()


def given(dtype="bfloat16", vocab=VOCAB):
    rng = np.random.default_rng(0)
    z = jnp.asarray(rng.normal(size=(TOKENS, vocab)) * 2, dtype)
    return z, jnp.asarray(rng.integers(vocab, size=TOKENS)).at[3].set(-100)


def assert_right(made, z, y, dtype="bfloat16", **options):
    loss, g = made
    right = oracle(np.asarray(z, np.float64), np.asarray(y), **options)
    assert abs(loss - right.loss) <= 1e-6 * abs(right.loss)
    assert g.dtype == dtype
    g, tolerance = np.asarray(g, np.float64), max(2e-6, float(jnp.finfo(dtype).eps))
    assert np.linalg.norm(g - right.grad_logits) <= tolerance * np.linalg.norm(right.grad_logits)


PER_TOKEN = np.linspace(0.5, 1.5, TOKENS, dtype=np.float32)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        ("bfloat16", {}),
        ("float16", {"reduction": "sum", "z_loss": 1e-2}),
        ("float32", {"temperature": PER_TOKEN, "token_weight": PER_TOKEN, "normalizer": 7.0, "logit_scale": 0.5}),
    ],
    ids=["mean", "z-loss", "per token"],
)
def test_one_kernel_makes_both(launched, dtype, options):
    z, y = given(dtype)
    made = jax.jit(jax.value_and_grad(partial(cross_entropy, backend="mosaic_gpu", **options)))(z, y)
    assert launched[0] == "losses"
    assert_right(made, z, y, dtype, **options)
    text = jax.jit(jax.grad(partial(cross_entropy, backend="mosaic_gpu", **options))).lower(z, y).compile().as_text()
    assert " conditional(" not in text  # XLA knows that the upstream gradient is 1


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("upstream", [1.0, 0.3, -0.25, 0.0, 2.0**15])
def test_the_gradient_is_rounded_once_whatever_is_upstream(upstream, dtype):
    z, y = given(dtype)
    step = jax.jit(jax.grad(lambda z, u: cross_entropy(z, y, backend="mosaic_gpu") * u))
    right = oracle(np.asarray(z, np.float64), np.asarray(y), grad_loss=upstream).grad_logits
    assert (step(z, jnp.float32(upstream)) == jnp.asarray(right, dtype)).mean() > 0.99


@pytest.mark.usefixtures("launched")
def test_xla_keeps_the_one_way_that_a_known_upstream_gradient_needs():
    z, y = given()
    made = {}
    for u in (1, 0.25, 0.3):
        loss = jax.value_and_grad(lambda z, u=u: cross_entropy(z, y, backend="mosaic_gpu") * u)
        made[u] = jax.jit(loss).lower(z).compile()
        assert " conditional(" not in made[u].as_text()
    exponentials = {u: x.cost_analysis()["transcendentals"] for u, x in made.items()}
    assert exponentials[1] == exponentials[0.25] < exponentials[0.3]


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("options", [{}, {"z_loss": 1e-2}], ids=str)
@pytest.mark.parametrize("lead", [0.0, 1 / 16, 0.25, 30.0])
def test_logits_that_lead_together(lead, options):
    z, y = given()
    z = z.at[0].set(1.0).at[1, :2].set(30.0).at[1, 0].add(lead).at[2, y[2]].set(30.0)
    y = y.at[1].set(0)
    for ids in (y, y.at[1].set(1)):
        made = jax.jit(jax.value_and_grad(partial(cross_entropy, backend="mosaic_gpu", **options)))(z, ids)
        assert_right(made, z, ids, **options)


def in_rows(z, y):
    return jax.vmap(lambda z, y: cross_entropy(z, y, reduction="sum", backend="mosaic_gpu"))(
        z.reshape(3, -1, VOCAB), y.reshape(3, -1)
    ).sum()


@pytest.mark.slow
@pytest.mark.parametrize(
    "f",
    [
        in_rows,
        jax.checkpoint(partial(cross_entropy, reduction="sum", backend="mosaic_gpu")),
        lambda z, y: jax.lax.scan(
            lambda total, x: (total + cross_entropy(*x, reduction="sum", backend="mosaic_gpu"), None),
            0.0, (z.reshape(3, -1, VOCAB), y.reshape(3, -1)),
        )[0],
    ],
    ids=["vmap", "checkpoint", "scan"],
)  # fmt: skip
def test_transformations(launched, f):
    z, y = given()
    made = jax.jit(jax.value_and_grad(f))(z, y)
    assert "losses" in launched
    assert_right(made, z, y, reduction="sum")


@pytest.mark.parametrize(
    ("options", "dtype", "vocab"),
    [
        ({"reduction": "none"}, "bfloat16", VOCAB),
        ({"label_smoothing": 0.1}, "bfloat16", VOCAB),
        ({"softcap": 5.0}, "bfloat16", VOCAB),
        ({"return_stats": True}, "bfloat16", VOCAB),
        ({}, "bfloat16", 32009),  # rows that begin anywhere
        ({}, "bfloat16", 16384),  # rows of which a round of reads holds all
        ({"soft": True}, "bfloat16", VOCAB),
    ],
    ids=str,
)
def test_other_calls_take_two_kernels(launched, options, dtype, vocab):
    z, y = given(dtype, vocab)
    options = dict(options)
    if options.pop("soft", False):
        y = TopK(jnp.abs(y)[:, None], jnp.ones((TOKENS, 1)), "probs", "truncated")
    f = partial(cross_entropy, backend="mosaic_gpu", **options)
    jax.eval_shape(jax.grad(lambda z: jax.tree.leaves(f(z, y))[0].sum()), z)
    assert launched == ["statistics", "gradients"]


def test_outside_of_a_jit_memory_holds_one_gradient(launched):
    """Forward makes none, which backward could only copy."""
    z, y = given()
    assert_right(jax.value_and_grad(partial(cross_entropy, backend="mosaic_gpu"))(z, y), z, y)
    assert launched == ["statistics", "gradients"]


def test_without_a_gradient_none_is_made(launched):
    z, y = given()
    jax.jit(partial(cross_entropy, backend="mosaic_gpu"))(z, y)
    assert launched == ["statistics"]


# --------------------------------------------------------------------------------------------------------- the kernel


@pytest.mark.parametrize(
    ("vocab", "dtype"),
    [
        (128256, "bfloat16"),
        pytest.param(50264, "float16", marks=pytest.mark.slow),
        pytest.param(262144, "bfloat16", marks=pytest.mark.slow),  # on two multiprocessors
        pytest.param(300000, "float32", marks=pytest.mark.slow),  # which don't hold it
        pytest.param(32000, "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_the_kernel_lowers(vocab, dtype):
    """Which fails if there is too little shared memory."""
    f = jax.ShapeDtypeStruct
    one, tokens, ids = f((1,), "float32"), f((300,), "float32"), f((300,), "int32")

    def run(z, kept, factor, ids, scale, slope):
        return mosaic_once.losses(z, kept, factor, RowLoss(ids, scale, slope))

    traced = jax.jit(run).trace(f((300, vocab), dtype), ids, one, ids, tokens, one)
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("custom_call @mosaic_gpu") == 1


@pytest.mark.parametrize("vocab", [32000, 50264, 128256, 151936, 262144])
def test_rows_of_16_bits_fit(vocab):
    """Nothing is read twice: so many rounds are in rings, and one in registers."""
    ring = ring_of(vocab, "bfloat16")
    assert ring.width < vocab <= (ring.slots + 1) * ring.width
