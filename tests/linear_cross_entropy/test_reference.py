"""The oracle itself: against PyTorch's autograd in float64, and against finite differences."""

import numpy as np
import pytest
import torch

from onchip.ops.linear_cross_entropy.cases import CHECK_CASES, Case, make_inputs
from onchip.ops.linear_cross_entropy.checks import as_arguments, plain_linear_cross_entropy, run_oracle
from onchip.ops.linear_cross_entropy.reference import linear_cross_entropy

# -inf logits have no gradient in the plain expression with label smoothing; no case has both.
CASES = {case.name: case for case in CHECK_CASES if case.vocab < 10_000}


@pytest.mark.parametrize("name", CASES)
def test_matches_autograd_in_float64(name):
    case = CASES[name]
    inputs = make_inputs(case, seed=1)
    arguments, keywords = as_arguments(case, inputs, torch.float64, "cpu")
    loss = plain_linear_cross_entropy(*arguments, **keywords)
    loss.backward(torch.from_numpy(np.asarray(inputs.grad_loss)).to(loss))
    oracle = run_oracle(arguments, keywords, inputs)
    np.testing.assert_allclose(oracle.loss, loss.detach(), rtol=1e-12, atol=1e-14)
    names = ("grad_hidden", "grad_weight", "grad_bias")
    for name, x in zip(names, (arguments[0], arguments[1], arguments[3]), strict=True):
        if x is not None:
            ref = x.grad.numpy()
            assert np.linalg.norm(getattr(oracle, name) - ref) <= 1e-11 * max(1e-3, np.linalg.norm(ref)), name


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_gradients_match_finite_differences(reduction):
    case = Case(
        "tiny", 5, 4, 7, bias=True, token_weight=True, token_temperature=True,
        options={"reduction": reduction, "softcap": 3.0, "label_smoothing": 0.2, "z_loss": 0.1, "logit_scale": 0.7},
    )  # fmt: skip
    x = make_inputs(case)
    target = x.target.copy()
    target[2] = -100
    upstream = x.grad_loss if reduction == "none" else np.float64(1.7)

    def run(hidden, weight, bias):
        return linear_cross_entropy(
            hidden, weight, target, bias,
            token_weight=x.token_weight, temperature=x.temperature, grad_loss=upstream, **case.options,
        )  # fmt: skip

    point = [np.float64(a) for a in (x.hidden, x.weight, x.bias)]
    result = run(*point)
    for i, gradient in enumerate((result.grad_hidden, result.grad_weight, result.grad_bias)):
        for index in np.ndindex(gradient.shape):
            step = np.zeros_like(point[i])
            step[index] = 1e-6
            high, low = (
                np.sum(upstream * run(*(p + sign * step if j == i else p for j, p in enumerate(point))).loss)
                for sign in (1, -1)
            )
            assert (high - low) / 2e-6 == pytest.approx(gradient[index], abs=1e-8, rel=1e-6)


def test_statistics_match_their_definitions():
    x = make_inputs(Case("tiny", 6, 4, 9))
    z = np.float64(x.hidden) @ np.float64(x.weight).T / 0.5
    p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    result = linear_cross_entropy(x.hidden, x.weight, x.target, temperature=0.5)
    np.testing.assert_allclose(result.lse, np.log(np.exp(z).sum(1)))
    np.testing.assert_allclose(result.log_prob, np.log(p[np.arange(6), x.target]))
    np.testing.assert_allclose(result.entropy, -(p * np.log(p)).sum(1))
    np.testing.assert_array_equal(result.correct, z.argmax(1) == x.target)


def test_blocks_of_tokens_change_nothing(monkeypatch):
    x = make_inputs(Case("tiny", 50, 8, 64))
    whole = linear_cross_entropy(x.hidden, x.weight, x.target)
    monkeypatch.setattr("onchip.oracle.reference._BLOCK_LOGITS", 64 * 7)
    for a, b in zip(whole, linear_cross_entropy(x.hidden, x.weight, x.target), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-16)


def test_a_bad_label_is_nan_and_touches_its_token_alone():
    x = make_inputs(Case("tiny", 4, 4, 7))
    target = x.target.copy()
    target[1] = 7
    result = linear_cross_entropy(x.hidden, x.weight, target, reduction="none", grad_loss=np.ones(4))
    assert np.isnan(result.loss).tolist() == [False, True, False, False]
    assert np.isnan(result.grad_hidden).all(1).tolist() == [False, True, False, False]
    assert np.isnan(result.grad_weight).all()
