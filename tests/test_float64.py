"""float64: the oracles to nearly its own rounding.  test_edges.py has derivatives by finite differences, and calls
without values.
"""

import numpy as np
import pytest
import torch

import onchip.torch
from float64 import as_torch, differentiable, examples
from losses import CE, LCE, LLP, LP, Loss, nan_filled
from onchip.ops.linear_jsd import checks
from onchip.torch import TopK
from onchip.vocab import memory
from onchip.vocab.memory import Problem
from soft_labels import everything, oracle, problem

EXAMPLES = examples("target")


def assert_near(name, made, expected):
    assert made.dtype == torch.float64, name
    expected = torch.from_numpy(np.asarray(expected))
    assert (made - expected).norm() <= 1e-12 * max(1, expected.norm()), name


def run(example, device):
    """The outputs that have gradients, and the gradients of their sum; "auto" takes PyTorch's operations."""

    def there(x):
        return TopK(*map(there, x)) if isinstance(x, TopK) else x.to(device) if isinstance(x, torch.Tensor) else x

    leaves = {name: there(as_torch(x)).requires_grad_() for name, x in example.leaves.items()}
    options = {name: there(as_torch(x)) for name, x in example.options.items()}
    made = differentiable(getattr(onchip.torch, example.op)(**leaves, **options))
    made = list(made) if isinstance(made, tuple) else [made]
    return made, list(torch.autograd.grad(sum(x.sum() for x in made), list(leaves.values())))


@pytest.mark.gpu
@pytest.mark.parametrize("example", EXAMPLES.values(), ids=list(EXAMPLES))
def test_on_the_gpu(example):
    for made, right in zip(run(example, "cuda"), run(example, "cpu"), strict=True):
        for x, y in zip(made, right, strict=True):
            assert_near(example.op, x.detach().cpu(), y.detach().numpy())


def options_of(loss):
    each = torch.linspace(0.5, 1.5, 200, dtype=torch.float64).reshape(2, 100)
    options = {"softcap": 9.1, "logit_scale": 0.7, "temperature": each}
    if not loss.of_ids:
        weights = torch.linspace(0, 2, 1300, dtype=torch.float64)
        options |= {"label_smoothing": 0.1, "z_loss": 0.01, "token_weight": each.flip(0), "class_weight": weights}
    return options


LOSSES = [
    Loss(LCE.op, LCE.checks, {"strategy": "stash", "normalizer": 7.1}),
    Loss(LCE.op, LCE.checks, {"strategy": "recompute", "reduction": "none"}),
    Loss(CE.op, CE.checks, {"reduction": "none"}),
    Loss(LLP.op, LLP.checks, {"entropy": True}),
    Loss(LP.op, LP.checks, {"entropy": True}),
]


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_the_oracle_in_several_chunks(loss):
    """With every statistic, and some tokens ignored."""
    given = loss.problem((2, 100), vocab=1300, ids=2 if loss.of_ids else None, dtype=torch.float64)
    given[loss.ids][:, ::9] = -100
    budget = 300 << 10
    if loss.linear:
        more = {"ids": 2, "more_stats": 2} if loss.of_ids else {"smoothing": 0.1, "class_weight": True}
        p = Problem(200, 16, 1300, "float64", grad_bias=True, softcap=True, stats=True, compacted=True, **more)
        budget = memory.scratch_at_least(p, loss.options.get("strategy", "recompute")) + 8 * 64
    with nan_filled():
        made = loss.run(given, **options_of(loss), scratch_bytes=budget)
    right = loss.oracle(given, loss.upstream(made), **options_of(loss))
    for name, x in made.items():
        if x.is_floating_point():
            assert_near(name, x, getattr(right, name))


@pytest.mark.parametrize("loss", [LCE, CE], ids=str)
@pytest.mark.parametrize("form", ["log_probs", "dense"])
def test_the_oracle_of_soft_labels(loss, form):
    given = problem(loss, form, dtype=torch.float64)
    leaves = {name: x for name, x in given.items() if name != "target"}
    made = loss.op(**given, **everything())
    right = oracle(loss, given, torch.ones(()), **everything())
    assert_near("loss", made.detach(), right.loss)
    for name, g in zip(leaves, torch.autograd.grad(made, list(leaves.values())), strict=True):
        assert_near(name, g, getattr(right, f"grad_{name}"))


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("op", ["linear_jsd", "jsd"])
def test_the_oracle_of_divergences(op, beta):
    example = EXAMPLES[f"{op} beta=0.3" if op == "linear_jsd" else op]
    leaves = {name: as_torch(x, requires_grad=True) for name, x in example.leaves.items()}
    options = example.options | {"beta": beta}
    made = getattr(onchip.torch, op)(**leaves, **{name: as_torch(x) for name, x in options.items()})
    right = getattr(checks, op)(**example.leaves, **{n: x for n, x in options.items() if n != "teacher_grad"})
    assert_near("loss", made.detach(), right.loss)
    for name, g in zip(leaves, torch.autograd.grad(made, list(leaves.values())), strict=True):
        assert_near(name, g, getattr(right, f"grad_{name}"))


def test_numbers_beyond_float32():
    """A logit far below float32's, a probability of 1e-130, and logits that float32 can't tell apart."""
    logits = torch.tensor([[-1e200, -2e200], [0.0, -300.0], [1e9, 1e9 + 1]], dtype=torch.float64)
    logits = logits.requires_grad_()
    made = onchip.torch.log_probs(logits, torch.tensor([0, 1, 0]), entropy=True, lse=True)
    right = torch.tensor([0.0, -300.0, -float(np.log1p(np.e))], dtype=torch.float64)
    assert torch.equal(made.log_prob[:2], right[:2])
    assert_near("log_prob", made.log_prob.detach()[2], right[2])
    p = np.exp(-300.0)
    assert float(made.entropy[1].detach()) == pytest.approx(301 * p, rel=1e-12)
    (g,) = torch.autograd.grad(made.entropy.sum(), logits)
    assert float(g[1, 1]) == pytest.approx(300 * p, rel=1e-12)


def test_the_linear_layer_of_a_call():
    """Added to a float64 gradient; and autocast leaves float64 alone, as it does with F.linear."""
    given = LCE.problem(dtype=torch.float64)
    made = onchip.torch.linear_cross_entropy(**given, reduction="sum")
    expected = torch.autograd.grad(made, given["weight"])[0]
    for strategy in ("stash", "recompute"):
        total = torch.ones_like(given["weight"])
        with torch.autocast("cpu", torch.bfloat16):
            again = onchip.torch.linear_cross_entropy(
                **given, reduction="sum", strategy=strategy, weight_grad_out=total.requires_grad_(False)
            )
        assert_near("loss", again.detach(), made.detach().numpy())
        again.backward()
        assert given["weight"].grad is None
        assert_near("weight", total, (1 + expected).numpy())
