"""Compare the JAX op with the float64 oracle: what `onchip check` and the tests run."""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from onchip.ops.cross_entropy import reference
from onchip.ops.cross_entropy.cases import CHECK_CASES, Case, Inputs, make_inputs
from onchip.ops.cross_entropy.checks import float32_bounds
from onchip.ops.cross_entropy.jax_op import BACKENDS, cross_entropy
from onchip.oracle.checks import Check, compare, relative_error
from onchip.oracle.jax_checks import DTYPES, for_oracle, plain_cross_entropy, platform_of, split_arrays


def planned_checks(device: str) -> list[Callable[[], list[Check]]]:
    """All cases on "cpu" or "cuda" in all dtypes, in turn."""
    platform = platform_of(device)
    return [partial(check_case, case, dtype, platform) for case, dtype in product(CHECK_CASES, DTYPES)]


def plain_refusals(platform: str, dtype: str) -> dict[str, str | None]:
    """Why each backend can't serve a call without options on "cpu", "gpu" or "tpu", or None."""
    return dict.fromkeys(BACKENDS)


def as_arguments(case: Case, inputs: Inputs, dtype: str) -> tuple[jax.Array, jax.Array, dict[str, Any]]:
    """(logits, labels) and the keyword arguments of the op."""
    keywords = dict(case.options)
    for name in ("token_weight", "temperature"):
        if (value := getattr(inputs, name)) is not None:
            keywords[name] = jnp.asarray(value)
    return jnp.asarray(inputs.logits[:, : case.vocab], dtype), jnp.asarray(inputs.target, jnp.int32), keywords


def check_case(
    case: Case,
    dtype: str,
    device: str = "cpu",
    *,
    scratch_bytes: int | None = None,
    backend: str = "xla",
) -> list[Check]:
    """Run the op on `case`, forward and backward under jit, and compare all that it returns with the oracle."""
    inputs = make_inputs(case)
    # The plain expression and the oracle run here too, so that all see the same rounded numbers.
    with jax.default_device(jax.devices(device)[0]):
        logits, labels, keywords = as_arguments(case, inputs, dtype)
        oracle = run_oracle(logits, labels, keywords, inputs.grad_loss)
        op = partial(cross_entropy, scratch_bytes=scratch_bytes, backend=backend, return_stats=True)
        loss, stats, grad = _run(op, logits, labels, keywords, inputs.grad_loss)
        plain = {}
        if dtype != "float32":
            plain = plain_errors(logits, labels, keywords, inputs.grad_loss, oracle)
    names = ("loss", "lse", "log_prob", "entropy", "correct", "grad_logits")
    results = {name: np.asarray(x) for name, x in zip(names, (loss, *stats, grad), strict=True)}
    bounds = float32_bounds(case, oracle)
    return compare(case.name, dtype, backend, results, oracle, bounds, plain, choice="correct")


def _run(op: Any, logits: jax.Array, labels: jax.Array, keywords: Mapping[str, Any], grad_loss: Any) -> Any:
    """Loss, statistics and the gradient of the logits."""
    arrays, options = split_arrays(keywords)

    def step(logits: Any, labels: Any, arrays: Any, grad_loss: Any) -> Any:
        loss, pullback, stats = jax.vjp(lambda x: op(x, labels, **arrays, **options), logits, has_aux=True)
        return loss, stats, pullback(grad_loss.astype(loss.dtype))[0]

    return jax.jit(step)(logits, labels, arrays, jnp.asarray(grad_loss))


def run_oracle(logits: jax.Array, labels: jax.Array, keywords: Mapping[str, Any], grad_loss: Any) -> reference.Result:
    """The oracle on exactly the numbers that the op was given."""
    return reference.cross_entropy(
        for_oracle(logits),
        for_oracle(labels),
        grad_loss=grad_loss,
        **{name: for_oracle(value) for name, value in keywords.items()},
    )


def plain_errors(
    logits: jax.Array, labels: jax.Array, keywords: Mapping[str, Any], grad_loss: Any, oracle: reference.Result
) -> dict[str, float]:
    """The errors that the plain framework expression makes in the logits' dtype."""
    loss, _, grad = _run(lambda *x, **y: (plain_cross_entropy(*x, **y), None), logits, labels, keywords, grad_loss)
    return {
        "loss": relative_error(np.asarray(loss, np.float64), oracle.loss),
        "grad_logits": relative_error(np.asarray(grad, np.float64), oracle.grad_logits),
    }
