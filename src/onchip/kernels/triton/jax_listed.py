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
"""By the number of the storage for which they were made; one that is missing has not been written."""
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


class Program(TorchDispatchMode):
    """What `function(*given)` and its backward do on a device like `device`, and the arrays that stand for its memory.

    stack: how many bytes of stack a thread of a launch has, for lack of registers.  given: tensors without memory.
    needs: which of them need a gradient.
    """

    def __init__(
        self,
        device: Any,
        stack: Callable[[Launch], int],
        capability: int,
        function: Callable[..., Any],
        given: Sequence[Tensor],
        needs: Sequence[bool],
    ) -> None:
        super().__init__()
        self.device, self.stack, self.capability = device, stack, capability
        self.spans: list[Span] = []
        self.steps: tuple[list[Launch | Computed], ...] = ([],)  # forward and backward; the last is being listed
        given, THREAD.builder = [x.requires_grad_(needed) for x, needed in zip(given, needs, strict=True)], self
        try:
            with self, torch.set_grad_enabled(any(needs)):
                outputs = _tensors(function(*given))
            self.steps += ([],)
            with self:
                upstream = [torch.empty_like(x) if x.requires_grad else None for x in outputs]
                of, into = [x for x in outputs if x.requires_grad], _tensors(upstream)
                found = iter(torch.autograd.grad(of, [x for x in given if x.requires_grad], into) if of else ())
        finally:
            THREAD.builder = None
        gradients = [next(found, None) if needed else None for needed in needs]
        self.given, self.outputs, self.upstream, self.gradients = _each(
            Tensor.detach, (given, outputs, upstream, gradients)
        )
        self.starts: dict[int, tuple[int, int]] = {}  # of storages in another one's array: that, and bytes
        self.like: list[jax.ShapeDtypeStruct] = []
        self.numbers: dict[int, int] = {}  # of storages, by what they are for PyTorch
        for x in _tensors((self.given, self.steps, self.spans, self.outputs, self.upstream, self.gradients)):
            if self.numbers.setdefault(_storage(x), len(self.like)) == len(self.like):
                dtype, size = _in_jax(x.dtype), x.untyped_storage().nbytes()
                self.like.append(jax.ShapeDtypeStruct((size // dtype.itemsize,), dtype))
        self.fixed = self._storages((self.given, self.upstream))  # that nothing writes to
        self._join()
        self.matrices: dict[int, tuple[int, int]] = {}  # where derived ones begin, as of `_home`
        rows = {}  # arguments for rows, by those that were made from no addresses
        for span in self.spans:
            homes = [self._home(piece) if piece.numel() else (0, 0) for piece in span.pieces]
            first, _, rows[id(span.rows)] = span.function(*[at for _, at in homes])
            self.matrices[id(span.matrix)] = max(array for array, _ in homes), first
        kept = {self._home(x)[0] for x in self._memory((self.steps[1], self.gradients))}
        self.kept = kept - self._storages(self.upstream)  # what backward needs
        self.steps = jax.tree.map(lambda x: rows.get(id(x), x), self.steps, is_leaf=lambda x: id(x) in rows)

    # ------------------------------------------------------------------------------------------------------- the list

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made, known = func(*args, **(kwargs or {})), {_storage(x) for x in _tensors((args, kwargs))}
        schema, name = func._schema, func._schema.name.removeprefix("aten::")
        aliases = all(x.alias_info is not None and not x.alias_info.is_write for x in schema.returns)
        if aliases and all(_storage(x) in known for x in _tensors(made)):  # a view
            return made
        given = dict(zip([x.name for x in schema.arguments], args, strict=False)) | (kwargs or {})
        if name in ("zero_", "fill_") and given.get("value", 0) == 0 and made.nbytes < made.untyped_storage().nbytes():
            x = made.detach().view(-1)  # a part of an array
            self.launch(Launch(fill_zeros, (-(-x.numel() // _FILLED),), {"out": x, "N": x.numel(), "BLOCK": _FILLED}))
        elif not name.startswith(("empty", "new_empty")):
            self.steps[-1].append(Computed(name, *_each(Tensor.detach, ((*given.items(),), made))))
        return made

    # What operators and launches state (torch_prepared.py).

    def launch(self, launch: Launch) -> None:
        if 0 not in launch.grid:
            self.steps[-1].append(launch._replace(given=launch.arguments, shared=Shared({})))

    def derive(self, *span: Any) -> None:
        self.spans.append(Span(*span))

    def refuse(self, reason: str) -> None:
        raise NotImplementedError(reason)

    def allocate(self, *_: Any) -> None:
        """Of what ATen's operators do, `__torch_dispatch__` knows."""

    zero = call = connected = require = allocate

    # ------------------------------------------------------------------------------------------------------ its memory

    def _join(self) -> None:
        """Make the storages that matrices span one array; those that aren't needed at the same time share a place."""
        group = [*dict.fromkeys(self.numbers[_storage(x)] for span in self.spans for x in span.pieces if x.numel())]
        if len(group) < 2:
            return
        needed = [*([x] for steps in self.steps for x in steps), (self.outputs, self.gradients)]
        used = [self._storages(self._memory(each)) for each in needed]
        lives = [[n for n, x in enumerate(used) if key in x] or [0] for key in group]
        sizes = [self.like[key].size * self.like[key].dtype.itemsize for key in group]
        starts, size = placed(sizes, [(x[0], x[-1]) for x in lives])
        self.starts = {key: (group[0], start) for key, start in zip(group, starts, strict=True)}
        dtype = self.like[group[0]].dtype
        self.like[group[0]] = jax.ShapeDtypeStruct((up(size, ALIGNED) // dtype.itemsize,), dtype)

    def _storages(self, x: Any) -> set[int]:
        return {self.numbers[_storage(y)] for y in _tensors(x)}

    def _memory(self, steps: Any) -> list[Tensor]:
        """The memory that steps need."""
        spans = {id(x.matrix): x.pieces for x in self.spans}
        return [y for x in _tensors(steps) for y in spans.get(id(x), (x,))]

    def _home(self, x: Tensor) -> tuple[int, int]:
        """The array of a tensor, and where it begins there, in bytes."""
        if id(x) in self.matrices:
            return self.matrices[id(x)]
        number = self.numbers[_storage(x)]
        array, start = self.starts.get(number, (number, 0))
        return array, start + int(x.storage_offset()) * x.itemsize

    # -------------------------------------------------------------------------------------------------------- running

    def compile(self) -> None:
        """Put all kernels into Triton's cache, compiling several at a time."""
        launches = [x for steps in self.steps for x in steps if isinstance(x, Launch)]
        compile_jobs([jax_call.job(x, self.capability) for x in launches])

    def forward(self, given: Sequence[jax.Array]) -> tuple[list[jax.Array], Arrays]:
        """The outputs, and what backward needs."""
        arrays: Arrays = {}
        for x, array in zip(self.given, given, strict=True):
            self._write(arrays, x, array)
        self._run(self.steps[0], arrays)
        outputs = [self._read(arrays, x) for x in self.outputs]
        return outputs, {i: arrays[i] for i in self.kept & arrays.keys()}

    def backward(self, arrays: Arrays, upstream: Sequence[jax.Array | None]) -> list[jax.Array | None]:
        """The gradients."""
        arrays = dict(arrays)
        for x, array in zip(self.upstream, upstream, strict=True):
            if x is not None:
                self._write(arrays, x, jnp.zeros(()) if array is None else array)
        self._run(self.steps[1], arrays)
        return [None if x is None else self._read(arrays, x) for x in self.gradients]

    def _run(self, steps: Sequence[Launch | Computed], arrays: Arrays) -> None:
        for step in steps:
            if isinstance(step, Launch):
                self._launch(arrays, step)
            else:
                made = run_aten(step.name, dict(_each(lambda x: self._read(arrays, x), step.arguments)))
                for x, array in zip(_tensors(step.made), made if isinstance(made, tuple) else (made,), strict=True):
                    self._write(arrays, x, array)

    def _launch(self, arrays: Arrays, launch: Launch) -> None:
        used = sorted({self._home(x)[0] for x in _tensors(launch.given) if x.numel()})

        def pointer(x: Tensor) -> jax_call.Pointer:
            array, start = self._home(x) if x.numel() else (used[0], 0)  # of what is empty nothing is read
            return jax_call.Pointer(used.index(array), start)

        written = [i not in self.fixed for i in used]
        given = [arrays.get(i, self.like[i]) for i in used]
        made = iter(jax_call.call(launch, _each(pointer, launch.given), self.capability, given, written))
        arrays.update({i: next(made) for i, write in zip(used, written, strict=True) if write})

    def _read(self, arrays: Arrays, x: Tensor) -> jax.Array:
        if _is_turned(x):
            return self._read(arrays, x.T).T
        if not x.numel():
            return jnp.zeros(x.shape, _in_jax(x.dtype))
        (array, start), dtype, words = self._home(x), _in_jax(x.dtype), 2 if x.dtype == torch.int64 else 1
        count = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
        flat, end = self._array(arrays, array), start + count * x.itemsize
        own = flat.dtype.itemsize
        part = flat[start // own : -(-end // own)].view(dtype)[start % own // dtype.itemsize :][: count * words : words]
        if x.is_contiguous():
            return part.reshape(x.shape)
        return part[np.lib.stride_tricks.as_strided(np.arange(count), x.shape, [8 * stride for stride in x.stride()])]

    def _write(self, arrays: Arrays, x: Tensor, value: Any) -> None:
        value = jnp.broadcast_to(value, x.shape).astype(_in_jax(x.dtype))
        if _is_turned(x):
            x, value = x.T, value.T
        assert x.is_contiguous()
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


def _is_turned(x: Tensor) -> bool:
    return x.ndim == 2 and not x.is_contiguous() and x.T.is_contiguous()


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
