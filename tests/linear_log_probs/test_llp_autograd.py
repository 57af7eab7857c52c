"""Autograd, torch.compile, autocast, checkpointing: what training code does around the op."""

import pytest
import torch
from common_llp import assert_same, small_problem
from torch.utils.checkpoint import checkpoint

from onchip.ops.linear_log_probs import torch_op
from onchip.ops.linear_log_probs.checks import plain_linear_log_probs
from onchip.ops.linear_log_probs.torch_op import linear_log_probs
from shared import count_products


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


def objective(op, h, w, ids, b=None, **options):
    out = op(h, w, ids, b, **options)
    return (out.log_prob * torch.linspace(-1, 2, 24).view(2, 12)).sum() + 0.3 * (out.entropy**2).sum()


def loss(*inputs, **options):
    return objective(linear_log_probs, *inputs, entropy=True, **options)


def plain(*inputs, **options):
    return objective(plain_linear_log_probs, *inputs, **options)


@pytest.mark.parametrize("needs", [(h, w, b) for h in (0, 1) for w in (0, 1) for b in (0, 1)], ids=str)
def test_only_what_needs_a_gradient_gets_one(needs):
    h, w, ids, b = small_problem()
    leaves = [x.requires_grad_(bool(need)) for x, need in zip((h, w, b), needs, strict=True)]
    value = loss(h, w, ids, b)
    assert value.requires_grad == any(needs)
    wanted = [x for x in leaves if x.requires_grad]
    if wanted:
        for p, q in zip(torch.autograd.grad(value, wanted), torch.autograd.grad(plain(h, w, ids, b), wanted), strict=True):  # fmt: skip # noqa: E501
            assert_same(p, q)


@pytest.mark.parametrize(("needs", "products"), [((1, 1), 4), ((1, 0), 3), ((0, 1), 3), ((0, 0), 1)], ids=str)
def test_nothing_is_multiplied_for_what_needs_no_gradient(needs, products, monkeypatch):
    work = count_products(monkeypatch)
    h, w, ids, _ = small_problem(2)
    ids[0, :6] = -100  # a quarter is ignored: that too costs nothing
    ids[1, :, 1] = -100
    h.requires_grad_(bool(needs[0]))
    w.requires_grad_(bool(needs[1]))
    out = linear_log_probs(h, w, ids)
    if any(needs):
        out.sum().backward()
    assert sum(work) == products * 18 * 16 * 70


def test_upstream_gradients_of_any_kind():
    """Expanded, strided, zero, and for some of the outputs alone."""
    h, w, ids, _ = small_problem(3)

    def check(select, upstream):
        got = select(linear_log_probs(h, w, ids, entropy=True, lse=True))
        expected = select(plain_linear_log_probs(h, w, ids))
        grads = torch.autograd.grad(got, (h, w), upstream)
        for p, q in zip(grads, torch.autograd.grad(expected, (h, w), upstream), strict=True):
            assert_same(p, q)

    check(lambda out: out.log_prob, torch.ones(1, 1, 1).expand(2, 12, 3))
    check(lambda out: out.log_prob, torch.randn(3, 12, 2).transpose(0, 2))
    check(lambda out: out.log_prob, torch.zeros(2, 12, 3))
    check(lambda out: out.entropy, torch.randn(12, 2).T)
    check(lambda out: out.lse, torch.randn(2, 24)[:, ::2])
    check(lambda out: out.log_prob[..., 1], torch.randn(2, 12))


def test_inputs_are_not_changed():
    h, w, ids, b = small_problem()
    ids[0, 0] = -100
    tensors = [h, w, ids, b, torch.rand(2, 12) + 0.5]
    before = [(x.detach().clone(), x._version) for x in tensors]
    loss(h, w, ids, b, temperature=tensors[-1]).backward()
    assert all(torch.equal(x, old) and x._version == version for x, (old, version) in zip(tensors, before, strict=True))


