"""Autograd, the gradient in place, torch.compile, autocast, checkpointing: what training code does around the op."""

import pytest
import torch
from ce_common import assert_same, computed, gradient, plain, small_problem
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from onchip.ops.cross_entropy import torch_op
from onchip.ops.cross_entropy.torch_op import CrossEntropyLoss, CrossEntropyStats, cross_entropy

in_place = pytest.mark.parametrize("inplace", [False, True], ids=["new tensor", "in place"])


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


def test_no_grad_and_inference_mode():
    x, y = small_problem()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            loss = cross_entropy(x, y, inplace_backward=True)  # nothing is overwritten without a backward
        assert not loss.requires_grad
        assert_same(loss, plain(x, y))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_inputs_are_not_changed(reduction):
    x, y = small_problem()
    y[0, 0] = -100
    constants = {"token_weight": torch.rand(2, 12), "temperature": torch.rand(2, 12) + 0.5}
    if reduction == "mean":
        constants["normalizer"] = torch.tensor(5.0)
    tensors = [x, y, *constants.values()]
    before = [(t.detach().clone(), t._version) for t in tensors]
    cross_entropy(x, y, reduction=reduction, **constants).sum().backward()
    assert all(torch.equal(t, old) and t._version == version for t, (old, version) in zip(tensors, before, strict=True))


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


@in_place
@pytest.mark.parametrize("upstream", [1.0, 0.125, 0.3, 0.0])
def test_a_retained_graph_gives_the_same_gradients_again(upstream, inplace):
    x, y = small_problem()
    logits = computed(x)
    loss = cross_entropy(logits, y, inplace_backward=inplace)
    grad = torch.tensor(upstream)
    first = torch.autograd.grad(loss, x, grad, retain_graph=True)[0]
    kept = first.clone()
    first.mul_(3)  # what a caller does with its gradients must not reach the graph
    assert torch.equal(logits, x)
    second = torch.autograd.grad(loss, x, grad, retain_graph=True)[0]
    third = torch.autograd.grad(loss, x, grad)[0]
    assert torch.equal(kept, second)
    assert torch.equal(kept, third)
    assert_same(kept, gradient(plain(x, y), x) * upstream)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(loss, x, grad)


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


def test_the_same_inputs_give_the_same_bits():
    x, y = small_problem(tokens=200, vocab=3000)

    def run():
        loss = cross_entropy(x, y)
        return [loss, gradient(loss, x)]

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


@in_place
def test_a_backward_of_the_backward_raises(inplace):
    x, y = small_problem()
    loss = cross_entropy(computed(x), y, inplace_backward=inplace)
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"^cross_entropy: a backward of the backward is not supported"):
        (loss + grad.norm()).backward()


@pytest.mark.parametrize(
    "transform",
    [torch.func.grad, torch.func.vmap, torch.func.jacrev, lambda f: lambda x: torch.func.jvp(f, (x,), (x,))],
    ids=["grad", "vmap", "jacrev", "jvp"],
)
def test_torch_func_transforms_raise(transform):
    x, y = small_problem()
    with pytest.raises(RuntimeError, match=r"^cross_entropy: torch\.func transforms .* are not supported"):
        transform(lambda x: cross_entropy(x, y[0]))(x)


def test_forward_mode_raises():
    x, y = small_problem()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(RuntimeError, match=r"^cross_entropy: forward-mode differentiation is not supported"):
            cross_entropy(dual, y)


@in_place
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant, inplace):
    x, y = small_problem()
    expected = gradient(cross_entropy(2 * x, y), x)
    checkpoint(lambda x: cross_entropy(2 * x, y, inplace_backward=inplace), x, use_reentrant=reentrant).backward()
    assert torch.equal(x.grad, expected)


@in_place
@pytest.mark.parametrize("hooks", [True, False])
def test_saved_tensor_hooks(hooks, inplace):
    x, y = small_problem()
    expected = gradient(cross_entropy(x, y), x)
    packing = (
        torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
        if hooks
        else torch.autograd.graph.save_on_cpu()
    )
    with packing:
        loss = cross_entropy(computed(x), y, inplace_backward=inplace)
    assert torch.equal(gradient(loss, x), expected)


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


# ------------------------------------------------------------------------------------------- torch.library and compile


def operator_arguments(reduction="mean", everything=False):
    x, y = small_problem()
    y[0, 0] = -100
    per_token = torch.rand(2, 12) + 0.5
    extra = (per_token, per_token, torch.tensor(5.0) if reduction == "mean" else None) if everything else (None,) * 3
    numbers = (0.1, 1e-3, 5.0, 0.5, 1.0) if everything else (0.0, 0.0, None, 1.0, 1.0)
    return (x, y, *extra, -100, reduction, *numbers, False, None, everything, False, True)


@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_opcheck(reduction, everything):
    arguments = operator_arguments(reduction, everything)
    torch.library.opcheck(torch_op._forward_op, arguments)
    detached = [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments]
    loss, lse, log_prob, *_ = torch_op._forward_op(*detached)
    torch.library.opcheck(torch_op._backward_op, (torch.ones_like(loss), lse, log_prob, *detached))


@pytest.mark.parametrize(
    "options",
    [
        {}, {"reduction": "none"}, {"normalizer": 7}, {"return_stats": True},
        {"temperature": 0.5, "softcap": 10.0, "label_smoothing": 0.1, "z_loss": 1e-3, "scratch_bytes": 1 << 20},
    ],
    ids=str,
)  # fmt: skip
def test_compile_takes_it_whole(options):
    x, y = small_problem()

    def loss(x, y):
        out = cross_entropy(torch.tanh(x)[:, 1:], y[:, :-1], **options)
        return (out[0] + out[1].lse.mean().detach()) if "return_stats" in options else out.sum() * 3

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, y), loss(x, y))
    assert_same(gradient(compiled(x, y), x), gradient(loss(x, y), x))


def test_compile_refuses_in_place():
    x, y = small_problem()
    compiled = torch.compile(lambda x: cross_entropy(x * 2, y, inplace_backward=True), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"inplace_backward is not supported inside torch\.compile"):
        compiled(x)


def test_new_batch_sizes_and_token_counts_do_not_recompile():
    counter = CompileCounterWithBackend("aot_eager")
    loss = torch.compile(lambda x, y, n: cross_entropy(x, y, normalizer=n), fullgraph=True, backend=counter)
    for tokens in (24, 36, 48, 64, 100):
        x, y = small_problem(tokens=tokens)
        assert_same(loss(x, y, tokens), plain(x, y))
    assert counter.frame_count <= 2  # once with these numbers, once with any


def test_meta_tensors_give_shapes():
    x, y = (t.to("meta") for t in small_problem())
    loss, stats = cross_entropy(x, y, reduction="none", return_stats=True)
    assert loss.shape == stats.entropy.shape == (2, 12)
