"""The patch on transformers' models, one of each kind: the same losses and gradients, and no logits."""

import pytest

from integrations.transformers_models import TESTED, build, compare


@pytest.mark.parametrize("model_type", TESTED)
def test_a_patched_step_is_that_of_the_model(model_type):
    model, why = build(model_type)
    assert model is not None, why
    report, loss, grads = compare(model)
    assert (report.losses, report.materialized) == (1, {})
    assert loss < 1e-5
    assert grads < 1e-5


def test_a_model_whose_own_loss_is_no_cross_entropy():
    """It takes log_softmax of the logits, which are computed and stored, once."""
    model, why = build("prophetnet")
    assert model is not None, why
    report, loss, grads = compare(model)
    assert (report.losses, report.materialized) == (0, {"transpose": 1})
    assert loss < 1e-5
    assert grads < 1e-5
