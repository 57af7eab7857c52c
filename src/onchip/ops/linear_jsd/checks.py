"""How the ops are compared with the float64 oracle: what `onchip check` and the tests run.  No framework."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from onchip.frontend.topk import TopK
from onchip.ops.linear_jsd import OP, JsdOptions, reference
from onchip.ops.linear_jsd.cases import CHECK_CASES, JsdCase, JsdInputs, make_inputs
from onchip.oracle.checks import DEVIATIONS, Checker, adapter_of, kernel_refusals, op_in, plain_reduction

# Half the distance between neighbouring numbers, relative to them.
_ROUNDING = {"float32": 2.0**-24, "bfloat16": 2.0**-9, "float16": 2.0**-12}

# Numbers smaller than these are this far apart, whatever their size.
_SMALLEST = {"float32": 2.0**-149, "bfloat16": 2.0**-133, "float16": 2.0**-24}


def limits(
    case: JsdCase, dtype: str, how: Mapping[str, Any], oracle: reference.JsdResult, given: Mapping[str, Any]
) -> dict[str, tuple[Any, float]]:
    """The oracle's loss and gradients, and the limits of the relative errors."""
    of = bounds(case, dtype, oracle)
    made = {}
    for name, right in oracle._asdict().items():
        if right is None or name == "distance":
            continue
        limit, norm = of["loss" if name == "loss" else "gradient"], float(np.linalg.norm(right))
        if name != "loss" and norm > 0:
            limit += _SMALLEST[dtype] / 2 * float(np.sqrt(right.size)) / norm
        # For equal models everything must be exactly 0; the oracle's arithmetic gives 1e-17.
        made[name] = right, 0.0 if case.noise == 0 else limit
    return made


def bounds(case: JsdCase, dtype: str, oracle: reference.JsdResult) -> dict[str, float]:
    """Limits of the relative errors, from float32's precision and the lengths of the sums.

    A logit is a sum of H products: its error is a random walk of H steps (H / 24 in units of variance) plus one
    rounding at its size.  The loss and its gradient are made of log t - log s, of root mean square `distance`, which
    has the error of two logits: the closer the models, the fewer of its digits are known.
    """
    eps = float(np.finfo(np.float32).eps)
    tau = float(case.options.get("temperature", 1.0))
    largest = abs(case.logit_offset) + case.logit_std * float(np.sqrt(2 * np.log(case.vocab + 1)))
    if case.student == "logits":
        logit = eps * (1 + largest) / tau
    else:
        logit = eps * (1 + largest + case.logit_std * float(np.sqrt(case.hidden / 24))) / tau
    logit *= 1 + (2 / oracle.distance if oracle.distance > 0 else 0)
    sums = eps * float(np.sqrt((case.tokens + case.vocab) / 24))
    loss = DEVIATIONS * (eps + logit)
    return {"loss": loss, "gradient": DEVIATIONS * (logit + sums) + (_ROUNDING[dtype] if dtype != "float32" else 0)}


plain_refusals = partial(kernel_refusals, "onchip.vocab.triton.setup:refusal")


def _keywords(inputs: JsdInputs) -> dict[str, Any]:
    topk = dict(zip(TopK._fields, inputs.topk or (), strict=False))
    return {"target": inputs.target, "token_weight": inputs.token_weight, **topk}


