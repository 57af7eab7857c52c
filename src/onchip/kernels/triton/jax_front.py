"""JAX's functions on PyTorch's Triton kernels: `by_torch` lets a public function take backend="triton".

jax_listed.py lists what PyTorch's function does with the same arguments, and lets XLA do it.  PyTorch's CPU build is
enough.  JAX's own function checks the arguments and says what is returned.
"""

import warnings
from collections.abc import Callable, Collection, Mapping
from functools import partial, wraps
from importlib.util import find_spec
from inspect import signature
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from onchip.frontend.jax_call import Planned, callable_here, vary_alike, with_gradients
from onchip.frontend.jax_inputs import hopper_refusal, platform
from onchip.frontend.topk import TopK

F = TypeVar("F", bound=Callable[..., Any])

_CANT = "backend 'triton' can't run this call: "
# Options that only JAX's functions have, but for the layout of groups' weights.
_OURS = ("weight_layout", "axis_name", "check_inputs", "backend")


def gpu() -> tuple[int, int, int]:
    """The compute capability of JAX's default GPU (80 is 8.0), its multiprocessors, and the bytes of shared memory that
    a block may use."""
    device: Any = jax.devices()[0]
    shared = getattr(device, "shared_memory_per_block_optin", 101376)  # or the least that there is
    return round(10 * float(device.compute_capability)), device.core_count, shared


def refusal() -> str | None:
    """Why the kernels can't run here, or None."""
    if platform() != "gpu":
        return f"it runs on NVIDIA GPUs, not on {platform()!r}"
    missing = [name for name in ("torch", "triton") if find_spec(name) is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        return f"{' and '.join(missing)} {verb} not installed: pip install 'onchip[jax-triton]'"
    if (capability := gpu()[0]) < 80:
        return f"it needs compute capability 8.0 or later; this is {capability / 10}"
    if jax.device_count() > 1 and not jax.sharding.get_abstract_mesh().manual_axes:
        return "with several devices it runs only inside of jax.shard_map, on each device's own part"
    return None


def by_torch(function: str, *differentiable: str) -> Callable[[F], F]:
    """A decorator that lets a public function of JAX run the kernels of PyTorch's function "module:name": with
    backend="triton", and by default on GPUs that aren't Hopper.  `differentiable` names arguments."""

    def decorate(ours: F) -> F:
        op = ours.__name__
        run = with_gradients(op, _forward, _backward)

        @wraps(ours)
        def with_kernels(*args: Any, **kwargs: Any) -> Any:
            backend = kwargs.get("backend", "auto")
            named = isinstance(backend, str) and backend == "triton"
            if not named and not (backend == "auto" and platform() == "gpu" and hopper_refusal()):
                return ours(*args, **kwargs)
            try:
                if reason := refusal():
                    raise ValueError(f"{op}: {_CANT}{reason}")
                given = signature(ours).bind(*args, **kwargs).arguments
                like, tree = jax.tree.flatten(jax.eval_shape(lambda: ours(**given | {"backend": "xla"})))
                made = callable_here(run)(*_split(op, function, given, differentiable))
            except (ValueError, TypeError, NotImplementedError) as error:
                if named:
                    raise
                made = ours(*args, **kwargs)  # which raises where the arguments are wrong
                reason = str(error).removeprefix(f"{op}: ").removeprefix(_CANT)
                warnings.warn(f"{op}: it runs in plain JAX on this GPU, without kernels: {reason}", stacklevel=2)
                return made
            made = [x.reshape(y.shape).astype(y.dtype) for x, y in zip(made, like, strict=True)]
            return jax.tree.unflatten(tree, made)

        return with_kernels  # type: ignore[return-value]

    return decorate


def _split(op: str, function: str, given: Mapping[str, Any], differentiable: Collection[str]) -> tuple[Any, Any, Any]:
    """Of a call's arguments, what is known while tracing, the arrays with gradients, and the others by their names."""
    if given.get("axis_name") is not None:
        raise ValueError(f"{op}: backend 'triton' can't take a split vocabulary; pass backend='auto'")
    arrays, options = {}, {}
    for name, x in given.items():
        if isinstance(x, TopK):
            arrays[name] = jax.tree.map(jnp.asarray, x)
        elif hasattr(x, "dtype") and (x.ndim or name == "normalizer"):
            constant = name not in differentiable and not name.startswith(("target", "labels", "teacher"))
            to = jnp.float32 if constant and jnp.issubdtype(x.dtype, jnp.floating) else None
            arrays[name] = jnp.asarray(x, to)
        elif isinstance(x, jax.core.Tracer):
            raise ValueError(f"{op}: backend 'triton' needs to know {name}; pass a number that isn't traced")
        elif x is not None and (name not in _OURS or x == "gkn"):
            options[name] = x.item() if hasattr(x, "dtype") else x
    turned = [x for x in differentiable if x.endswith("weight")] if given.get("weight_layout") == "hv" else []
    fixed = "constant" if given.get("teacher_grad") else "teacher"
    names = [x for x in differentiable if x in arrays and not x.startswith(fixed)]
    static = function, tuple(names), tuple(turned), tuple(sorted(options.items())), gpu()
    arrays = vary_alike(arrays)
    return static, tuple([arrays.pop(x) for x in names]), arrays


def _forward(static: Any, needs: Any, parameters: Any, constants: Any) -> tuple[Any, Planned]:
    from onchip.kernels.triton.jax_listed import listed

    leaves, tree = jax.tree.flatten(dict(zip(static[1], parameters, strict=True)) | constants)
    # Labels have 64 bits in PyTorch.
    dtypes = ["int64" if jnp.issubdtype(x.dtype, jnp.integer) else x.dtype.name for x in leaves]
    program = listed(static, tree, tuple([(x.shape, y) for x, y in zip(leaves, dtypes, strict=True)]), needs)
    outputs, kept = jax.custom_batching.sequential_vmap(partial(program.run, 0, ()))(leaves)
    return outputs, Planned(kept, program)


def _backward(static: Any, needs: Any, saved: Planned, cotangents: Any) -> tuple[jax.Array | None, ...]:
    run = jax.custom_batching.sequential_vmap(lambda *given: saved.plan.run(1, *given)[0])
    return tuple(run(saved.arrays, cotangents))
