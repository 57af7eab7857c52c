"""The oracle itself: against PyTorch's autograd in float64, and against finite differences."""

import numpy as np
import pytest
import torch

from onchip.ops.cross_entropy.cases import CHECK_CASES, Case, make_inputs
from onchip.ops.cross_entropy.checks import as_arguments, run_oracle
from onchip.ops.cross_entropy.reference import cross_entropy
from onchip.oracle.checks import plain_cross_entropy

CASES = {case.name: case for case in CHECK_CASES if case.vocab < 10_000}


@pytest.mark.parametrize("name", CASES)
def test_matches_autograd_in_float64(name):
    case = CASES[name]
    inputs = make_inputs(case, seed=1)
    (logits, target), keywords = as_arguments(case, inputs, torch.float64, "cpu")
    loss = plain_cross_entropy(logits, target, **keywords)
    (grad,) = torch.autograd.grad(loss, logits, torch.from_numpy(np.asarray(inputs.grad_loss)).to(loss))
    oracle = run_oracle([logits, target], keywords, inputs)
    np.testing.assert_allclose(oracle.loss, loss.detach(), rtol=1e-12, atol=1e-14)
    assert np.linalg.norm(oracle.grad_logits - grad.numpy()) <= 1e-11 * max(1e-3, float(grad.norm()))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_gradients_match_finite_differences(reduction):
    case = Case(
        "tiny", 5, 7, token_weight=True, token_temperature=True,
        options={"reduction": reduction, "softcap": 3.0, "label_smoothing": 0.2, "z_loss": 0.1, "logit_scale": 0.7},
    )  # fmt: skip
    x = make_inputs(case)
    target = x.target.copy()
    target[2] = -100
    upstream = x.grad_loss if reduction == "none" else np.float64(1.7)

    def run(logits):
        return cross_entropy(
            logits, target, token_weight=x.token_weight, temperature=x.temperature, grad_loss=upstream, **case.options
        )

    point = np.float64(x.logits)
    result = run(point)
    for index in np.ndindex(point.shape):
        step = np.zeros_like(point)
        step[index] = 1e-6
        high, low = (np.sum(upstream * run(point + sign * step).loss) for sign in (1, -1))
        assert (high - low) / 2e-6 == pytest.approx(result.grad_logits[index], abs=1e-8, rel=1e-6)


def test_statistics_match_their_definitions():
    x = make_inputs(Case("tiny", 6, 9))
    z = np.float64(x.logits) / 0.5
    p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    result = cross_entropy(x.logits, x.target, temperature=0.5)
    np.testing.assert_allclose(result.lse, np.log(np.exp(z).sum(1)))
    np.testing.assert_allclose(result.log_prob, np.log(p[np.arange(6), x.target]))
    np.testing.assert_allclose(result.entropy, -(p * np.log(p)).sum(1))
    np.testing.assert_array_equal(result.correct, z.argmax(1) == x.target)


def test_blocks_of_tokens_change_nothing(monkeypatch):
    x = make_inputs(Case("tiny", 50, 64))
    whole = cross_entropy(x.logits, x.target)
    monkeypatch.setattr("onchip.oracle.reference._BLOCK_LOGITS", 64 * 7)
    for a, b in zip(whole, cross_entropy(x.logits, x.target), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-16)


def test_a_bad_label_is_nan_and_touches_its_token_alone():
    x = make_inputs(Case("tiny", 4, 7))
    target = x.target.copy()
    target[1] = 7
    result = cross_entropy(x.logits, target, reduction="none", grad_loss=np.ones(4))
    assert np.isnan(result.loss).tolist() == [False, True, False, False]
    assert np.isnan(result.grad_logits).all(1).tolist() == [False, True, False, False]


def test_a_nearly_certain_target_keeps_the_digits_of_its_gradient():
    grad = cross_entropy([[50.0, 0.0]], [0]).grad_logits
    np.testing.assert_allclose(grad, [[-np.exp(-50.0), np.exp(-50.0)]], rtol=1e-12)
