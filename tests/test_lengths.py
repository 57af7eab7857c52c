"""What is compiled for a head doesn't depend on how many tokens there are."""

import random
from collections import defaultdict

import pytest
import torch

from linear_cross_entropy import ahead_of_time
from onchip.frontend import torch_ahead
from onchip.torch import linear_log_probs

HOPPER = 90, 232448
# Heads of each kind: kernels differ by H; with fewer entries forward makes no gradients.
HEADS = {
    "turns": {"hidden": 576, "vocab": 16640},
    "staggered": {"hidden": 1024, "vocab": 16640},
    "wide": {"hidden": 4160, "vocab": 16640},
    "few entries": {"hidden": 520, "vocab": 1000},
    "smoothing": {"hidden": 1024, "vocab": 16640, "label_smoothing": 0.1, "z_loss": 1e-4},
    "softcap": {"hidden": 1024, "vocab": 16640, "softcap": 30.0},
    "none": {"hidden": 1024, "vocab": 16640, "reduction": "none"},
    "float32 weight": {"hidden": 1024, "vocab": 16640, "parameters": torch.float32},
    "log-probs": {"hidden": 1024, "vocab": 16640, "op": linear_log_probs},
}
# Kernels of one head for all lengths, with those that stand in for each other.
MOST = 28


def kind_of(launch):
    """What is asked of the compiler, and what of it depends on numbers and addresses alone."""
    source = ahead_of_time.source_of(launch)
    kind = launch.kernel.__name__, str(source.signature), str(source.constants), str(launch.options)
    return kind, str(source.attrs)


def compiled(tokens, head):
    return [kind_of(x) for x in ahead_of_time.launches(HOPPER, tokens=tokens, in_turns=True, **HEADS[head])]


def lengths(number):
    draw = random.Random(number)
    return [1, 8192, 100_000, *(round(10 ** (5 * draw.random())) for _ in range(number))]


@pytest.mark.parametrize("head", HEADS)
def test_few_kernels_for_all_lengths(head):
    found = defaultdict(set)
    for tokens in lengths(5):
        for kind, attributes in compiled(tokens, head):
            found[kind].add(attributes)
    assert {kind: x for kind, x in found.items() if len(x) > 1} == {}  # nothing but 16's divisibility differs
    assert len(found) <= MOST


def rehearsed(tokens, head):
    """What the first launch of a call finds out about the others, and about calls of other lengths."""
    found = []

    def run(launch):
        gathered = torch_ahead.gathered()
        found.extend(torch_ahead.rehearsed() if gathered is None else ())
        if gathered is not None:
            gathered.append(launch)

    ahead_of_time.launches(HOPPER, tokens=tokens, in_turns=True, run=run, **HEADS[head])
    return [kind_of(x) for x in found]


@pytest.mark.parametrize("head", HEADS)
def test_the_first_launch_knows_all_kernels(head):
    known = set(rehearsed(3000, head))
    for tokens in (3000, 1003, 2200, 5007, 8999):
        assert not set(compiled(tokens, head)) - known
    assert len(known) <= MOST


@pytest.mark.slow
@pytest.mark.parametrize("head", HEADS)
def test_few_kernels_for_a_thousand_lengths(head):
    assert len({x for tokens in lengths(1000) for x in compiled(tokens, head)}) <= MOST
