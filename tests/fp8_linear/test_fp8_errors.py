"""Every wrong call raises an error that says what is wrong and what to do."""

import pytest
import torch

from onchip.torch import Fp8Linear, fp8_linear, quantize_activation, quantize_weight, weights_unchanged

X, W, B = torch.randn(4, 32), torch.randn(16, 32), torch.randn(16)
SHARED, QUANTIZED = quantize_activation(X), quantize_weight(W)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((X, torch.randn(16, 31)), {}, ValueError, r"fp8_linear: x has K=32 but weight has K=31; weight must be \[N, K\]"),
        ((X, torch.randn(16)), {}, ValueError, r"weight must be \[N, K\] with N, K >= 1; got shape \[16\]"),
        ((X, torch.randn(0, 32)), {}, ValueError, r"weight must be \[N, K\] with N, K >= 1; got shape \[0, 32\]"),
        ((torch.tensor(1.0), W), {}, ValueError, r"x must be \[..., K\]; got a 0-d tensor"),
        ((X, W, torch.randn(15)), {}, ValueError, r"bias has shape \[15\] but weight has N=16; bias must be \[N\]"),
        ((X.tolist(), W), {}, TypeError, r"x must be a torch.Tensor; got list"),
        ((X, None), {}, TypeError, r"weight must be a torch.Tensor; got NoneType"),
        ((X.double(), W), {}, TypeError, r"x must be float32, bfloat16 or float16; got float64"),
        ((X, W.to(torch.float8_e4m3fn)), {}, TypeError, r"weight must be float32, bfloat16 or float16; got float8_e4m3fn"),
        ((X, W.to("meta")), {}, ValueError, r"weight is on meta but x is on cpu; move it there"),
        ((X, W), {"backend": "scaled_mm"}, ValueError, r"backend 'scaled_mm' can't run this call: it runs on CUDA tensors, not on 'cpu'"),
        ((X, W), {"backend": "triton"}, ValueError, r"backend 'triton' can't run this call: it runs on CUDA tensors, not on 'cpu'"),
        ((X, W), {"weight_grad_out": [1]}, TypeError, r"weight_grad_out must be a torch.Tensor; got list"),
        ((X, W), {"weight_grad_out": W.bfloat16()}, TypeError, r"weight_grad_out must be float32; got bfloat16"),
        ((X, W), {"weight_grad_out": W.T}, ValueError, r"weight_grad_out must be contiguous, of weight's shape, \[16, 32\]; got shape \[32, 16\]"),
        ((X, W), {"weight_grad_out": W.clone().requires_grad_()}, ValueError, r"weight_grad_out must not require a gradient"),
        ((quantize_activation(X), W), {"scale": "power_of_two"}, ValueError, r"x was quantised with scale='float32' but scale is 'power_of_two'"),
        ((X, QUANTIZED), {"scale": "power_of_two"}, ValueError, r"weight was quantised with scale='float32' but scale is 'power_of_two'"),
        ((X.clone().requires_grad_(), QUANTIZED._replace(transposed=None)), {}, ValueError, r"weight was quantised without gradients but x needs one; call quantize_weight where"),
        ((X, QUANTIZED._replace(weight=W.to("meta"))), {}, ValueError, r"weight is on meta but x is on cpu"),
    ],
)  # fmt: skip
def test_fp8_linear(arguments, options, error, message):
    with pytest.raises(error, match=message):
        fp8_linear(*arguments, **options)


OTHERS = {
    "an activation of integers": (lambda: quantize_activation(X.int()), TypeError, "quantize_activation: x must be float32, bfloat16 or float16; got int32"),
    "an activation without features": (lambda: quantize_activation(X[:, :0]), ValueError, r"quantize_activation: x must be \[..., K\] with K >= 1; got shape \[4, 0\]"),
    "an activation's scale": (lambda: quantize_activation(X, scale=2), ValueError, "quantize_activation: scale must be one of 'float32', 'power_of_two'; got 2"),
    "an activation's backend": (lambda: quantize_activation(X, backend="scaled_mm"), ValueError, "quantize_activation: backend 'scaled_mm' can't run this call"),
    "a weight of integers": (lambda: quantize_weight(W.int()), TypeError, "quantize_weight: weight must be float32, bfloat16 or float16; got int32"),
    "a weight of one row": (lambda: quantize_weight(W[0]), ValueError, r"quantize_weight: weight must be \[N, K\] with N, K >= 1; got shape \[32\]"),
    "a weight without rows": (lambda: quantize_weight(W[:0]), ValueError, r"quantize_weight: weight must be \[N, K\] with N, K >= 1; got shape \[0, 32\]"),
    "a weight's scale": (lambda: quantize_weight(W, scale=2), ValueError, "quantize_weight: scale must be one of 'float32', 'power_of_two'; got 2"),
    "a weight's backend": (lambda: quantize_weight(W, backend="scaled_mm"), ValueError, "quantize_weight: backend 'scaled_mm' can't run this call"),
    "a layer for a weight": (lambda: quantize_weight(Fp8Linear(32, 16)), TypeError, r"quantize_weight: weight must be a torch\.Tensor; got Fp8Linear"),
    "a layer's grad_dtype": (lambda: Fp8Linear(32, 16, grad_dtype="fp8"), ValueError, "fp8_linear: grad_dtype must be one of"),
    "a layer's scale": (lambda: Fp8Linear(32, 16, scale="x"), ValueError, "fp8_linear: scale must be one of"),
    "a layer's backend": (lambda: Fp8Linear(32, 16, backend="x"), ValueError, "fp8_linear: backend must be one of"),
    "a layer's main_grad": (lambda: Fp8Linear(32, 16, main_grad=W), TypeError, "fp8_linear: main_grad must be True or False; got Tensor"),
    "a model without layers": (lambda: weights_unchanged(torch.nn.Linear(32, 16)).__enter__(), ValueError, "weights_unchanged: model has no Fp8Linear; convert .* with conv"),
    "a context's check_inputs": (lambda: weights_unchanged(Fp8Linear(32, 16), check_inputs=1).__enter__(), TypeError, "weights_unchanged: check_inputs must be True or False"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_others(name):
    call, error, message = OTHERS[name]
    with pytest.raises(error, match=f"^{message}"):
        call()


@pytest.mark.parametrize(
    ("made", "changed"),
    [
        (SHARED, {"rows": SHARED.rows.bfloat16()}),
        (SHARED, {"row_scales": SHARED.row_scales.expand(2, 4)}),
        (SHARED, {"columns": SHARED.columns[:16]}),
        (SHARED, {"column_scales": SHARED.column_scales.to("meta")}),
        (SHARED, {"x": X[:2]}),
        (QUANTIZED, {"row_scales": QUANTIZED.row_scales.bfloat16()}),
        (QUANTIZED, {"row_scales": QUANTIZED.row_scales[:, :1]}),
        (QUANTIZED, {"transposed": QUANTIZED.rows}),
        (QUANTIZED, {"transposed_scales": QUANTIZED.transposed_scales.to("meta")}),
        (QUANTIZED, {"weight": torch.randn(144, 32)}),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else type(x).__name__,
)
def test_what_was_quantised_is_as_it_was_made(made, changed):
    """Mixed precision casts what enters a module, kernels take what they expect."""
    x, w = (made._replace(**changed), W) if made is SHARED else (X, made._replace(**changed))
    name, maker = ("x", "activation") if made is SHARED else ("weight", "weight")
    message = f"{name} is not as quantize_{maker} made it: (rows|columns|transposed) must be float"
    with pytest.raises(ValueError, match=message):
        fp8_linear(x, w)
