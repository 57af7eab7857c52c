"""JAX's functions on PyTorch's Triton kernels: `by_torch` lets a public function take backend="triton".

torch_listed.py lists what PyTorch's function does with the same arguments, and jax_listed.py lets XLA do it.  PyTorch's
CPU build is enough.  JAX's own function checks the arguments and says what is returned.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial, wraps
from importlib import import_module
from importlib.util import find_spec
from inspect import Signature, signature
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
# Options that only JAX's functions have.
_OURS = ("weight_layout", "axis_name", "check_inputs", "backend")


class JaxGpu(NamedTuple):
    capability: int  # 80 is 8.0
    programs: int  # multiprocessors


class _Array(NamedTuple):
    """A tensor without memory."""

    name: str  # "target.indices" of a TopK
    shape: tuple[int, ...]
    dtype: str
    turned: bool = False  # the caller gives its transpose

    def tensor(self) -> Any:
        import torch

        shape = self.shape[::-1] if self.turned else self.shape
        made = torch.empty(shape, dtype=getattr(torch, self.dtype), device="meta")
        return made.T if self.turned else made


class _Call(NamedTuple):
    """Everything that a list depends on, except which gradients are needed."""

    function: str
    arrays: tuple[_Array, ...]
    options: tuple[tuple[str, Any], ...]
    kinds: tuple[tuple[str, str, str], ...]  # of each TopK: its name and its words
    gpu: JaxGpu


def refusal() -> str | None:
    """Why the kernels can't run here, or None."""
    if platform() != "gpu":
        return f"it runs on NVIDIA GPUs, not on {platform()!r}"
    missing = [name for name in ("torch", "triton") if find_spec(name) is None]
    if missing:
        return f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed: {INSTALL}"
    if reason := jax_call.refusal():
        return reason
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
    warnings.warn(f"{op}: it runs in plain JAX on this GPU, without kernels: {reason}", stacklevel=4)


def by_torch(function: str, *differentiable: str) -> Callable[[F], F]:
    """A decorator that lets a public function of JAX run the kernels of PyTorch's function "module:name": with
    backend="triton", and by default on GPUs that aren't Hopper.  `differentiable` names arguments."""

    def decorate(ours: F) -> F:
        op, parameters = ours.__name__, signature(ours)

        @wraps(ours)
        def with_kernels(*args: Any, **kwargs: Any) -> Any:
            backend = kwargs.get("backend", "auto")
            if backend == "auto" and platform() == "gpu" and hopper_refusal():
                return _where_possible(op, function, ours, parameters, differentiable, args, kwargs)
            if not (isinstance(backend, str) and backend == "triton"):
                return ours(*args, **kwargs)
            if reason := refusal():
                raise ValueError(f"{op}: backend 'triton' can't run this call: {reason}")
            return _run(function, ours, parameters.bind(*args, **kwargs).arguments, differentiable)

        return with_kernels  # type: ignore[return-value]

    return decorate


def _where_possible(
    op: str, function: str, ours: Any, parameters: Signature, differentiable: Sequence[str], args: Any, kwargs: Any
) -> Any:
    if reason := refusal():
        _tell(op, reason)
        return ours(*args, **kwargs)
    try:
        return _run(function, ours, parameters.bind(*args, **kwargs).arguments, differentiable)
    except (ValueError, TypeError, NotImplementedError) as error:
        made = ours(*args, **kwargs)  # which raises where the arguments are wrong
        _tell(op, str(error).removeprefix(f"{op}: "))
        return made


def _run(function: str, ours: Callable[..., Any], given: Mapping[str, Any], differentiable: Sequence[str]) -> Any:
    """What JAX's function returns for these arguments, by PyTorch's kernels."""
    like = jax.eval_shape(lambda: ours(**{**given, "backend": "xla"}))
    op, layout = ours.__name__, given.get("weight_layout", "vh")
    if given.get("axis_name") is not None:
        raise ValueError(f"{op}: backend 'triton' can't take a split vocabulary; pass backend='auto'")
    arrays: dict[str, Any] = {}
    options: dict[str, Any] = {}
    kinds: list[tuple[str, str, str]] = []
    for name, x in given.items():
        if isinstance(x, TopK):
            arrays |= {f"{name}.indices": x.indices, f"{name}.values": x.values}
            kinds.append((name, x.kind, x.rest))
        elif name in _OURS or x is None:
            continue
        elif hasattr(x, "dtype") and (x.ndim or name == "normalizer"):
            arrays[name] = x
        elif isinstance(x, jax.core.Tracer):
            raise ValueError(f"{op}: backend 'triton' needs to know {name}; pass a number that isn't traced")
        else:
            options[name] = x.item() if hasattr(x, "dtype") else x
    arrays = {
        name: _as_taken(name, arrays[name], differentiable) for name in sorted(arrays, key=_order(differentiable))
    }
    turned = [name for name in arrays if name.endswith("weight") and layout == "hv" and name in differentiable]
    like_torch = tuple([_array(name, x, name in turned) for name, x in arrays.items()])
    static = _Call(function, like_torch, tuple(sorted(options.items())), tuple(kinds), gpu())
    fixed = () if given.get("teacher_grad") else tuple([x for x in arrays if x.startswith("teacher")])
    constant = [name not in differentiable or name in fixed for name in arrays]
    values = [jax.lax.stop_gradient(x) if fixed else x for x, fixed in zip(arrays.values(), constant, strict=True)]
    count = constant.index(True) if True in constant else len(constant)  # arguments with gradients come first
    values = vary_alike(values)
    made = callable_here(_differentiated(op))(static, tuple(values[:count]), tuple(values[count:]))
    leaves, tree = jax.tree.flatten(like)
    return jax.tree.unflatten(tree, [x.reshape(y.shape).astype(y.dtype) for x, y in zip(made, leaves, strict=True)])


