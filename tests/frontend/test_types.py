"""Overloads and literals: the types of a public function name all of its arguments, and no others."""

import inspect
from typing import TypedDict, get_args, get_origin, get_overloads, get_type_hints

import pytest

from onchip import jax as in_jax
from onchip import torch as in_torch
from onchip.ops.cross_entropy import torch_op as ce
from onchip.ops.fp8_linear import torch_op as fp8
from onchip.ops.linear_cross_entropy import torch_op as lce
from onchip.vocab import jax_ways

NAMES = ("cross_entropy", "linear_cross_entropy", "linear_log_probs", "log_probs")
FUNCTIONS = [getattr(framework, name) for framework in (in_torch, in_jax) for name in NAMES]
FUNCTIONS += [in_jax.sharded_linear_cross_entropy, in_jax.sharded_linear_log_probs]
FUNCTIONS += [module.__init__ for module in (in_torch.CrossEntropyLoss, in_torch.LinearCrossEntropyLoss)]


def named(function):
    """The arguments by their names, those of `**options: Unpack[TypedDict]` among them."""
    names = set()
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is not parameter.VAR_KEYWORD:
            names.add(parameter.name)
        else:
            (given,) = get_args(parameter.annotation)
            options = get_origin(given) or given  # of one with an argument of its own
            assert type(options) is type(TypedDict("Empty", {}))
            names |= set(get_type_hints(options))
    return names


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda x: f"{x.__module__}.{x.__qualname__}")
def test_overloads_have_the_functions_arguments(function):
    overloads = get_overloads(function)
    assert len(overloads) == 3
    for overload in overloads:
        assert named(overload) == {*inspect.signature(function).parameters}


def test_heads_take_the_options_of_their_loss():
    of_module = {*inspect.signature(in_torch.LinearCrossEntropyLoss).parameters}
    for function in (in_torch.LMHead.__init__, in_torch.LMHead.from_linear):
        layer = {"self", "cls", "linear", "in_features", "out_features", "bias", "device", "dtype"}
        for overload in get_overloads(function):
            overload = getattr(overload, "__func__", overload)  # of a class method
            assert named(overload) - layer == of_module


def test_doors_of_heads_take_the_options_of_their_op():
    of_log_probs = {*inspect.signature(in_torch.linear_log_probs).parameters} - {"weight", "bias"}
    for overload in get_overloads(in_torch.lm_log_probs):
        assert named(overload) - {"head"} == of_log_probs
    of_layers = {f"{who}_{part}" for who in ("student", "teacher") for part in ("weight", "bias")}
    of_jsd = {*inspect.signature(in_torch.linear_jsd).parameters} - of_layers
    assert named(in_torch.lm_jsd) == of_jsd | {"student", "teacher", "shift"}


def test_backends_are_the_words_of_their_type():
    assert get_args(lce.Backend) == get_args(ce.Backend) == ("auto", *lce.BACKENDS, "torch")
    assert lce.BACKENDS == ce.BACKENDS
    assert get_args(fp8.Backend) == ("auto", *fp8.BACKENDS)
    for names in jax_ways.BACKENDS.values():
        assert {*get_args(jax_ways.Backend)} == {"auto", "triton", *names}
