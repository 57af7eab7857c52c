"""What the comparisons of every front end with the float64 oracle share.  No framework."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from onchip.ops.linear_jsd import reference
from onchip.ops.linear_jsd.cases import Case, Inputs
from onchip.oracle.checks import DEVIATIONS, Check, relative_error

# Half the distance of two numbers next to each other, relative to them.
_ROUNDING = {"float32": 2.0**-24, "bfloat16": 2.0**-9, "float16": 2.0**-12}

# Below these, numbers are this far apart, whatever their size.
_SMALLEST = {"float32": 2.0**-149, "bfloat16": 2.0**-133, "float16": 2.0**-24}


def oracle_of(inputs: Inputs, options: Mapping[str, Any]) -> reference.Result:
    """The oracle on the numbers that the op was given."""
    rest = dict(options) | {"teacher_topk": inputs.topk, "target": inputs.target, "token_weight": inputs.token_weight}
    rest |= {"teacher_logits": inputs.teacher_logits, "grad_loss": inputs.grad_loss}
    if inputs.student_logits is not None:
        return reference.jsd(inputs.student_logits, **rest)
    assert inputs.student_hidden is not None
    assert inputs.student_weight is not None
    return reference.linear_jsd(
        inputs.student_hidden,
        inputs.student_weight,
        inputs.teacher_hidden,
        inputs.teacher_weight,
        student_bias=inputs.student_bias,
        teacher_bias=inputs.teacher_bias,
        **rest,
    )


def compare(
    case: Case,
    dtype: str,
    implementation: str,
    results: Mapping[str, npt.NDArray[Any]],
    oracle: reference.Result,
    plain: Mapping[str, float],
) -> list[Check]:
    """Compare `results`, named like the oracle's fields, with the oracle.

    `plain` holds the errors that the plain framework expression makes in a 16-bit dtype: the op may make twice those.
    """
    limits = bounds(case, dtype, oracle)
    checks = []
    for name, out in results.items():
        if case.noise == 0:  # what must be exactly 0; in the oracle's arithmetic it is 1e-17
            checks.append(Check(case.name, dtype, implementation, name, float(np.abs(out).max(initial=0)), 0.0))
            continue
        limit = limits["loss" if name == "loss" else "gradient"]
        norm = float(np.linalg.norm(getattr(oracle, name)))
        if name != "loss" and norm > 0:
            limit += _SMALLEST[dtype] / 2 * float(np.sqrt(out.size)) / norm
        if np.isfinite(plain.get(name, np.nan)):
            limit = max(limit, 2 * plain[name])
        checks.append(Check(case.name, dtype, implementation, name, relative_error(out, getattr(oracle, name)), limit))
    return checks


def bounds(case: Case, dtype: str, oracle: reference.Result) -> dict[str, float]:
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
