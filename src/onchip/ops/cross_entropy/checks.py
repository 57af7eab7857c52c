"""How the op is compared with the float64 oracle: what `onchip check` and the tests run.  No framework."""

from collections.abc import Mapping
from typing import Any

from onchip.ops.cross_entropy import reference
from onchip.ops.cross_entropy.cases import CHECK_CASES, CLASS_CASES, make_inputs
from onchip.oracle.checks import Checker, kernel_refusals, op_in, plain_cross_entropy


def plain_refusals(device: str, dtype: str, framework: str, given: Mapping[str, Any] = {}) -> dict[str, str | None]:
    """As `kernel_refusals`, of the op's own backends."""
    if framework == "jax":
        from onchip.vocab.jax_ways import row_refusals_of

        return row_refusals_of(device, dtype, given)
    return kernel_refusals("onchip.kernels.triton.launch:device_refusal", device, dtype, framework, given)


def _call(fw: Any, how: Mapping[str, Any], logits: Any, target: Any, **keywords: Any) -> dict[str, Any]:
    more = dict(how)
    if more.pop("inplace", False):
        logits, more["inplace_backward"] = fw.computed(logits), True
    loss, stats = op_in(fw, "cross_entropy")(logits, target, **keywords, **more, return_stats=True)
    return {"loss": loss, **stats._asdict()}


CHECKER = Checker(
    names=("logits", "target"),
    inputs=lambda case, dtype: make_inputs(case),
    oracle=reference.cross_entropy,
    call=_call,
    cases=(*CHECK_CASES, *CLASS_CASES),
    # With a new gradient and, in PyTorch, one over the logits.
    hows=lambda fw: [{"inplace": x} for x in (False, True)] if fw.NAME == "torch" else [{}],
    refusals=plain_refusals,
    plain=lambda fw, how, logits, target, **keywords: {"loss": plain_cross_entropy(logits, target, **keywords)},
)
