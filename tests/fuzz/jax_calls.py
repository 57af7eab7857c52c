"""Arrays of a random call in JAX, and its results."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fuzz.draw import Call
from fuzz.judge import CONSTANTS, named, scratch_budget


def array(name: str, x: Any, dtype: str | None, call: Call) -> Any:
    """An input in a dtype (None: its own)."""
    if name == "topk":
        return x
    return np.asarray(x).astype(dtype) if np.asarray(x).dtype.kind == "i" else jnp.asarray(x, dtype)


def results(
    op: Callable[..., Any], given: Mapping[str, Any], options: Mapping[str, Any], call: Call, leaves: Sequence[str]
) -> dict[str, Any]:
    """As PyTorch's: what `op` returns and the gradients of the `leaves`, under the names of the oracle's fields.

    Weights are transposed for the other layout, and of a call that is "traced" the numbers are arrays.
    """
    upstream = {name.removeprefix("grad_"): g for name, g in given.items() if name.startswith("grad_")}
    constants = {n: given[n] for n in CONSTANTS if n in given}
    topk = given.get("teacher_topk")
    if topk is not None:
        constants["teacher_topk"] = topk
    if call["traced"]:
        names = ("normalizer",) if call["op"] == "linear_jsd" else tuple(options)
        constants |= {n: jnp.float32(options[n]) for n in names if isinstance(options.get(n), float)}
    static = {n: x for n, x in options.items() if n not in constants}
    trained = {n: given[n] for n in leaves}
    others = (*leaves, *CONSTANTS, "teacher_topk")
    fixed = {n: x for n, x in given.items() if n not in others and not n.startswith("grad_")}

    def values(trained: Any, fixed: Any, constants: Any, **more: Any) -> Any:
        transposed = "weight_layout" in options
        floats = {
            n: x.swapaxes(-2, -1) if transposed and n.endswith("weight") else x for n, x in (trained | fixed).items()
        }
        made = named(op(**floats, **constants, **static, **more), next(iter(upstream)))
        return {n: made.pop(n) for n in upstream if n in made}, made

    def step(trained: Any, fixed: Any, constants: Any, upstream: Any, **more: Any) -> Any:
        outputs, pullback, statistics = jax.vjp(lambda x: values(x, fixed, constants, **more), trained, has_aux=True)
        factors = {n: upstream[n].astype(x.dtype) for n, x in outputs.items()}
        return outputs | statistics, [pullback(factors)[0] for _ in range(1 + call["again"])]

    def trace(**more: Any) -> Any:
        return jax.eval_shape(lambda *x: step(*x, **more), trained, fixed, constants, upstream)

    more = scratch_budget(call.get("scratch"), trace)
    if call["twice"] and leaves:
        _refuse_second_derivative(lambda x: step(x, fixed, constants, upstream, **more)[1][0], trained)

    def run(*x: Any) -> Any:
        return step(*x, **more)

    outputs, gradients = (jax.jit(run) if call["jit"] else run)(trained, fixed, constants, upstream)
    for name in leaves if call["again"] else ():
        first, second = (np.asarray(made[name], np.float32) for made in gradients)
        same = np.array_equal(first, second, equal_nan=True)
        assert same, f"a second backward gives another gradient of {name}"
    made: dict[str, Any] = outputs | {f"grad_{name}": x for name, x in gradients[0].items()}
    return made


def _refuse_second_derivative(gradients: Callable[[Any], Mapping[str, Any]], leaves: Any) -> None:
    """A derivative of the gradients must raise."""
    try:
        jax.grad(lambda x: sum(jnp.linalg.norm(g.astype(jnp.float32)) for g in gradients(x).values()))(leaves)
    except NotImplementedError:
        return
    raise AssertionError("a backward of the backward gives something")
