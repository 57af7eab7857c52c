"""The oracle itself: its gradients against PyTorch's autograd in float64, and against finite differences."""

import numpy as np
import pytest
import torch
from common_llp import gradients

from onchip.ops.linear_log_probs import reference
from onchip.ops.linear_log_probs.cases import CHECK_CASES, make_inputs
from onchip.ops.linear_log_probs.checks import as_arguments, plain_linear_log_probs, run_oracle


@pytest.mark.parametrize("name", ["one class", "half ignored", "all ignored", "masked vocab", "softcap", "everything"])
def test_against_autograd_in_float64(name):
    case = next(c for c in CHECK_CASES if c.name == name)
    inputs = make_inputs(case)
    arguments, keywords = as_arguments(case, inputs, torch.float32, "cpu")
    oracle = run_oracle(arguments, keywords, inputs)
    wide = [x if x is None or not x.is_floating_point() else x.detach().double().requires_grad_() for x in arguments]
    keywords = {k: x.double() if isinstance(x, torch.Tensor) else x for k, x in keywords.items()}
    out = plain_linear_log_probs(*wide, **keywords)
    for name, x in (out._asdict() | gradients(out, wide, inputs)).items():
        np.testing.assert_allclose(x.detach().numpy(), getattr(oracle, name), rtol=1e-7, atol=1e-9, err_msg=name)


def test_against_finite_differences():
    rng = np.random.default_rng(0)
    h, w, ids = rng.standard_normal((4, 3)), rng.standard_normal((7, 3)), rng.integers(7, size=(4, 2))
    upstream = {name: rng.standard_normal(4) for name in ("grad_entropy", "grad_lse")}
    upstream["grad_log_prob"] = rng.standard_normal((4, 2))
    options = {"softcap": 2.0, "logit_scale": 0.7, "temperature": rng.uniform(0.5, 2, 4)}

    def value(h):
        out = reference.linear_log_probs(h, w, ids, **options)
        return sum((getattr(out, name.removeprefix("grad_")) * g).sum() for name, g in upstream.items())

    made = reference.linear_log_probs(h, w, ids, **options, **upstream).grad_hidden
    for i in np.ndindex(h.shape):
        step = np.zeros_like(h)
        step[i] = 1e-6
        assert made[i] == pytest.approx((value(h + step) - value(h - step)) / 2e-6, rel=1e-6, abs=1e-7)


def test_an_id_out_of_range_gives_nan():
    out = reference.linear_log_probs(np.ones((2, 3)), np.ones((5, 3)), [[1, 7], [0, -100]])
    assert np.isnan(out.log_prob).tolist() == [[False, True], [False, False]]
    assert np.isnan(out.grad_hidden).all(1).tolist() == [True, False]
