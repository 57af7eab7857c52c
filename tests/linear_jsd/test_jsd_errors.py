"""Every way to call the ops wrongly: the exception's type, and that it names the argument."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from onchip.frontend.topk import TopK
from onchip.ops.linear_jsd import jax_op
from onchip.ops.linear_jsd.torch_op import jsd, linear_jsd
from shared import assert_refused

R = torch.randn
IDS = torch.arange(3).expand(2, 12, 3)
LOGP = R(2, 12, 3).log_softmax(-1)


def topk(indices=IDS, values=LOGP, kind="log_probs", rest="tail"):
    return TopK(indices, values, kind, rest)


def call(**changes):
    arguments = {"student_hidden": R(2, 12, 16), "student_weight": R(70, 16), "teacher_hidden": R(2, 12, 24)}
    return linear_jsd(**(arguments | {"teacher_weight": R(70, 24)} | changes))


NO_TEACHER = {"teacher_hidden": None, "teacher_weight": None}
WRONG = {
    "no teacher": (NO_TEACHER, ValueError, "pass exactly one of teacher_hidden with teacher_weight, teacher_logits, teacher_topk; got 0"),
    "two teachers": ({"teacher_logits": R(2, 12, 70)}, ValueError, "pass exactly one of"),
    "half a teacher": ({"teacher_weight": None}, ValueError, "teacher_hidden and teacher_weight go together"),
    "teacher_bias alone": (NO_TEACHER | {"teacher_logits": R(2, 12, 70), "teacher_bias": R(70)}, ValueError, "teacher_bias goes with teacher_hidden"),
    "student_weight transposed": ({"student_weight": R(16, 70)}, ValueError, "student_hidden has H=16 but student_weight has H=70; student_weight must be [V, H]; pass student_weight.T"),
    "teacher_weight transposed": ({"teacher_weight": R(24, 70)}, ValueError, "teacher_hidden has H=24 but teacher_weight has H=70"),
    "teacher has other tokens": ({"teacher_hidden": R(24, 24)}, ValueError, "teacher_hidden has shape [24, 24] but student_hidden has shape [2, 12, 16]"),
    "vocabularies differ": ({"teacher_weight": R(72, 24)}, ValueError, "the student has V=70 but the teacher has V=72; if they differ in padding, pass vocab="),
    "vocab too large": ({"vocab": 71}, ValueError, "vocab=71 but the student has V=70"),
    "teacher_bias too long": ({"teacher_bias": R(71)}, ValueError, "teacher_bias has shape [71]"),
    "target is flat": ({"target": torch.zeros(24, dtype=torch.int64)}, ValueError, "target has shape [24]"),
    "token_weight is flat": ({"token_weight": torch.ones(24)}, ValueError, "token_weight has shape [24]"),
    "teacher_logits short": (NO_TEACHER | {"teacher_logits": R(2, 12, 69)}, ValueError, "the teacher has V=69"),
    # top-k
    "topk is a tuple": (NO_TEACHER | {"teacher_topk": (IDS, LOGP)}, TypeError, "teacher_topk must be a TopK(indices, values, kind, rest); got tuple"),
    "topk kind": (NO_TEACHER | {"teacher_topk": topk(kind="probs")}, ValueError, "teacher_topk.kind must be one of 'log_probs', 'logits'"),
    "topk rest": (NO_TEACHER | {"teacher_topk": topk()._replace(rest="drop")}, ValueError, "teacher_topk.rest must be one of 'tail', 'truncated', 'renormalised'"),
    "topk logits with a tail": (NO_TEACHER | {"teacher_topk": topk(kind="logits")}, ValueError, "needs the teacher's probabilities: pass kind='log_probs'"),
    "topk shapes": (NO_TEACHER | {"teacher_topk": topk(values=R(2, 12, 4))}, ValueError, "both must be [..., K]"),
    "topk tokens": (NO_TEACHER | {"teacher_topk": topk(IDS[0], LOGP[0])}, ValueError, "teacher_topk.indices has shape [12, 3]"),
    "topk indices float": (NO_TEACHER | {"teacher_topk": topk(LOGP)}, TypeError, "teacher_topk.indices must hold integers"),
    "topk out of range": (NO_TEACHER | {"teacher_topk": topk(IDS + 68)}, ValueError, "teacher_topk.indices[0, 0, 2] is 70, which is not in [0, 70)"),
    "topk repeated": (NO_TEACHER | {"teacher_topk": topk(IDS // 2)}, ValueError, "must be distinct within a token; 24 are not"),
    "topk with teacher_grad": (NO_TEACHER | {"teacher_topk": topk(), "teacher_grad": True}, ValueError, "teacher_grad=True needs a teacher with all logits"),
    "topk values need a gradient": (NO_TEACHER | {"teacher_topk": topk(values=R(2, 12, 3, requires_grad=True))}, ValueError, "teacher_topk.values gets no gradient"),
    # dtypes and types
    "student_weight is None": ({"student_weight": None}, TypeError, "student_weight must be a torch.Tensor; got NoneType"),
    "student dtypes differ": ({"student_hidden": R(2, 12, 16).half(), "student_weight": R(70, 16).bfloat16()}, TypeError, "student_hidden is float16 but student_weight is bfloat16, and neither dtype holds the other's numbers"),
    "teacher dtypes differ": ({"teacher_hidden": R(2, 12, 24).bfloat16(), "teacher_weight": R(70, 24).half()}, TypeError, "teacher_hidden is bfloat16 but teacher_weight is float16, and neither dtype holds the other's numbers"),
    "target is float": ({"target": torch.zeros(2, 12)}, TypeError, "target must hold integers; got float32"),
    # ranges and options
    "hard_weight alone": ({"hard_weight": 0.5}, ValueError, "hard_weight=0.5 needs target, the hard labels"),
    "normalizer tensor 0": ({"normalizer": torch.zeros(())}, ValueError, "normalizer must be finite and above 0; got 0.0"),
    "normalizer with sum": ({"normalizer": 3, "reduction": "sum"}, ValueError, "normalizer is what reduction='mean' divides by"),
    "scratch_bytes too small": ({"scratch_bytes": 100}, ValueError, "scratch_bytes=100 is too small for T=24, V=70"),
    "too small a part of both models' logits": ({"scratch_bytes": 0.01}, ValueError, "scratch_bytes=134 is too small for T=24, V=70"),
    "scratch_bytes is 2.0": ({"scratch_bytes": 2.0}, ValueError, "scratch_bytes=2.0 is a float"),
    "scratch_bytes in MB": ({"scratch_bytes": "10MB"}, ValueError, "scratch_bytes as a text must be like '1GiB'"),
    "teacher elsewhere": ({"teacher_hidden": R(2, 12, 24, device="meta")}, ValueError, "teacher_hidden is on meta but student_hidden is on cpu"),
    "bad label": ({"target": torch.full((2, 12), -100).index_put((torch.tensor(1), torch.tensor(7)), torch.tensor(70))}, ValueError, "target[1, 7] is 70, which is neither ignore_index (-100) nor in [0, 70); 1 of 24"),
    "token_weight needs a gradient": ({"token_weight": torch.ones(2, 12, requires_grad=True)}, ValueError, "token_weight gets no gradient"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_call(name):
    changes, kind, message = WRONG[name]
    assert_refused("linear_jsd", partial(call, **changes), kind, message)


def test_jsd_speaks_of_itself():
    with pytest.raises(ValueError, match=r"^jsd: pass exactly one of teacher_logits, teacher_topk; got 0"):
        jsd(R(2, 5))
    with pytest.raises(ValueError, match=r"^jsd: teacher_logits has shape \[3, 5\] but student_logits"):
        jsd(R(2, 5), R(3, 5))
    with pytest.raises(ValueError, match=r"^jsd: the student has V=5 but the teacher has V=6"):
        jsd(R(2, 5), R(2, 6))


J = {"student_hidden": np.ones((4, 8), np.float32), "student_weight": np.ones((9, 8), np.float32)}
TEACHER = {"teacher_hidden": np.ones((4, 6), np.float32), "teacher_weight": np.ones((9, 6), np.float32)}
WRONG_IN_JAX = {
    "other layout": (J | TEACHER | {"weight_layout": "hv"}, ValueError, "student_hidden has H=8 but student_weight has H=9"),
    "dtypes": (J | TEACHER | {"student_hidden": jnp.ones((4, 8), "float16"), "student_weight": jnp.ones((9, 8), "bfloat16")}, TypeError, "student_hidden is float16 but student_weight is bfloat16, and neither dtype holds the other's numbers"),
    "target float": (J | TEACHER | {"target": np.ones(4, np.float32)}, TypeError, "target must hold integers"),
    "target and labels": (J | TEACHER | {"target": np.ones(4, np.int32), "labels": np.ones(4, np.int32)}, TypeError, "labels is another name for target; pass one of them"),
    "labels float": (J | TEACHER | {"labels": np.ones(4, np.float32)}, TypeError, "labels must hold integers"),
    "labels shape": (J | TEACHER | {"labels": np.ones(5, np.int32)}, ValueError, "labels has shape [5]"),
    "hard_weight": (J | TEACHER | {"hard_weight": 0.5}, ValueError, "needs target, the hard labels"),
    "normalizer sum": (J | TEACHER | {"normalizer": 2, "reduction": "sum"}, ValueError, "normalizer is what"),
    "scratch": (J | TEACHER | {"scratch_bytes": 10}, ValueError, "scratch_bytes=10 is too small"),
    "part of the logits": (J | TEACHER | {"scratch_bytes": 0.1}, ValueError, "scratch_bytes=28 is too small"),
    "part above 1": (J | TEACHER | {"scratch_bytes": 2.0}, ValueError, "scratch_bytes=2.0 is a float"),
    "text": (J | TEACHER | {"scratch_bytes": "much"}, ValueError, "scratch_bytes as a text must be like '1GiB'"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_IN_JAX)
def test_wrong_call_in_jax(name):
    arguments, kind, message = WRONG_IN_JAX[name]
    assert_refused("linear_jsd", partial(jax_op.linear_jsd, **arguments), kind, message)
