"""Runs in XLA the steps of a PyTorch call that torch_listed.py lists: each launch is a call in XLA, and JAX computes
what ATen computes between them.

A piece of memory is an array of one dimension; a launch that may write to it takes the array and gives it back.  Pieces
that one matrix spans are one array, since only XLA knows where arrays are.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from onchip.core.sizes import up
from onchip.frontend.torch_builder import ALIGNED, placed
from onchip.frontend.torch_listed import Computed, Launched, Listed, SpanPart, View, parts_of, views_of
from onchip.kernels.triton import jax_call
from onchip.kernels.triton.compiling import compile_jobs
from onchip.kernels.triton.jax_call import Pointer

Array = jax.Array
Arrays = dict[int, Array]
"""Arrays by home; one that is missing has not been written."""

# JAX may have no 64 bits: two words.
_WORDS = {"int64": ("int32", 2)}
_FILLED = 4096  # elements, by a program


class Home(NamedTuple):
    """Where memory is."""

    array: int
    offset: int  # bytes


class Program:
    """A list of steps, and the arrays that stand for its memory."""

    def __init__(self, listed: Listed, capability: int) -> None:
        self.listed, self.capability = listed, capability
        self.fixed = {x.memory for x in (*listed.given, *listed.upstream) if x is not None}  # that nothing writes to
        self.homes = [Home(i, 0) for i in range(len(listed.memory))]
        self.sizes = [(x.size, x.dtype) for x in listed.memory]
        for group in self._groups():
            self._join(group)
        self.parts = [self._spanning(*x) for x in listed.spannings]

    def _groups(self) -> Iterator[list[int]]:
        """Pieces of memory that matrices span."""
        groups: list[set[int]] = []
        for spanning in self.listed.spannings:
            mine = {x.memory for x in spanning.pieces if self.listed.memory[x.memory].size > 0}
            for other in [x for x in groups if x & mine]:
                groups.remove(other)
                mine |= other
            groups.append(mine)
        return (sorted(x) for x in groups if len(x) > 1)

    def _join(self, group: Sequence[int]) -> None:
        """Make them one array; pieces that aren't needed at the same time share a place."""
        steps = [*self.listed.forward, *self.listed.backward]
        used: dict[int, list[int]] = {i: [] for i in group}
        for n, step in enumerate(steps):
            for i in self._memories(step):
                if i in used:
                    used[i].append(n)
        for x in (*self.listed.outputs, *self.listed.gradients):
            if x is not None and x.memory in used:
                used[x.memory].append(len(steps))
        sizes = [self.listed.memory[i].size for i in group]
        starts, size = placed(sizes, [(min(used[i], default=0), max(used[i], default=0)) for i in group])
        for i, start in zip(group, starts, strict=True):
            self.homes[i] = Home(group[0], start)
        self.sizes[group[0]] = up(size, ALIGNED), self.listed.memory[group[0]].dtype

    def _memories(self, step: Launched | Computed) -> set[int]:
        """The memory that a step needs."""
        if isinstance(step, Computed):
            return {x.memory for x in (*views_of(step.args), *views_of(step.options), *step.made)}
        spanned = {p.memory for x in parts_of(step.arguments) for p in self.listed.spannings[x.spanning].pieces}
        return spanned | {x.memory for x in views_of(step.arguments)}

    def _spanning(self, function: Callable[..., Any], pieces: Sequence[View]) -> tuple[int, int, Any]:
        """The array, where the matrix begins in it, and the argument for its rows."""
        there = [x for x in pieces if math.prod(x.shape)]
        array = self.homes[there[0].memory].array
        at = [self.homes[x.memory].offset + x.offset if math.prod(x.shape) else 0 for x in pieces]
        first, _, rows = function(*at)
        return array, first, rows

    # -------------------------------------------------------------------------------------------------------- running

    def forward(self, given: Sequence[Array]) -> tuple[list[Array], Arrays]:
        """The outputs, and what backward needs."""
        arrays: Arrays = {}
        for x, array in zip(self.listed.given, given, strict=True):
            arrays[self.homes[x.memory].array] = array.reshape(-1)
        for step in self.listed.forward:
            self._run(step, arrays)
        return [self._read(arrays, x) for x in self.listed.outputs], {i: arrays[i] for i in self._kept if i in arrays}

    def backward(self, arrays: Arrays, upstream: Sequence[Array | None]) -> list[Array | None]:
        """The gradients."""
        arrays = dict(arrays)
        for view, x in zip(self.listed.upstream, upstream, strict=True):
            if view is not None:
                x = jnp.zeros(view.shape) if x is None else x
                arrays[self.homes[view.memory].array] = x.astype(view.dtype).reshape(-1)
        for step in self.listed.backward:
            self._run(step, arrays)
        return [None if x is None else self._read(arrays, x) for x in self.listed.gradients]

    @cached_property
    def _kept(self) -> list[int]:
        """The arrays that backward needs."""
        needed = {self.homes[i].array for step in self.listed.backward for i in self._memories(step)}
        needed |= {self.homes[x.memory].array for x in self.listed.gradients if x is not None}
        return sorted(needed - {self.homes[x.memory].array for x in self.listed.upstream if x is not None})

    def _run(self, step: Launched | Computed, arrays: Arrays) -> None:
        if isinstance(step, Launched):
            self._launch(arrays, *step)
        elif step.name in ("zero_", "fill_") and (step.name == "zero_" or step.args[1] == 0):
            self._zero(arrays, step.made[0])
        else:
            self._compute(arrays, step)

    def compile(self) -> None:
        """Put all kernels into Triton's cache, compiling several at a time."""
        compile_jobs([jax_call.job(*launch, self.capability) for launch in self.launches()])

    def launches(self) -> Iterator[tuple[Any, dict[str, Any], dict[str, Any]]]:
        """Kernels, arguments and options of all launches."""
        for step in (*self.listed.forward, *self.listed.backward):
            if isinstance(step, Launched):
                yield step.kernel, self._arguments(step.arguments), step.options

    def _arguments(self, arguments: dict[str, Any]) -> dict[str, Any]:
        return {name: self._argument(x) for name, x in arguments.items()}

    def _argument(self, x: Any) -> Any:
        if isinstance(x, SpanPart):
            array, first, rows = self.parts[x.spanning]
            return rows if x.matrix is None else Pointer(x.matrix.dtype, array, first)
        if isinstance(x, View):
            if self.listed.memory[x.memory].size == 0 or not math.prod(x.shape):  # nothing is read or written
                return Pointer(x.dtype, self.homes[self.listed.given[0].memory].array, 0)
            home = self.homes[x.memory]
            return Pointer(x.dtype, home.array, home.offset + x.offset)
        if isinstance(x, tuple):
            parts = [self._argument(y) for y in x]
            return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
        return x

    def _launch(self, arrays: Arrays, kernel: Any, grid: Any, arguments: dict[str, Any], options: Any) -> None:
        found = self._arguments(arguments)
        used = sorted({x.array for x in _pointers(found)})
        place = {array: i for i, array in enumerate(used)}
        moved = {name: _renumbered(x, place) for name, x in found.items()}
        given = [arrays.get(i, self._blank(i)) for i in used]
        written = [i not in self.fixed for i in used]
        made = iter(jax_call.call(kernel, grid, moved, options, self.capability, given, written))
        arrays.update({i: next(made) for i, write in zip(used, written, strict=True) if write})

    def _blank(self, i: int) -> jax.ShapeDtypeStruct:
        size, dtype = self.sizes[i]
        dtype, _ = _WORDS.get(dtype, (dtype, 1))
        return jax.ShapeDtypeStruct((size // np.dtype(jnp.dtype(dtype)).itemsize,), dtype)

    def _zero(self, arrays: Arrays, view: View) -> None:
        home, count = self.homes[view.memory], math.prod(view.shape)
        blank = self._blank(home.array)
        size = count * jnp.dtype(view.dtype).itemsize
        if size == blank.size * blank.dtype.itemsize and home.array not in arrays:
            arrays[home.array] = jnp.zeros(blank.shape, blank.dtype)
        elif count:
            from onchip.kernels.triton.fill import fill_zeros

            dtype = view.dtype if size % 4 else "int32"
            number = count if size % 4 else size // 4
            options = {"num_warps": 4, "num_stages": 1, "maxnreg": None, "enable_fp_fusion": True}
            arguments = {"out": View(view.memory, view.offset, dtype, (number,), (1,)), "N": number, "BLOCK": _FILLED}
            self._launch(arrays, fill_zeros, (-(-number // _FILLED),), arguments, options)

    def _compute(self, arrays: Arrays, step: Computed) -> None:
        function = _ATEN.get(step.name)
        if function is None:
            raise NotImplementedError(f"JAX is not told what ATen's {step.name} does")
        options = {name: x for name, x in step.options.items() if name not in ("device", "layout", "pin_memory")}
        options = {name: self._value(arrays, x) for name, x in options.items() if x is not None}
        made = function(*[self._value(arrays, x) for x in step.args], **options)
        for view, x in zip(step.made, made if isinstance(made, tuple) else (made,), strict=True):
            self._write(arrays, view, x, whole=not step.in_place)

    def _value(self, arrays: Arrays, x: Any) -> Any:
        if isinstance(x, View):
            return self._read(arrays, x)
        return tuple(self._value(arrays, y) for y in x) if isinstance(x, tuple) else x

    def _read(self, arrays: Arrays, view: View) -> Array:
        home, count = self.homes[view.memory], math.prod(view.shape)
        if not count:
            return jnp.zeros(view.shape, _in_jax(view.dtype))
        if home.array not in arrays:
            blank = self._blank(home.array)
            arrays[home.array] = jnp.zeros(blank.shape, blank.dtype)
        # As far as its last element, then by strides.
        last = sum((n - 1) * s for n, s in zip(view.shape, view.strides, strict=True)) + 1
        flat = _cast(arrays[home.array], home.offset + view.offset, last, view.dtype)
        if view.strides == _contiguous(view.shape):
            return flat.reshape(view.shape)
        order = sorted(range(len(view.shape)), key=lambda i: -view.strides[i])
        if _contiguous([view.shape[i] for i in order]) == tuple(view.strides[i] for i in order):
            return flat.reshape([view.shape[i] for i in order]).transpose(np.argsort(order))
        index: Any = 0
        for i, (n, stride) in enumerate(zip(view.shape, view.strides, strict=True)):
            index = index + np.arange(n).reshape(-1, *[1] * (len(view.shape) - i - 1)) * stride
        return flat[np.broadcast_to(index, view.shape)]

    def _write(self, arrays: Arrays, view: View, x: Array, *, whole: bool) -> None:
        home, blank = self.homes[view.memory], self._blank(self.homes[view.memory].array)
        x = jnp.broadcast_to(x, view.shape).astype(_in_jax(view.dtype)).reshape(-1)
        if view.dtype == "int64":
            x = lax.bitcast_convert_type(jnp.stack([x, x >> 31], -1), jnp.int32).reshape(-1)
        if whole and not home.offset and x.size * x.dtype.itemsize == blank.size * blank.dtype.itemsize:
            arrays[home.array] = _bits(x, blank.dtype)
            return
        assert view.strides == _contiguous(view.shape), "only memory without gaps is written"
        into = arrays.get(home.array)
        into = jnp.zeros(blank.shape, blank.dtype) if into is None else into
        start = (home.offset + view.offset) // blank.dtype.itemsize
        arrays[home.array] = lax.dynamic_update_slice(into, _bits(x, blank.dtype), (start,))


def words(x: Array) -> Array:
    """Integers as 64 bits are in memory."""
    x = x.astype(jnp.int32)
    return jnp.stack([x, x >> 31], -1)


def _in_jax(dtype: str) -> Any:
    return jnp.dtype(_WORDS.get(dtype, (dtype, 1))[0])


def _cast(flat: Array, start: int, count: int, dtype: str) -> Array:
    """So many numbers of `dtype`, from a byte on."""
    made, per = _WORDS.get(dtype, (dtype, 1))
    size, own = per * jnp.dtype(made).itemsize, flat.dtype.itemsize
    part = lax.slice(flat, (start // own,), (-(-(start + count * size) // own),))
    part = _bits(part, jnp.dtype(made))
    return part.reshape(count, per)[:, 0] if per > 1 else part[:count]


def _bits(x: Array, dtype: Any) -> Array:
    """The same memory, as another dtype."""
    if x.dtype == dtype:
        return x
    if jnp.bool_ in (x.dtype, dtype):
        assert x.dtype.itemsize == dtype.itemsize
        return x.astype(dtype)
    own, other = x.dtype.itemsize, dtype.itemsize
    x = x.reshape(-1, other // own) if other > own else x
    return lax.bitcast_convert_type(x, dtype).reshape(-1)


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def _pointers(x: Any) -> Iterator[Pointer]:
    if isinstance(x, Pointer):
        yield x
    elif isinstance(x, dict | tuple):
        for y in x.values() if isinstance(x, dict) else x:
            yield from _pointers(y)


def _renumbered(x: Any, place: dict[int, int]) -> Any:
    if isinstance(x, Pointer):
        return x._replace(array=place[x.array])
    if isinstance(x, tuple):
        parts = [_renumbered(y, place) for y in x]
        return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
    return x


def _dims(dim: Any) -> Any:
    return tuple(dim) if isinstance(dim, tuple) else dim


def _sorted(x: Array, stable: bool = True, dim: int = -1, descending: bool = False) -> tuple[Array, Array]:
    by = jnp.argsort(x, dim, stable=True, descending=descending)
    return jnp.take_along_axis(x, by, dim), by


def _pad(x: Array, widths: Sequence[int], mode: str = "constant", value: float = 0.0) -> Array:
    assert mode == "constant"
    pairs: Any = [tuple(widths[i : i + 2]) for i in range(0, len(widths), 2)][::-1]
    return jnp.pad(x, [(0, 0)] * (x.ndim - len(pairs)) + pairs, constant_values=value or 0)


# ATen's operators that the walks call between kernels.
_ATEN: dict[str, Callable[..., Any]] = {
    "full": lambda shape, value, dtype=None: jnp.full(shape, value),
    "zeros": lambda shape, dtype=None: jnp.zeros(shape), "ones": lambda shape, dtype=None: jnp.ones(shape),
    "ones_like": lambda x, **_: jnp.ones_like(x),
    "zeros_like": lambda x, **_: jnp.zeros_like(x),
    "fill_": lambda x, value: jnp.full_like(x, value),
    "copy_": lambda x, y, *_: y,
    "_to_copy": lambda x, *_, **__: x, "to": lambda x, *_, **__: x, "clone": lambda x, *_, **__: x,
    "contiguous": lambda x, *_, **__: x, "reshape": jnp.reshape, "flatten": lambda x, *_, **__: jnp.ravel(x),
    "arange": lambda n, **_: jnp.arange(n),
    "sum": lambda x, dim=None, keepdim=False, **_: jnp.sum(x, _dims(dim), keepdims=keepdim),
    "amax": lambda x, dim=None, keepdim=False: jnp.max(x, _dims(dim) or None, keepdims=keepdim),
    "any": lambda x, dim=None, keepdim=False: jnp.any(x, dim, keepdims=keepdim),
    "sort": _sorted,
    "mul": jnp.multiply, "mul_": jnp.multiply, "add": lambda x, y, alpha=1: x + alpha * y,
    "sub": lambda x, y, alpha=1: x - alpha * y, "rsub": lambda x, y, alpha=1: y - alpha * x, "div": jnp.divide,
    "neg": jnp.negative, "abs": jnp.abs, "exp": jnp.exp, "log": jnp.log, "exp2": jnp.exp2, "log2": jnp.log2,
    "floor": jnp.floor, "reciprocal": lambda x: 1 / x,
    "where": jnp.where, "lt": jnp.less, "gt": jnp.greater, "ge": jnp.greater_equal, "le": jnp.less_equal,
    "eq": jnp.equal, "ne": jnp.not_equal, "logical_and": jnp.logical_and, "bitwise_and": jnp.bitwise_and,
    "bitwise_or": jnp.bitwise_or, "bitwise_not": jnp.invert, "logical_not": jnp.logical_not,
    "clamp": jnp.clip, "clip": jnp.clip, "cat": jnp.concatenate, "concatenate": jnp.concatenate,
    "clamp_min": jnp.maximum, "maximum": jnp.maximum, "minimum": jnp.minimum,
    "nan_to_num": lambda x, nan=0.0: jnp.nan_to_num(x, nan=nan),
    "argmax": lambda x, dim=None, keepdim=False: jnp.argmax(x, dim, keepdims=keepdim),
    "gather": lambda x, dim, index: jnp.take_along_axis(x, index, dim),
    "index": lambda x, index: x[tuple(slice(None) if i is None else i for i in index)],
    "pow": jnp.power, "sqrt": jnp.sqrt, "mean": lambda x, dim=None, keepdim=False, **_: jnp.mean(x, _dims(dim)),
    "masked_fill": lambda x, mask, value: jnp.where(mask, value, x), "__or__": jnp.bitwise_or,
    "__and__": jnp.bitwise_and, "where_": jnp.where, "expm1": jnp.expm1, "log1p": jnp.log1p, "tanh": jnp.tanh,
    "full_like": lambda x, value, **_: jnp.full_like(x, value), "pad": _pad, "constant_pad_nd": _pad,
    "logsumexp": lambda x, dim, keepdim=False: jax.nn.logsumexp(x, dim, keepdims=keepdim),
    "log_softmax": lambda x, dim, *_: jax.nn.log_softmax(x, dim),
    "scalar_tensor": lambda x, **_: jnp.asarray(x), "isnan": jnp.isnan,
}  # fmt: skip
