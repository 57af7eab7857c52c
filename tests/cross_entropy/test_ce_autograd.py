"""The gradient in place, autocast, the module, every option compiled; what holds for every op is in every_loss.py."""

import pytest
import torch
from ce_common import assert_same, computed, gradient, plain, small_problem

from every_loss import check_operators
from onchip.ops.cross_entropy.torch_op import CrossEntropyLoss, CrossEntropyStats, cross_entropy


def test_no_grad_and_inference_mode():
    x, y = small_problem()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            loss = cross_entropy(x, y, inplace_backward=True)  # nothing is overwritten without a backward
        assert not loss.requires_grad
        assert_same(loss, plain(x, y))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_in_place_the_gradient_takes_the_logits_memory(reduction):
    x, y = small_problem()
    y[0, 0] = -100
    upstream = torch.rand(2, 12) if reduction == "none" else torch.tensor(0.3)
    expected = gradient(cross_entropy(x, y, reduction=reduction), x, upstream)
    logits = computed(x)
    loss = cross_entropy(logits, y, reduction=reduction, inplace_backward=True)
    assert torch.equal(logits, x)
    grad = gradient(loss, logits, upstream)
    assert grad.data_ptr() == logits.data_ptr()
    assert torch.equal(grad, expected)
    assert torch.equal(logits.detach(), expected)


def test_what_saved_the_logits_raises_once_they_are_overwritten():
    """Two losses of the same logits, one of which is told to overwrite them."""
    x, y = small_problem()
    for second in (lambda z: z.square().sum(), lambda z: cross_entropy(z, y, inplace_backward=True)):
        logits = computed(x)
        first = cross_entropy(logits, y, inplace_backward=True)
        other = second(logits)
        first.backward()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            other.backward()


def test_logits_whose_layer_needs_its_output_raise():
    x, y = small_problem()
    loss = cross_entropy(torch.tanh(x), y, inplace_backward=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_in_place_through_a_linear_layer():
    h, w = torch.randn(2, 12, 16, requires_grad=True), torch.randn(70, 16, requires_grad=True)
    y = small_problem()[1]
    expected = torch.autograd.grad(plain(h @ w.T, y), (h, w))
    cross_entropy((h @ w.T)[:, :-1], y[:, 1:], inplace_backward=True).backward()
    h.grad = w.grad = None
    (cross_entropy(h @ w.T, y, inplace_backward=True) / 3).backward()
    for leaf, grad in zip((h, w), expected, strict=True):
        assert_same(leaf.grad * 3, grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_changes_nothing(dtype):
    x, y = small_problem(dtype=dtype)
    loss = cross_entropy(x, y, softcap=5.0, z_loss=0.1)
    with torch.autocast("cpu", torch.bfloat16):
        cast = cross_entropy(x, y, softcap=5.0, z_loss=0.1)
        grad = gradient(cast, x)
    assert cast.dtype == torch.float32
    assert torch.equal(loss, cast)
    assert grad.dtype == dtype
    assert torch.equal(grad, gradient(loss, x))


def test_stats_are_detached_and_float32():
    x, y = small_problem(dtype=torch.bfloat16)
    loss, stats = cross_entropy(x, y, return_stats=True)
    assert isinstance(stats, CrossEntropyStats)
    assert loss.requires_grad
    assert not any(s.requires_grad for s in stats)
    assert [s.dtype for s in stats] == [torch.float32] * 3 + [torch.bool]


def test_the_module_is_the_function_and_owns_nothing():
    x, y = small_problem()
    options = {"label_smoothing": 0.1, "softcap": 5.0, "reduction": "sum"}
    module = CrossEntropyLoss(**options)
    assert not list(module.parameters())
    assert not module.state_dict()
    assert torch.equal(module(x, y), cross_entropy(x, y, **options))
    assert repr(module) == "CrossEntropyLoss(reduction='sum', label_smoothing=0.1, softcap=5.0)"
    weights, temperature = torch.rand(2, 12), torch.rand(2, 12) + 0.5
    assert torch.equal(
        CrossEntropyLoss(normalizer=3)(x, y, token_weight=weights, temperature=temperature, normalizer=7),
        cross_entropy(x, y, token_weight=weights, temperature=temperature, normalizer=7),
    )
    _, stats = CrossEntropyLoss(return_stats=True)(x, y)
    assert stats.lse.shape == y.shape


def test_compile_refuses_in_place():
    x, y = small_problem()
    compiled = torch.compile(lambda x: cross_entropy(x * 2, y, inplace_backward=True), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"inplace_backward is not supported inside torch\.compile"):
        compiled(x)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_every_option_in_the_operators_and_compiled(reduction):
    x, y = small_problem()
    y[0, 0] = -100
    per_token = torch.rand(2, 12) + 0.5
    options = {
        "token_weight": per_token, "temperature": per_token, "softcap": 10.0, "label_smoothing": 0.1, "z_loss": 1e-3,
        "logit_scale": 0.5, "reduction": reduction, "return_stats": True, "scratch_bytes": 1 << 20,
        "normalizer": torch.tensor(5.0) if reduction == "mean" else None,
    }  # fmt: skip

    def run(x, y):
        loss, stats = cross_entropy(torch.tanh(x), y, **options)
        return loss.sum() * 3 + stats.lse.mean() + stats.entropy.sum() + stats.correct.sum()

    check_operators(lambda: gradient(run(x, y), x))
    made = torch.compile(run, fullgraph=True, backend="aot_eager")(x, y)
    assert_same(made, run(x, y))
    assert_same(gradient(made, x), gradient(run(x, y), x))
