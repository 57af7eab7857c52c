"""The JAX op under JAX's transformations, its memory, and every way to call it wrongly."""

import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ce_common_jax import assert_same, quick_compilation, small_problem  # noqa: F401

from onchip.ops.cross_entropy import jax_op
from onchip.ops.cross_entropy.jax_op import cross_entropy
from onchip.vocab.rows import memory as row_memory
from shared import assert_refused


def test_vmap_over_token_temperatures():
    x, y = small_problem()
    tau = jnp.linspace(0.5, 2, 24).reshape(2, 12)
    one = jax.jit(jax.grad(lambda x, y, t: cross_entropy(x, y, temperature=t)))
    assert_same(jax.jit(jax.vmap(one))(x, y, tau), jnp.stack([one(x[i], y[i], tau[i]) for i in range(2)]))


# ----------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize(
    ("shape", "changes", "options"),
    [
        ((1024, 8192), {}, {}),
        ((777, 5001), {"softcap": True}, {"softcap": 5.0}),
        ((777, 5001), {"stats": True, "grad": False}, {"return_stats": True}),
        ((777, 5001), {"dtype": "bfloat16", "softcap": True}, {"softcap": 5.0}),
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
    "logits is float64": ({"logits": np.ones((2, 12, 70))}, TypeError, "logits must be float32, bfloat16 or float16"),
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
    monkeypatch.setattr(jax_op, "refusal", lambda problem: f"not in {problem.dtype}")
    with pytest.raises(ValueError, match=re.escape("no backend can run this call (xla: not in float32)")):
        cross_entropy(*small_problem())
