"""Lists what a PyTorch call launches, and does the same in XLA: each launch is a call there, the same by which
jax-triton launches kernels, and JAX computes what PyTorch computes between them.

The call runs on tensors without memory, forward and backward, as it would on a GPU.  In XLA, a storage is an array of
one dimension; a launch that may write to it takes the array and gives it back.  An argument may begin anywhere in an
array: the kernel's machine code adds the offset to the address that it reads.
"""

import re
import subprocess
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from importlib import import_module
from tempfile import NamedTemporaryFile
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
from triton import knobs  # type: ignore[import-untyped]
from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]
from triton.compiler import ASTSource, make_backend  # type: ignore[import-untyped]
from triton.runtime.jit import create_function_from_signature  # type: ignore[import-untyped]

from onchip.core.sizes import up
from onchip.frontend.jax_call import vary_alike
from onchip.frontend.torch_builder import ALIGNED, THREAD, placed
from onchip.frontend.torch_inputs import dtype_name
from onchip.frontend.torch_prepared import unstated
from onchip.kernels.triton.compile_process import Job
from onchip.kernels.triton.compiling import compile_jobs
from onchip.kernels.triton.fill import fill_zeros
from onchip.kernels.triton.keys import settle
from onchip.kernels.triton.launch import Device, Launch, Shared

TARGET = "triton_kernel_call"  # XLA's name of the call
_FILLED = 4096  # elements, by a program


