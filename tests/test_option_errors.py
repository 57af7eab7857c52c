"""Every wrong option of every public function, in both frameworks, made from the specification of the options.

A number is refused as `onchip.frontend.options` refuses it, in the op's words; so are words that a type doesn't have,
and flags other than True and False.  What is special to an op is in its own tests.
"""

import inspect
import math
from typing import Literal, get_args, get_origin, get_type_hints

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import onchip.jax
import onchip.torch
from onchip.frontend.options import _NUMBERS
from onchip.frontend.torch_inputs import options_of
from onchip.ops.cross_entropy import CrossEntropyOptions
from shared import assert_refused

rng = np.random.default_rng(0)
X, W, Z = (rng.standard_normal(shape, np.float32) for shape in ((4, 8), (16, 8), (4, 16)))
IDS, QKV = np.zeros(4, np.int32), dict.fromkeys("qkv", X[None, :, None])
HEAD, PAIR = {"hidden": X, "weight": W}, {f"{who}_logits": Z for who in ("student", "teacher")}
HEADS = {f"{who}_{name}": x for who in ("student", "teacher") for name, x in HEAD.items()}
ARGUMENTS = {
    "linear_cross_entropy": HEAD | {"target": IDS},
    "cross_entropy": {"logits": Z, "target": IDS},
    "linear_log_probs": HEAD | {"ids": IDS},
    "log_probs": {"logits": Z, "ids": IDS},
    "linear_jsd": HEADS,
    "jsd": PAIR,
    "fp8_linear": {"x": X, "weight": W},
    "grouped_matmul": {"x": X, "weight": W[None], "group_sizes": IDS[:1]},
    "attention": QKV,
}
VALUES = (-1.0, -0.1, 0, 0.0, 1.1, 1.5, math.nan, math.inf, True, "1", None, 2**63, -(2**63) - 1)
# Numbers of these types have a meaning of their own.
NOT_ALONE = {"scratch_bytes": (float, str)}


def refusal(op, name, value):
    """What the specification raises of an option's value, or None."""
    try:
        _NUMBERS[name][1](op, name, value)
    except (TypeError, ValueError) as error:
        return type(error), str(error)
    return None


def words_of(hint):
    """Those of a Literal, or of one among several types."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    return next((found for x in get_args(hint) if (found := words_of(x))), ())


def wrong_options(op, function):
    """An option, a value, and how it is refused."""
    hints = get_type_hints(inspect.unwrap(function))
    for name, parameter in inspect.signature(function).parameters.items():
        if name in _NUMBERS:
            values = [x for x in VALUES if not isinstance(x, NOT_ALONE.get(name, ())) or isinstance(x, bool)]
            yield from ((name, x, *found) for x in values if (found := refusal(op, name, x)))
        elif isinstance(parameter.default, bool):
            yield from ((name, x, TypeError, f"{name} must be True or False; got ") for x in (1, None, "yes"))
        elif words_of(hints.get(name)):
            yield from ((name, x, ValueError, f"{name} must be ") for x in ("nonsense", ["auto"]))


@pytest.mark.parametrize("op", ARGUMENTS)
@pytest.mark.parametrize("framework", [onchip.torch, onchip.jax], ids=["torch", "jax"])
def test_options_are_refused_as_the_specification_says(framework, op):
    put = torch.from_numpy if framework is onchip.torch else jnp.asarray
    given, function = {name: put(x) for name, x in ARGUMENTS[op].items()}, getattr(framework, op)
    wrong = list(wrong_options(op, function))
    assert wrong
    for name, value, kind, message in wrong:
        assert_refused(op, lambda name=name, x=value: function(**given, **{name: x}), kind, message)


def test_options_that_were_checked_are_checked_no_more_but_others_are():
    made = options_of(CrossEntropyOptions, z_loss=1.0)
    assert options_of(CrossEntropyOptions, z_loss=1.0) is made
    assert options_of(CrossEntropyOptions, z_loss=0.5).z_loss == 0.5
    assert options_of(CrossEntropyOptions, z_loss=1).z_loss == 1
    for wrong in (True, [1.0], torch.ones(()), "1.0"):  # equal to it, without a hash, and others
        with pytest.raises(TypeError, match="z_loss must be"):
            options_of(CrossEntropyOptions, z_loss=wrong)
