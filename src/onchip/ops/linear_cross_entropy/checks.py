"""How the op is compared with the float64 oracle: what `onchip check` and the tests run.  No framework."""

from collections.abc import Mapping
from typing import Any

from onchip.ops.linear_cross_entropy import reference
from onchip.ops.linear_cross_entropy.cases import CHECK_CASES, CLASS_CASES, make_inputs
from onchip.oracle.checks import Checker, adapter_of, kernel_refusals, op_in, plain_cross_entropy


def plain_refusals(device: str, dtype: str, framework: str, given: Mapping[str, Any] = {}) -> dict[str, str | None]:
    """As `kernel_refusals`; in JAX refusals depend on the sizes, the layout and the strategy."""
    if framework == "torch":
        return kernel_refusals("onchip.vocab.triton.setup:refusal", device, dtype, framework)
    from onchip.vocab.jax_ways import refusals_of

    return refusals_of(device, dtype, given)


def _call(
    fw: Any, how: Mapping[str, Any], hidden: Any, weight: Any, target: Any, bias: Any, **keywords: Any
) -> dict[str, Any]:
    weight = weight.T if how.get("weight_layout") == "hv" else weight
    op, how = op_in(fw, "linear_cross_entropy"), dict(how)
    if how.pop("loss_alone", False):
        return {"loss": op(hidden, weight, target, bias, **keywords, **how)}
    loss, stats = op(hidden, weight, target, bias, **keywords, **how, return_stats=True)
    return {"loss": loss, **stats._asdict()}


def plain_linear_cross_entropy(hidden: Any, weight: Any, target: Any, bias: Any = None, **options: Any) -> Any:
    """The same loss written with the framework's own functions in hidden's dtype, logits and all."""
    return plain_cross_entropy(adapter_of(hidden).linear(hidden, weight, bias), target, **options)


CHECKER = Checker(
    names=("hidden", "weight", "target", "bias"),
    inputs=lambda case, dtype: make_inputs(case),
    oracle=reference.linear_cross_entropy,
    call=_call,
    cases=(*CHECK_CASES, *CLASS_CASES),
    # Statistics take other kernels than the loss alone.
    hows=lambda fw: [{"strategy": "stash"}, {"strategy": "recompute"}, {"strategy": "stash", "loss_alone": True}],
    refusals=plain_refusals,
    plain=lambda fw, how, **given: {"loss": plain_linear_cross_entropy(**given)},
)
