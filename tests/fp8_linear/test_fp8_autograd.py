"""How the op behaves in autograd, torch.library and torch.compile."""

import pytest
import torch
from fp8_common import assert_same, oracle, small_problem
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from onchip.ops.fp8_linear import torch_op
from onchip.torch import fp8_linear, quantize_activation, quantize_weight


def gradients(out, *inputs, grad=None):
    return torch.autograd.grad(out, inputs, torch.ones_like(out) if grad is None else grad)


@pytest.mark.parametrize("needs", [(x, w, b) for x in (0, 1) for w in (0, 1) for b in (0, 1)], ids=str)
def test_what_needs_no_gradient_gets_none(needs):
    leaves = small_problem(bias=True)
    for t, need in zip(leaves, needs, strict=True):
        t.requires_grad_(bool(need))
    out = fp8_linear(*leaves)
    assert out.requires_grad == any(needs)
    if any(needs):
        g = torch.randn_like(out)
        out.backward(g)
        expected = oracle(*leaves, grad_out=g)
        for t, need, right in zip(leaves, needs, expected[1:], strict=True):
            assert (t.grad is not None) == bool(need)
            if need:
                assert_same(t.grad, right)


def test_a_retained_graph_gives_the_same_gradients_again():
    x, w, b = small_problem(bias=True)
    out = fp8_linear(x, w, b)
    first = torch.autograd.grad(out.sum(), (x, w, b), retain_graph=True)
    kept = [g.clone() for g in first]
    for g in first:
        g.mul_(3)  # what a caller does with its gradients must not reach the graph
    second = torch.autograd.grad(out.sum(), (x, w, b))
    assert all(torch.equal(p, q) for p, q in zip(kept, second, strict=True))


def test_a_backward_of_the_backward_raises():
    x, w, _ = small_problem()
    grads = torch.autograd.grad(fp8_linear(x, w).sum(), (x, w), create_graph=True)
    with pytest.raises(RuntimeError, match="fp8_linear: a backward of the backward is not supported"):
        sum(g.norm() for g in grads).backward()


@pytest.mark.parametrize("by", range(3), ids=["x", "weight", "bias"])
@pytest.mark.parametrize("of", range(3), ids=["x", "weight", "bias"])
@pytest.mark.parametrize("how", ["eager", "registered", "quantised"])
def test_each_gradient_is_tied_to_each_input(how, of, by, monkeypatch):
    """`autograd.grad` of a loss with a gradient in it would leave the gradient's own part out without a word."""
    if how == "registered":
        monkeypatch.setattr(torch_op, "is_plain", lambda *_: False)
    x, w, b = leaves = small_problem(bias=True)
    given = (quantize_activation(x), quantize_weight(w), b) if how == "quantised" else leaves
    loss = fp8_linear(*given).sum()  # whose gradient by the output is a constant: no way back through it
    (grad,) = torch.autograd.grad(loss, leaves[of], create_graph=True)
    with pytest.raises(RuntimeError, match="fp8_linear: a backward of the backward is not supported"):
        torch.autograd.grad(loss + grad.sum(), leaves[by])


def test_a_second_derivative_that_is_asked_for_by_name_raises(monkeypatch):
    """Also where kernels leave no graph between the output's gradient and the others."""
    x, w, _ = small_problem()
    gradients_of = torch_op._gradients

    def without_a_graph(*arguments):
        with torch.no_grad():
            return gradients_of(*arguments)

    monkeypatch.setattr(torch_op, "_gradients", without_a_graph)
    (grad,) = torch.autograd.grad(fp8_linear(x, w).square().sum(), w, create_graph=True)
    later = fp8_linear(x, w - grad).sum()
    with pytest.raises(RuntimeError, match="fp8_linear: a backward of the backward is not supported"):
        torch.autograd.grad(later, w)


TRANSFORMS = [torch.func.grad, torch.func.vmap, torch.func.jacrev]


@pytest.mark.parametrize("transform", TRANSFORMS, ids=["grad", "vmap", "jacrev"])
def test_torch_func_transforms_raise(transform):
    x, w, _ = small_problem()
    with pytest.raises(RuntimeError, match=r"torch\.func transforms .* are not supported"):
        transform(lambda x: fp8_linear(x, w).sum())(x)


def test_forward_mode_raises():
    x, w, _ = small_problem()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(RuntimeError, match="forward-mode differentiation is not supported"):
            fp8_linear(dual, w)


