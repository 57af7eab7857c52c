"""Every wrong call of JAX's moe and its helpers raises an error that says what is wrong and what to do."""

import jax
import numpy as np
import pytest

from onchip.jax import init_moe, moe, update_correction_bias
from shared import assert_refused

# NumPy's: each operation of JAX outside of jit would be compiled.
PARAMS = jax.tree.map(
    lambda x: np.ones(x.shape, x.dtype), jax.eval_shape(lambda: init_moe(jax.random.key(0), 12, 8, 6, 5))
)
X3 = np.ones((2, 15, 12), np.float32)


def changed(**arrays):
    return {"params": PARAMS._replace(**arrays)}


MOE_CALLS = {
    "params are a dict": ({"params": PARAMS._asdict()}, TypeError, "params must be MoEParams, as init_moe returns; got dict"),
    "down is None": (changed(down=None), TypeError, "down must be a jax.Array or numpy.ndarray; got NoneType"),
    "half a shared expert": (changed(shared_down=None), TypeError, "one of shared_gate_up and shared_down; pass both or neither"),
    "x is a list": ({"x": [[1.0] * 12]}, TypeError, "x must be a jax.Array or numpy.ndarray; got list"),
    "x is int": ({"x": X3.astype("int32")}, TypeError, "x must be float32, bfloat16, float16 or float64; got int32"),
    "x is narrow": ({"x": X3[..., 1:]}, ValueError, "x has shape [2, 15, 11] but router has H=12; x must be [..., H]"),
    "top_k is 0": ({"top_k": 0}, ValueError, "top_k must be in [1, E], E=6; got 0"),
    "top_k is 7": ({"top_k": 7}, ValueError, "top_k must be in [1, E], E=6; got 7"),
    "top_k is a float": ({"top_k": 2.0}, TypeError, "top_k must be an int; got float"),
    "norm_topk is 1": ({"norm_topk": 1}, TypeError, "norm_topk must be True or False; got int"),
    "a correction of a list": ({"correction_bias": [0.0] * 6}, TypeError, "correction_bias must be a jax.Array or numpy.ndarray; got list"),
    "a correction of 16 bits": ({"correction_bias": np.zeros(6, "bfloat16")}, TypeError, "correction_bias must be float32 or float64; got bfloat16"),
    "a correction of 5 experts": ({"correction_bias": np.zeros(5)}, ValueError, "correction_bias has shape [5]; it must be [E], [6]"),
    "uneven groups": ({"n_group": 4, "topk_group": 2}, ValueError, "n_group=4 must divide the 6 experts into groups of two or more"),
    "router_bias is 2-d": (changed(router_bias=np.zeros((1, 6))), ValueError, "router_bias has shape [1, 6]; with these params it must be [6]"),
    "down_bias is wide": (changed(down_bias=np.zeros((6, 13))), ValueError, "down_bias has shape [6, 13]; with these params it must be [6, 12]"),
    "router is 1-d": (changed(router=PARAMS.router[0]), ValueError, "router must be [E, H] and down [E, H, F]; got shapes [12] and [6, 12, 8]"),
    "gate_up is turned": (changed(gate_up=PARAMS.gate_up.swapaxes(1, 2)), ValueError, "gate_up has shape [6, 12, 16]; with these params it must be [6, 16, 12]"),
    "shared_gate_up is narrow": (changed(shared_gate_up=PARAMS.shared_gate_up[:, 1:]), ValueError, "shared_gate_up has shape [10, 11]; with these params it must be [10, 12]"),
    "dtypes differ": ({"x": X3.astype("bfloat16")}, TypeError, "x is bfloat16 but gate_up is float32; cast one of them"),
}  # fmt: skip


@pytest.mark.parametrize("name", MOE_CALLS)
def test_moe_errors(name):
    changes, kind, message = MOE_CALLS[name]
    arguments = {"params": PARAMS, "x": X3, "top_k": 2} | changes
    assert_refused("moe", lambda: moe(**arguments), kind, message)


ZEROS, COUNTS = np.zeros(6, np.float32), np.arange(6, dtype=np.int32)
UPDATES = {
    "counts of other experts": ((ZEROS, COUNTS[1:]), ValueError, "counts has shape [5] but correction_bias has [6]; both must be [E]"),
    "counts of bools": ((ZEROS, COUNTS > 0), TypeError, "counts must be real numbers; got bool"),
    "counts of a list": ((ZEROS, [1] * 6), TypeError, "counts must be a jax.Array or numpy.ndarray; got list"),
    "a rate of 0": ((ZEROS, COUNTS, 0), ValueError, "rate must be above 0; got 0"),
    "a rate in words": ((ZEROS, COUNTS, "0.1"), TypeError, "rate must be a number; got str"),
    "a bias of integers": ((COUNTS, COUNTS), TypeError, "correction_bias must be float32 or float64; got int32"),
}  # fmt: skip


@pytest.mark.parametrize("name", UPDATES)
def test_update_errors(name):
    arguments, kind, message = UPDATES[name]
    assert_refused("update_correction_bias", lambda: update_correction_bias(*arguments), kind, message)


@pytest.mark.parametrize(
    ("sizes", "kind", "message"),
    [
        ((0, 8, 6), ValueError, "hidden must be 1 or more; got 0"),
        ((12, 8, 2.0), TypeError, "num_experts must be an int; got float"),
        ((12, 8, 6, -1), ValueError, "shared_intermediate must be 0 or more; got -1"),
    ],
)
def test_init_errors(sizes, kind, message):
    assert_refused("init_moe", lambda: init_moe(jax.random.key(0), *sizes), kind, message)


def test_init_bias_is_a_word():
    refused = lambda: init_moe(jax.random.key(0), 12, 8, 6, bias=1)  # noqa: E731
    assert_refused("init_moe", refused, TypeError, "bias must be True or False; got int")
