"""Lists what a PyTorch call launches, and does the same in XLA: each launch is a call there, and JAX computes what
PyTorch computes between them.

The call runs on tensors without memory, forward and backward, as it would on a GPU.  In XLA, a storage is an array of
one dimension; a launch that may write to it takes the array and gives it back.  Storages that one matrix spans are one
array, since only XLA knows where arrays are.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from onchip.core.sizes import up
from onchip.frontend.torch_builder import ALIGNED, THREAD, placed
from onchip.frontend.torch_inputs import dtype_name
from onchip.kernels.triton import jax_call
from onchip.kernels.triton.compiling import compile_jobs
from onchip.kernels.triton.fill import fill_zeros
from onchip.kernels.triton.launch import Launch, Shared

Arrays = dict[int, jax.Array]
"""By the storage for which they were made; one that is missing has not been written."""
_FILLED = 4096  # elements, by a program


class Computed(NamedTuple):
    """A call of one of ATen's operators."""

    name: str
    arguments: tuple[tuple[str, Any], ...]  # names in ATen and values
    made: Any


class Span(NamedTuple):
    """From the addresses of `pieces`, `function` makes a matrix's address, its number of rows, and a rows' argument."""

    function: Callable[..., tuple[int, int, Any]]
    pieces: Sequence[Tensor]
    matrix: Tensor
    rows: Any


class Listed(NamedTuple):
    """A call, forward and backward."""

    forward: list[Launch | Computed]
    backward: list[Launch | Computed]
    spans: list[Span]
    given: list[Tensor]
    outputs: list[Tensor]
    upstream: list[Tensor | None]  # each output's gradient, if it has one
    gradients: list[Tensor | None]  # each given tensor's gradient


class List(TorchDispatchMode):
    """A context that lists what this thread does with tensors without memory, as if on a device like `device`.

    `stack` tells how many bytes of stack a thread of a launch has, for lack of registers.
    """

    def __init__(self, device: Any, stack: Callable[[Launch], int]) -> None:
        super().__init__()
        self.device, self.stack = device, stack
        self.steps: list[Launch | Computed] = []
        self.spans: list[Span] = []

    def __enter__(self) -> Any:
        THREAD.builder = self
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        THREAD.builder = None
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made, known = func(*args, **(kwargs or {})), {_storage(x) for x in _tensors((args, kwargs))}
        schema, name = func._schema, func._schema.name.removeprefix("aten::")
        aliases = all(x.alias_info is not None and not x.alias_info.is_write for x in schema.returns)
        if aliases and all(_storage(x) in known for x in _tensors(made)):  # a view
            return made
        given = dict(zip([x.name for x in schema.arguments], args, strict=False)) | (kwargs or {})
        if name in ("zero_", "fill_") and given.get("value", 0) == 0 and made.nbytes < made.untyped_storage().nbytes():
            self.launch(_zeros(made.detach()))
        elif not name.startswith(("empty", "new_empty")):
            self.steps.append(Computed(name, *_each(Tensor.detach, ((*given.items(),), made))))
        return made

    # What operators and launches state (torch_prepared.py).

    def launch(self, launch: Launch) -> None:
        if 0 not in launch.grid:
            self.steps.append(launch._replace(given=launch.arguments, shared=Shared({})))

    def derive(self, *span: Any) -> None:
        self.spans.append(Span(*span))

    def refuse(self, reason: str) -> None:
        raise NotImplementedError(reason)

    def _nothing(self, *_: Any) -> None:
        """List a call of one of ATen's operators."""

    allocate = zero = call = connected = require = _nothing


def listed(
    device: Any,
    stack: Callable[[Launch], int],
    function: Callable[..., Any],
    given: Sequence[Tensor],
    needs: Sequence[bool],
) -> Listed:
    """What `function(*given)` and its backward do.

    given: tensors without memory.  needs: which of them need a gradient.
    """
    told = List(device, stack)
    given = [x.requires_grad_(needed) for x, needed in zip(given, needs, strict=True)]
    with told:
        with torch.set_grad_enabled(any(needs)):
            outputs = _tensors(function(*given))
        forward, told.steps = told.steps, []
        upstream = [torch.empty_like(x) if x.requires_grad else None for x in outputs]
        of, up = [x for x in outputs if x.requires_grad], _tensors(upstream)
        found = iter(torch.autograd.grad(of, [x for x in given if x.requires_grad], up) if of else ())
        gradients = [next(found, None) if needed else None for needed in needs]
    tensors = _each(Tensor.detach, (given, outputs, upstream, gradients))
    return Listed(forward, told.steps, told.spans, *tensors)


