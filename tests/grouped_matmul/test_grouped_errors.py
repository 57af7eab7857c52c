"""Every wrong call of grouped_matmul raises an error that says what is wrong and what to do, in both frameworks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import onchip.jax
from onchip.core.backends import choose_backend
from onchip.groups.triton import fp8
from onchip.ops.grouped_matmul import jax_op
from onchip.ops.grouped_matmul.torch_op import refusals
from onchip.torch import grouped_matmul
from shared import assert_refused

X, W, S = np.ones((6, 8), np.float32), np.ones((3, 4, 8), np.float32), np.array([2, 0, 3], np.int32)
I6, ONES = np.arange(6, dtype=np.int32), np.ones(6, np.float32)
SCATTER, SWIGLU = {"scatter_rows": I6, "num_rows": 6}, {"activation": "swiglu"}
FLOATS = "must be float32, bfloat16, float16 or float64; got "
# What differs from a call that is right, and what is said of it.
BOTH = [
    # shapes
    ({"weight": W[..., 1:]}, ValueError, "x has K=8 but weight has K=7; weight must be [G, N, K]"),
    ({"weight": W.swapaxes(1, 2)}, ValueError, "x has K=8 but weight has K=4; weight must be [G, N, K]; or pass weight_layout='gkn'"),
    ({"weight_layout": "gkn"}, ValueError, "x has K=8 but weight has K=4; weight must be [G, K, N] with weight_layout='gkn'; or pass weight_layout='gnk'"),
    ({"weight": W[0]}, ValueError, "weight must be [G, N, K], with G, N, K >= 1; got shape [4, 8]"),
    ({"weight": W[:0]}, ValueError, "weight must be [G, N, K], with G, N, K >= 1; got shape [0, 4, 8]"),
    ({"x": X[None]}, ValueError, "x must be [T, K]; got shape [1, 6, 8]; pass x.reshape(-1, x.shape[-1])"),
    ({"x": X[None], "rows": I6}, ValueError, "x must be [M, K]; got shape"),
    ({"group_sizes": S[:2]}, ValueError, "group_sizes has shape [2] but weight has G=3; group_sizes must be [G]"),
    ({"group_sizes": None, "group_offsets": S[:2]}, ValueError, "group_offsets has shape [2] but weight has G=3"),
    ({"bias": ONES[:4]}, ValueError, "bias has shape [4]; it must be [G, N], [3, 4]"),
    ({"row_scale": ONES[1:]}, ValueError, "row_scale has shape [5] but x has T=6; row_scale must be [T]"),
    ({"row_scale": ONES[1:], "rows": I6}, ValueError, "row_scale has shape [5] but rows has T=6"),
    ({"rows": I6[None]}, ValueError, "rows must be [T]; got shape [1, 6]"),
    ({"scatter_rows": I6[1:], "num_rows": 6}, ValueError, "scatter_rows has shape [5] but x has T=6"),
    ({"weight": W[:, :3], **SWIGLU}, ValueError, "weight has N=3; activation='swiglu' needs an even N, gate and up"),
    # options
    ({"activation": "silu"}, ValueError, "activation must be None or 'swiglu'; got 'silu'"),
    ({"gate_up": "interleaved"}, ValueError, "gate_up='interleaved' needs activation='swiglu'; pass that too"),
    ({"scatter_rows": I6}, TypeError, "scatter_rows needs num_rows, the number of rows of the result"),
    ({"num_rows": 6}, TypeError, "num_rows is the number of rows that scatter_rows writes to; pass both or neither"),
    ({**SCATTER, "num_rows": -1}, ValueError, "num_rows must be 0 or more; got -1"),
    ({**SCATTER, "num_rows": 6.0}, TypeError, "num_rows must be an int; got float"),
    # kinds
    ({"group_sizes": None}, TypeError, "group_sizes is missing or None; pass it, or group_offsets"),
    ({"group_offsets": S}, TypeError, "group_offsets are the cumulative sums of group_sizes; pass one of them"),
    ({"group_sizes": [2, 0, 3]}, TypeError, "group_sizes must be a "),
    ({"weight": None}, TypeError, "weight must be a "),
    ({"bias": 1.0}, TypeError, "bias must be a "),
    ({"x": X.astype(np.int32)}, TypeError, f"x {FLOATS}int32"),
    ({"weight": W.astype(np.float16)}, TypeError, "x is float32 but weight is float16; cast one of them"),
    ({"bias": np.ones((3, 4), np.int32)}, TypeError, f"bias {FLOATS}int32"),
    ({"row_scale": I6}, TypeError, f"row_scale {FLOATS}int32"),
    ({"group_sizes": S.astype(np.float32)}, TypeError, "group_sizes must hold integers; got float32"),
    ({"group_sizes": S.astype(np.int16)}, TypeError, "group_sizes must be int32 or int64; got int16"),
    ({"rows": I6.astype(np.uint8)}, TypeError, "rows must be int32 or int64; got uint8"),
    ({"rows": I6 > 0}, TypeError, "rows must hold integers; got bool"),
    ({**SCATTER, "scatter_rows": ONES}, TypeError, "scatter_rows must hold integers; got float32"),
]  # fmt: skip
VALUES = [
    ({"group_sizes": np.array([2, -1, 3])}, ValueError, "group_sizes[1] is -1; sizes must be 0 or more"),
    ({"group_sizes": np.array([2, 0, 5])}, ValueError, "the sum of group_sizes up to 2 is 7, more than the T=6 rows of the product"),
    ({"group_sizes": np.array([2, 3, 6])}, ValueError, "rows of the product; if they are where groups end, pass them as group_offsets"),
    ({"group_sizes": None, "group_offsets": np.array([2, 1, 3])}, ValueError, "group_offsets[1] is 1; offsets must be 0 or more and never decrease"),
    ({"group_sizes": None, "group_offsets": np.array([-1, 1, 3])}, ValueError, "group_offsets[0] is -1; offsets must be 0 or more"),
    ({"group_sizes": None, "group_offsets": np.array([2, 7, 7])}, ValueError, "the value of group_offsets at 1 is 7, more than the T=6 rows"),
    ({"rows": I6 + 2}, ValueError, "rows[4] is 6 but x has 6 rows"),
    ({"rows": I6 - 1}, ValueError, "rows[0] is -1 but x has 6 rows"),
    ({**SCATTER, "num_rows": 4}, ValueError, "scatter_rows[4] is 4 but num_rows is 4"),
]  # fmt: skip
WIDE = torch.ones(6, 8, dtype=torch.float64)
ONE = {
    "torch": [
        ({"x": WIDE, "weight": torch.ones(3, 4, 8).double(), "precision": "fp8"}, TypeError, "precision='fp8' takes no float64; pass precision='full', or cast x and weight"),
        ({"weight": torch.ones(3, 4, 8).bfloat16()}, TypeError, "x is float32 but weight is bfloat16; cast one of them, or run under torch.autocast"),
        ({"x": WIDE}, TypeError, "x is float64 but weight is float32; cast one of them"),
        ({"group_sizes": torch.ones(3, device="meta").int()}, ValueError, "group_sizes is on meta but x is on cpu; move it there"),
        ({"weight_grad_out": torch.ones(3, 4, 8).bfloat16()}, TypeError, "weight_grad_out must be float32; got bfloat16"),
        ({"weight_grad_out": torch.ones(3, 8, 4).mT}, ValueError, "weight_grad_out must be contiguous, of weight's shape, [3, 4, 8]"),
    ],
    "jax": [
        ({"weight": jnp.ones((3, 4, 8), "float8_e4m3fn")}, TypeError, "weight must be float32, bfloat16, float16 or float64"),
    ],
}  # fmt: skip
AS, OPS = {"torch": torch.from_numpy, "jax": jnp.asarray}, {"torch": grouped_matmul, "jax": onchip.jax.grouped_matmul}


@pytest.mark.parametrize(
    ("framework", "changes", "kind", "message"),
    [(framework, *wrong) for framework, own in ONE.items() for wrong in BOTH + VALUES + own],
)
def test_wrong_calls(framework, changes, kind, message):
    arguments = {"x": X, "weight": W, "group_sizes": S} | changes
    arguments = {k: AS[framework](x) if isinstance(x, np.ndarray) else x for k, x in arguments.items()}
    assert_refused("grouped_matmul", lambda: OPS[framework](**arguments), kind, message)
    if framework == "jax" and message not in [said for *_, said in VALUES]:  # which tracing doesn't see
        arrays = {name: a for name, a in arguments.items() if isinstance(a, jax.Array)}
        rest = {name: a for name, a in arguments.items() if name not in arrays}
        with pytest.raises(kind):
            jax.eval_shape(lambda arrays: OPS["jax"](**arrays, **rest), arrays)


def test_on_a_gpu_the_plain_path_must_be_named():
    """It reads the sizes on the host: "auto" never synchronises."""
    of = torch.device("cuda"), torch.float64
    with pytest.raises(ValueError, match=r"triton: it takes no float64; .*plain: it waits for the sizes on the host"):
        choose_backend("grouped_matmul", "auto", refusals(*of))
    assert choose_backend("grouped_matmul", "torch", refusals(*of, named=True)) == "plain"
    assert fp8.refusal(256, 128) is None
    assert fp8.refusal(256, 64) == "with precision='fp8' N and K must be multiples of 128; got N=256, K=64"


def test_transforms_and_compiled_main_gradients_are_refused():
    x, weight, sizes = map(torch.from_numpy, (X, W, S))
    with pytest.raises(RuntimeError, match=r"grouped_matmul: torch.func transforms .* are not supported"):
        torch.func.grad(lambda x: grouped_matmul(x, weight, sizes).sum())(x)
    compiled = torch.compile(grouped_matmul, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"weight_grad_out is not supported inside torch\.compile"):
        compiled(x, weight, sizes, weight_grad_out=torch.zeros_like(weight))


def test_check_inputs_needs_values():
    run = jax.jit(lambda sizes: OPS["jax"](X, W, sizes, check_inputs=True))
    message = "check_inputs=True reads the values of group_sizes, which has none while it is traced"
    assert_refused("grouped_matmul", lambda: run(jnp.asarray(S)), ValueError, message)
    assert OPS["jax"](X, W, S, check_inputs=True).shape == (6, 4)


def test_what_the_kernels_refuse():
    def why(*call):
        return jax_op.refusals(*call)["mosaic_gpu"]

    assert why("tpu", "bfloat16", 128, 128) == "it runs on NVIDIA GPUs, not on 'tpu'"
    assert why("gpu", "float32", 128, 128) == "it is for bfloat16 and float16, not float32"
    for n, k in ((96, 128), (128, 64), (130, 128)):
        assert why("gpu", "bfloat16", n, k) == f"K and N must be multiples of 64 and at least 128; got K={k}, N={n}"
    assert why("gpu", "bfloat16", 128, 192) == "it is for compute capability 9.0 (Hopper); this is none"
