"""Compare the JAX op with the float64 oracle: what `onchip check` and the tests run."""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from onchip.frontend.jax_call import Static
from onchip.ops.linear_cross_entropy import reference
from onchip.ops.linear_cross_entropy.cases import CHECK_CASES, Case, Inputs, make_inputs
from onchip.ops.linear_cross_entropy.checks import float32_bounds
from onchip.ops.linear_cross_entropy.jax_op import linear_cross_entropy, refusals
from onchip.oracle.checks import Check, compare, relative_error
from onchip.oracle.jax_checks import (
    DTYPES,
    for_oracle,
    linear_arguments,
    plain_cross_entropy,
    platform_of,
    split_arrays,
)
from onchip.vocab.memory import Problem


def planned_checks(device: str) -> list[Callable[[], list[Check]]]:
    """All cases on "cpu" or "cuda" in all dtypes, with both strategies and each backend that can run them, in turn."""
    platform = platform_of(device)
    return [
        partial(check_case, case, dtype, platform, strategy=strategy, backend=backend)
        for case, dtype, strategy in product(CHECK_CASES, DTYPES, ("stash", "recompute"))
        for backend, reason in plain_refusals(platform, dtype, case.hidden, case.vocab, strategy).items()
        if reason is None
    ]


def plain_refusals(
    platform: str, dtype: str, hidden: int = 128, vocab: int = 1024, strategy: str = "auto"
) -> dict[str, str | None]:
    """Why each backend can't serve a call with these sizes and no options on "cpu", "gpu" or "tpu", or None."""
    static = Static("auto", platform, dtype, "vh", "mean", strategy, scratch_bytes=None, return_stats=False)
    device = "cpu" if platform == "cpu" else "cuda"
    return refusals(static, Problem(1, hidden, vocab, dtype=dtype, device=device, compacted=True))


def as_arguments(case: Case, inputs: Inputs, dtype: str) -> tuple[list[Any], dict[str, Any]]:
    """(hidden, weight [V, H], labels, bias) and the keyword arguments of the op."""
    keywords = dict(case.options)
    for name in ("token_weight", "temperature"):
        if (value := getattr(inputs, name)) is not None:
            keywords[name] = jnp.asarray(value)
    return linear_arguments(inputs, inputs.target, dtype), keywords


def check_case(
    case: Case,
    dtype: str,
    device: str = "cpu",
    *,
    strategy: str = "auto",
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
            linear_cross_entropy,
            strategy=strategy,
            scratch_bytes=scratch_bytes,
            backend=backend,
            weight_layout=weight_layout,
            return_stats=True,
        )
        oracle = run_oracle(arguments, keywords, inputs.grad_loss)
        given = list(arguments)
        if weight_layout == "hv":
            given[1] = given[1].T
        loss, stats, grads = _run(op, given, keywords, inputs.grad_loss)
        if weight_layout == "hv":
            grads[1] = grads[1].T
        plain = {}
        if dtype != "float32":
            plain = plain_errors(arguments, keywords, inputs.grad_loss, oracle)
    names = ("loss", "lse", "log_prob", "entropy", "correct", "grad_hidden", "grad_weight", "grad_bias")
    results = {name: np.asarray(x) for name, x in zip(names, (loss, *stats, *grads), strict=False)}
    bounds = float32_bounds(case, oracle)
    return compare(case.name, dtype, f"{backend} {strategy}", results, oracle, bounds, plain, choice="correct")


def _run(op: Any, arguments: list[Any], keywords: Mapping[str, Any], grad_loss: Any) -> tuple[Any, Any, list[Any]]:
    """Loss, statistics and the gradients of hidden, weight and bias, if that is there."""
    hidden, weight, labels, bias = arguments
    arrays, options = split_arrays(keywords)

    def step(leaves: Any, labels: Any, arrays: Any, grad_loss: Any) -> Any:
        loss, pullback, stats = jax.vjp(
            lambda *x: op(x[0], x[1], labels, *x[2:], **arrays, **options), *leaves, has_aux=True
        )
        return loss, stats, list(pullback(grad_loss.astype(loss.dtype)))

    leaves = [x for x in (hidden, weight, bias) if x is not None]
    return jax.jit(step)(leaves, labels, arrays, jnp.asarray(grad_loss))  # type: ignore[no-any-return]


def run_oracle(arguments: list[Any], keywords: Mapping[str, Any], grad_loss: Any) -> reference.Result:
    """The oracle on exactly the numbers that the op was given."""
    return reference.linear_cross_entropy(
        *map(for_oracle, arguments),
        grad_loss=grad_loss,
        **{name: for_oracle(value) for name, value in keywords.items()},
    )


def plain_errors(
    arguments: list[Any], keywords: Mapping[str, Any], grad_loss: Any, oracle: reference.Result
) -> dict[str, float]:
    """The errors that the plain framework expression makes in the arguments' dtype."""
    loss, _, grads = _run(lambda *x, **y: (plain_linear_cross_entropy(*x, **y), None), arguments, keywords, grad_loss)
    names = ("loss", "grad_hidden", "grad_weight", "grad_bias")
    return {
        name: relative_error(np.asarray(x, np.float64), getattr(oracle, name))
        for name, x in zip(names, (loss, *grads), strict=False)
    }


def plain_linear_cross_entropy(
    hidden: jax.Array, weight: jax.Array, labels: jax.Array, bias: jax.Array | None = None, **options: Any
) -> jax.Array:
    """The same loss written with the framework's own functions in hidden's dtype, logits and all."""
    a = hidden @ weight.T
    return plain_cross_entropy(a if bias is None else a + bias, labels, **options)
