"""How JAX calls an op: derivatives of first order by reverse mode, and arrays that vary under `jax.shard_map`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import mlir

# What stands for a label that is not in [0, V).
IGNORED = -1
OUT_OF_RANGE = -2


class Static(NamedTuple):
    """What is known of a call while tracing; a call with another `Static` compiles anew."""

    options: Any  # the op's own, without numbers that may be arrays
    platform: str  # "cpu", "gpu" or "tpu"
    backend: str = "xla"
    shard: Any = None  # of the vocabulary
    mesh: Any = None  # an `OnMesh` of a call that spreads itself
    recompute: bool = False  # backward has the arguments and numbers of tokens alone
    fused: bool = True  # XLA compiles the call in a larger program, not outside of a jit


@partial(jax.tree_util.register_dataclass, data_fields=["arrays"], meta_fields=["plan"])
@dataclass(frozen=True)
class Planned:
    """Any pytree of arrays that forward leaves for backward, and the plan of both."""

    arrays: Any
    plan: Any


@partial(jax.tree_util.register_dataclass, data_fields=["residuals"], meta_fields=["needs", "like"])
@dataclass(frozen=True)
class _Saved:
    """What backward gets."""

    residuals: Any
    needs: Any
    like: Any


def with_gradients(op: str, forward: Callable[..., Any], backward: Callable[..., Any]) -> Any:
    """A function of (static, parameters, constants) with first derivatives of the parameters, by reverse mode alone.

    forward(static, needs, parameters, constants) returns the outputs, and what backward needs, any pytree;
    backward(static, needs, that, cotangents) returns the gradients, a tree like the parameters with None for what needs
    none.  `static` is hashable; `parameters` and `constants` are pytrees of arrays.  `needs`, a tree like the
    parameters, says of each whether it needs a gradient.  Gradients may have any dtype: they are cast to their
    parameters'.  Cotangents that are zero come as None; where all are, backward isn't called.

    Both functions run under jit, compiled anew for another `static` or `needs`, so that a call outside of a jit doesn't
    run operation by operation; `jitted` of the result has both.  To differentiate either would be a second derivative
    of the op: that raises NotImplementedError.  Forward mode raises JAX's own TypeError.
    """

    def cast_backward(static: Any, needs: Any, like: Any, residuals: Any, cotangents: Any) -> Any:
        made = backward(static, needs, residuals, cotangents)
        return jax.tree.map(lambda x, g: g.astype(x.dtype).reshape(x.shape), like, made)

    jit_forward = jax.jit(forward, static_argnums=(0, 1))
    jit_backward = jax.jit(cast_backward, static_argnums=(0, 1, 2))
    run_forward = jax.custom_jvp(jit_forward, nondiff_argnums=(0, 1))
    run_backward = jax.custom_jvp(jit_backward, nondiff_argnums=(0, 1, 2))
    for run in (run_forward, run_backward):
        run.defjvp(partial(refuse_second_derivative, op))

    @partial(jax.custom_vjp, nondiff_argnums=(0,))
    def call(static: Any, parameters: Any, constants: Any) -> Any:
        return run_forward(static, jax.tree.map(lambda _: False, parameters), parameters, constants)[0]

    def call_forward(static: Any, parameters: Any, constants: Any) -> tuple[Any, _Saved]:
        needs = jax.tree.map(lambda x: x.perturbed, parameters)
        values = jax.tree.map(lambda x: x.value, (parameters, constants))
        if isinstance(static, Static) and not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(values)):
            static = static._replace(fused=False)
        outputs, residuals = run_forward(static, needs, *values)
        return outputs, _Saved(residuals, needs, jax.tree.map(_like, parameters))

    def call_backward(static: Any, saved: _Saved, cotangents: Any) -> tuple[Any, Any]:
        upstream = jax.tree.map(_given, cotangents)
        if not jax.tree.leaves(upstream) or not any(jax.tree.leaves(saved.needs)):
            return None, None
        return run_backward(static, saved.needs, saved.like, saved.residuals, upstream), None

    call.defvjp(call_forward, call_backward, symbolic_zeros=True)
    call.jitted = jit_forward, jit_backward  # type: ignore[attr-defined]
    call.whole = jax.jit(call, static_argnums=0)  # type: ignore[attr-defined]
    return call


def callable_here(call: Any) -> Any:
    """A function that `with_gradients` made, as it can be called where this is.

    Outside of a jit, JAX 0.10's `shard_map` doesn't run a custom_vjp with symbolic zeros; inside of one it does.
    """
    return call.whole if jax.sharding.get_abstract_mesh().manual_axes else call


def _like(primal: Any) -> jax.ShapeDtypeStruct | None:
    """The shape and dtype of a gradient, or None where none is needed."""
    return jax.ShapeDtypeStruct(primal.value.shape, primal.value.dtype) if primal.perturbed else None


def _given(cotangent: Any) -> Any:
    """A cotangent, or None for one that is zero or an integer's."""
    return None if isinstance(cotangent, SymbolicZero) or cotangent.dtype == jax.dtypes.float0 else cotangent


def refused(x: jax.Array, error: str) -> jax.Array:
    """`x`, in a computation that can be traced but not run: to compile it raises ValueError."""
    return _REFUSED.bind(x, error=error)  # type: ignore[no-any-return]


def _refuse(context: Any, x: Any, *, error: str) -> Any:
    raise ValueError(error)


_REFUSED = Primitive("refused")
_REFUSED.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(_REFUSED, _refuse)


def refuse_second_derivative(op: str, *_: Any) -> Any:
    """The derivative, by `jax.custom_jvp`, of an op's forward and backward functions: it raises."""
    raise NotImplementedError(
        f"{op}: differentiated twice; the op has only first derivatives, by reverse mode (jax.grad, jax.vjp)"
    )


def varies_over(x: Any) -> frozenset[str]:
    """The mesh axes over which JAX knows an array to vary, inside of `jax.shard_map`."""
    return jax.typeof(x).manual_axis_type.varying  # type: ignore[no-any-return]


def names_of(entry: Any) -> tuple[str, ...]:
    """The mesh axes of an entry of a `PartitionSpec`."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def is_tracked(axis: Any) -> bool:
    """Whether the `jax.shard_map` over the axis, or axes, has check_vma, so that JAX knows what varies."""
    return {*names_of(axis)} <= varies_over(jax.lax.axis_index(axis))


def vary_alike(arrays: Any, like: Any = None, but: Any = None) -> Any:
    """The arrays, each taken to vary over all axes of `jax.shard_map` over which any of them, or of `like`, does; over
    the axis, or axes, `but` as before.

    A loop's state must vary as what is added to it does; and JAX sums the gradient of an array that is the same on all
    devices over the axes that it is made to vary over here.
    """

    every = frozenset[str]().union(*map(varies_over, jax.tree.leaves((arrays, like)))) - {*names_of(but)}

    def vary(x: Any) -> Any:
        missing = tuple(sorted(every - varies_over(x)))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(vary, arrays)