def _order(differentiable: Sequence[str]) -> Callable[[str], int]:
    return lambda name: differentiable.index(name) if name in differentiable else len(differentiable)


def _as_taken(name: str, x: Any, differentiable: Sequence[str]) -> jax.Array:
    made: jax.Array = jnp.asarray(x)
    if name in differentiable or name.startswith(("target", "labels", "teacher")):
        return made
    return made.astype(jnp.float32) if jnp.issubdtype(made.dtype, jnp.floating) else made


def _array(name: str, x: jax.Array, turned: bool) -> _Array:
    dtype = "int64" if jnp.issubdtype(x.dtype, jnp.integer) else x.dtype.name
    return _Array(name, x.shape[::-1] if turned else x.shape, dtype, turned)


@lru_cache(maxsize=64)
def _program(call: _Call, needs: tuple[bool, ...]) -> Any:
    """The list of a call, as a program."""
    from onchip.frontend.torch_listed import listed
    from onchip.kernels.triton.jax_listed import Program
    from onchip.kernels.triton.launch import Device

    module, _, name = call.function.partition(":")
    function = getattr(import_module(module), name)
    kinds: dict[str, Any] = {name: words for name, *words in call.kinds}

    def run(*tensors: Any) -> Any:
        given = dict(zip([x.name for x in call.arrays], tensors, strict=True))
        of_kinds = {x: TopK(given.pop(f"{x}.indices"), given.pop(f"{x}.values"), *kinds[x]) for x in kinds}
        return function(**given, **of_kinds, **dict(call.options), backend="triton")

    shared = _SHARED.get(call.gpu.capability, _LEAST_SHARED)
    # Without descriptors, which XLA's call doesn't make: as on a GPU of compute capability 8.0.
    device, tensors = Device(80, call.gpu.programs, shared), [x.tensor() for x in call.arrays]
    found, _ = listed(device, partial(_stack, call.gpu.capability), run, tensors, needs)
    program = Program(found, call.gpu.capability)
    program.compile()
    return program


def _stack(capability: int, launch: Any) -> int:
    arguments = {name: _pointers(x) for name, x in launch.arguments.items()}
    return jax_call.stack(launch.kernel, arguments, launch.options, capability)


def _pointers(x: Any) -> Any:
    """The same with pointers in place of tensors."""
    if hasattr(x, "untyped_storage"):
        return jax_call.Pointer(str(x.dtype).removeprefix("torch."), 0, x.storage_offset() * x.element_size())
    if isinstance(x, tuple):
        parts = [_pointers(y) for y in x]
        return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
    return x


@lru_cache(maxsize=16)
def _differentiated(op: str) -> Any:
    return with_gradients(op, _forward, _backward)


def _forward(static: _Call, needs: Any, parameters: Any, constants: Any) -> tuple[Any, Any]:
    from onchip.kernels.triton.jax_listed import words

    wanted = (*needs, *[False] * len(constants))
    program = _program(static, wanted)

    def run(*arrays: jax.Array) -> Any:
        return program.forward([words(x) if jnp.issubdtype(x.dtype, jnp.integer) else x for x in arrays])

    outputs, kept = _untracked(jax.custom_batching.sequential_vmap(run), *parameters, *constants)
    return outputs, Planned(kept if any(wanted) else None, (static, wanted))


def _backward(static: _Call, needs: Any, saved: Planned, cotangents: Any) -> Any:
    program = _program(*saved.plan)
    made = _untracked(jax.custom_batching.sequential_vmap(program.backward), saved.arrays, cotangents)
    turned = [x.turned for x in static.arrays]
    made = [g if g is None or not t else g.T for g, t in zip(made, turned, strict=True)]
    return tuple(made[: len(needs)])


def _untracked(run: Callable[..., Any], *arrays: Any) -> Any:
    """Call `run`; inside of a `jax.shard_map` with check_vma too, it need not say over which axes its results vary."""
    axes = frozenset[str]().union(*map(varies_over, jax.tree.leaves(arrays)))
    if not axes:
        return run(*arrays)
    made = jax.shard_map(run, in_specs=P(), out_specs=P(), axis_names=axes, check_vma=False)(*arrays)
    return jax.tree.map(lambda x: jax.lax.pcast(x, tuple(sorted(axes)), to="varying"), made)
