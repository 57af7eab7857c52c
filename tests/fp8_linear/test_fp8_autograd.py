"""Gradients that are wanted, added and shared; every_loss.py has what holds for every op."""

import pytest
import torch
from fp8_common import assert_equal, assert_same, assert_the_oracles, oracle, small_problem

from every_loss import check_operators, registered_fp8_linear
from onchip.ops.fp8_linear import torch_op
from onchip.torch import fp8_linear, quantize_activation, quantize_weight


def gradients(out, *inputs, grad=None):
    return torch.autograd.grad(out, inputs, torch.ones_like(out) if grad is None else grad)


@pytest.mark.parametrize("needs", [(x, w, b) for x in (0, 1) for w in (0, 1) for b in (0, 1)], ids=str)
def test_what_needs_no_gradient_gets_none(needs):
    leaves = small_problem(bias=True)
    for t, need in zip(leaves, needs, strict=True):
        t.requires_grad_(bool(need))
    assert_the_oracles(*leaves)


def test_inputs_may_change_before_backward():
    """Neither of them is kept."""
    x, w, _ = small_problem()
    expected = gradients(fp8_linear(x, w), x, w)
    out = fp8_linear(x, w)
    with torch.no_grad():
        x.zero_()
        w.zero_()
    assert_equal(gradients(out, x, w), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_decides_the_outputs_dtype_alone(dtype):
    """A float32 weight's gradient is never rounded to bfloat16 on the way."""
    x, w, b = small_problem(bias=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert_the_oracles(x.detach().to(dtype).requires_grad_(), w, b, dtype=torch.bfloat16)


@pytest.mark.parametrize("backward", ["separate", "together"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weight_grad_out_is_the_sum_over_micro_batches(dtype, backward):
    """Of bfloat16 too: nothing is rounded to it on the way."""
    _, w, b = small_problem(dtype=dtype, bias=True)
    total, expected = torch.full((136, 144), 0.5), torch.full((136, 144), 0.5)
    losses = []
    for seed in (0, 1, 2):
        x, _, _ = small_problem(dtype=dtype, seed=seed)
        out = fp8_linear(x, w, b, weight_grad_out=total)
        g = torch.randn_like(out)
        losses.append((out * g).sum())
        if backward == "separate":
            losses.pop().backward()
        expected += oracle(x, w, b, g).grad_weight
    if losses:
        sum(losses).backward()
    assert w.grad is None
    assert b.grad is not None
    assert_same(total, expected)


def test_weight_grad_out_of_a_frozen_weight_is_left_alone():
    x, w, _ = small_problem()
    total = torch.zeros(136, 144)
    fp8_linear(x, w.requires_grad_(False), weight_grad_out=total).sum().backward()
    assert not total.any()


@pytest.mark.parametrize("layer", [fp8_linear, registered_fp8_linear])
def test_what_a_backward_is_not_asked_for_is_left_out(layer, monkeypatch):
    """As pipelines do that make x's gradient first: the weight's may be added to main_grad once, not twice."""
    x, w, b = small_problem(bias=True)
    products, total = [], torch.zeros_like(w)
    made = torch_op.multiply
    monkeypatch.setattr(torch_op, "multiply", lambda *a, **k: products.append(1) or made(*a, **k))
    expected = gradients(layer(x, w, b), x, w, b)
    h = x * 1
    out = layer(h, w, b, weight_grad_out=total).sum()
    products.clear()
    (grad_h,) = torch.autograd.grad(out, h, retain_graph=True)
    out.backward(inputs=[x], retain_graph=True)
    assert len(products) == 2
    assert not total.any()
    assert torch.equal(grad_h, expected[0])
    assert torch.equal(x.grad, expected[0])
    out.backward(inputs=[w, b])
    assert len(products) == 3
    assert_same(total, expected[1])
    assert torch.equal(b.grad, expected[2])
    assert_equal(gradients(layer(x, w, b), w, b), expected[1:])


@pytest.mark.parametrize("scale", ["float32", "power_of_two"])
@pytest.mark.parametrize("compiled", [False, True])
def test_what_was_quantised_gives_each_layer_what_its_own_would(compiled, scale):
    """An activation that two layers share, and a weight that two activations do."""
    leaves = x, w, b = small_problem(bias=True)
    v = torch.randn(72, 144, requires_grad=True)

    def together(x, w, b, v):
        shared, quantized = quantize_activation(x, scale=scale), quantize_weight(w, scale=scale)
        return [
            fp8_linear(shared, quantized, b, scale=scale),
            fp8_linear(shared, v, scale=scale),
            fp8_linear(x * 2, quantized, scale=scale),
        ]

    made = (torch.compile(together, fullgraph=True, backend="aot_eager") if compiled else together)(*leaves, v)
    expected = [fp8_linear(h, p, c, scale=scale) for h, p, c in ((x, w, b), (x, v, None), (x * 2, w, None))]
    assert_equal(made, expected)
    grads = [gradients(sum(o.square().sum() for o in outs), *leaves, v) for outs in (made, expected)]
    for p, q in zip(*grads, strict=True):  # sums of several layers' gradients, in another order
        assert_same(p, q)


def test_without_gradients_one_copy_is_made():
    x, w, _ = small_problem()
    with torch.no_grad():
        shared, quantized = quantize_activation(x), quantize_weight(w)
        assert shared.columns is None
        assert quantized.transposed is None
        assert_equal([fp8_linear(shared, w), fp8_linear(x, quantized)], [fp8_linear(x, w)] * 2)
    with pytest.raises(ValueError, match="x was quantised without gradients but weight needs one"):
        fp8_linear(shared, w)
    with pytest.raises(ValueError, match="weight was quantised without gradients but x needs one"):
        fp8_linear(x, quantized)
    fp8_linear(shared, w.detach()).sum().backward()  # what is frozen needs none of it
    fp8_linear(x.detach(), quantized).sum().backward()
    assert x.grad is not None
    assert w.grad is not None


# ------------------------------------------------------------------------------------------- torch.library and compile


def test_operators_without_what_is_not_needed():
    x, w, b = small_problem(bias=True)
    for needs in ((True, False, False), (False, True, True), (False, False, False)):
        leaves = [t.detach().requires_grad_(need) for t, need in zip((x, w, b), needs, strict=True)]
        check_operators(
            lambda leaves=leaves: fp8_linear(*leaves, grad_dtype="e5m2", weight_grad_out=torch.zeros_like(w))
        )
    with torch.no_grad():
        check_operators(lambda: (quantize_activation(x), quantize_weight(w)))


def test_autocast_in_compiled_code():
    x, w, b = small_problem(bias=True)

    def layer(x, w, b):
        with torch.autocast("cpu", torch.bfloat16):
            h = quantize_activation(torch.tanh(x))
            return (fp8_linear(h, w, b) * fp8_linear(h, w)).float() * 3

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        made, eager = compiled(x, w, b), layer(x, w, b)
        assert torch.equal(made, eager)
        for p, q in zip(gradients(made, x, w, b), gradients(eager, x, w, b), strict=True):
            assert_same(p, q)
        with torch.no_grad():
            w.mul_(1.5)  # a compiled step sees the change, too


def test_weight_grad_out_does_not_compile():
    x, w, _ = small_problem()
    layer = torch.compile(lambda x, w, t: fp8_linear(x, w, weight_grad_out=t), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="weight_grad_out is not supported inside"):
        layer(x, w, torch.zeros(136, 144))
