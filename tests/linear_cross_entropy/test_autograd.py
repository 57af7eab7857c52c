"""Autograd, torch.compile, autocast, checkpointing: what training code does around the op."""

import pytest
import torch
import torch.nn.functional as F
from common import assert_same, gradients, small_problem
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from onchip.torch import LinearCrossEntropyLoss, LinearCrossEntropyStats, linear_cross_entropy
from onchip.vocab.torch import walk
from shared import count_products

STRATEGIES = ("stash", "recompute")
both_strategies = pytest.mark.parametrize("strategy", STRATEGIES)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


def plain(hidden, weight, target, bias=None, **options):
    logits = F.linear(hidden, weight, bias)
    return F.cross_entropy(logits.flatten(0, -2), target.flatten(), **options)


@both_strategies
@pytest.mark.parametrize("needs", [(h, w, b) for h in (0, 1) for w in (0, 1) for b in (0, 1)], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_only_what_needs_a_gradient_gets_one(needs, reduction, strategy):
    h, w, y, b = small_problem(bias=True)
    leaves = [x.requires_grad_(bool(need)) for x, need in zip((h, w, b), needs, strict=True)]
    loss = linear_cross_entropy(h, w, y, b, reduction=reduction, strategy=strategy)
    assert loss.requires_grad == any(needs)
    wanted = [x for x in leaves if x.requires_grad]
    if wanted:
        grads = gradients(loss.sum(), *wanted)
        expected = gradients(plain(h, w, y, b, reduction="mean" if reduction == "mean" else "sum"), *wanted)
        for p, q in zip(grads, expected, strict=True):
            assert_same(p, q)


@both_strategies
@pytest.mark.parametrize(
    ("needs", "products"), [((1, 1), {"stash": 3, "recompute": 4}), ((1, 0), {"stash": 2, "recompute": 3}),
                            ((0, 1), {"stash": 2, "recompute": 3}), ((0, 0), {"stash": 1, "recompute": 1})], ids=str,
)  # fmt: skip
def test_nothing_is_multiplied_for_what_needs_no_gradient(needs, products, strategy, monkeypatch):
    work = count_products(monkeypatch, walk)
    h, w, y, _ = small_problem()
    y[0, :6] = -100  # a quarter is ignored: that too costs nothing
    h.requires_grad_(bool(needs[0]))
    w.requires_grad_(bool(needs[1]))
    loss = linear_cross_entropy(h, w, y, strategy=strategy)
    if any(needs):
        loss.backward()
    assert sum(work) == products[strategy] * 18 * 16 * 70


def test_no_grad_and_inference_mode():
    h, w, y, _ = small_problem()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            loss = linear_cross_entropy(h, w, y)
        assert not loss.requires_grad
        assert_same(loss, plain(h, w, y))


@both_strategies
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_inputs_are_not_changed(reduction, strategy):
    h, w, y, b = small_problem(bias=True)
    y[0, 0] = -100
    constants = {"token_weight": torch.rand(2, 12), "temperature": torch.rand(2, 12) + 0.5}
    if reduction == "mean":
        constants["normalizer"] = torch.tensor(5.0)
    tensors = [h, w, y, b, *constants.values()]
    before = [(x.detach().clone(), x._version) for x in tensors]
    linear_cross_entropy(h, w, y, b, reduction=reduction, strategy=strategy, **constants).sum().backward()
    assert all(torch.equal(x, old) and x._version == version for x, (old, version) in zip(tensors, before, strict=True))


@both_strategies
@pytest.mark.parametrize("upstream", [1.0, 0.125, 0.3, 0.0])
def test_a_retained_graph_gives_the_same_gradients_again(upstream, strategy):
    h, w, y, _ = small_problem()
    loss = linear_cross_entropy(h, w, y, strategy=strategy)
    grad = torch.tensor(upstream)
    first = torch.autograd.grad(loss, (h, w), grad, retain_graph=True)
    kept = [g.clone() for g in first]
    for g in first:
        g.mul_(3)  # what a caller does with its gradients must not reach the graph
    second = torch.autograd.grad(loss, (h, w), grad, retain_graph=True)
    third = torch.autograd.grad(loss, (h, w), grad)
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(kept, second, third, strict=True))
    for g, q in zip(kept, gradients(plain(h, w, y), h, w), strict=True):
        assert_same(g, q * upstream)


@both_strategies
def test_the_same_inputs_give_the_same_bits(strategy):
    h, w, y, _ = small_problem(tokens=200, vocab=3000)

    def run():
        loss = linear_cross_entropy(h, w, y, strategy=strategy)
        return [loss, *gradients(loss, h, w)]

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


@both_strategies
def test_a_backward_of_the_backward_raises(strategy):
    h, w, y, _ = small_problem()
    loss = linear_cross_entropy(h, w, y, strategy=strategy)
    grads = torch.autograd.grad(loss, (h, w), create_graph=True)
    with pytest.raises(RuntimeError, match="a backward of the backward is not supported"):
        (loss + sum(g.norm() for g in grads)).backward()