class Program:
    """A list of steps, and the arrays that stand for its memory."""

    def __init__(self, listed: Listed, capability: int) -> None:
        self.listed, self.capability = listed, capability
        self.fixed = {_storage(x) for x in _tensors((listed.given, listed.upstream))}  # that nothing writes to
        self.starts: dict[int, tuple[int, int]] = {}  # of storages in another one's array: that, and bytes
        self.like: dict[int, jax.ShapeDtypeStruct] = {}
        for x in _tensors((listed.given, listed)):
            dtype, size = _in_jax(x.dtype), x.untyped_storage().nbytes()
            self.like.setdefault(_storage(x), jax.ShapeDtypeStruct((size // dtype.itemsize,), dtype))
        self._join()
        self.matrices = {id(x.matrix): self._derived(x) for x in listed.spans}
        rows = {id(x.rows): self.matrices[id(x.matrix)][2] for x in listed.spans}
        self.steps = jax.tree.map(
            lambda x: rows.get(id(x), x), (listed.forward, listed.backward), is_leaf=lambda x: id(x) in rows
        )
        kept = {self._home(x)[0] for x in _tensors((self._memory(listed.backward), listed.gradients))}
        self.kept = kept - {_storage(x) for x in _tensors(listed.upstream)}  # what backward needs

    def _join(self) -> None:
        """Make the storages that matrices span one array; those that aren't needed at the same time share a place."""
        group = [*dict.fromkeys(_storage(x) for span in self.listed.spans for x in span.pieces if x.numel())]
        if len(group) < 2:
            return
        needed = [self._memory([x]) for x in (*self.listed.forward, *self.listed.backward)]
        needed.append(_tensors((self.listed.outputs, self.listed.gradients)))
        used = [{_storage(x) for x in tensors} for tensors in needed]
        lives = [[n for n, x in enumerate(used) if key in x] for key in group]
        sizes = [self.like[key].size * self.like[key].dtype.itemsize for key in group]
        starts, size = placed(sizes, [(x[0], x[-1]) if x else (0, 0) for x in lives])
        self.starts = {key: (group[0], start) for key, start in zip(group, starts, strict=True)}
        dtype = self.like[group[0]].dtype
        self.like[group[0]] = jax.ShapeDtypeStruct((up(size, ALIGNED) // dtype.itemsize,), dtype)

    def _memory(self, steps: Any) -> list[Tensor]:
        """The memory that steps need."""
        spans = {id(x.matrix): x.pieces for x in self.listed.spans}
        return [y for x in _tensors(steps) for y in spans.get(id(x), (x,))]

    def _derived(self, span: Span) -> tuple[int, int, Any]:
        """The array, where the matrix begins in it, and the argument for its rows."""
        homes = [self._home(x) if x.numel() else (0, 0) for x in span.pieces]
        first, _, rows = span.function(*[at for _, at in homes])
        return max(array for array, _ in homes), first, rows

    def _home(self, x: Tensor) -> tuple[int, int]:
        """The array of a tensor, and where it begins there, in bytes."""
        array, start = self.starts.get(_storage(x), (_storage(x), 0))
        return array, start + int(x.storage_offset()) * x.itemsize

    def compile(self) -> None:
        """Put all kernels into Triton's cache, compiling several at a time."""
        launches = [x for steps in self.steps for x in steps if isinstance(x, Launch)]
        compile_jobs([jax_call.job(x, self.capability) for x in launches])

    # -------------------------------------------------------------------------------------------------------- running

    def forward(self, given: Sequence[jax.Array]) -> tuple[list[jax.Array], Arrays]:
        """The outputs, and what backward needs."""
        arrays: Arrays = {}
        for x, array in zip(self.listed.given, given, strict=True):
            self._write(arrays, x, array)
        self._run(self.steps[0], arrays)
        outputs = [self._read(arrays, x) for x in self.listed.outputs]
        return outputs, {i: arrays[i] for i in sorted(self.kept) if i in arrays}

    def backward(self, arrays: Arrays, upstream: Sequence[jax.Array | None]) -> list[jax.Array | None]:
        """The gradients."""
        arrays = dict(arrays)
        for x, array in zip(self.listed.upstream, upstream, strict=True):
            if x is not None:
                self._write(arrays, x, jnp.zeros(()) if array is None else array)
        self._run(self.steps[1], arrays)
        return [None if x is None else self._read(arrays, x) for x in self.listed.gradients]

    def _run(self, steps: Sequence[Launch | Computed], arrays: Arrays) -> None:
        for step in steps:
            if isinstance(step, Launch):
                self._launch(arrays, step)
            else:
                made = run_aten(step.name, dict(_each(lambda x: self._read(arrays, x), step.arguments)))
                for x, array in zip(_tensors(step.made), made if isinstance(made, tuple) else (made,), strict=True):
                    self._write(arrays, x, array)

    def _launch(self, arrays: Arrays, launch: Launch) -> None:
        homes = {id(x): self.matrices.get(id(x)) or self._home(x) for x in _tensors(launch.given) if x.numel()}
        used = sorted({array for array, *_ in homes.values()})

        def pointer(x: Tensor) -> jax_call.Pointer:
            array, start, *_ = homes.get(id(x), (used[0], 0))  # of what is empty nothing is read
            return jax_call.Pointer(used.index(array), start)

        written = [i not in self.fixed for i in used]
        given = [arrays.get(i, self.like[i]) for i in used]
        made = iter(jax_call.call(launch, _each(pointer, launch.arguments), self.capability, given, written))
        arrays.update({i: next(made) for i, write in zip(used, written, strict=True) if write})

    def _read(self, arrays: Arrays, x: Tensor) -> jax.Array:
        if _is_turned(x):
            return self._read(arrays, x.T).T
        if not x.is_contiguous():
            whole, index = _around(x)
            return self._read(arrays, whole)[index]
        (array, start), dtype, words = self._home(x), _in_jax(x.dtype), 2 if x.dtype == torch.int64 else 1
        if not x.numel():
            return jnp.zeros(x.shape, dtype)
        flat = self._array(arrays, array)
        own = flat.dtype.itemsize
        part = flat[start // own : -(-(start + x.nbytes) // own)].view(dtype)[start % own // dtype.itemsize :]
        return part[: x.numel() * words : words].reshape(x.shape)

    def _write(self, arrays: Arrays, x: Tensor, value: Any) -> None:
        value = jnp.broadcast_to(value, x.shape).astype(_in_jax(x.dtype))
        if _is_turned(x):
            self._write(arrays, x.T, value.T)
        elif not x.is_contiguous():
            whole, index = _around(x)
            self._write(arrays, whole, self._read(arrays, whole).at[index].set(value))
        else:
            (array, start), value = self._home(x), value.reshape(-1)
            if x.dtype == torch.int64:
                value = jnp.stack([value, value >> 31], -1).reshape(-1)
            value = value.view(self.like[array].dtype)
            if value.size < self.like[array].size:
                into = self._array(arrays, array)
                value = lax.dynamic_update_slice(into, value, (start // into.dtype.itemsize,))
            arrays[array] = value

    def _array(self, arrays: Arrays, i: int) -> jax.Array:
        return arrays[i] if i in arrays else jnp.zeros(self.like[i].shape, self.like[i].dtype)


def _zeros(x: Tensor) -> Launch:
    """The launch that fills a part of an array with zeros."""
    return Launch(fill_zeros, (-(-x.numel() // _FILLED),), {"out": x.view(-1), "N": x.numel(), "BLOCK": _FILLED})


def _is_turned(x: Tensor) -> bool:
    return x.ndim == 2 and not x.is_contiguous() and x.T.is_contiguous()


def _around(x: Tensor) -> tuple[Tensor, Any]:
    """The memory from a tensor's first element to its last, and where its elements are in that."""
    last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)) + 1
    strides = [8 * stride for stride in x.stride()]
    return x.as_strided((last,), (1,)), np.lib.stride_tricks.as_strided(np.arange(last), x.shape, strides)


def _storage(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)


def _in_jax(dtype: torch.dtype) -> Any:
    """Two of these stand for a number of 64 bits, which JAX may not have."""
    return jnp.dtype("int32" if dtype == torch.int64 else dtype_name(dtype))


def _tensors(x: Any) -> list[Tensor]:
    return [y for y in jax.tree.leaves(x) if isinstance(y, Tensor)]


def _each(function: Callable[[Tensor], Any], x: Any) -> Any:
    """The same with the function's results in place of tensors."""
    return jax.tree.map(lambda y: function(y) if isinstance(y, Tensor) else y, x)


# ----------------------------------------------------------------------------------------- what PyTorch computes itself


def _sorted(x: jax.Array, axis: int = -1, descending: bool = False) -> tuple[jax.Array, jax.Array]:
    order = jnp.argsort(x, axis, stable=True, descending=descending)
    return jnp.take_along_axis(x, order, axis), order


# ATen's operators that JAX has by the same names.
_SAME = """abs amax any arange argmax bitwise_not exp exp2 expm1 floor full full_like isnan log log1p log2 logical_and
logical_not maximum mean minimum nan_to_num ones ones_like pow reshape sqrt square sum tanh where zeros zeros_like"""
_ATEN: dict[str, Callable[..., Any]] = {
    **{name: getattr(jnp, name) for name in _SAME.split()},
    **dict.fromkeys(("to", "_to_copy", "clone", "contiguous"), lambda x: x),
    "add": lambda x, y, alpha=1: x + alpha * y, "sub": lambda x, y, alpha=1: x - alpha * y,
    "rsub": lambda x, y, alpha=1: y - alpha * x, "mul": jnp.multiply, "div": jnp.divide, "neg": jnp.negative,
    "reciprocal": lambda x: 1 / x, "eq": jnp.equal, "ne": jnp.not_equal, "lt": jnp.less, "le": jnp.less_equal,
    "gt": jnp.greater, "ge": jnp.greater_equal, "__or__": jnp.bitwise_or, "__and__": jnp.bitwise_and,
    "clamp": jnp.clip, "clamp_min": jnp.maximum, "cat": jnp.concatenate, "scalar_tensor": jnp.asarray,
    "zero_": lambda x: 0, "copy_": lambda x, y: y, "fill_": jnp.full_like,
    "masked_fill": lambda x, mask, value: jnp.where(mask, value, x), "sort": _sorted,
    "gather": lambda x, index, axis: jnp.take_along_axis(x, index, axis),
    "searchsorted": lambda ascending, x: jnp.searchsorted(ascending, x, method="sort"),
    "index": lambda x, index: x[tuple(slice(None) if i is None else i for i in index)],
    "pad": lambda x, widths, mode="constant", value=0: jnp.pad(
        x,
        np.pad(np.reshape(widths, (-1, 2))[::-1], [(x.ndim - len(widths) // 2, 0), (0, 0)]),
        mode,
        constant_values=value,
    ),
}  # fmt: skip
_KEYWORDS = {"dim": "axis", "keepdim": "keepdims"} | {x: x for x in ("descending", "max", "min", "nan")}
_UNUSED = "copy", "device", "dtype", "layout", "memory_format", "non_blocking", "pin_memory", "stable"


def run_aten(name: str, given: dict[str, Any]) -> Any:
    """What an operator makes of JAX's arrays, in some dtype."""
    function = _ATEN.get(name) or _ATEN.get(name.removesuffix("_"))
    if function is None:
        raise NotImplementedError(f"JAX is not told what ATen's {name} does")
    given = {name: x for name, x in given.items() if x is not None and name not in _UNUSED}
    options = {_KEYWORDS[x]: tuple(y) or None if isinstance(y, list) else y for x, y in given.items() if x in _KEYWORDS}
    return function(*[x for name, x in given.items() if name not in _KEYWORDS], **options)