def test_a_retained_graph_gives_the_same_bits_again_and_so_does_a_second_run():
    h, w, ids, _ = small_problem(tokens=24, vocab=3000)
    value = loss(h, w, ids)
    first = torch.autograd.grad(value, (h, w), retain_graph=True)
    kept = [g.clone() for g in first]
    for g in first:
        g.mul_(3)  # what a caller does with its gradients must not reach the graph
    for again in (torch.autograd.grad(value, (h, w)), torch.autograd.grad(loss(h, w, ids), (h, w))):
        assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))


def test_a_backward_of_the_backward_raises():
    h, w, ids, _ = small_problem()
    value = loss(h, w, ids)
    grads = torch.autograd.grad(value, (h, w), create_graph=True)
    with pytest.raises(RuntimeError, match="linear_log_probs: a backward of the backward is not supported"):
        (value + sum(g.norm() for g in grads)).backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant):
    h, w, ids, _ = small_problem()
    expected = torch.autograd.grad(loss(torch.tanh(h), w, ids), (h, w))
    checkpoint(lambda h, w: loss(torch.tanh(h), w, ids), h, w, use_reentrant=reentrant).backward()
    assert all(torch.equal(x.grad, g) for x, g in zip((h, w), expected, strict=True))


@pytest.mark.parametrize("hidden_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast(hidden_dtype):
    """The products see bfloat16; gradients come back in each input's own dtype, rounded once."""
    h, w, ids, b = small_problem()
    h = h.detach().to(hidden_dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        value = loss(h, w, ids, b)
    rounded = [x.detach().bfloat16().float().requires_grad_() for x in (h, w, b)]
    expected = plain(rounded[0], rounded[1], ids, rounded[2])
    assert value.dtype == torch.float32
    assert_same(value, expected)
    grads = zip((h, w, b), torch.autograd.grad(value, (h, w, b)), torch.autograd.grad(expected, rounded), strict=True)
    for x, g, q in grads:
        assert g.dtype == x.dtype
        assert float((g - q).norm() / q.norm()) < (2e-6 if x.dtype == torch.float32 else 2**-8)


def test_no_grad_and_inference_mode():
    h, w, ids, _ = small_problem()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out = linear_log_probs(h, w, ids)
        assert not out.requires_grad
        assert_same(out, plain_linear_log_probs(h, w, ids).log_prob)


@pytest.mark.parametrize(("each", "everything"), [(None, False), (3, True)])
def test_opcheck(each, everything):
    h, w, ids, b = small_problem(each)
    ids[0, 0] = -100
    tau = torch.rand(2, 12) + 0.5
    extra = (b, ids, tau) if everything else (None, ids, None)
    numbers = (torch.float32, -100, 5.0 if everything else None, 0.5, 1.0, False, None, everything)
    arguments = (h, w, *extra, *numbers, True, True, everything)
    torch.library.opcheck(torch_op._forward_op, arguments)
    detached = [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments]
    log_prob, entropy, lse, _, mean = torch_op._forward_op(*detached)
    upstream = (torch.ones_like(log_prob), torch.ones_like(entropy) if everything else None, None)
    torch.library.opcheck(torch_op._backward_op, (*upstream, log_prob, entropy, lse, mean, *detached))


def test_compile_takes_it_whole():
    h, w, ids, b = small_problem()
    compiled = torch.compile(lambda *x: loss(torch.tanh(x[0]), *x[1:]), fullgraph=True, backend="aot_eager")
    eager = loss(torch.tanh(h), w, ids, b)
    got = compiled(h, w, ids, b)
    assert_same(got, eager)
    for p, q in zip(torch.autograd.grad(got, (h, w, b)), torch.autograd.grad(eager, (h, w, b)), strict=True):
        assert_same(p, q)


def test_meta_tensors():
    h, w, ids = (torch.empty(s, device="meta") for s in ((2, 12, 16), (70, 16), (2, 12, 3)))
    out = linear_log_probs(h.requires_grad_(), w, ids.long(), entropy=True, top1=True)
    assert (out.log_prob.shape, out.entropy.shape, out.top1.dtype) == ((2, 12, 3), (2, 12), torch.int64)
