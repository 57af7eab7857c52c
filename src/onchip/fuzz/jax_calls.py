"""Arrays of a random call in JAX, and its results."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from onchip.fuzz.judge import CONSTANTS, least_scratch, named
from onchip.ops.linear_jsd.spec import TopK


def arrays(made: Any, shape: Sequence[int], dtype: str, *, label_dtype: str = "int64") -> dict[str, Any]:
    """The arrays of `made`, the inputs of a case, with `shape` for their tokens, and upstream gradients among them."""
    out: dict[str, Any] = {}
    for name, x in made._asdict().items():
        if x is None:
            continue
        if name == "topk":
            out["teacher_topk"] = TopK(*(part.reshape(*shape, part.shape[-1]) for part in x[:2]), *x[2:])
            continue
        per_token = name == "token_weight" or not name.endswith(("weight", "bias"))
        x = np.reshape(x, (*shape, *np.shape(x)[1:])) if per_token and np.ndim(x) else x
        if name in ("target", "ids"):
            out[name] = np.asarray(x).astype(label_dtype)
        elif name in CONSTANTS or (name.startswith("grad_") and name != "grad_out"):
            out[name] = jnp.asarray(x)
        else:
            out[name] = jnp.asarray(x, dtype)
    return out


def numbers(given: Mapping[str, Any]) -> dict[str, Any]:
    """The same for the oracle: NumPy, floats as float64."""
    return {
        name: tuple(x) if name == "teacher_topk" else x if isinstance(x, np.ndarray) else np.asarray(x, np.float64)
        for name, x in given.items()
    }


def results(
    op: Callable[..., Any],
    given: Mapping[str, Any],
    *,
    frozen: Sequence[str] = (),
    transposed: bool = False,
    traced: Mapping[str, float] | None = None,
    jit: bool = True,
    scratch: float | None = None,
    again: bool = False,
    twice: bool = False,
) -> dict[str, Any]:
    """What `op` returns and the gradients of the arrays in `given`, under the names of the oracle's fields.

    Weights are passed `transposed` for the other layout, and `traced` numbers as arrays.  `scratch` is so many times
    the least budget.  `again` pulls back a second time, which must give the same; `twice` differentiates a gradient,
    which must raise.
    """
    upstream = {name.removeprefix("grad_"): g for name, g in given.items() if name.startswith("grad_")}
    constants = {n: given[n] for n in ("target", "ids", "token_weight", "temperature") if n in given}
    if "target" in constants:
        constants["labels"] = constants.pop("target")
    topk = given.get("teacher_topk")
    constants |= {} if topk is None else {"teacher_topk": tuple(topk[:2])}
    constants |= {name: jnp.float32(x) for name, x in (traced or {}).items()}
    rest = {n: x for n, x in given.items() if n not in CONSTANTS and n != "teacher_topk" and not n.startswith("grad_")}
    fixed = {n: x for n, x in rest.items() if n in frozen}
    leaves = {n: x for n, x in rest.items() if n not in frozen}

    def values(leaves: Any, fixed: Any, constants: Any, **more: Any) -> Any:
        floats = {n: x.T if transposed and n.endswith("weight") else x for n, x in (leaves | fixed).items()}
        if topk is not None:
            constants = constants | {"teacher_topk": TopK(*constants["teacher_topk"], *topk[2:])}
        made = named(op(**floats, **constants, **more), next(iter(upstream)))
        return {n: made.pop(n) for n in upstream if n in made}, made

    def step(leaves: Any, fixed: Any, constants: Any, upstream: Any, **more: Any) -> Any:
        outputs, pullback, others = jax.vjp(lambda x: values(x, fixed, constants, **more), leaves, has_aux=True)
        factors = {n: upstream[n].astype(x.dtype) for n, x in outputs.items()}
        return outputs | others, [pullback(factors)[0] for _ in range(1 + again)]

    more = {}
    if scratch is not None:

        def trace(**more: Any) -> Any:
            return jax.eval_shape(lambda *x: step(*x, **more), leaves, fixed, constants, upstream)

        more = {"scratch_bytes": math.ceil(scratch * least_scratch(trace))}
    if twice and leaves:
        refuse_second_derivative(lambda x: step(x, fixed, constants, upstream, **more)[1][0], leaves)

    def run(*x: Any) -> Any:
        return step(*x, **more)

    outputs, gradients = (jax.jit(run) if jit else run)(leaves, fixed, constants, upstream)
    for name in leaves if again else ():
        first, second = (np.asarray(made[name], np.float32) for made in gradients)
        same = np.array_equal(first, second, equal_nan=True)
        assert same, f"a second backward gives another gradient of {name}"
    out = outputs | {f"grad_{name}": x for name, x in gradients[0].items()}
    return {
        n: np.asarray(x, np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else np.asarray(x) for n, x in out.items()
    }


def refuse_second_derivative(gradients: Callable[[Any], Mapping[str, Any]], leaves: Any) -> None:
    """A derivative of the gradients must raise."""
    try:
        jax.grad(lambda x: sum(jnp.linalg.norm(g.astype(jnp.float32)) for g in gradients(x).values()))(leaves)
    except NotImplementedError:
        return
    raise AssertionError("a backward of the backward gives something")