@both_strategies
@pytest.mark.parametrize(
    "transform",
    [torch.func.grad, torch.func.vmap, torch.func.jacrev, lambda f: lambda x: torch.func.jvp(f, (x,), (x,))],
    ids=["grad", "vmap", "jacrev", "jvp"],
)
def test_torch_func_transforms_raise(transform, strategy):
    h, w, y, _ = small_problem()
    with pytest.raises(RuntimeError, match=r"torch\.func transforms .* are not supported; use torch\.autograd"):
        transform(lambda x: linear_cross_entropy(x, w, y[0], strategy=strategy))(h)


@both_strategies
def test_forward_mode_raises(strategy):
    h, w, y, _ = small_problem()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(h, torch.ones_like(h))
        with pytest.raises(RuntimeError, match="forward-mode differentiation is not supported"):
            linear_cross_entropy(dual, w, y, strategy=strategy)


@both_strategies
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant, strategy):
    h, w, y, _ = small_problem()
    expected = gradients(linear_cross_entropy(torch.tanh(h), w, y, strategy=strategy), h, w)
    checkpoint(
        lambda h, w: linear_cross_entropy(torch.tanh(h), w, y, strategy=strategy), h, w, use_reentrant=reentrant
    ).backward()
    assert all(torch.equal(x.grad, g) for x, g in zip((h, w), expected, strict=True))


@both_strategies
def test_gradient_accumulation_adds_up(strategy):
    h, w, y, _ = small_problem()
    for _ in range(3):
        (linear_cross_entropy(h, w, y, strategy=strategy) / 3).backward()
    for x, g in zip((h, w), gradients(plain(h, w, y), h, w), strict=True):
        assert_same(x.grad, g)


@both_strategies
@pytest.mark.parametrize("hooks", [True, False])
def test_saved_tensor_hooks(hooks, strategy):
    h, w, y, _ = small_problem()
    expected = gradients(linear_cross_entropy(h, w, y, strategy=strategy), h, w)
    packing = (
        torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
        if hooks
        else torch.autograd.graph.save_on_cpu()
    )
    with packing:
        loss = linear_cross_entropy(h, w, y, strategy=strategy)
    assert all(torch.equal(a, b) for a, b in zip(gradients(loss, h, w), expected, strict=True))


@both_strategies
@pytest.mark.parametrize(
    "dtypes", [(a, b) for a in (torch.float32, torch.bfloat16) for b in (torch.float32, torch.bfloat16)], ids=str
)
def test_autocast(dtypes, strategy):
    """The products see bfloat16; gradients come back in each input's own dtype, rounded once."""
    h, w, y, b = small_problem(bias=True)
    h, w, b = (x.detach().to(t).requires_grad_() for x, t in zip((h, w, b), (*dtypes, torch.float32), strict=True))
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(h, w, y, b, strategy=strategy)
    rounded = [x.detach().bfloat16().float().requires_grad_() for x in (h, w, b)]
    expected = plain(rounded[0], rounded[1], y, rounded[2])
    assert loss.dtype == torch.float32
    assert_same(loss, expected)
    for x, g, q in zip((h, w, b), gradients(loss, h, w, b), gradients(expected, *rounded), strict=True):
        assert g.dtype == x.dtype
        # Gradients of float32 parameters are never rounded to bfloat16 on the way.
        assert float((g - q).norm() / q.norm()) < (1e-6 if x.dtype == torch.float32 else 2**-8)


@both_strategies
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("upstream", [1.0, 0.3])
def test_weight_grad_out_is_added_to(upstream, reduction, strategy):
    total, expected = torch.full((70, 16), 0.5), torch.full((70, 16), 0.5)
    for seed in (0, 1, 2):
        h, w, y, b = small_problem(bias=True, seed=seed)
        y[0, seed] = -100
        options = {"reduction": reduction, "strategy": strategy}
        loss = linear_cross_entropy(h, w, y, b, weight_grad_out=total, **options)
        grad = torch.rand_like(loss) * upstream
        loss.backward(grad)
        assert w.grad is None
        grads = gradients(linear_cross_entropy(h, w, y, b, **options), h, w, b, grad=grad)
        expected += grads[1]
        assert_same(h.grad, grads[0])
        assert_same(b.grad, grads[2])
    assert_same(total, expected)


@both_strategies
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weight_grad_out_under_autocast_and_in_16_bits_is_not_rounded(dtype, strategy):
    h, w, y, _ = small_problem(dtype=dtype)
    total = torch.zeros(70, 16)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
        linear_cross_entropy(h, w, y, weight_grad_out=total, strategy=strategy).backward()
    rounded = [x.detach().bfloat16().float().requires_grad_() for x in (h, w)]
    expected = gradients(plain(*rounded, y), *rounded)
    assert float((total - expected[1]).norm() / expected[1].norm()) < 1e-6
    assert float((h.grad - expected[0]).norm() / expected[0].norm()) < (1e-6 if dtype == torch.float32 else 2**-8)


