"""Every wrong call of JAX's grouped_matmul and moe says what is wrong and what to do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from onchip.jax import grouped_matmul, init_moe, moe, update_correction_bias
from onchip.ops.grouped_matmul.jax_op import refusals
from shared import assert_refused

X, W, SIZES = jnp.ones((6, 4)), jnp.ones((3, 8, 4)), jnp.array([2, 3, 1])
INDEX = jnp.zeros(6, int)

CALLS = {
    # shapes
    "x is 3-d": ({"x": X[None]}, ValueError, "x must be [T, K]; got shape [1, 6, 4]; pass x.reshape(-1, x.shape[-1])"),
    "x is 3-d, with rows": ({"x": X[None], "rows": INDEX}, ValueError, "x must be [M, K]"),
    "weight is 2-d": ({"weight": W[0]}, ValueError, "weight must be [G, N, K], with G, N, K >= 1; got shape [8, 4]"),
    "no groups": ({"weight": W[:0]}, ValueError, "weight must be [G, N, K], with G, N, K >= 1"),
    "weight is transposed": ({"weight": jnp.ones((3, 4, 8))}, ValueError, "or pass weight_layout='gkn'"),
    "the other layout": ({"weight_layout": "gkn"}, ValueError, "x has K=4 but weight has K=8; weight must be [G, K, N] with weight_layout='gkn'; or pass weight_layout='gnk'"),
    "too few sizes": ({"group_sizes": SIZES[:2]}, ValueError, "group_sizes has shape [2] but weight has G=3; group_sizes must be [G]"),
    "too few offsets": ({"group_sizes": None, "group_offsets": SIZES[:2]}, ValueError, "group_offsets has shape [2]"),
    "odd N": ({"weight": W[:, :7], "activation": "swiglu"}, ValueError, "weight has N=7; activation='swiglu' needs an even N"),
    "bias is 1-d": ({"bias": jnp.ones(8)}, ValueError, "bias has shape [8]; it must be [G, N], [3, 8]"),
    "row_scale too long": ({"row_scale": jnp.ones(7)}, ValueError, "row_scale has shape [7] but x has T=6"),
    "rows is 2-d": ({"rows": INDEX[None]}, ValueError, "rows must be [T]; got shape [1, 6]"),
    "row_scale unlike rows": ({"rows": INDEX[:5], "row_scale": jnp.ones(6)}, ValueError, "row_scale has shape [6] but rows has T=5"),
    "scatter_rows unlike rows": ({"rows": INDEX[:5], "scatter_rows": INDEX, "num_rows": 2}, ValueError, "scatter_rows has shape [6] but rows has T=5"),
    # dtypes and types
    "x is a list": ({"x": [[1.0]]}, TypeError, "x must be a jax.Array or numpy.ndarray; got list; pass jax.numpy.asarray(x)"),
    "weight is None": ({"weight": None}, TypeError, "weight must be a jax.Array or numpy.ndarray; got NoneType"),
    "bias is a number": ({"bias": 1.0}, TypeError, "bias must be a jax.Array"),
    "sizes are a list": ({"group_sizes": [2, 3, 1]}, TypeError, "group_sizes must be a jax.Array or numpy.ndarray; got list"),
    "no sizes": ({"group_sizes": None}, TypeError, "group_sizes is missing or None; pass it, or group_offsets"),
    "sizes and offsets": ({"group_offsets": SIZES}, TypeError, "group_offsets are the cumulative sums of group_sizes; pass one of them"),
    "sizes are floats": ({"group_sizes": SIZES * 1.0}, TypeError, "group_sizes must hold integers; got float32"),
    "sizes are int8": ({"group_sizes": SIZES.astype("int8")}, TypeError, "group_sizes must be int32 or int64; got int8"),
    "rows are uint32": ({"rows": INDEX.astype("uint32")}, TypeError, "rows must be int32 or int64; got uint32"),
    "rows are bool": ({"rows": INDEX > 0}, TypeError, "rows must hold integers; got bool"),
    "x is int": ({"x": X.astype(int)}, TypeError, "x must be float32, bfloat16, float16 or float64; got int32"),
    "weight is float8": ({"weight": W.astype("float8_e4m3fn")}, TypeError, "weight must be float32, bfloat16, float16 or float64"),
    "dtypes differ": ({"weight": W.astype("bfloat16")}, TypeError, "x is float32 but weight is bfloat16; cast one of them"),
    "bias is int": ({"bias": jnp.ones((3, 8), int)}, TypeError, "bias must be float32, bfloat16, float16 or float64; got int32"),
    "row_scale is bool": ({"row_scale": INDEX > 0}, TypeError, "row_scale must be float32, bfloat16, float16 or float64; got bool"),
    "scatter_rows without num_rows": ({"scatter_rows": INDEX}, TypeError, "scatter_rows needs num_rows"),
    "num_rows without scatter_rows": ({"num_rows": 3}, TypeError, "pass both or neither"),
    "num_rows is a float": ({"scatter_rows": INDEX, "num_rows": 3.0}, TypeError, "num_rows must be an int; got float"),
    "num_rows is negative": ({"scatter_rows": INDEX, "num_rows": -1}, ValueError, "num_rows must be 0 or more; got -1"),
    "check_inputs is 1": ({"check_inputs": 1}, TypeError, "check_inputs must be True or False; got int"),
    # options
    "layout": ({"weight_layout": "nk"}, ValueError, "weight_layout must be one of 'gnk', 'gkn'; got 'nk'"),
    "activation": ({"activation": "gelu"}, ValueError, "activation must be None or 'swiglu'; got 'gelu'"),
    "gate_up": ({"activation": "swiglu", "gate_up": "split"}, ValueError, "gate_up must be one of 'concatenated', 'interleaved'; got 'split'"),
    "gate_up alone": ({"gate_up": "interleaved"}, ValueError, "gate_up='interleaved' is of activation='swiglu', which is not given"),
    "backend": ({"backend": "triton"}, ValueError, "backend must be one of 'auto', 'mosaic_gpu', 'xla'; got 'triton'"),
    "mosaic_gpu on a CPU": ({"backend": "mosaic_gpu"}, ValueError, "backend 'mosaic_gpu' can't run this call: it runs on NVIDIA GPUs, not on 'cpu'"),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_errors(name):
    changes, kind, message = CALLS[name]
    arguments = {"x": X, "weight": W, "group_sizes": SIZES} | changes
    assert_refused("grouped_matmul", lambda: grouped_matmul(**arguments), kind, message)
    # All of it is seen while tracing.
    arrays = {name: a for name, a in arguments.items() if isinstance(a, jax.Array)}
    rest = {name: a for name, a in arguments.items() if name not in arrays}
    with pytest.raises(kind):
        jax.eval_shape(lambda arrays: grouped_matmul(**arrays, **rest), arrays)


def test_check_inputs_needs_values():
    run = jax.jit(lambda sizes: grouped_matmul(X, W, sizes, check_inputs=True))
    message = "check_inputs=True reads the values of group_sizes, which has none while it is traced"
    assert_refused("grouped_matmul", lambda: run(SIZES), ValueError, message)
    assert grouped_matmul(X, W, np.array([2, 3, 1]), check_inputs=True).shape == (6, 8)


def test_what_the_kernels_refuse():
    def why(*call):
        return refusals(*call)["mosaic_gpu"]

    assert why("tpu", "bfloat16", 128, 128) == "it runs on NVIDIA GPUs, not on 'tpu'"
    assert why("gpu", "float32", 128, 128) == "it is for bfloat16 and float16, not float32"
    for n, k in ((96, 128), (128, 64), (130, 128)):
        assert why("gpu", "bfloat16", n, k) == f"K and N must be multiples of 64 and at least 128; got K={k}, N={n}"
    assert why("gpu", "bfloat16", 128, 192) == "it is for compute capability 9.0 (Hopper); this is none"


# ------------------------------------------------------------------------------------------------------------- the layer

PARAMS, X3 = init_moe(jax.random.key(0), 12, 8, 6, 5), jnp.ones((2, 15, 12))


def changed(**arrays):
    return {"params": PARAMS._replace(**arrays)}


MOE_CALLS = {
    "params are a dict": ({"params": PARAMS._asdict()}, TypeError, "params must be MoEParams, as of init_moe; got dict"),
    "down is None": (changed(down=None), TypeError, "down must be a jax.Array or numpy.ndarray; got NoneType"),
    "half a shared expert": (changed(shared_down=None), TypeError, "one of shared_gate_up and shared_down; pass both or neither"),
    "x is a list": ({"x": [[1.0] * 12]}, TypeError, "x must be a jax.Array or numpy.ndarray; got list"),
    "x is int": ({"x": X3.astype(int)}, TypeError, "x must be float32, bfloat16, float16 or float64; got int32"),
    "x is narrow": ({"x": X3[..., 1:]}, ValueError, "x has shape [2, 15, 11] but router has H=12; x must be [..., H]"),
    "top_k is 0": ({"top_k": 0}, ValueError, "top_k must be in [1, E], E=6; got 0"),
    "top_k is 7": ({"top_k": 7}, ValueError, "top_k must be in [1, E], E=6; got 7"),
    "top_k is a float": ({"top_k": 2.0}, TypeError, "top_k must be an int; got float"),
    "norm_topk is 1": ({"norm_topk": 1}, TypeError, "norm_topk must be True or False; got int"),
    "another scoring": ({"scoring": "tanh"}, ValueError, "scoring must be one of 'softmax', 'sigmoid'; got 'tanh'"),
    "scaling_factor is 0": ({"scaling_factor": 0}, ValueError, "scaling_factor must be above 0; got 0"),
    "a correction of a list": ({"correction_bias": [0.0] * 6}, TypeError, "correction_bias must be a jax.Array or numpy.ndarray; got list"),
    "a correction of 16 bits": ({"correction_bias": jnp.zeros(6, "bfloat16")}, TypeError, "correction_bias must be float32 or float64; got bfloat16"),
    "a correction of 5 experts": ({"correction_bias": jnp.zeros(5)}, ValueError, "correction_bias has shape [5]; it must be [E], [6]"),
    "uneven groups": ({"n_group": 4, "topk_group": 2}, ValueError, "n_group=4 must divide the 6 experts into groups of two or more"),
    "too many groups": ({"n_group": 2, "topk_group": 3}, ValueError, "topk_group must be at most n_group=2; got 3"),
    "groups too small": ({"top_k": 3, "n_group": 3}, ValueError, "top_k=3 but topk_group=1 groups have 2 experts; raise topk_group"),
    "router_bias is 2-d": (changed(router_bias=jnp.zeros((1, 6))), ValueError, "router_bias has shape [1, 6]; with these params it must be [6]"),
    "down_bias is wide": (changed(down_bias=jnp.zeros((6, 13))), ValueError, "down_bias has shape [6, 13]; with these params it must be [6, 12]"),
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


ZEROS, COUNTS = jnp.zeros(6), jnp.arange(6)
UPDATES = {
    "counts of other experts": ((ZEROS, COUNTS[1:]), ValueError, "counts has shape [5] but correction_bias [6]; both must be [E]"),
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
