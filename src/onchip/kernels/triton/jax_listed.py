"""Lists what a PyTorch call launches, and does the same in XLA: each launch is a call there, the same by which
jax-triton launches kernels, and JAX computes what PyTorch computes between them.

The call runs on tensors without memory, forward and backward, as it would on a GPU.  In XLA, a storage is an array of
one dimension; a launch that may write to it takes the array and gives it back.  An argument may begin anywhere in an
array: the kernel's machine code adds the offset to the address that it reads.
"""

import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from importlib import import_module
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from jaxlib import gpu_triton
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from onchip.frontend.jax_call import vary_alike
from onchip.frontend.torch_builder import THREAD
from onchip.frontend.torch_inputs import dtype_name
from onchip.frontend.torch_prepared import unstated
from onchip.kernels.triton.compiling import compile_jobs, resources
from onchip.kernels.triton.launch import Device, Launch, Shared

TARGET = "triton_kernel_call"  # XLA's name of the call


class Program(TorchDispatchMode):
    """What a function of PyTorch's and its backward do with arguments like these.

    static: the function's "module:name", names of arguments with gradients and of those of which it takes the
    transpose, those that are no arrays, and the GPU (`jax_front.gpu`).  tree: of the arrays by their names.  like:
    their shapes and PyTorch's dtypes.  needs: which of those with gradients need one.
    """

    def __init__(self, static: Any, tree: Any, like: Sequence[tuple[Any, str]], needs: Sequence[bool]) -> None:
        super().__init__()
        function, names, turned, options, (capability, programs, shared) = static
        # Without descriptors, which XLA's call doesn't make: as on a GPU of compute capability 8.0.
        self.device = Device(80, programs, shared)
        self.stack = lambda launch: resources(*compile_jobs([launch.job(capability)]))[1]
        self.steps: list[Any] = []  # launches; of ATen's operators the name, the arguments by name, and the results
        given: Any = [torch.empty(shape, dtype=getattr(torch, dtype), device="meta") for shape, dtype in like]
        arguments = jax.tree.unflatten(tree, given)
        of = [arguments[x].requires_grad_() for x, need in zip(names, needs, strict=True) if need]
        arguments |= {x: arguments[x].T for x in turned if x in arguments} | dict(options)
        module, _, name = function.partition(":")
        with unstated(), self, torch.set_grad_enabled(any(needs)):
            THREAD.builder = self
            outputs = _tensors(getattr(import_module(module), name)(**arguments, backend="triton"))
            forward, self.steps = self.steps, []
            upstream = [torch.empty_like(x) if x.requires_grad else None for x in outputs]
            roots = [x for x in outputs if x.requires_grad]
            found = iter(torch.autograd.grad(roots, of, _tensors(upstream)) if roots else ())
        made = [next(found, None) if need else None for need in needs]
        given, outputs, upstream, made = tree_map_only(Tensor, Tensor.detach, (given, outputs, upstream, made))
        self.parts = (given, forward, outputs), (upstream, self.steps, made)
        self.fixed = _storages((given, upstream))  # that nothing writes to
        needed = _storages(self.parts[1][1:])
        self.kept = [x for x in _storages(self.parts[0]) if x in needed]  # what backward needs
        launches = {id(x): x for x in (*forward, *self.steps) if isinstance(x, Launch)}
        self.codes = dict(zip(launches, compile_jobs([x.job(capability) for x in launches.values()]), strict=True))

    # What operators and launches state (torch_prepared.py), and what PyTorch computes.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made, kwargs = func(*args, **(kwargs or {})), kwargs or {}
        schema, name = func._schema, func._schema.name.removeprefix("aten::")
        if not schema.is_mutable and _storages(made).keys() <= _storages((args, kwargs)).keys():  # a view
            return made
        given = dict(zip([x.name for x in schema.arguments], args, strict=False)) | kwargs
        if not name.startswith(("empty", "new_empty")):
            self.steps.append((name, *tree_map_only(Tensor, Tensor.detach, ([*given.items()], made))))
        return made

    def launch(self, launch: Launch) -> None:
        if 0 not in launch.grid:
            self.steps.append(launch._replace(given=launch.arguments, shared=Shared({})))

    def refuse(self, reason: str) -> None:
        raise NotImplementedError(reason)

    # `__torch_dispatch__` knows what ATen's operators do.
    allocate = zero = call = connected = derive = require = lambda *_: None

    def run(self, part: int, kept: Sequence[Any], values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Do forward, part 0, or backward, 1, with what forward kept; returns the results, and what backward needs."""
        memory = XlaMemory({x: array for x, array in zip(self.kept, kept, strict=False) if array is not None})
        given, steps, results = self.parts[part]
        for x, value in zip(given, values, strict=True):
            if x is not None:
                memory.write(x, jnp.zeros(()) if value is None else value)
        for step in steps:
            if isinstance(step, Launch):
                memory.launch(step, self.codes[id(step)], self.fixed)
            else:
                name, arguments, outputs = step
                made = run_aten(name, dict(tree_map_only(Tensor, memory.read, arguments)))
                for x, value in zip(_tensors(outputs), made if isinstance(made, tuple) else (made,), strict=True):
                    memory.write(x, value)
        made = vary_alike([None if x is None else memory.read(x) for x in results], (kept, values))
        return made, [memory.get(x) for x in self.kept]


listed = lru_cache(maxsize=64)(Program)


class XlaMemory(dict[int, jax.Array]):
    """Arrays by the storages for which they were made; one that is missing has not been written."""

    def read(self, x: Tensor) -> jax.Array:
        dtype = _in_jax(x.dtype)
        if not x.numel() or _storage(x) not in self:
            return jnp.zeros(x.shape, dtype)
        if not x.is_contiguous():
            whole, place, order = _within(x)
            return self.read(whole)[place].transpose(np.argsort(order)).reshape(x.shape)
        flat, start, words = self[_storage(x)], _start(x), x.itemsize // dtype.itemsize
        own, size, end = flat.dtype.itemsize, dtype.itemsize, start + x.nbytes
        part = flat[start // own : -(-end // own)].view(dtype)[start % own // size :][: x.numel() * words : words]
        return part.reshape(x.shape)

    def write(self, x: Tensor, value: Any) -> None:
        dtype, value = _in_jax(x.dtype), jnp.broadcast_to(value, x.shape)
        if not x.is_contiguous():
            x, place, order = _within(x)
            value = self.read(x).at[place].set(value.squeeze().transpose(order).astype(dtype))
        if x.itemsize > dtype.itemsize:
            value = jnp.stack([value.astype(dtype), -(value < 0).astype(dtype)], -1)
        value = value.astype(dtype).reshape(-1)
        if x.nbytes < x.untyped_storage().nbytes():
            into = self[_storage(x)] if _storage(x) in self else jnp.zeros_like(_new(x))
            value = lax.dynamic_update_slice(into, value.view(into.dtype), (_start(x) // into.dtype.itemsize,))
        self[_storage(x)] = value

    def launch(self, launch: Launch, code: Any, fixed: Mapping[int, Any]) -> None:
        """Launch a kernel, where XLA passes it all operands, then all results, which may be in operands' memory."""
        used: dict[int, Tensor] = {}
        for x in _tensors(launch.given):
            if x.numel():
                used.setdefault(_storage(x), x)
        operands, written = [x for x in used if x in self], [x for x in used if x not in fixed]
        places = {x: n for n, x in enumerate([*operands, *written])}
        # Inside of a jax.shard_map results vary as the operands do.
        given = vary_alike([self[x] for x in operands])
        results = [self.get(x, _new(used[x])) for x in written]
        call: Any = jax.ffi.ffi_call(  # type: ignore[call-overload]
            TARGET,
            [jax.typeof(given[0]).update(shape=x.shape, dtype=x.dtype) if given else x for x in results],
            input_output_aliases={operands.index(x): n for n, x in enumerate(written) if x in self},
            custom_call_api_version=2,
            legacy_backend_config=told(launch, code, places, len(given) + len(results)),
        )
        self.update(zip(written, call(*given), strict=True))


def _storage(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)


def _storages(x: Any) -> dict[int, None]:
    return dict.fromkeys(map(_storage, _tensors(x)))


def _start(x: Tensor) -> int:
    """Bytes from the beginning of its storage."""
    return int(x.storage_offset()) * x.itemsize


def _within(x: Tensor) -> tuple[Tensor, Any, list[int]]:
    """An array around a tensor that has strides of its own, where in it the tensor is, and the order there of those of
    the tensor's dimensions that are longer than 1."""
    x = x.squeeze()
    order = sorted(range(x.ndim), key=x.stride, reverse=True)
    x = x.permute(order)
    steps, offset = [*x.stride(), 1], int(x.storage_offset())
    start = min(offset, x.untyped_storage().nbytes() // x.itemsize - len(x) * steps[0])
    whole = x.as_strided([len(x), *(a // b for a, b in pairwise(steps))], steps, start)
    assert whole.is_contiguous(), f"{x.shape} with strides {x.stride()} is no slice of an array"
    *first, last = np.unravel_index(offset - start, whole.shape)
    return whole, (*[slice(i, i + n) for i, n in zip(first, x.shape, strict=True)], last), order


def _in_jax(dtype: torch.dtype) -> Any:
    """The same dtype, or int32 where JAX has no numbers of 64 bits: two of these stand for one."""
    return jax.dtypes.canonicalize_dtype(dtype_name(dtype))


def _new(x: Tensor) -> jax.ShapeDtypeStruct:
    """An array for a tensor's storage."""
    dtype = _in_jax(x.dtype)
    return jax.ShapeDtypeStruct((x.untyped_storage().nbytes() // dtype.itemsize,), dtype)


def _tensors(x: Any) -> list[Tensor]:
    return [y for y in jax.tree.leaves(x) if isinstance(y, Tensor)]


def told(launch: Launch, code: Any, places: Mapping[int, int], arrays: int) -> bytes:
    """What XLA is told of the launch of a compiled kernel that it passes so many `arrays` and then numbers; `places`
    are the arrays', by storage."""
    kinds, tree = jax.tree.flatten([*code.src.signature.values()])
    values = tree.flatten_up_to([launch.given[x] for x in code.src.signature])  # type: ignore[attr-defined]
    flat = [(x, kind) for x, kind in zip(values, kinds, strict=True) if kind != "constexpr"]
    where = [(places.get(_storage(x), 0), _start(x)) if isinstance(x, Tensor) else None for x, _ in flat]
    parameters = [gpu_triton.create_array_parameter(0, 0)] * arrays
    parameters += [gpu_triton.create_scalar_parameter(*x) for x, at in zip(flat, where, strict=True) if at is None]
    name, shared, target = code.metadata.name, code.metadata.shared, code.metadata.target
    ptx, ttir = of_arrays(name, code.asm["ptx"], where, arrays), str(code.asm["ttir"])
    kernel = gpu_triton.TritonKernel(name, launch.warps, 1, shared, ptx, ttir, target.arch)
    call = gpu_triton.TritonKernelCall(kernel, *(*launch.grid, 1, 1)[:3], parameters)
    return zlib.compress(call.to_proto(name, b""))


def of_arrays(kernel: str, ptx: str, where: Sequence[tuple[int, int] | None], arrays: int) -> str:
    """The machine code of a kernel that takes `arrays`, in the order in which XLA passes them, and then its numbers.

    where: for each parameter that is memory, the array and the byte in it where it begins; for a number, None.
    """
    head = re.search(rf"\.visible \.entry {re.escape(kernel)}\(([^)]*)\)", ptx)
    assert head is not None
    parameters = [x.strip() for x in head[1].split(",")]
    assert len(parameters) == len(where) + 2, "Triton's kernels have two more parameters, for scratch memory"
    for i, found in enumerate(where):
        if found is not None:
            name, (array, offset) = rf"\[{re.escape(kernel)}_param_{i}\]", found
            to = rf"\1\2, [{kernel}_array_{array}];" + (rf"\n\tadd.s64 \t\2, \2, {offset};" if offset else "")
            ptx = re.sub(rf"(ld\.param\.[bu]64\s+)(%\w+), {name};", to, ptx)
            assert not re.search(name, ptx), f"{kernel} reads the address of parameter {i} in an unknown way"
    numbers = [x for x, found in zip(parameters, [*where, None, None], strict=True) if found is None]
    given = [f".param .u64 {kernel}_array_{i}" for i in range(arrays)] + numbers
    return ptx.replace(head[1], "\n\t" + ",\n\t".join(given) + "\n", 1)


# ATen's operators, and what they are called in JAX if not by the same names.
_NAMES = """abs add amax any arange argmax bitwise_not clamp:clip clone:asarray contiguous:asarray div:divide eq:equal
exp expm1 full full_like gather:take_along_axis ge:greater_equal gt:greater log lt:less mean mul:multiply nan_to_num
ne:not_equal neg:negative ones ones_like __and__:bitwise_and __or__:bitwise_or reciprocal reshape square sub:subtract
sum to:asarray where zero_:zeros_like zeros zeros_like"""
_ATEN: dict[str, Callable[..., Any]] = {
    **{aten: getattr(jnp, name or aten) for aten, _, name in (x.partition(":") for x in _NAMES.split())},
    "copy_": lambda x, y: y,
    "index": lambda x, index: x[tuple(slice(None) if i is None else i for i in index)],
    "masked_fill": lambda x, mask, value: jnp.where(mask, value, x),
    # The last dimension's widths come first.
    "pad": lambda x, widths, mode=None, value=0: jnp.pad(
        x, [(0, 0)] * (x.ndim - len(widths) // 2) + np.reshape(widths, (-1, 2))[::-1].tolist(), constant_values=value
    ),
    "searchsorted": partial(jnp.searchsorted, method="sort"),
    "slice_backward": lambda x, shape, first, last, step, axis: (
        jnp.zeros(shape, x.dtype).at[*[slice(None)] * axis, slice(first, last, step)].set(x)
    ),
    "sort": lambda x: lax.sort_key_val(x, lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)),
}
_KEYWORDS = {"dim": "axis", "keepdim": "keepdims"} | {x: x for x in ("max", "min", "mode", "nan", "value")}
_UNUSED = "copy", "device", "dtype", "layout", "memory_format", "non_blocking", "pin_memory", "stable"


def run_aten(name: str, given: dict[str, Any]) -> Any:
    """What an operator makes of JAX's arrays, in some dtype."""
    function = _ATEN.get(name) or _ATEN.get(name.removesuffix("_"))
    if function is None:
        raise NotImplementedError(f"JAX is not told what ATen's {name} does")
    given = {name: x for name, x in given.items() if x is not None and name not in _UNUSED}
    options = {_KEYWORDS[x]: tuple(y) or None if isinstance(y, list) else y for x, y in given.items() if x in _KEYWORDS}
    return function(*[x for name, x in given.items() if name not in _KEYWORDS], **options)
