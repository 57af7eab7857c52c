"""Every wrong call says what is wrong and what to do."""

import pytest
import torch
from grouped_common import SWIGLU

from onchip.core.backends import choose_backend
from onchip.groups.triton import fp8
from onchip.ops.grouped_matmul.torch_op import refusals
from onchip.torch import grouped_matmul

X, W, S = torch.randn(6, 8), torch.randn(3, 4, 8), torch.tensor([2, 0, 3])
I6 = torch.tensor([0, 1, 2, 3, 4, 5])
SCATTER = {"scatter_rows": I6, "num_rows": 6}


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        # shapes
        ((X, torch.randn(3, 4, 7), S), {}, ValueError, r"x has K=8 but weight has K=7; weight must be \[G, N, K\]"),
        ((X, W.mT, S), {}, ValueError, r"x has K=8 but weight has K=4; weight must be \[G, N, K\]; or pass weight_layout='gkn'"),
        ((X, W, S), {"weight_layout": "gkn"}, ValueError, r"weight must be \[G, K, N\] with weight_layout='gkn'; or pass weight_layout='gnk'"),
        ((X, W[0], S), {}, ValueError, r"weight must be \[G, N, K\], with G, N, K >= 1; got shape \[4, 8\]"),
        ((X, W[:0], S[:0]), {}, ValueError, r"weight must be \[G, N, K\], with G, N, K >= 1; got shape \[0, 4, 8\]"),
        ((X[None], W, S), {}, ValueError, r"x must be \[T, K\]; got shape \[1, 6, 8\]; pass x.reshape\(-1, x.shape\[-1\]\)"),
        ((X[None], W, S), {"rows": I6}, ValueError, r"x must be \[M, K\]; got shape"),
        ((X, W, S[:2]), {}, ValueError, r"group_sizes has shape \[2\] but weight has G=3; group_sizes must be \[G\]"),
        ((X, W), {"group_offsets": S[:2]}, ValueError, r"group_offsets has shape \[2\] but weight has G=3"),
        ((X, W, S), {"bias": torch.randn(4)}, ValueError, r"bias has shape \[4\]; it must be \[G, N\], \[3, 4\]"),
        ((X, W, S), {"row_scale": torch.ones(5)}, ValueError, r"row_scale has shape \[5\] but x has T=6; row_scale must be \[T\]"),
        ((X, W, S), {"row_scale": torch.ones(5), "rows": I6}, ValueError, r"row_scale has shape \[5\] but rows has T=6"),
        ((X, W, S), {"rows": I6[None]}, ValueError, r"rows must be \[T\]; got shape \[1, 6\]"),
        ((X, W, S), {"scatter_rows": I6[1:], "num_rows": 6}, ValueError, r"scatter_rows has shape \[5\] but x has T=6"),
        ((X, W[:, :3], S), SWIGLU, ValueError, r"weight has N=3; activation='swiglu' needs an even N, gate and up"),
        # options
        ((X, W, S), {"weight_layout": "kn"}, ValueError, "weight_layout must be one of 'gnk', 'gkn'; got 'kn'"),
        ((X, W, S), {"activation": "silu"}, ValueError, "activation must be None or 'swiglu'; got 'silu'"),
        ((X, W, S), {**SWIGLU, "gate_up": "both"}, ValueError, "gate_up must be one of 'concatenated', 'interleaved'; got 'both'"),
        ((X, W, S), {"gate_up": "interleaved"}, ValueError, "gate_up='interleaved' is of activation='swiglu', which is not given"),
        ((X, W, S), {"scatter_rows": I6}, TypeError, "scatter_rows needs num_rows, how many rows the result has"),
        ((X, W, S), {"num_rows": 6}, TypeError, "num_rows is the number of rows that scatter_rows writes to; pass both or neither"),
        ((X, W, S), {**SCATTER, "num_rows": -1}, ValueError, "num_rows must be 0 or more; got -1"),
        ((X, W, S), {**SCATTER, "num_rows": 6.0}, TypeError, "num_rows must be an int; got float"),
        ((X, W, S), {"check_inputs": 1}, TypeError, "check_inputs must be True or False; got int"),
        ((X, W, S), {"precision": "int8"}, ValueError, "precision must be one of 'full', 'fp8'; got 'int8'"),
        ((X.double(), W.double(), S), {"precision": "fp8"}, TypeError, "precision='fp8' takes no float64; pass precision='full', or cast x and weight"),
        ((X, W, S), {"backend": "cublas"}, ValueError, "backend must be one of 'auto', 'triton', 'torch'; got 'cublas'"),
        ((X, W, S), {"backend": "triton"}, ValueError, "backend 'triton' can't run this call: it runs on CUDA tensors, not on 'cpu'"),
        # kinds
        ((X, W), {}, TypeError, "group_sizes is missing or None; pass it, or group_offsets"),
        ((X, W, S), {"group_offsets": S}, TypeError, "group_offsets are the cumulative sums of group_sizes; pass one of them"),
        ((X, W, [2, 0, 3]), {}, TypeError, "group_sizes must be a torch.Tensor; got list"),
        ((X, None, S), {}, TypeError, "weight must be a torch.Tensor; got NoneType"),
        ((X.int(), W, S), {}, TypeError, "x must be float32, bfloat16, float16 or float64; got int32"),
        ((X, W.bfloat16(), S), {}, TypeError, "x is float32 but weight is bfloat16; cast one of them, or run under torch.autocast"),
        ((X, W.double(), S), {}, TypeError, "x is float32 but weight is float64; cast one of them"),
        ((X, W, S.float()), {}, TypeError, "group_sizes must hold integers; got float32"),
        ((X, W, S.short()), {}, TypeError, "group_sizes must be int32 or int64; got int16"),
        ((X, W, S), {"rows": I6.byte()}, TypeError, "rows must be int32 or int64; got uint8"),
        ((X, W, S), {**SCATTER, "scatter_rows": I6.float()}, TypeError, "scatter_rows must hold integers; got float32"),
        ((X, W, S), {"row_scale": I6}, TypeError, "row_scale must be float32, bfloat16, float16 or float64; got int64"),
        ((X, W, S.to("meta")), {}, ValueError, "group_sizes is on meta but x is on cpu; move it there"),
        ((X, W, S), {"weight_grad_out": W.bfloat16()}, TypeError, "weight_grad_out must be float32; got bfloat16"),
        ((X, W, S), {"weight_grad_out": W.mT}, ValueError, r"weight_grad_out must be contiguous, of weight's shape, \[3, 4, 8\]"),
        # values
        ((X, W, torch.tensor([2, -1, 3])), {}, ValueError, r"group_sizes\[1\] is -1; sizes must be 0 or more"),
        ((X, W, torch.tensor([2, 0, 5])), {}, ValueError, "the sum of group_sizes up to 2 is 7, more than the T=6 rows of the product"),
        ((X, W), {"group_offsets": torch.tensor([2, 1, 3])}, ValueError, r"group_offsets\[1\] is 1; offsets must be 0 or more, and none below the last"),
        ((X, W), {"group_offsets": torch.tensor([-1, 1, 3])}, ValueError, r"group_offsets\[0\] is -1; offsets must be 0 or more"),
        ((X, W), {"group_offsets": torch.tensor([2, 7, 7])}, ValueError, "the value of group_offsets at 1 is 7, more than the T=6 rows"),
        ((X, W, S), {"rows": I6 + 2}, ValueError, r"rows\[4\] is 6 but x has 6 rows"),
        ((X, W, S), {"rows": I6 - 1}, ValueError, r"rows\[0\] is -1 but x has 6 rows"),
        ((X, W, S), {**SCATTER, "num_rows": 4}, ValueError, r"scatter_rows\[4\] is 4 but num_rows is 4"),
    ],
)  # fmt: skip
def test_wrong_calls(arguments, options, error, message):
    with pytest.raises(error, match=f"grouped_matmul: .*{message}"):
        grouped_matmul(*arguments, **options)


def test_on_a_gpu_the_plain_path_must_be_named():
    """It reads the sizes on the host: "auto" never synchronises."""
    of = torch.device("cuda"), torch.float64
    with pytest.raises(ValueError, match=r"triton: it takes no float64; .*torch: it waits for the sizes on the host"):
        choose_backend("grouped_matmul", "auto", refusals(*of))
    assert choose_backend("grouped_matmul", "torch", refusals(*of, named=True)) == "torch"
    assert fp8.refusal(256, 128) is None
    assert fp8.refusal(256, 64) == "with precision='fp8' N and K must be multiples of 128; got N=256, K=64"


def test_transforms_and_compiled_main_gradients_are_refused():
    with pytest.raises(RuntimeError, match=r"grouped_matmul: torch.func transforms .* are not supported"):
        torch.func.grad(lambda x: grouped_matmul(x, W, S).sum())(X)
    compiled = torch.compile(grouped_matmul, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"weight_grad_out is not supported inside torch\.compile"):
        compiled(X, W, S, weight_grad_out=torch.zeros_like(W))