def _arguments(given: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The op that is called, and its arguments, where a top-k teacher is one argument."""
    made = {name: x for name, x in given.items() if x is not None and name not in TopK._fields}
    if "indices" in given:
        made["teacher_topk"] = TopK(*(given[name] for name in TopK._fields))
    return "jsd" if "student_logits" in made else "linear_jsd", made


def _oracle(**given: Any) -> reference.JsdResult:
    name, arguments = _arguments(given)
    made: reference.JsdResult = getattr(reference, name)(**arguments)
    return made


def _constant_teacher(how: Mapping[str, Any], student_hidden: Any, teacher_logits: Any) -> bool:
    """The kernels give no gradient to logits that are a linear student's teacher."""
    return how["backend"] in ("triton", "mosaic_gpu") and student_hidden is not None and teacher_logits is not None


def _call(fw: Any, how: Mapping[str, Any], **given: Any) -> dict[str, Any]:
    name, arguments = _arguments(given)
    for weight in {"student_weight", "teacher_weight"} & set(arguments):
        if how.get("weight_layout") == "hv":
            arguments[weight] = arguments[weight].T
    constant = _constant_teacher(how, given["student_hidden"], given["teacher_logits"])
    teacher_grad = "teacher_topk" not in arguments and not constant
    return {"loss": op_in(fw, "linear_jsd", name)(**arguments, **how, teacher_grad=teacher_grad)}


def _plain(
    fw: Any,
    how: Mapping[str, Any],
    *,
    target: Any = None,
    token_weight: Any = None,
    normalizer: float | None = None,
    **given: Any,
) -> dict[str, Any]:
    xp, options = fw.xp, JsdOptions.of(OP, given)
    tau, hard = options.temperature, options.hard_weight

    def logits(model: str) -> Any:
        z = given[f"{model}_logits"]
        if z is None:
            z = fw.linear(*(given[f"{model}_{x}"] for x in ("hidden", "weight", "bias")))
        return z[..., : options.vocab]

    z = logits("student")
    ls = fw.log_softmax(z / tau, -1)
    if "indices" not in given:
        lt = fw.log_softmax(logits("teacher") / tau, -1)
    else:
        ls, lt = fw.take(ls, given["indices"]), fw.like(given["values"], z)
        if given["rest"] == "renormalised":
            ls, lt = fw.log_softmax(ls, -1), fw.log_softmax(lt, -1)
        elif given["rest"] == "tail":
            ls, lt = (xp.concatenate([x, xp.log1p(-xp.exp(x).sum(-1)[..., None])], -1) for x in (ls, lt))
    # For entries that both models exclude, a difference would be NaN.
    least = float(xp.finfo(z.dtype).min) / 2
    loss = options.soft_factor * plain_divergence(ls.clip(min=least), lt.clip(min=least), options.beta)
    kept = (z[..., 0] == z[..., 0]) if target is None else target != options.ignore_index
    if hard > 0:
        own = xp.where(kept, target, 0)[..., None]
        loss = loss - hard * fw.take(fw.log_softmax(z, -1), own)[..., 0]
    if token_weight is not None:
        loss = loss * fw.like(token_weight, z)
    return {"loss": plain_reduction(loss, kept, options.reduction, normalizer)}


def plain_divergence(ls: Any, lt: Any, beta: float) -> Any:
    """The divergence of each row of log-probabilities, the student's and the teacher's."""
    xp = adapter_of(ls).xp
    if beta == 0:
        return (xp.exp(lt) * (lt - ls)).sum(-1)
    if beta == 1:
        return (xp.exp(ls) * (ls - lt)).sum(-1)
    lm = xp.logaddexp(ls + math.log(1 - beta), lt + math.log(beta))
    return (1 - beta) * (xp.exp(ls) * (ls - lm)).sum(-1) + beta * (xp.exp(lt) * (lt - lm)).sum(-1)


CHECKER = Checker(
    names=JsdInputs._fields[:8],
    inputs=lambda case, dtype: make_inputs(case),
    oracle=_oracle,
    call=_call,
    cases=CHECK_CASES,
    refusals=lambda device, dtype, framework, given: {"auto": None},
    plain=_plain,
    keywords=_keywords,
    defaults={"torch": {"backend": "auto"}, "jax": {"backend": "auto"}},
    constant=lambda name, inputs, how: (
        name.startswith("teacher") and _constant_teacher(how, inputs.student_hidden, inputs.teacher_logits)
    ),
    limits=limits,
)
