"""How the op is compared with the float64 oracle: what `onchip check` and the tests run.  No framework."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from onchip.ops.linear_log_probs import reference
from onchip.ops.linear_log_probs.cases import CHECK_CASES, make_inputs
from onchip.ops.linear_log_probs.spec import LogProbs
from onchip.oracle.checks import Checker, adapter_of, kernel_refusals, op_in, plain_logits

plain_refusals = partial(kernel_refusals, "onchip.vocab.triton.setup:refusal")


def _call(
    fw: Any, how: Mapping[str, Any], hidden: Any, weight: Any, ids: Any, bias: Any, **keywords: Any
) -> dict[str, Any]:
    weight = weight.T if how.get("weight_layout") == "hv" else weight
    asked = ("entropy", "lse", "top1", "mean_logits", "log_sum_sq_probs")
    options = {**dict.fromkeys(asked, True), **how}
    made: dict[str, Any] = op_in(fw, "linear_log_probs")(hidden, weight, ids, bias, **keywords, **options)._asdict()
    return made


def plain_linear_log_probs(
    hidden: Any,
    weight: Any,
    ids: Any,
    bias: Any = None,
    *,
    ignore_index: int = -100,
    entropy: bool = True,
    **transform: Any,
) -> LogProbs:
    """The same written with the framework's own functions in hidden's dtype, logits and all."""
    fw = adapter_of(hidden)
    xp = fw.xp
    z = plain_logits(fw.linear(hidden, weight, bias), **transform)
    several = ids if ids.ndim == hidden.ndim else ids[..., None]
    counted = several != ignore_index
    kept = counted.any(-1)
    log_p = fw.log_softmax(z, -1)
    picked = xp.where(counted, fw.take(log_p, xp.where(counted, several, 0)), 0)
    p = xp.exp(log_p)
    return LogProbs(
        picked.reshape(ids.shape),
        xp.where(kept, -(p * xp.where(p > 0, log_p, 0)).sum(-1), 0) if entropy else None,
        xp.where(kept, fw.logsumexp(z, -1), 0),
        xp.where(kept, z.argmax(-1), -1),
        xp.where(kept, z.mean(-1), 0),
        xp.where(kept, fw.logsumexp(2 * log_p, -1), 0),
    )


CHECKER = Checker(
    names=("hidden", "weight", "ids", "bias"),
    inputs=lambda case, dtype: make_inputs(case),
    oracle=reference.linear_log_probs,
    call=_call,
    cases=CHECK_CASES,
    hows=lambda fw: [{"entropy": x} for x in (False, True)],
    refusals=plain_refusals,
    plain=lambda fw, how, **given: plain_linear_log_probs(**given, entropy=how.get("entropy", True))._asdict(),
    values=("log_prob", "entropy", "lse"),
)
