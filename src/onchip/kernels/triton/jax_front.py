"""JAX's functions on PyTorch's Triton kernels: `by_torch` lets a public function take backend="triton".

jax_listed.py lists what PyTorch's function does with the same arguments, and lets XLA do it.  PyTorch's CPU build is
enough.  JAX's own function checks the arguments and says what is returned.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial, wraps
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from onchip.frontend.jax_call import Planned, callable_here, varies_over, vary_alike, with_gradients
from onchip.frontend.jax_inputs import hopper_refusal, platform
from onchip.frontend.topk import TopK
from onchip.kernels.triton import jax_call

F = TypeVar("F", bound=Callable[..., Any])

INSTALL = "pip install 'onchip[jax-triton]'"
# Bytes of shared memory that a block may use, by compute capability; others have as much as 8.6.
_SHARED = {80: 166912, 87: 166912, 90: 232448, 100: 232448, 103: 232448}
_LEAST_SHARED = 101376
_CANT = "backend 'triton' can't run this call: "
# Options that only JAX's functions have, but for the layout of groups' weights.
_OURS = ("weight_layout", "axis_name", "check_inputs", "backend")


class JaxGpu(NamedTuple):
    capability: int  # 80 is 8.0
    programs: int  # multiprocessors


class _Static(NamedTuple):
    """What is known of a call while tracing."""

    function: str
    parameters: tuple[str, ...]  # names of the arrays with gradients
    turned: tuple[str, ...]  # those of which PyTorch takes the transpose
    options: tuple[tuple[str, Any], ...]
    gpu: JaxGpu


def refusal() -> str | None:
    """Why the kernels can't run here, or None."""
    if platform() != "gpu":
        return f"it runs on NVIDIA GPUs, not on {platform()!r}"
    missing = [name for name in ("torch", "triton") if find_spec(name) is None]
    if missing:
        return f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed: {INSTALL}"
    try:
        if not hasattr(jax_call.library(), "TritonKernelCall"):
            return "JAX is not installed for CUDA: pip install 'jax[cuda13]'"
    except ImportError as error:
        return str(error)
    if gpu().capability < 80:
        return f"it needs compute capability 8.0 or later; this is {gpu().capability / 10}"
    if jax.device_count() > 1 and not jax.sharding.get_abstract_mesh().manual_axes:
        return "with several devices it runs only inside of jax.shard_map, on each device's own part"
    return None


def gpu() -> JaxGpu:
    """JAX's default GPU."""
    device: Any = jax.devices()[0]
    return JaxGpu(round(10 * float(device.compute_capability)), device.core_count)


@lru_cache(maxsize=64)
def _tell(op: str, reason: str) -> None:
    warnings.warn(f"{op}: it runs in plain JAX on this GPU, without kernels: {reason}", stacklevel=3)


def by_torch(function: str, *differentiable: str) -> Callable[[F], F]:
    """A decorator that lets a public function of JAX run the kernels of PyTorch's function "module:name": with
    backend="triton", and by default on GPUs that aren't Hopper.  `differentiable` names arguments."""

    def decorate(ours: F) -> F:
        op, parameters = ours.__name__, signature(ours)

        @wraps(ours)
        def with_kernels(*args: Any, **kwargs: Any) -> Any:
            backend = kwargs.get("backend", "auto")
            named = isinstance(backend, str) and backend == "triton"
            if not named and not (backend == "auto" and platform() == "gpu" and hopper_refusal()):
                return ours(*args, **kwargs)
            try:
                if reason := refusal():
                    raise ValueError(f"{op}: {_CANT}{reason}")
                return _run(function, ours, parameters.bind(*args, **kwargs).arguments, differentiable)
            except (ValueError, TypeError, NotImplementedError) as error:
                if named:
                    raise
                made = ours(*args, **kwargs)  # which raises where the arguments are wrong
                _tell(op, str(error).removeprefix(f"{op}: ").removeprefix(_CANT))
                return made

        return with_kernels  # type: ignore[return-value]

    return decorate


