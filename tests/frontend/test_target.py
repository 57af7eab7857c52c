"""`labels` is another name for `target`."""

import jax.numpy as jnp
import pytest
import torch

from onchip import jax as in_jax
from onchip import torch as in_torch

HIDDEN, WEIGHT = torch.randn(4, 8), torch.randn(20, 8)
TARGET = torch.tensor([3, -100, 19, 0])
LINEAR, LOGITS = (HIDDEN, WEIGHT), (HIDDEN @ WEIGHT.T,)
TAUGHT = {"hard_weight": 0.5}
CALLS = {
    "linear_cross_entropy": (LINEAR, {}),
    "cross_entropy": (LOGITS, {}),
    "linear_jsd": (2 * LINEAR, TAUGHT),
    "jsd": (2 * LOGITS, TAUGHT),
}
MODULES = {"LinearCrossEntropyLoss": LINEAR, "CrossEntropyLoss": LOGITS}


@pytest.mark.parametrize("name", CALLS)
def test_labels_are_the_target(name):
    given, options = CALLS[name]
    run = getattr(in_torch, name)
    assert run(*given, target=TARGET, **options) == run(*given, labels=TARGET, **options)
    given = [jnp.asarray(x) for x in given]
    run, target = getattr(in_jax, name), jnp.asarray(TARGET)
    assert run(*given, target=target, **options) == run(*given, labels=target, **options)


@pytest.mark.parametrize("name", MODULES)
def test_labels_are_the_target_of_a_module(name):
    module = getattr(in_torch, name)()
    assert module(*MODULES[name], TARGET) == module(*MODULES[name], labels=TARGET)


@pytest.mark.parametrize(("name", "given"), [("linear_log_probs", LINEAR), ("log_probs", LOGITS)])
def test_labels_are_the_ids(name, given):
    run = getattr(in_torch, name)
    assert torch.equal(run(*given, TARGET), run(*given, labels=TARGET))