def test_inputs_may_change_before_backward():
    """Neither of them is kept."""
    x, w, _ = small_problem()
    expected = gradients(fp8_linear(x, w), x, w)
    out = fp8_linear(x, w)
    with torch.no_grad():
        x.zero_()
        w.zero_()
    assert all(torch.equal(p, q) for p, q in zip(gradients(out, x, w), expected, strict=True))


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant):
    x, w, b = small_problem(bias=True)
    expected = gradients(fp8_linear(torch.tanh(x), w, b), x, w, b)
    out = checkpoint(lambda x: fp8_linear(torch.tanh(x), w, b), x, use_reentrant=reentrant)
    assert all(torch.equal(p, q) for p, q in zip(gradients(out, x, w, b) if not reentrant else (
        out.sum().backward(), x.grad, w.grad, b.grad)[1:], expected, strict=True))  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_decides_the_outputs_dtype_alone(dtype):
    x, w, b = small_problem(bias=True)
    x = x.detach().to(dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = fp8_linear(x, w, b)
    g = torch.randn_like(out)
    out.backward(g)
    expected = oracle(x, w, b, g)
    assert out.dtype == torch.bfloat16
    assert (x.grad.dtype, w.grad.dtype) == (dtype, torch.float32)
    assert_same(out, expected.out, 2**-8)
    assert_same(x.grad, expected.grad_x, 2**-8 if dtype == torch.bfloat16 else 2e-6)
    assert_same(w.grad, expected.grad_weight)  # never rounded to bfloat16 on the way


@pytest.mark.parametrize("hooks", ["identity", "on the CPU"])
def test_saved_tensor_hooks(hooks):
    x, w, _ = small_problem()
    expected = gradients(fp8_linear(x, w), x, w)
    graph = torch.autograd.graph
    with graph.saved_tensors_hooks(lambda t: t, lambda t: t) if hooks == "identity" else graph.save_on_cpu():
        out = fp8_linear(x, w)
    assert all(torch.equal(p, q) for p, q in zip(gradients(out, x, w), expected, strict=True))


@pytest.mark.parametrize("backward", ["separate", "together"])
def test_weight_grad_out_is_the_sum_over_micro_batches(backward):
    _, w, b = small_problem(bias=True)
    total, expected = torch.full((136, 144), 0.5), torch.full((136, 144), 0.5)
    outs = []
    for seed in (0, 1, 2):
        x, _, _ = small_problem(seed=seed)
        out = fp8_linear(x, w, b, weight_grad_out=total)
        g = torch.randn_like(out)
        outs.append((out * g).sum())
        if backward == "separate":
            outs.pop().backward()
        right = oracle(x, w, b, g)
        expected += right.grad_weight
        if backward == "separate":
            assert_same(x.grad, right.grad_x)
    if outs:
        sum(outs).backward()
    assert w.grad is None
    assert b.grad is not None
    assert_same(total, expected)


def test_weight_grad_out_of_bfloat16_is_not_rounded():
    x, w, _ = small_problem(dtype=torch.bfloat16)
    total = torch.zeros(136, 144)
    out = fp8_linear(x, w, weight_grad_out=total)
    g = torch.randn_like(out)
    out.backward(g)
    assert_same(total, oracle(x, w, grad_out=g).grad_weight)


def test_weight_grad_out_of_a_frozen_weight_is_left_alone():
    x, w, _ = small_problem()
    total = torch.zeros(136, 144)
    fp8_linear(x, w.requires_grad_(False), weight_grad_out=total).sum().backward()
    assert not total.any()


@pytest.mark.parametrize("plain", [True, False], ids=["eager", "registered"])
def test_what_a_backward_is_not_asked_for_is_left_out(plain, monkeypatch):
    """As pipelines do that make x's gradient first: the weight's may be added to main_grad once, not twice."""
    monkeypatch.setattr(torch_op, "is_plain", lambda *_: plain)
    x, w, b = small_problem(bias=True)
    products, total = [], torch.zeros_like(w)
    made = torch_op._multiply
    monkeypatch.setattr(torch_op, "_multiply", lambda *a, **k: products.append(1) or made(*a, **k))
    expected = gradients(fp8_linear(x, w, b), x, w, b)
    h = x * 1
    out = fp8_linear(h, w, b, weight_grad_out=total).sum()
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
    assert all(torch.equal(p, q) for p, q in zip(gradients(fp8_linear(x, w, b), w, b), expected[1:], strict=True))


def test_a_shared_activation_gives_each_layer_what_its_own_would():
    x, w, b = small_problem(bias=True)
    v = torch.randn(72, 144, requires_grad=True)
    grads = torch.randn(2, 12, 136), torch.randn(2, 12, 72)
    apart = [fp8_linear(x, w, b), fp8_linear(x, v)]
    expected = torch.autograd.grad(apart, (x, w, b, v), grads)
    shared = quantize_activation(x)
    outs = [fp8_linear(shared, w, b), fp8_linear(shared, v)]
    assert all(torch.equal(p, q) for p, q in zip(outs, apart, strict=True))
    made = torch.autograd.grad(outs, (x, w, b, v), grads)
    assert all(torch.equal(p, q) for p, q in zip(made, expected, strict=True))
    assert_same(made[0], oracle(x, w, grad_out=grads[0]).grad_x + oracle(x, v, grad_out=grads[1]).grad_x)


def test_a_shared_activation_without_gradients():
    x, w, _ = small_problem()
    with torch.no_grad():
        shared = quantize_activation(x)
        assert shared.columns is None
        assert torch.equal(fp8_linear(shared, w), fp8_linear(x, w))
    with pytest.raises(ValueError, match="was quantised without gradients but weight needs one"):
        fp8_linear(shared, w)
    fp8_linear(shared, w.detach()).sum().backward()  # a frozen weight needs none of it
    assert x.grad is not None


# ------------------------------------------------------------------------------------------- torch.library and compile


# On the CPU PyTorch has no arithmetic on FP8 tensors, which some of opcheck's tests try on what goes in or comes out.
WITHOUT_ARITHMETIC = ("test_autograd_registration", "test_faketensor")


@pytest.mark.parametrize("given", ["plain", "shared", "nothing"])
def test_opcheck(given):
    x, w, b = small_problem(bias=True)
    words = (torch.float32, "e5m2", "float32", "dequantize", False)
    copies = (*quantize_activation(x.detach())[1:5], *quantize_weight(w.detach())[1:5])
    shared = copies if given == "shared" else (None,) * 8
    grads = [given != "nothing"] * 3
    if given == "nothing":
        x, w, b = x.detach(), w.detach(), b.detach()
    tests = WITHOUT_ARITHMETIC if given == "shared" else ("test_schema", *WITHOUT_ARITHMETIC)
    torch.library.opcheck(torch_op._forward_op, (x, w, b, *shared, None, *words, grads), test_utils=tests)


@pytest.mark.parametrize("given", ["both", "weight_grad_out", "x alone"])
def test_opcheck_of_backward(given):
    x, w, _ = small_problem()
    _, *kept, _ = torch_op._forward_op(
        x, w, *(None,) * 10, torch.float32, "e4m3", "float32", "dequantize", False, [True] * 3
    )
    kept = [t.detach() for t in kept]
    alone = given == "x alone"
    if alone:
        kept[:2] = None, None
    total = torch.zeros(136, 144) if given == "weight_grad_out" else None
    words = (torch.float32, torch.float32, torch.bfloat16, "e4m3", "float32", "dequantize", [True, not alone, True])
    backward = (torch.randn(2, 12, 136), *kept, total, *words)
    torch.library.opcheck(torch_op._backward_op, backward, test_utils=WITHOUT_ARITHMETIC)


def test_the_registered_operators_make_what_eager_mode_makes(monkeypatch):
    """A retained graph and a main gradient, whose version counter both raise, too."""
    x, w, b = small_problem(bias=True)
    made = []
    for plain in (True, False):
        monkeypatch.setattr(torch_op, "is_plain", lambda *_, plain=plain: plain)
        out = fp8_linear(x, w, b)
        assert ("_Eager" in type(out.grad_fn).__name__) == plain
        grads = [torch.autograd.grad(out.square().sum(), (x, w, b), retain_graph=True) for _ in range(2)]
        total = torch.zeros_like(w)
        fp8_linear(x, w, b, weight_grad_out=total).sum().backward()
        assert total._version > 0
        made.append([out, *grads[0], *grads[1], total])
    assert all(torch.equal(p, q) for p, q in zip(*made, strict=True))


def test_a_dispatch_mode_sees_one_operator():
    """Selective checkpointing chooses by operator."""
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    x, w, _ = small_problem()
    with Watch():
        fp8_linear(x, w)
    assert "onchip.fp8_linear_forward.default" in seen


@pytest.mark.parametrize("columns", [True, False])
def test_opcheck_of_quantising(columns):
    x, _, _ = small_problem(m=130)
    for op in (torch_op._quantize_op, torch_op._quantize_weight_op):
        torch.library.opcheck(op, (x.detach().flatten(0, 1), "power_of_two", "dequantize", columns))


@pytest.mark.parametrize("how", ["plain", "shared", "autocast"])
def test_compile_takes_it_whole(how):
    x, w, b = small_problem(bias=True)

    def layer(x, w, b):
        h = torch.tanh(x)
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            h = quantize_activation(h) if how == "shared" else h
            return (fp8_linear(h, w, b, scale="float32") * fp8_linear(h, w)).float() * 3

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    eager = layer(x, w, b)
    for _ in range(2):
        made = compiled(x, w, b)
        assert torch.equal(made, eager)
        for p, q in zip(gradients(made, x, w, b), gradients(layer(x, w, b), x, w, b), strict=True):
            assert_same(p, q)
        with torch.no_grad():
            w.mul_(1.5)  # a compiled step sees the change, too
        eager = layer(x, w, b)


def test_new_row_counts_do_not_recompile():
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    layer = torch.compile(lambda x, w: fp8_linear(x, w), fullgraph=True, backend=counter)
    for m in (130, 256, 300, 520):
        x, w, _ = small_problem(m=m)
        assert torch.equal(layer(x, w), fp8_linear(x, w))
    assert counter.frame_count <= 2  # once with these numbers, once with any


def test_weight_grad_out_does_not_compile():
    x, w, _ = small_problem()
    layer = torch.compile(lambda x, w, t: fp8_linear(x, w, weight_grad_out=t), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="weight_grad_out is not supported inside"):
        layer(x, w, torch.zeros(136, 144))


def test_meta_tensors_give_shapes():
    x, w, b = (t.to("meta") for t in small_problem(bias=True))
    assert fp8_linear(x, w, b).shape == (2, 12, 136)