@both_strategies
def test_weight_grad_out_and_a_retained_graph(strategy):
    h, w, y, _ = small_problem()
    total = torch.zeros(70, 16)
    loss = linear_cross_entropy(h, w, y, weight_grad_out=total, strategy=strategy)
    assert not total.any()
    loss.backward(retain_graph=True)
    once = total.clone()
    loss.backward()
    assert_same(once, gradients(plain(h, w, y), w)[0])
    assert_same(total, 2 * once)


@both_strategies
def test_weight_grad_out_of_a_frozen_weight_is_left_alone(strategy):
    h, w, y, _ = small_problem()
    total = torch.zeros(70, 16)
    linear_cross_entropy(h, w.requires_grad_(False), y, weight_grad_out=total, strategy=strategy).backward()
    assert not total.any()


@both_strategies
def test_weight_grad_out_is_left_alone_where_a_backward_is_not_asked_for_it(strategy):
    h, w, y, _ = small_problem()
    total = torch.zeros(70, 16)
    (expected,) = gradients(plain(h, w, y), h)
    (asked,) = torch.autograd.grad(linear_cross_entropy(h, w, y, weight_grad_out=total, strategy=strategy), h)
    linear_cross_entropy(h, w, y, weight_grad_out=total, strategy=strategy).backward(inputs=[h])
    assert_same(asked, expected)
    assert_same(h.grad, expected)
    assert not total.any()


def test_stats_are_detached_and_float32():
    h, w, y, _ = small_problem(dtype=torch.bfloat16)
    loss, stats = linear_cross_entropy(h, w, y, return_stats=True)
    assert isinstance(stats, LinearCrossEntropyStats)
    assert loss.requires_grad
    assert not any(x.requires_grad for x in stats)
    assert [x.dtype for x in stats] == [torch.float32] * 3 + [torch.bool]


def test_the_module_is_the_function_and_owns_nothing():
    h, w, y, b = small_problem(bias=True)
    options = {"label_smoothing": 0.1, "softcap": 5.0, "reduction": "sum", "strategy": "recompute"}
    module = LinearCrossEntropyLoss(**options)
    assert not list(module.parameters())
    assert not module.state_dict()
    assert torch.equal(module(h, w, y, b), linear_cross_entropy(h, w, y, b, **options))
    assert (
        repr(module)
        == "LinearCrossEntropyLoss(reduction='sum', label_smoothing=0.1, softcap=5.0, strategy='recompute')"
    )
    weights, temperature = torch.rand(2, 12), torch.rand(2, 12) + 0.5
    assert torch.equal(
        LinearCrossEntropyLoss(normalizer=3)(h, w, y, token_weight=weights, temperature=temperature, normalizer=7),
        linear_cross_entropy(h, w, y, token_weight=weights, temperature=temperature, normalizer=7),
    )
    _, stats = LinearCrossEntropyLoss(return_stats=True)(h, w, y)
    assert stats.lse.shape == y.shape


# ------------------------------------------------------------------------------------------- torch.library and compile


@both_strategies
@pytest.mark.parametrize(
    "options",
    [
        {}, {"reduction": "none"}, {"normalizer": 7}, {"return_stats": True},
        {"temperature": 0.5, "softcap": 10.0, "label_smoothing": 0.1, "z_loss": 1e-3, "scratch_bytes": 1 << 20},
    ],
    ids=str,
)  # fmt: skip
def test_compile_takes_it_whole(options, strategy):
    h, w, y, b = small_problem(bias=True)

    def loss(h, w, y, b):
        out = linear_cross_entropy(torch.tanh(h), w, y, b, strategy=strategy, **options)
        return (out[0] + out[1].lse.mean().detach()) if "return_stats" in options else out.sum() * 3

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    eager = loss(h, w, y, b)
    assert torch.equal(compiled(h, w, y, b), eager)
    for p, q in zip(gradients(compiled(h, w, y, b), h, w, b), gradients(eager, h, w, b), strict=True):
        assert_same(p, q)


def test_compile_with_autocast_and_no_grad():
    h, w, y, _ = small_problem()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def loss(h, w, y):
        with torch.autocast("cpu", torch.bfloat16):
            return linear_cross_entropy(h, w, y)

    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(loss(h, w, y), linear_cross_entropy(h, w, y))
    with torch.no_grad():
        assert not loss(h, w, y).requires_grad


def test_new_batch_sizes_and_token_counts_do_not_recompile():
    counter = CompileCounterWithBackend("aot_eager")
    loss = torch.compile(
        lambda h, w, y, n: linear_cross_entropy(h, w, y, normalizer=n), fullgraph=True, backend=counter
    )
    for tokens in (24, 36, 48, 64, 100, 128):
        h, w, y, _ = small_problem(tokens=tokens)
        assert_same(loss(h, w, y, tokens), plain(h, w, y))
    assert counter.frame_count <= 2  # once with these numbers, once with any


def test_meta_tensors_give_shapes():
    h, w, y, _ = (x if x is None else x.to("meta") for x in small_problem())
    loss, stats = linear_cross_entropy(h, w, y, reduction="none", return_stats=True)
    assert loss.shape == stats.entropy.shape == (2, 12)
