"""`TopK`, and the log-probabilities of one."""

import copy
import pickle
from functools import partial

import pytest
import torch
from torch.utils import _pytree

from onchip.torch import TopK, cross_entropy, jsd, linear_cross_entropy, linear_jsd

H, W = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) for shape in ((2, 3, 8), (20, 8)))
Z = H @ W.T
FORMS = [
    *((partial(jsd, Z), "teacher_topk", rest) for rest in ("tail", "truncated", "renormalised")),
    *((partial(linear_jsd, H, W), "teacher_topk", rest) for rest in ("tail", "truncated", "renormalised")),
    (partial(cross_entropy, Z), "target", "truncated"),
    (partial(linear_cross_entropy, H, W), "target", "truncated"),
]


def test_words_are_checked_when_it_is_made():
    for words, message in (
        (
            ("log_probs", "renormalized"),
            "TopK: rest must be one of .*; got 'renormalized'; did you mean 'renormalised'",
        ),
        (("logprobs", "tail"), "TopK: kind must be one of .*; got 'logprobs'; did you mean 'log_probs'"),
        (("renormalized", "tail"), "TopK: kind must be .*; got 'renormalized'; did you mean rest='renormalised'"),
        (("log_probs", "x"), "TopK: rest must be one of 'tail', 'truncated', 'renormalised'; got 'x'$"),
    ):
        with pytest.raises(ValueError, match=message):
            TopK(0, 1, *words)
    with pytest.raises(TypeError, match=r"^TopK\(\) missing 1 required positional argument: 'rest'"):
        TopK(0, 1, "log_probs")
    made = TopK(0, indices := 1, kind="probs", rest="truncated")
    assert made.values == indices
    assert pickle.loads(pickle.dumps(made)) == copy.deepcopy(made) == made
    assert made._replace(kind="log_probs").kind == "log_probs"
    assert type(_pytree.tree_map(type, made)) is TopK  # a tree of something else


@pytest.mark.parametrize(("op", "name", "rest"), FORMS, ids=[f"{op.func.__name__}-{name}" for op, name, _ in FORMS])
def test_a_log_probability_above_0(op, name, rest):
    values, indices = Z.log_softmax(-1).topk(3)
    bad = values.clone()
    bad[1, 0, 2] = 2.5
    message = (
        rf"{name}.values\[1, 0, 2\] is 2.5, but a log-probability is at most 0 \(up to 0.001 passes for rounding\)"
    )
    with pytest.raises(ValueError, match=message):
        op(**{name: TopK(indices, bad, "log_probs", rest)})
    for dtype, most in ((torch.float32, 1e-3), (torch.float16, 2**-4), (torch.bfloat16, 0.5)):
        rounded = values.to(dtype)
        rounded[1, 0, 0] = most
        assert torch.isfinite(op(**{name: TopK(indices, rounded, "log_probs", rest)}))
    if name == "teacher_topk" and rest == "renormalised":
        assert torch.isfinite(op(teacher_topk=TopK(indices, Z.topk(3)[0], "logits", rest)))


@pytest.mark.parametrize("op", [partial(jsd, Z), partial(linear_jsd, H, W)])
def test_a_token_that_is_ignored_may_have_any(op):
    values, indices = Z.log_softmax(-1).topk(3)
    values[1, 0, 2], target = 2.5, torch.zeros(2, 3, dtype=torch.int64)
    target[1, 0] = -100
    assert torch.isfinite(op(teacher_topk=TopK(indices, values, "log_probs", "tail"), target=target))
