"""The kernels that are compiled for a call don't depend on the number of tokens.

A call runs as far as its operator.  The operator is rehearsed, forward and backward, on tensors without memory, and the
launches that it would make are collected.
"""

import random
from collections import defaultdict
from contextlib import ExitStack
from functools import partial
from unittest import mock

import pytest
import torch

import launched_cases
from launched import Recorder, bound_by_one_function, on_h100
from launched_cases import grouped, head, of_logits, quantised, two_heads
from onchip.frontend.torch_ahead import without_memory
from onchip.frontend.torch_register import Operator
from onchip.kernels.triton.launch import Launch
from onchip.ops.cross_entropy import checks as logits_cases
from onchip.ops.fp8_linear import cases as fp8_cases
from onchip.ops.grouped_matmul import cases as grouped_cases
from onchip.ops.linear_cross_entropy import checks as head_cases
from onchip.ops.linear_jsd import checks as jsd_cases
from onchip.ops.linear_log_probs import checks as log_probs_cases
from onchip.torch import jsd, linear_cross_entropy, linear_log_probs, log_probs

# Kernels of one head and set of options for all lengths, with those that stand in for each other.
MOST = 20

# ------------------------------------------------------------------------------------------------------------- calls


def _of_heads(cases, op=linear_cross_entropy):
    """By all that a case has but its tokens and how many of them are ignored."""
    for case in cases:
        more = {"frozen": True} if getattr(case, "frozen", False) else {}
        more |= {"weight_dtype": torch.float32} if getattr(case, "autocast", False) else {}
        yield head, {"op": op, "hidden": case.hidden, "vocab": case.vocab, **more, **case.options}


def _heads():
    yield from _of_heads(head_cases.SUITES["users"])
    yield from _of_heads(log_probs_cases.SUITES["cuda"], linear_log_probs)
    yield head, {"op": linear_log_probs, "hidden": 4096, "vocab": 128256, "ids": 4}


def _more_heads():
    yield from _of_heads(head_cases.SUITES["cuda"])
    yield from _of_heads(log_probs_cases.SUITES["others"], linear_log_probs)


def _of_two_heads(cases):
    for case in cases:
        teacher_hidden = case.teacher_hidden or case.hidden
        sizes = {"hidden": case.hidden, "teacher_hidden": teacher_hidden, "vocab": case.vocab}
        yield two_heads, {**sizes, **case.options}


def _others():
    yield from _of_two_heads(jsd_cases.SUITES["cuda"])
    for case in logits_cases.SUITES["cuda"]:
        yield of_logits, {"vocab": case.vocab, "sliced": case.sliced}
    yield of_logits, {"vocab": 50257, "reduction": "none", "label_smoothing": 0.1, "z_loss": 1e-4}
    yield of_logits, {"vocab": 128256, "return_stats": True}
    yield of_logits, {"op": jsd, "vocab": 128256}
    for options in ({}, {"entropy": True}, {"ids": 4}):
        yield of_logits, {"op": log_probs, "vocab": 128256, **options}
    yield head, {"hidden": 1024, "vocab": 8192, "labels": "dense"}
    yield of_logits, {"vocab": 1000, "labels": "dense"}
    for model in grouped_cases.MODELS:
        yield grouped, {"model": model}
        yield grouped, {"model": model, "activation": "swiglu"}
    for options in ({"way": "rows", "activation": "swiglu"}, {"way": "scattered"}, {"way": "added"}):
        yield grouped, {"model": grouped_cases.MODELS[-1], **options}
    for options in ({}, {"add": True, "grad_dtype": "e5m2"}):
        yield quantised, {"n": 4096, "k": 14336, **options}


def _more_others():
    yield from _of_two_heads(jsd_cases.SUITES["others"])
    for case in logits_cases.SUITES["others"]:
        yield of_logits, {"vocab": case.vocab}
    for case in fp8_cases.SUITES["cuda"]:
        yield quantised, {"n": case.n, "k": case.k}


def _named(calls):
    def text(x):
        return getattr(x, "__name__", None) or getattr(x, "name", None) or str(x)

    return {" ".join((f.__name__, *(f"{k}={text(x)}" for k, x in options.items()))): partial(f, **options)
            for f, options in calls}  # fmt: skip


HEADS, OTHERS = _named(_heads()), _named(_others())
MORE_HEADS, MORE_OTHERS = _named(_more_heads()), _named(_more_others())
CALLS = HEADS | OTHERS | MORE_HEADS | MORE_OTHERS


