"""The float64 oracle compared with finite differences, autograd and known values."""

import numpy as np
import pytest
import torch

from onchip.ops.linear_jsd import checks
from onchip.ops.linear_jsd.checks import plain_divergence

BETAS = (0.0, 0.25, 0.5, 0.9, 1.0)
# At V = 2, s = (.9, .1), t = (.2, .8): the true gradients, which (1 - b)(s - m) misses.
KNOWN = {0.25: 0.082878, 0.5: 0.089845, 0.75: 0.060931}


@pytest.mark.parametrize("beta", KNOWN)
def test_known_values(beta):
    z, u = np.log([[0.9, 0.1]]), np.log([[0.2, 0.8]])
    grad = checks.jsd(z, u, beta=beta).grad_student_logits
    np.testing.assert_allclose(grad, [[KNOWN[beta], -KNOWN[beta]]], atol=1e-6)


def small(seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((3, 7)), rng.standard_normal((3, 7)), rng


def differences(f, x, step=1e-5):
    out = np.zeros_like(x)
    for i in np.ndindex(x.shape):
        up, down = x.copy(), x.copy()
        up[i] += step
        down[i] -= step
        out[i] = (f(up) - f(down)) / (2 * step)
    return out


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("hard_weight", [0.0, 0.3])
def test_gradients_are_finite_differences(beta, hard_weight):
    z, u, rng = small()
    upstream = rng.standard_normal(3)
    options = {
        "beta": beta, "temperature": 1.7, "temperature_squared": True, "hard_weight": hard_weight, "vocab": 6,
        "target": np.array([1, -100, 5]), "token_weight": rng.random(3), "reduction": "none",
    }  # fmt: skip
    r = checks.jsd(z, u, grad_loss=upstream, **options)
    for x, grad, f in (
        (z, r.grad_student_logits, lambda x: (checks.jsd(x, u, **options).loss * upstream).sum()),
        (u, r.grad_teacher_logits, lambda x: (checks.jsd(z, x, **options).loss * upstream).sum()),
    ):
        np.testing.assert_allclose(grad, differences(f, x), atol=1e-8)
        assert not grad[1].any()


def topk_of(u, k, rest):
    log_t = u - np.log(np.exp(u).sum(1, keepdims=True))
    indices = np.argsort(-u, 1)[:, :k]
    return indices, np.take_along_axis(log_t, indices, 1), "log_probs", rest


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("rest", ["tail", "truncated", "renormalised"])
def test_top_k_gradients_are_finite_differences(beta, rest):
    z, u, _ = small()
    given = {"teacher_topk": topk_of(u, 3, rest), "beta": beta}
    expected = differences(lambda x: checks.jsd(x, **given).loss, z)
    np.testing.assert_allclose(checks.jsd(z, **given).grad_student_logits, expected, atol=1e-8)


@pytest.mark.parametrize("rest", ["tail", "truncated", "renormalised"])
def test_a_top_k_of_everything_is_the_full_divergence(rest):
    z, u, _ = small()
    with np.errstate(divide="ignore"):
        part = checks.jsd(z, teacher_topk=topk_of(u, 7, rest))
    np.testing.assert_allclose(part.loss, checks.jsd(z, u).loss, rtol=1e-12)


@pytest.mark.parametrize("beta", BETAS)
def test_heads_are_what_autograd_says(beta):
    g = torch.Generator().manual_seed(0)
    h, w, x, v, b, c = (
        torch.randn(*shape, generator=g, dtype=torch.float64, requires_grad=True)
        for shape in ((2, 3, 4), (9, 4), (2, 3, 5), (9, 5), (9,), (9,))
    )
    loss = plain_divergence((h @ w.T + b).log_softmax(-1), (x @ v.T + c).log_softmax(-1), beta)
    loss.mean().backward()
    r = checks.linear_jsd(
        *(p.detach().numpy() for p in (h, w, x, v)), student_bias=b.detach().numpy(), teacher_bias=c.detach().numpy(),
        beta=beta,
    )  # fmt: skip
    np.testing.assert_allclose(r.loss, loss.mean().item(), rtol=1e-12)
    for p, q in zip((h, w, b), r[1:4], strict=True):
        np.testing.assert_allclose(p.grad.numpy(), q, atol=1e-14)
    for p, q in zip((x, v, c), r[5:8], strict=True):
        np.testing.assert_allclose(p.grad.numpy(), q, atol=1e-14)


def test_the_mean_divides_the_gradients():
    z, u, _ = small()
    once, twice = checks.jsd(z, u), checks.jsd(np.tile(z, (2, 1)), np.tile(u, (2, 1)))
    np.testing.assert_allclose(once.loss, twice.loss)
    np.testing.assert_allclose(once.grad_student_logits / 2, twice.grad_student_logits[:3])
