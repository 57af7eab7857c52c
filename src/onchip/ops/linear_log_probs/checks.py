"""How the op is compared with the float64 oracle: what `onchip check` and the tests run.  No framework."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from onchip.ops.linear_log_probs import WantedOutputs, reference
from onchip.ops.linear_log_probs.cases import CHECK_CASES, make_inputs
from onchip.oracle.checks import Checker, adapter_of, kernel_refusals, op_in, plain_logits


def plain_refusals(device: str, dtype: str, framework: str, given: Mapping[str, Any] = {}) -> dict[str, str | None]:
    """Why each backend can't serve a call, or None; cases without a hidden size are log_probs'."""
    of_logits = given.get("hidden", 1) == 0
    if framework == "jax":
        from onchip.vocab import jax_ways

        return (jax_ways.row_refusals_of if of_logits else jax_ways.refusals_of)(device, dtype, given)
    refusal = "onchip.kernels.triton.launch:device_refusal" if of_logits else "onchip.vocab.triton.setup:refusal"
    return kernel_refusals(refusal, device, dtype, framework, given)


def _oracle(**given: Any) -> Any:
    arguments = {name: x for name, x in given.items() if x is not None}
    return (reference.log_probs if "logits" in arguments else reference.linear_log_probs)(**arguments)


def _call(
    fw: Any, how: Mapping[str, Any], hidden: Any, weight: Any, ids: Any, bias: Any, logits: Any, **keywords: Any
) -> dict[str, Any]:
    asked = ("entropy", "lse", "top1", "mean_logits", "log_sum_sq_probs")
    options = {**keywords, **dict.fromkeys(asked, True), **how}
    made: WantedOutputs
    if logits is not None:
        module = import_module(f"onchip.ops.linear_log_probs.{fw.NAME}_rows")
        made = module.log_probs(logits, ids, **options)
    else:
        weight = weight.T if how.get("weight_layout") == "hv" else weight
        made = op_in(fw, "linear_log_probs")(hidden, weight, ids, bias, **options)
    return made._asdict()


def _plain(fw: Any, how: Mapping[str, Any], logits: Any = None, **given: Any) -> dict[str, Any]:
    entropy = how.get("entropy", True)
    if logits is None:
        return plain_linear_log_probs(**given, entropy=entropy)._asdict()
    options = {name: x for name, x in given.items() if x is not None}
    return plain_log_probs(logits, **options, entropy=entropy)._asdict()


def plain_linear_log_probs(hidden: Any, weight: Any, ids: Any, bias: Any = None, **options: Any) -> WantedOutputs:
    """The same written with the framework's own functions in hidden's dtype, logits and all."""
    return plain_log_probs(adapter_of(hidden).linear(hidden, weight, bias), ids, **options)


def plain_log_probs(
    logits: Any,
    ids: Any,
    *,
    ignore_index: int = -100,
    entropy: bool = True,
    **transform: Any,
) -> WantedOutputs:
    """log_probs, likewise written with the framework's own functions, in the logits' dtype."""
    fw = adapter_of(logits)
    xp = fw.xp
    z = plain_logits(logits, **transform)
    several = ids if ids.ndim == logits.ndim else ids[..., None]
    counted = several != ignore_index
    kept = counted.any(-1)
    log_p = fw.log_softmax(z, -1)
    picked = xp.where(counted, fw.take(log_p, xp.where(counted, several, 0)), 0)
    p = xp.exp(log_p)
    return WantedOutputs(
        picked.reshape(ids.shape),
        xp.where(kept, -(p * xp.where(p > 0, log_p, 0)).sum(-1), 0) if entropy else None,
        xp.where(kept, fw.logsumexp(z, -1), 0),
        xp.where(kept, z.argmax(-1), -1),
        xp.where(kept, z.mean(-1), 0),
        xp.where(kept, fw.logsumexp(2 * log_p, -1), 0),
    )


CHECKER = Checker(
    names=("hidden", "weight", "ids", "bias", "logits"),
    inputs=lambda case, dtype: make_inputs(case),
    oracle=_oracle,
    call=_call,
    cases=CHECK_CASES,
    hows=lambda fw: [{"entropy": x} for x in (False, True)],
    refusals=plain_refusals,
    plain=_plain,
    values=("log_prob", "entropy", "lse"),
)
