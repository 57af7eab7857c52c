"""Every way to call the JAX op wrongly: the exception's type, and that it names the argument."""

from functools import partial

import jax.numpy as jnp
import pytest
from common_llp_jax import small_problem

from onchip.ops.linear_log_probs.jax_op import linear_log_probs
from shared import assert_refused

ones = jnp.ones
WRONG = {
    "layout": ({"weight_layout": "hh"}, ValueError, "weight_layout must be one of 'vh', 'hv'; got 'hh'"),
    "weight is transposed": ({"weight": ones((16, 70))}, ValueError, "hidden has H=16 but weight has H=70; weight must be [V, H]"),
    "weight is not transposed": ({"weight_layout": "hv"}, ValueError, "hidden has H=16 but weight has H=70; weight must be [H, V] with weight_layout='hv'"),
    "ids are flat": ({"ids": ones(24, int)}, ValueError, "ids has shape [24]"),
    "no ids": ({"ids": ones((2, 12, 0), int)}, ValueError, "[..., K] needs K >= 1"),
    "bias too long": ({"bias": ones(71)}, ValueError, "bias has shape [71] but weight has V=70"),
    "temperature is flat": ({"temperature": ones(24)}, ValueError, "temperature has shape [24]"),
    "softcap is 1-d": ({"softcap": ones(1)}, ValueError, "softcap must be a number or a 0-d array; got shape [1]"),
    "softcap is bool": ({"softcap": ones((), bool)}, TypeError, "softcap must be a real number; got bool"),
    "hidden is a list": ({"hidden": [1.0]}, TypeError, "hidden must be a jax.Array or numpy.ndarray; got list"),
    "ids is None": ({"ids": None}, TypeError, "ids must be a jax.Array"),
    "dtypes differ": ({"weight": ones((70, 16), "bfloat16")}, TypeError, "hidden is float32 but weight is bfloat16; cast one of them"),
    "ids are float": ({"ids": ones((2, 12))}, TypeError, "ids must hold integers; got float32"),
    "temperature is complex": ({"temperature": ones((2, 12), "complex64")}, TypeError, "temperature must be real"),
    "temperature 0": ({"temperature": 0.0}, ValueError, "temperature must be above 0"),
    "entropy is 1": ({"entropy": 1}, TypeError, "entropy must be True or False"),
    "ignore_index is a float": ({"ignore_index": -100.0}, TypeError, "ignore_index must be an int"),
    "scratch_bytes too small": ({"scratch_bytes": 100}, ValueError, "scratch_bytes=100 is too small for T=24, H=16, V=70"),
    "backend": ({"backend": "triton"}, ValueError, "backend must be one of 'auto', 'xla'; got 'triton'"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_call(name):
    changes, kind, message = WRONG[name]
    h, w, ids, b = small_problem()
    arguments = {"hidden": h, "weight": w, "ids": ids, "bias": b} | changes
    assert_refused("linear_log_probs", partial(linear_log_probs, **arguments), kind, message)