def _run(function: str, ours: Callable[..., Any], given: Mapping[str, Any], differentiable: Sequence[str]) -> Any:
    """What JAX's function returns for these arguments, by PyTorch's kernels."""
    like = jax.eval_shape(lambda: ours(**{**given, "backend": "xla"}))
    op, arrays, options = ours.__name__, {}, {}
    if given.get("axis_name") is not None:
        raise ValueError(f"{op}: backend 'triton' can't take a split vocabulary; pass backend='auto'")
    for name, x in given.items():
        if x is None or (name in _OURS and x != "gkn"):
            continue
        if isinstance(x, TopK) or (hasattr(x, "dtype") and (x.ndim or name == "normalizer")):
            floating = not isinstance(x, TopK) and jnp.issubdtype(x.dtype, jnp.floating)
            as_it_is = not floating or name in differentiable or name.startswith(("target", "labels", "teacher"))
            arrays[name] = jax.tree.map(jnp.asarray, x) if as_it_is else jnp.asarray(x, jnp.float32)
        elif isinstance(x, jax.core.Tracer):
            raise ValueError(f"{op}: backend 'triton' needs to know {name}; pass a number that isn't traced")
        else:
            options[name] = x.item() if hasattr(x, "dtype") else x
    weights = [x for x in differentiable if x in arrays and x.endswith("weight")]
    turned = tuple(weights if given.get("weight_layout") == "hv" else [])
    fixed = "constant" if given.get("teacher_grad") else "teacher"
    parameters = tuple([x for x in differentiable if x in arrays and not x.startswith(fixed)])
    static = _Static(function, parameters, turned, tuple(sorted(options.items())), gpu())
    arrays = vary_alike(arrays)
    values = tuple([arrays.pop(x) for x in parameters])
    made = callable_here(_differentiated(op))(static, values, arrays)
    leaves, tree = jax.tree.flatten(like)
    return jax.tree.unflatten(tree, [x.reshape(y.shape).astype(y.dtype) for x, y in zip(made, leaves, strict=True)])


@lru_cache(maxsize=64)
def _program(static: _Static, needs: tuple[bool, ...], like: tuple[jax.ShapeDtypeStruct, ...], tree: Any) -> Any:
    """The list of a call, as a program; `needs` says which arrays need a gradient."""
    import torch

    from onchip.kernels.triton.jax_listed import Program
    from onchip.kernels.triton.launch import Device

    module, _, name = static.function.partition(":")
    function, capability = getattr(import_module(module), name), static.gpu.capability

    def run(*tensors: torch.Tensor) -> Any:
        given = jax.tree.unflatten(tree, tensors)
        given |= {x: given[x].T for x in static.turned}
        return function(**given, **dict(static.options), backend="triton")

    names = ["int64" if jnp.issubdtype(x.dtype, jnp.integer) else x.dtype.name for x in like]
    tensors = [torch.empty(x.shape, dtype=getattr(torch, n), device="meta") for x, n in zip(like, names, strict=True)]
    # Without descriptors, which XLA's call doesn't make: as on a GPU of compute capability 8.0.
    device = Device(80, static.gpu.programs, _SHARED.get(capability, _LEAST_SHARED))
    stack = partial(jax_call.stack, capability=capability)
    program = Program(device, stack, capability, run, tensors, needs)
    program.compile()
    return program


@lru_cache(maxsize=16)
def _differentiated(op: str) -> Any:
    return with_gradients(op, _forward, _backward)


def _forward(static: _Static, needs: Any, parameters: Any, constants: Any) -> tuple[Any, Any]:
    leaves, tree = jax.tree.flatten(constants | dict(zip(static.parameters, parameters, strict=True)))
    unneeded = jax.tree.map(lambda _: False, constants)
    needed = tuple(jax.tree.leaves(unneeded | dict(zip(static.parameters, needs, strict=True))))
    plan = static, needed, tuple([jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]), tree
    program = _program(*plan)
    run = jax.custom_batching.sequential_vmap(lambda *arrays: program.forward(arrays))
    outputs, kept = _untracked(run, *leaves)
    return outputs, Planned(kept if any(needed) else None, plan)


def _backward(static: _Static, needs: Any, saved: Planned, cotangents: Any) -> Any:
    run = jax.custom_batching.sequential_vmap(_program(*saved.plan).backward)
    made = jax.tree.unflatten(saved.plan[-1], _untracked(run, saved.arrays, cotangents))
    return tuple([made[x] for x in static.parameters])


def _untracked(run: Callable[..., Any], *arrays: Any) -> Any:
    """Call `run`; inside of a `jax.shard_map` with check_vma too, it need not say over which axes its results vary."""
    axes = frozenset[str]().union(*map(varies_over, jax.tree.leaves(arrays)))
    if not axes:
        return run(*arrays)
    made = jax.shard_map(run, in_specs=P(), out_specs=P(), axis_names=axes, check_vma=False)(*arrays)
    return jax.tree.map(lambda x: jax.lax.pcast(x, tuple(sorted(axes)), to="varying"), made)
