"""The oracles of the losses, compared with PyTorch's autograd on the definition in float64."""

import numpy as np
import pytest
import torch

from losses import CE, LCE, LLP, LP, Loss
from onchip.ops.cross_entropy.checks import cross_entropy
from onchip.ops.linear_cross_entropy.checks import plain_linear_cross_entropy
from onchip.ops.linear_log_probs.checks import plain_linear_log_probs, plain_log_probs
from onchip.oracle.checks import plain_cross_entropy

PLAIN = {LCE: plain_linear_cross_entropy, CE: plain_cross_entropy, LLP: plain_linear_log_probs, LP: plain_log_probs}
LOSSES = [LCE, CE, *(Loss(x.op, x.checks, {"entropy": True}) for x in (LLP, LP))]
by_op = pytest.mark.parametrize("loss", LOSSES, ids=str)
# -inf logits have no gradient in the plain expression with label smoothing; no case has both.
CASES = [
    pytest.param(loss, case, id=f"{case}-{loss}") for loss in LOSSES for case in loss.own_cases() if case.vocab < 10_000
]


@pytest.mark.parametrize(("loss", "case"), CASES)
def test_autograd_in_float64(loss, case):
    inputs = loss.checks.make_inputs(case, seed=1)
    arguments, keywords = loss.checks.CHECKER.as_arguments(case, inputs, torch.float64)
    given = {n: x for n, x in zip(loss.checks.CHECKER.names, arguments, strict=True) if x is not None}
    plain = next(f for key, f in PLAIN.items() if key.op is loss.op)
    made = plain(**given, **keywords)
    made = made._asdict() if loss.of_ids else {"loss": made}
    leaves = {n: x for n, x in given.items() if x.requires_grad}
    upstream = [torch.from_numpy(np.asarray(getattr(inputs, f"grad_{n}"))).to(made[n]) for n in loss.values]
    grads = torch.autograd.grad([made[n] for n in loss.values], list(leaves.values()), upstream)
    made |= {f"grad_{n}": g for n, g in zip(leaves, grads, strict=True)}
    oracle = loss.checks.CHECKER.run_oracle(arguments, keywords, inputs)
    for name, x in made.items():
        expected = x.detach().numpy()
        infinite = np.isinf(expected)
        np.testing.assert_array_equal(getattr(oracle, name)[infinite], expected[infinite])
        error = np.linalg.norm(getattr(oracle, name)[~infinite] - expected[~infinite])
        assert error <= 1e-11 * max(1e-3, np.linalg.norm(expected[~infinite])), name


@by_op
def test_statistics_match_their_definitions(loss):
    given = {name: x.detach() for name, x in loss.problem((6,), 4, 9).items()}
    z = (given["hidden"] @ given["weight"].T + given["bias"]) if loss.linear else given["logits"]
    z = np.float64(z) / 0.5
    p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    result = loss.oracle(given, {}, temperature=0.5)
    y = given[loss.ids].numpy()
    np.testing.assert_allclose(result.lse, np.log(np.exp(z).sum(1)), rtol=1e-6)
    np.testing.assert_allclose(result.log_prob, np.log(p[np.arange(6), y]), rtol=1e-6)
    np.testing.assert_allclose(result.entropy, -(p * np.log(p)).sum(1), rtol=1e-6)
    if loss.of_ids:
        np.testing.assert_allclose(result.mean_logits, z.mean(1), rtol=1e-6)
        np.testing.assert_allclose(result.log_sum_sq_probs, np.log(np.square(p).sum(1)), rtol=1e-6)
    top = z.argmax(1)
    np.testing.assert_array_equal(result.top1 if loss.of_ids else result.argmax, top)
    if not loss.of_ids:
        np.testing.assert_array_equal(result.correct, top == y)
        np.testing.assert_allclose(result.target_logit, z[np.arange(6), y], rtol=1e-6)


@by_op
def test_blocks_of_tokens_change_nothing(loss, monkeypatch):
    given = {name: x.detach() for name, x in loss.problem((50,), 8, 64).items()}
    whole = loss.oracle(given, {})
    monkeypatch.setattr("onchip.oracle.reference._BLOCK_LOGITS", 64 * 7)
    for a, b in zip(whole, loss.oracle(given, {}), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-16)


@by_op
def test_a_bad_id_is_nan_and_touches_its_token_alone(loss):
    given = {name: x.detach() for name, x in loss.problem((4,), 4, 7).items()}
    given[loss.ids][1] = 7
    result = loss.oracle(given, {}, **({} if loss.of_ids else {"reduction": "none"}))
    bad = [False, True, False, False]
    assert np.isnan(getattr(result, loss.values[0])).tolist() == bad
    assert np.isnan(result.grad_hidden if loss.linear else result.grad_logits).all(1).tolist() == bad
    if loss.linear:
        assert np.isnan(result.grad_weight).all()


def test_a_nearly_certain_target_keeps_the_digits_of_its_gradient():
    grad = cross_entropy([[50.0, 0.0]], [0]).grad_logits
    np.testing.assert_allclose(grad, [[-np.exp(-50.0), np.exp(-50.0)]], rtol=1e-12)