class Program(TorchDispatchMode):
    """What a function of PyTorch's and its backward do with arguments like these.

    static: the function's "module:name", names of arguments of which it takes the transpose, those that are no arrays,
    the GPU (`jax_front.gpu`), and the tree of arrays.  needs: which of these need a gradient.
    """

    def __init__(self, static: Any, like: Sequence[jax.ShapeDtypeStruct], needs: Sequence[bool | None]) -> None:
        super().__init__()
        function, turned, options, (capability, programs, shared), tree = static
        # Without descriptors, which XLA's call doesn't make: as on a GPU of compute capability 8.0.
        self.device = Device(80, programs, shared)
        self.stack = partial(stack, capability=capability)
        self.steps: list[Any] = []  # launches; of ATen's operators the name, the arguments by name, and the results
        self.spans: list[tuple[Any, ...]] = []
        self.derive = lambda *span: self.spans.append(span)  # as `Builder.derive`
        dtypes = ["int64" if jnp.issubdtype(x.dtype, jnp.integer) else x.dtype.name for x in like]
        given: Any = [
            torch.empty(x.shape, dtype=getattr(torch, dtype), device="meta", requires_grad=bool(need))
            for x, dtype, need in zip(like, dtypes, needs, strict=True)
        ]
        arguments = jax.tree.unflatten(tree, given)
        arguments |= {x: arguments[x].T for x in turned if x in arguments} | dict(options)
        module, _, name = function.partition(":")
        with unstated(), self, torch.set_grad_enabled(any(needs)):
            THREAD.builder = self
            outputs = _tensors(getattr(import_module(module), name)(**arguments, backend="triton"))
            forward, self.steps = self.steps, []
            upstream = [torch.empty_like(x) if x.requires_grad else None for x in outputs]
            of, by = [x for x in outputs if x.requires_grad], [x for x in given if x.requires_grad]
            found = iter(torch.autograd.grad(of, by, _tensors(upstream)) if of else ())
        gradients = [next(found, None) if need else None for need in needs]
        given, outputs, upstream, gradients = tree_map_only(
            Tensor, Tensor.detach, (given, outputs, upstream, gradients)
        )
        self.fixed = _storages((given, upstream))  # that nothing writes to
        self.parts = self._joined((given, forward, outputs), (upstream, self.steps, gradients))
        made, needed = _storages(self.parts[0]), _storages(self.parts[1][1:])
        self.kept = [x for x in made if x in needed]  # what backward needs
        launches = [x for _, steps, _ in self.parts for x in steps if isinstance(x, Launch)]
        codes = compile_jobs([job(x, capability) for x in launches])
        self.codes = dict(zip(map(id, launches), codes, strict=True))

    def _joined(self, *parts: Any) -> Any:
        """The parts, where storages that one matrix spans are one, since only XLA knows where arrays are; those that
        aren't needed at the same time share a place."""
        spanned = {id(matrix): pieces for _, pieces, matrix, _ in self.spans}
        sizes = {_storage(x): x.untyped_storage().nbytes() for x in _tensors([*spanned.values()]) if x.numel()}
        if len(sizes) > 1:
            (_, forward, outputs), (_, backward, gradients) = parts
            steps = [_tensors(x) for x in (*forward, *backward, (outputs, gradients))]
            used = [_storages([spanned.get(id(x), x) for x in step]) for step in steps]
            lives = [[n for n, x in enumerate(used) if key in x] or [0] for key in sizes]
            starts, size = placed([*sizes.values()], [(x[0], x[-1]) for x in lives])
            at = dict(zip(sizes, starts, strict=True))
            whole = torch.empty(up(size, ALIGNED), dtype=torch.uint8, device="meta").untyped_storage()
            for x in _tensors((parts, [*spanned.values()])):
                if _storage(x) in at:
                    x.set_(whole, at[_storage(x)] // x.itemsize + x.storage_offset(), x.shape, x.stride())
        rows = {}  # arguments that say where the pieces are, by those that were made from no addresses
        for function, pieces, matrix, made in self.spans:
            first, _, rows[id(made)] = function(*[_start(x) if x.numel() else 0 for x in pieces])
            whole = next(x for x in pieces if x.numel()).untyped_storage()
            matrix.set_(whole, first // matrix.itemsize, matrix.shape, matrix.stride())
        return jax.tree.map(lambda x: rows.get(id(x), x), parts, is_leaf=lambda x: id(x) in rows)

    # What operators and launches state (torch_prepared.py), and what PyTorch computes.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made, kwargs = func(*args, **(kwargs or {})), kwargs or {}
        schema, name = func._schema, func._schema.name.removeprefix("aten::")
        if not schema.is_mutable and _storages(made).keys() <= _storages((args, kwargs)).keys():  # a view
            return made
        given = dict(zip([x.name for x in schema.arguments], args, strict=False)) | kwargs
        if name in ("zero_", "fill_") and given.get("value", 0) == 0 and made.nbytes < made.untyped_storage().nbytes():
            x = made.detach().view(-1)  # a part of an array
            self.launch(Launch(fill_zeros, (-(-x.numel() // _FILLED),), {"out": x, "N": x.numel(), "BLOCK": _FILLED}))
        elif not name.startswith(("empty", "new_empty")):
            self.steps.append((name, *tree_map_only(Tensor, Tensor.detach, ([*given.items()], made))))
        return made

    def launch(self, launch: Launch) -> None:
        if 0 not in launch.grid:
            self.steps.append(launch._replace(given=launch.arguments, shared=Shared({})))

    def refuse(self, reason: str) -> None:
        raise NotImplementedError(reason)

    def allocate(self, *_: Any) -> None:
        """Of what ATen's operators do, `__torch_dispatch__` knows."""

    zero = call = connected = require = allocate

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
        if x.ndim == 2 and not x.is_contiguous() and x.T.is_contiguous():
            return self.read(x.T).T
        if not x.is_contiguous():
            whole, places = _within(x)
            return self.read(whole)[places]
        flat, start, words = self[_storage(x)], _start(x), x.itemsize // dtype.itemsize
        own, size, end = flat.dtype.itemsize, dtype.itemsize, start + x.nbytes
        part = flat[start // own : -(-end // own)].view(dtype)[start % own // size :][: x.numel() * words : words]
        return part.reshape(x.shape)

    def write(self, x: Tensor, value: Any) -> None:
        dtype = _in_jax(x.dtype)
        value = jnp.broadcast_to(value, x.shape).astype(dtype)
        if not x.is_contiguous():
            x, places = _within(x)
            value = self.read(x).at[places].set(value)
        value = value.reshape(-1)
        if x.itemsize > dtype.itemsize:
            value = jnp.stack([value, value >> 31], -1).reshape(-1)
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


def _within(x: Tensor) -> tuple[Tensor, Any]:
    """The memory from a tensor's first element to its last, and the places of its elements there."""
    count = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    places = np.lib.stride_tricks.as_strided(np.arange(count), x.shape, [8 * stride for stride in x.stride()])
    return x.as_strided((count,), (1,)), places


def _in_jax(dtype: torch.dtype) -> Any:
    """Two of these stand for a number of 64 bits, which JAX may not have."""
    return jnp.dtype("int32" if dtype == torch.int64 else dtype_name(dtype))


def _new(x: Tensor) -> jax.ShapeDtypeStruct:
    """An array for a tensor's storage."""
    dtype = _in_jax(x.dtype)
    return jax.ShapeDtypeStruct((x.untyped_storage().nbytes() // dtype.itemsize,), dtype)


def _tensors(x: Any) -> list[Tensor]:
    return [y for y in jax.tree.leaves(x) if isinstance(y, Tensor)]


def job(launch: Launch, capability: int) -> Job:
    """The job of compiling the launch's kernel for a GPU that need not be there; 80 stands for compute capability 8.0.
    Triton sees of the arguments what it would see in PyTorch.
    """
    kernel, target = launch.kernel, GPUTarget("cuda", capability, 32)
    backend, given = make_backend(target), launch.arguments | launch.options
    bound, seen, _ = create_function_from_signature(kernel.signature, kernel.params, backend)(**given)
    options, *source = kernel._pack_args(backend, given, bound, seen, None)
    settle(kernel)
    return Job(ASTSource(kernel, *source), target, vars(options), None)


def stack(launch: Launch, capability: int) -> int:
    """Bytes of each thread's stack, which it needs because registers don't suffice."""
    (code,) = compile_jobs([job(launch, capability)])
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code.asm["cubin"])
        file.flush()
        asked = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        found = re.search(r"STACK:(\d+)", subprocess.check_output(asked, text=True, stderr=subprocess.STDOUT))
    return 0 if found is None else int(found[1])


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


def _pad(x: jax.Array, widths: Sequence[int], value: float = 0) -> jax.Array:
    pairs = np.reshape(widths, (-1, 2))[::-1].tolist()  # the last dimension's come first
    return lax.pad(x, jnp.asarray(value, x.dtype), [(0, 0, 0)] * (x.ndim - len(pairs)) + [(*x, 0) for x in pairs])


# ATen's operators, and what they are called in JAX if not by the same names.
_NAMES = """abs add amax any arange argmax bitwise_not clamp:clip clone:asarray contiguous:asarray div:divide eq:equal
exp expm1 full full_like gather:take_along_axis ge:greater_equal gt:greater log lt:less mean mul:multiply nan_to_num
ne:not_equal neg:negative ones ones_like __and__:bitwise_and __or__:bitwise_or reciprocal reshape square sub:subtract
sum to:asarray where zero_:zeros_like"""
_ATEN: dict[str, Callable[..., Any]] = {
    **{aten: getattr(jnp, name or aten) for aten, _, name in (x.partition(":") for x in _NAMES.split())},
    "constant_pad_nd": _pad,
    "copy_": lambda x, y: y,
    "index": lambda x, index: x[tuple(slice(None) if i is None else i for i in index)],
    "masked_fill": lambda x, mask, value: jnp.where(mask, value, x),
    "pad": _pad,
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
