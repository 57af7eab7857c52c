"""Compare the JAX op with the float64 oracle: what `onchip check` and the tests run."""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from onchip.ops.linear_log_probs import reference
from onchip.ops.linear_log_probs.cases import CHECK_CASES, Case, Inputs, make_inputs
from onchip.ops.linear_log_probs.checks import float32_bounds
from onchip.ops.linear_log_probs.jax_op import BACKENDS, LogProbs, linear_log_probs
from onchip.oracle.checks import Check, compare, relative_error
from onchip.oracle.jax_checks import DTYPES, for_oracle, linear_arguments, platform_of, split_arrays


def planned_checks(device: str) -> list[Callable[[], list[Check]]]:
    """All cases on "cpu" or "cuda" in all dtypes, with and without the entropy, one by one."""
    platform = platform_of(device)
    return [
        partial(check_case, case, dtype, platform, entropy=entropy)
        for case, dtype, entropy in product(CHECK_CASES, DTYPES, (False, True))
    ]


def plain_refusals(platform: str, dtype: str) -> dict[str, str | None]:
    """Why each backend can't serve a call without options on "cpu", "gpu" or "tpu", or None."""
    return dict.fromkeys(BACKENDS)


def as_arguments(case: Case, inputs: Inputs, dtype: str) -> tuple[list[Any], dict[str, Any]]:
    """(hidden, weight [V, H], ids, bias) and the keyword arguments of the op."""
    keywords = dict(case.options)
    if inputs.temperature is not None:
        keywords["temperature"] = jnp.asarray(inputs.temperature)
    return linear_arguments(inputs, inputs.ids, dtype), keywords


def check_case(
    case: Case,
    dtype: str,
    device: str = "cpu",
    *,
    entropy: bool = True,
    scratch_bytes: int | None = None,
    backend: str = "xla",
    weight_layout: str = "vh",
) -> list[Check]:
    """Run the op on `case`, forward and backward under jit, and compare all that it returns with the oracle."""
    inputs = make_inputs(case)
    # The plain expression and the oracle run here too, so that all see the same rounded numbers.
    with jax.default_device(jax.devices(device)[0]):
        arguments, keywords = as_arguments(case, inputs, dtype)
        op = partial(
            linear_log_probs,
            entropy=entropy,
            lse=True,
            top1=True,
            scratch_bytes=scratch_bytes,
            backend=backend,
            weight_layout=weight_layout,
        )
        oracle = run_oracle(arguments, keywords, inputs, entropy=entropy)
        given = list(arguments)
        if weight_layout == "hv":
            given[1] = given[1].T
        results = run(op, given, keywords, inputs)
        if weight_layout == "hv":
            results["grad_weight"] = results["grad_weight"].T
        plain = {}
        if dtype != "float32":
            made = run(partial(plain_linear_log_probs, entropy=entropy), arguments, keywords, inputs)
            plain = {name: relative_error(x, getattr(oracle, name)) for name, x in made.items() if name != "top1"}
    name = f"{backend} with entropy" if entropy else backend
    bounds = float32_bounds(case, oracle)
    return compare(case.name, dtype, name, results, oracle, bounds, plain, choice="top1")


def run(op: Any, arguments: list[Any], keywords: Mapping[str, Any], inputs: Inputs) -> dict[str, Any]:
    """Values and gradients, named like the oracle's fields, as float64."""
    hidden, weight, ids, bias = arguments
    arrays, options = split_arrays(keywords)

    def step(leaves: Any, ids: Any, arrays: Any, upstream: Any) -> Any:
        def values(*x: Any) -> Any:
            out = op(x[0], x[1], ids, *x[2:], **arrays, **options)
            return out[:3], out.top1

        out, pullback, top1 = jax.vjp(values, *leaves, has_aux=True)
        grads = tuple(None if x is None else g.astype(x.dtype) for x, g in zip(out, upstream, strict=True))
        return LogProbs(out[0], out[1], out[2], top1), pullback(grads)

    leaves = [x for x in (hidden, weight, bias) if x is not None]
    upstream = [jnp.asarray(x) for x in (inputs.grad_log_prob, inputs.grad_entropy, inputs.grad_lse)]
    out, grads = jax.jit(step)(leaves, ids, arrays, upstream)
    names = ("grad_hidden", "grad_weight", "grad_bias")
    named = out._asdict() | dict(zip(names, grads, strict=False))
    return {name: np.asarray(x, np.float64) for name, x in named.items() if x is not None}


def run_oracle(
    arguments: list[Any], keywords: Mapping[str, Any], inputs: Inputs, *, entropy: bool = True
) -> reference.Result:
    """The oracle on exactly the numbers that the op was given."""
    return reference.linear_log_probs(
        *map(for_oracle, arguments),
        grad_log_prob=inputs.grad_log_prob,
        grad_entropy=inputs.grad_entropy if entropy else 0.0,
        grad_lse=inputs.grad_lse,
        **{name: for_oracle(value) for name, value in keywords.items()},
    )


def plain_linear_log_probs(
    hidden: jax.Array,
    weight: jax.Array,
    ids: jax.Array,
    bias: jax.Array | None = None,
    *,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float | jax.Array = 1.0,
    entropy: bool = True,
) -> LogProbs:
    """The same written with the framework's own functions in hidden's dtype, logits and all."""
    a = hidden @ weight.T
    if bias is not None:
        a = a + bias
    z = a * logit_scale
    if softcap is not None:
        z = softcap * jnp.tanh(z / softcap)
    z = z / (temperature[..., None].astype(z.dtype) if isinstance(temperature, jax.Array) else temperature)
    several = ids if ids.ndim == hidden.ndim else ids[..., None]
    counted = several != ignore_index
    kept = counted.any(-1)
    log_p = jax.nn.log_softmax(z, -1)
    picked = jnp.take_along_axis(log_p, jnp.where(counted, several, 0), -1)
    p = jnp.exp(log_p)
    entropies = jnp.where(kept, -jnp.sum(p * jnp.where(p > 0, log_p, 0), -1), 0)
    return LogProbs(
        jnp.where(counted, picked, 0).reshape(ids.shape),
        entropies if entropy else None,
        jnp.where(kept, jax.nn.logsumexp(z, -1), 0),
        jnp.where(kept, jnp.argmax(z, -1), -1),
    )