def every(*calls, quick=lambda name: True):
    """The names of all, the first ones' quickly checked if they are among the `quick`."""
    names = dict.fromkeys(name for some in calls for name in some)
    return [x if x in calls[0] and quick(x) else pytest.param(x, marks=pytest.mark.slow) for x in names]


def is_of_another_kind(name):
    return any(part in name for part in ("hidden=1024", "softcap", "smoothing", "entropy=", "ids="))


def is_no_divergence_at_an_end(name):
    """With a beta of 0 or 1, which has fewer kernels."""
    return not name.startswith("two_heads") or not ("beta=0.0" in name or "beta=1.0" in name)


# --------------------------------------------------------------------------------------------------- what is launched


@pytest.fixture(autouse=True, scope="module")
def binders():
    with bound_by_one_function():
        yield


def kind_of(launch):
    """What is asked of the compiler, and what of it depends on numbers and addresses alone."""
    source = launch.job(90).source
    kind = launch.kernel.__name__, str(source.signature), str(source.constants), str(launch.options)
    return kind, str(source.attrs)


class _Reached(Exception):
    """What a call comes to."""

    def __init__(self, operator, call):
        self.operator, self.call = operator, call


def _reach(operator, call):
    raise _Reached(operator, call)


def asked_for(call, rehearse):
    """What `rehearse`, of the call's operator and arguments, asks the compiler for, each once."""
    found = {}

    def add(launch):
        found.setdefault(kind_of(launch))

    def spills(launch, *_):  # what is looked at is compiled
        return add(launch) or False

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(launched_cases, "recorded", lambda op, given, how, **_: op(**how)))
        stack.enter_context(on_h100(Recorder()))
        stack.enter_context(mock.patch.object(Launch, "run", add))
        stack.enter_context(mock.patch.object(Launch, "spills", spills))
        with mock.patch.object(Operator, "is_plain", _reach), pytest.raises(_Reached) as reached:
            call()
        rehearse(reached.value.operator, reached.value.call)
    return list(found)


def compiled(call, tokens):
    def rehearse(operator, arguments):
        given = operator.call.tensors_of(arguments)
        operator._rehearse_with(arguments, [without_memory(x) for x in given])

    return asked_for(partial(call, tokens), rehearse)


def rehearsed(call, tokens):
    """What the first launch of a call finds out about the others, and about calls of other lengths."""
    return asked_for(partial(call, tokens), lambda operator, arguments: operator._rehearse(arguments))


def lengths(number, least=1, most=100_000):
    draw = random.Random(number)
    between = (round(least * (most / least) ** draw.random()) for _ in range(number))
    return [least, most, *between]


def check_all_lengths(call, number):
    found, most = defaultdict(set), defaultdict(int)
    for tokens in {16, 8192, *lengths(number)}:
        of_length = defaultdict(set)
        for kind, attributes in compiled(call, tokens):
            of_length[kind].add(attributes)
        for kind, attributes in of_length.items():
            found[kind] |= attributes
            most[kind] = max(most[kind], len(attributes))
    # What differs in nothing but 16's divisibility differs in one call.
    assert {kind: x for kind, x in found.items() if len(x) > most[kind]} == {}
    assert sum(len(x) for x in found.values()) <= MOST, sorted(kind[0] for kind in found)


@pytest.mark.parametrize("name", every(HEADS | OTHERS, quick=is_no_divergence_at_an_end))
def test_few_kernels_for_all_lengths(name):
    check_all_lengths(CALLS[name], 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_few_kernels_for_a_thousand_lengths(name):
    check_all_lengths(CALLS[name], 1000)


@pytest.mark.parametrize("name", every(HEADS, MORE_HEADS, quick=is_of_another_kind))
def test_the_first_launch_knows_all_kernels(name):
    known = set(rehearsed(CALLS[name], 3000))
    for tokens in (1003, 5007, 8999):
        assert not set(compiled(CALLS[name], tokens)) - known
    assert len(known) <= MOST


@pytest.mark.parametrize("name", every(OTHERS, MORE_OTHERS, quick=is_no_divergence_at_an_end))
def test_no_kernels_after_the_second_call(name):
    """Of lengths that differ by no more than a factor of 3."""
    for least in (100, 3000, 30_000):
        first, second, *others = lengths(2, least, 3 * least)
        known = {x for tokens in (first, second) for x in compiled(CALLS[name], tokens)}
        assert not {x for tokens in others for x in compiled(CALLS[name], tokens)} - known
