"""cross_entropy and log_probs on the 'mosaic_gpu' backend, compiled for a GPU: what the CPU can't show."""

from dataclasses import replace
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from onchip.jax import TopK, cross_entropy, log_probs
from onchip.ops.cross_entropy.checks import CHECKER as LOSSES
from onchip.ops.cross_entropy.checks import CrossEntropyCase
from onchip.ops.cross_entropy.checks import cross_entropy as oracle
from onchip.ops.linear_log_probs.checks import CHECKER as LOG_PROBS
from onchip.ops.linear_log_probs.checks import LogProbsCase
from onchip.vocab import jax_ways
from onchip.vocab.rows import memory
from shared import alternating, assert_within_bounds, pairs_once

pytestmark = pytest.mark.gpu
LOSS = CrossEntropyCase("kernels", 61, 50264, ignored=0.3)
VALUES = LogProbsCase("kernels, logits", 61, 0, 50264, ignored=0.3)
EVERYTHING = {"label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 15.0, "logit_scale": 0.5}


ROWS = (131, "float32"), (2056, "bfloat16"), (50257, "float16"), (50264, "bfloat16")
CHANGES = (
    {},
    {"options": EVERYTHING, "class_weight": True, "token_weight": True, "token_temperature": True},
    {"target_prob": 0.999},
    {"logit_std": 30.0, "options": {"reduction": "none"}},
    {"ignored": 1.0},
)


@pytest.mark.parametrize(
    ("changes", "vocab", "dtype"), [(x, *row) for i, x in enumerate(CHANGES) for row in ROWS[i % 2 :: 2]], ids=str
)
def test_losses(changes, vocab, dtype):
    case = replace(LOSS, **{"vocab": vocab} | changes)
    assert_within_bounds(LOSSES.check_case(case, dtype, "cuda", backend="mosaic_gpu"))


OF_IDS = (
    {},
    {"options": {"softcap": 5.0}, "token_temperature": True},
    {"ids": 4, "ignored_ids": 0.2, "vocab": 50257},
    {"ids": 4, "options": {"softcap": 5.0}},
    {"target_prob": 0.999, "vocab": 2056},
)


@pairs_once("changes, entropy, dtype", product(OF_IDS, [False, True], ["float32", "bfloat16"]))
def test_log_probs(changes, entropy, dtype):
    case = replace(VALUES, **changes)
    assert_within_bounds(LOG_PROBS.check_case(case, dtype, "cuda", backend="mosaic_gpu", entropy=entropy))


@pairs_once(
    "labels, dtype, vocab",
    product(["float32", "bfloat16", "float16", "topk"], ["float32", "bfloat16"], [1027, 2056]),
)
def test_soft_labels(vocab, dtype, labels):
    """As plain JAX, which is compared with the oracle elsewhere."""
    keys = jax.random.split(jax.random.key(0), 3)
    z = (jax.random.normal(keys[0], (40, vocab)) * 2).astype(dtype)
    if labels == "topk":
        ids, values = jax.random.randint(keys[1], (40, 5), 0, vocab), jax.random.uniform(keys[2], (40, 5)) / 5
        target = TopK(ids, values, "probs", "truncated")
    else:
        target = jax.nn.softmax(jax.random.normal(keys[1], (40, vocab)) * 2).astype(labels)
    weight = jnp.linspace(0, 2, vocab)
    for options in ({}, EVERYTHING | {"class_weight": weight}):
        loss = partial(cross_entropy, return_stats=True, **options)

        def run(backend, loss=loss):
            return jax.jit(jax.value_and_grad(partial(loss, backend=backend), has_aux=True))(z, target)

        eps = max(float(jnp.finfo(dtype).eps), 2e-6)
        for x, y in zip(*(jax.tree.leaves(run(name)) for name in ("mosaic_gpu", "xla")), strict=True):
            x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
            assert np.linalg.norm(x - y) <= (2 * eps if x.shape == z.shape else 2e-5) * np.linalg.norm(y)


@pytest.mark.parametrize("ids", [0, 4])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_memory_is_what_the_formula_says(ids, softcap):
    """And the same inputs give the same bits."""
    tokens, vocab = 3999, 32768
    z = jax.random.normal(jax.random.key(0), (tokens, vocab), jnp.bfloat16)
    y = jax.random.randint(jax.random.key(1), (tokens, ids) if ids else (tokens,), 0, vocab)

    def total(z):
        if not ids:
            return cross_entropy(z, y, softcap=softcap, backend="mosaic_gpu")
        made = log_probs(z, y, softcap=softcap, entropy=True, backend="mosaic_gpu")
        return made.log_prob.sum() + made.entropy.sum()

    step = jax.jit(jax.grad(total)).lower(z).compile()
    how = {"ids": ids, "stats": ids > 0, "softcap": softcap is not None}
    p = memory.RowsProblem(tokens, vocab, "bfloat16", "cuda", mosaic=True, **how)
    assert jax_ways.row_plan(p, "mosaic_gpu", None).token_chunk == tokens
    assert step.memory_analysis().temp_size_in_bytes <= memory.scratch_bytes(p, tokens)
    first = step(z)
    assert all((first == step(z)).all() for _ in range(9))


def test_rows_beyond_31_bits():
    """The last rows of more than 2**31 logits have the bits of a call of their own."""
    tokens, vocab = 16900, 128256
    z = jax.random.normal(jax.random.key(0), (tokens, vocab), jnp.bfloat16)
    y = jax.random.randint(jax.random.key(1), (tokens,), 0, vocab)
    step = jax.jit(jax.value_and_grad(partial(cross_entropy, reduction="sum", backend="mosaic_gpu")))
    assert (step(z, y)[1][-64:] == step(z[-64:], y[-64:])[1]).all()


@alternating(
    size=[
        (3, 32008, "bfloat16"),
        (301, 32000, "bfloat16"),  # several rows of a ring
        (140, 50264, "float16"),
        (150, 128256, "bfloat16"),
        (140, 128256, "float32"),  # on two multiprocessors
        (140, 262144, "bfloat16"),
        (70, 300000, "bfloat16"),  # which don't hold it
    ],
    options=[{"z_loss": 1e-3, "logit_scale": 0.5, "temperature": "by token"}, {}],
)
def test_loss_and_gradient_from_one_read(size, options):
    tokens, vocab, dtype = size
    rng = np.random.default_rng(0)
    z = (jax.random.normal(jax.random.key(0), (tokens, vocab)) * 2).astype(dtype)
    y = rng.integers(vocab, size=tokens)
    y[0], y[1], y[-1] = -100, 0, vocab - 1
    z = z.at[2, y[2]].set(30.0).at[1, 3:9].set(-jnp.inf).at[1, :2].set(20.0)  # two lead together
    if "temperature" in options:
        options = options | {"temperature": np.linspace(0.5, 1.5, tokens, dtype=np.float32)}
    step = jax.jit(jax.value_and_grad(lambda z, u: cross_entropy(z, y, backend="mosaic_gpu", **options) * u))
    right = oracle(np.asarray(z, np.float64), y, **options)
    bound = max(float(jnp.finfo(dtype).eps), 1e-5)
    small = 2.0**-24 * np.sqrt(vocab) if dtype == "float16" else 0
    for upstream in (1.0, 0.25, 0.3):
        (loss, g), again = step(z, jnp.float32(upstream)), step(z, jnp.float32(upstream))[1]
        assert (g == again).all()
        assert abs(loss - upstream * right.loss) <= 1e-6 * abs(right.loss)
        assert not g[0].any()
        # By row: where the id leads, all of a row's gradient is small.
        g, rows = np.asarray(g[1:], np.float64), upstream * right.grad_logits[1:]
        of_rows = np.linalg.norm(rows, axis=1)
        assert (np.linalg.norm(g - rows, axis=1) <= bound * of_rows + small).all()
