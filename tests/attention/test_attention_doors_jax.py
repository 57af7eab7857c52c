"""attention called with the arguments of jax.nn and of Flax's layers, compared with their own attention."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from onchip.jax import attention, dot_product_attention
from onchip.masks import Causal, Documents
from shared_jax import assert_same

LENGTHS = jnp.asarray([5, 9])


def drawn(heads=4, key_heads=2, queries=9, keys=9):
    rng = np.random.default_rng(0)
    shapes = (2, queries, heads, 8), (2, keys, key_heads, 8), (2, keys, key_heads, 8)
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


def near(made, right):
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-6), made, right)


ONE_IN_EACH = np.random.default_rng(1).random((2, 1, 9, 9)) < 0.5
ONE_IN_EACH[..., 0] = True


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True, "scale": 0.3},
        {"local_window_size": (2, 1)},
        {"local_window_size": 3, "is_causal": True},
        {"query_seq_lengths": LENGTHS, "key_value_seq_lengths": LENGTHS, "is_causal": True},
        {"key_value_seq_lengths": LENGTHS},
        {"query_seq_lengths": LENGTHS},
        {"mask": ONE_IN_EACH, "is_causal": True},
        {"mask": ONE_IN_EACH[:, :, :1], "is_causal": True},
    ],
    ids=lambda x: " ".join(x) or "full",
)
@pytest.mark.parametrize("whole", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_as_jax_nn(options, whole):
    as_jax_nn(options, whole)


def test_as_jax_nn_without_a_batch():
    options = {"query_seq_lengths": LENGTHS, "key_value_seq_lengths": LENGTHS, "mask": ONE_IN_EACH, "is_causal": True}
    as_jax_nn(options, whole=False)


def as_jax_nn(options, whole):
    given = drawn()
    if not whole:
        given = [x[0] for x in given]
        options = {name: x[:1] if name.endswith("lengths") or name == "mask" else x for name, x in options.items()}

    def run(op):
        def loss(*given):
            out, lse = op(*given, **options, return_residual=True)
            # jax.nn's log-sum-exp has no gradient, and where all is hidden it is of what hides.
            lse = jnp.where(lse > -1e9, jax.lax.stop_gradient(lse), 0)
            return (out * jnp.linspace(-1, 1, out.size).reshape(out.shape)).sum(), (out, lse)

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(*given)

    near(run(dot_product_attention), run(jax.nn.dot_product_attention))


def test_more_than_jax_nn():
    q, k, v = drawn()
    ids, sinks = jnp.arange(9) // 4, jnp.ones(4)
    made = dot_product_attention(q, k, v, mask=Documents(ids), is_causal=True, softcap=3.0, sinks=sinks)
    assert_same(made, attention(q, k, v, Documents(ids) & Causal(), softcap=3.0, sinks=sinks))


@pytest.mark.parametrize(
    ("error", "message", "options"),
    [
        (ValueError, "bias must be None", {"bias": jnp.zeros((1, 1, 9, 9))}),
        (TypeError, "mask must be one of onchip.masks, or a bool array; got float32", {"mask": jnp.zeros((9, 9))}),
        (ValueError, "the same for all heads", {"mask": jnp.ones((2, 4, 9, 9), bool)}),
        (ValueError, r"blocks must be \[2, 9, 9\]", {"mask": jnp.ones((3, 1, 9, 1), bool)}),
        (
            ValueError,
            r"T=9 and S=9 or 1; got shape \[2, 9\]; for keys that are padding",
            {"mask": jnp.ones((2, 9), bool)},
        ),
        (ValueError, "local_window_size must be", {"local_window_size": -1}),
        (TypeError, r"query_seq_lengths must be an array \[B\]", {"query_seq_lengths": 3}),
        (ValueError, r"key_value_seq_lengths must be \[2\]", {"key_value_seq_lengths": jnp.array([3])}),
        (ValueError, "backend must be one of 'auto', 'mosaic_gpu', 'xla'; got 'cudnn'", {"implementation": "cudnn"}),
        (ValueError, "it runs on NVIDIA GPUs, not on 'cpu'", {"implementation": "mosaic_gpu"}),
    ],
)
def test_what_is_wrong_raises(error, message, options):
    with pytest.raises(error, match=message):
        dot_product_attention(*drawn(), **options)
