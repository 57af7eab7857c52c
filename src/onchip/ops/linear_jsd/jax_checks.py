"""Compare the JAX ops with the float64 oracle: what `onchip check` and the tests run."""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from onchip.ops.linear_jsd import checks, reference
from onchip.ops.linear_jsd.cases import CHECK_CASES, Case, Inputs, make_inputs
from onchip.ops.linear_jsd.checks import compare
from onchip.ops.linear_jsd.jax_op import BACKENDS, jsd, linear_jsd
from onchip.ops.linear_jsd.spec import TopK
from onchip.oracle.checks import Check, relative_error
from onchip.oracle.jax_checks import DTYPES, platform_of


def planned_checks(device: str) -> list[Callable[[], list[Check]]]:
    """All cases on "cpu" or "cuda" in all dtypes, in turn."""
    platform = platform_of(device)
    return [partial(check_case, case, dtype, platform) for case, dtype in product(CHECK_CASES, DTYPES)]


def plain_refusals(platform: str, dtype: str) -> dict[str, str | None]:
    """Why each backend can't serve a call without options on "cpu", "gpu" or "tpu", or None."""
    return dict.fromkeys(BACKENDS)


def check_case(
    case: Case,
    dtype: str,
    device: str = "cpu",
    *,
    scratch_bytes: int | None = None,
    weight_layout: str = "vh",
) -> list[Check]:
    """Run the op on `case`, forward and backward under jit, and compare all that it returns with the oracle."""
    inputs = make_inputs(case)
    # The plain expression and the oracle run here too, so that all see the same rounded numbers.
    with jax.default_device(jax.devices(device)[0]):
        arrays = as_arrays(inputs, dtype)
        oracle = run_oracle(arrays, inputs, case.options)
        options = dict(case.options) | {"teacher_grad": inputs.topk is None, "scratch_bytes": scratch_bytes}
        results = _run(partial(_call, inputs=inputs, layout=weight_layout, **options), arrays, inputs)
        plain = {}
        if dtype != "float32":
            made = _run(partial(plain_jsd, inputs=inputs, **case.options), arrays, inputs)
            plain = {name: relative_error(x, getattr(oracle, name)) for name, x in made.items()}
    return compare(case, dtype, "xla", results, oracle, plain)


def as_arrays(inputs: Inputs, dtype: str) -> dict[str, jax.Array]:
    """The arrays that get gradients, in `dtype`, under their names."""
    return {
        name: jnp.asarray(x, dtype) for name, x in zip(inputs._fields[:8], inputs[:8], strict=True) if x is not None
    }


def run_oracle(arrays: Mapping[str, jax.Array], inputs: Inputs, options: Mapping[str, Any]) -> reference.Result:
    """The oracle on exactly the numbers that the op was given."""
    wide: Any = {name: np.asarray(x, np.float64) for name, x in arrays.items()}
    return checks.oracle_of(inputs._replace(**wide), options)


def _call(a: Mapping[str, Any], constants: Mapping[str, Any], *, inputs: Inputs, layout: str, **options: Any) -> Any:
    if inputs.topk is not None:
        options["teacher_topk"] = TopK(constants["indices"], constants["values"], *inputs.topk[2:])
    options |= {"labels": constants.get("labels"), "token_weight": constants.get("token_weight")}
    if "student_logits" in a:
        return jsd(a["student_logits"], a.get("teacher_logits"), **options)
    weights = {k: a[k].T if layout == "hv" else a[k] for k in ("student_weight", "teacher_weight") if k in a}
    return linear_jsd(**{**a, **weights}, weight_layout=layout, **options)


def _run(op: Any, arrays: Mapping[str, jax.Array], inputs: Inputs) -> dict[str, Any]:
    """The loss and the gradients, under the names of the oracle's fields."""
    constants: dict[str, Any] = {}
    if inputs.topk is not None:
        constants = {"indices": jnp.asarray(inputs.topk[0], jnp.int32), "values": jnp.asarray(inputs.topk[1])}
    if inputs.target is not None:
        constants["labels"] = jnp.asarray(inputs.target, jnp.int32)
    if inputs.token_weight is not None:
        constants["token_weight"] = jnp.asarray(inputs.token_weight)

    def step(leaves: Any, constants: Any, grad_loss: Any) -> Any:
        loss, pullback = jax.vjp(lambda x: op(x, constants), leaves)
        return loss, pullback(grad_loss.astype(loss.dtype))[0]

    loss, grads = jax.jit(step)(dict(arrays), constants, jnp.asarray(inputs.grad_loss))
    named = {"loss": loss, **{f"grad_{name}": x for name, x in grads.items()}}
    return {name: np.asarray(x, np.float64) for name, x in named.items()}


def plain_jsd(
    a: Mapping[str, Any],
    constants: Mapping[str, Any],
    *,
    inputs: Inputs,
    beta: float = 0.5,
    temperature: float = 1.0,
    temperature_squared: bool = False,
    ignore_index: int = -100,
    reduction: str = "mean",
    normalizer: float | None = None,
    hard_weight: float = 0.0,
    vocab: int | None = None,
) -> Any:
    """The same loss written with the framework's own functions in the arguments' dtype, logits and all."""

    def logits(who: str) -> Any:
        if f"{who}_logits" in a:
            return a[f"{who}_logits"][..., :vocab]
        z = a[f"{who}_hidden"] @ a[f"{who}_weight"].T
        return (z + a[f"{who}_bias"] if f"{who}_bias" in a else z)[..., :vocab]

    z = logits("student")
    ls = jax.nn.log_softmax(z / temperature)
    if inputs.topk is not None:
        lt = constants["values"].astype(z.dtype)
        ls = jnp.take_along_axis(ls, constants["indices"], -1)
        if inputs.topk[3] == "renormalised":
            ls, lt = jax.nn.log_softmax(ls), jax.nn.log_softmax(lt)
        elif inputs.topk[3] == "tail":
            ls, lt = (jnp.concatenate([x, jnp.log1p(-jnp.exp(x).sum(-1, keepdims=True))], -1) for x in (ls, lt))
    else:
        lt = jax.nn.log_softmax(logits("teacher") / temperature)
    if beta == 0:
        loss = (jnp.exp(lt) * (lt - ls)).sum(-1)
    elif beta == 1:
        loss = (jnp.exp(ls) * (ls - lt)).sum(-1)
    else:
        lm = jnp.logaddexp(ls + np.log(1 - beta).astype(z.dtype), lt + np.log(beta).astype(z.dtype))
        loss = (1 - beta) * (jnp.exp(ls) * (ls - lm)).sum(-1) + beta * (jnp.exp(lt) * (lt - lm)).sum(-1)
    if temperature_squared:
        loss = loss * temperature**2
    labels: Any = constants.get("labels")
    kept = jnp.ones(loss.shape, bool) if labels is None else labels != ignore_index
    if hard_weight > 0:
        own = jnp.where(kept, labels, 0)[..., None]
        ce = -jnp.take_along_axis(jax.nn.log_softmax(z), own, -1)[..., 0]
        loss = hard_weight * ce + (1 - hard_weight) * loss
    if "token_weight" in constants:
        loss = loss * constants["token_weight"].astype(z.dtype)
    loss = jnp.where(kept, loss, 0)
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    return loss.sum() / (jnp.maximum(kept.sum(), 1) if normalizer is None else normalizer)
