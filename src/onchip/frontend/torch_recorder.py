"""Recorders, which write down what an op allocates and launches: the lines of a tape."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from onchip.frontend import torch_program
from onchip.frontend.torch_program import Copy, Fill, Kernel, Map, Param, Place
from onchip.frontend.torch_script import ALIGNED, Does, Line, Memory, Script, allocator, view

Function = Callable[..., Any]
Tensors = Sequence[Tensor | None]

_NEW = {
    **dict.fromkeys(("aten::empty", "aten::new_empty", "aten::empty_strided", "aten::new_empty_strided"), "empty"),
    **dict.fromkeys(("aten::zeros", "aten::new_zeros", "aten::zeros_like"), "zero"),
    "aten::empty_like": "empty",
}

_BY_VALUE = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


class Tape(NamedTuple):
    """Repeats an op for other tensors."""

    run: Callable[..., Tensors]
    conditions: Sequence[Callable[[], bool]]
    """What must hold for it to be run."""
    source: str = ""
    """Of `run`, for people and tests."""
    small: int = 0
    """Bytes of the allocation that small memory shares."""


class Attached(NamedTuple):
    """That an operator's outputs were connected by autograd, while a call was recorded."""

    operator: Any
    saving: Any
    """What its node keeps beside tensors; None: it has no node."""
    kept: Tensors
    """The tensors that its node keeps."""
    inputs: Tensors
    """The operator's differentiable tensors."""
    before: Tensors
    """The outputs as they were computed, and a link where there is a node."""
    after: Tensors
    """The same, connected."""
    versions: Sequence[int | None]
    """How often the connected ones had been changed in place."""


class Recorder(TorchDispatchMode):
    """Writes the lines of a tape while the op runs."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__()
        self.reason = ""
        self.operators: list[Attached] = []
        self._device = next(x.device for x in tensors if x is not None)
        self._new = allocator(self._device)
        self._lines: list[Line] = []
        self._memory: dict[int, Memory] = {}
        self._all: list[Memory] = []
        self._constants: dict[str, Any] = {"_view": view}
        self._once: dict[str, tuple[str, set[int]]] = {}  # by code
        self._derived: dict[int, tuple[Any, _Code]] = {}  # by the object's id
        self._rows: dict[int, _Code] = {}
        self._conditions: dict[Callable[[], bool], None] = {}
        self._uses: set[int] = set()  # of memory, by the line that is being written
        self._names = [f"t{i}" for i in range(len(tensors))]
        for name, x in zip(self._names, tensors, strict=True):
            if x is not None:
                self._given(name, x)

    def _given(self, name: str, x: Tensor) -> None:
        place = x.untyped_storage()._cdata
        known = self._memory.get(place)
        if known is None:
            self._know(x, name)
        elif known.geometry[-1] != x.data_ptr():  # the same tensor twice is always that: see `kind_of`
            self.refuse("two arguments share memory")

    def _know(self, x: Tensor, name: str = "") -> Memory:
        """Memory that is new, or an argument's of this name."""
        given, place = bool(name), x.untyped_storage()._cdata
        made = self._memory[place] = Memory(name or f"m{len(self._all)}", x, given=given)
        self._all.append(made)
        if x.is_cuda and not given and made.address % ALIGNED:
            self.refuse("memory is not aligned as PyTorch's allocator does")
        return made

    def refuse(self, reason: str) -> None:
        """Make no tape of this call."""
        self.reason = self.reason or reason

    def require(self, condition: Callable[[], bool]) -> None:
        """Let the tape be run only where this holds."""
        self._conditions[condition] = None

    def attached(
        self, operator: Any, saving: Any, kept: Tensors, inputs: Tensors, before: Tensors, after: Tensors
    ) -> None:
        """Note that these outputs were connected to these inputs."""
        self.operators.append(Attached(operator, saving, kept, inputs, before, after, versions(after)))

    # What operators do.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if not self.reason:
            self._operator(func, args, kwargs, made)
        return made

    def _operator(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], made: Any) -> None:
        several = isinstance(made, tuple | list)
        results = made if several else [made]
        name = func._schema.name
        there = all(isinstance(x, Tensor) and x.device == self._device for x in results)
        by_value = bool(_BY_VALUE & {*func.tags})
        if name == "aten::index":  # by numbers it is as large as these
            by_value = any(_is_tensor(x) and x.dtype in (torch.bool, torch.uint8) for x in args[1])
        if not name.startswith("aten::") or by_value or not there:
            self.refuse(f"what {name} makes may depend on values")
            return
        given = {x.untyped_storage()._cdata for x in torch.utils._pytree.tree_leaves((args, kwargs)) if _is_tensor(x)}
        fresh = [x.untyped_storage()._cdata not in given for x in results]
        if not any(fresh) and not func._schema.is_mutable:
            return  # a view, which is made where it is used
        kind = "copy" if name == "aten::clone" and _is_copy(results[0], args[0]) else _NEW.get(name)
        if kind is not None:
            self._allocate(results[0])
            if kind == "zero":
                self._fill(results[0])
            elif kind == "copy":
                self._copy(results[0], args[0])
        elif name == "aten::zero_":
            self._fill(args[0])
        elif name == "aten::copy_" and _is_copy(*args[:2]):
            self._copy(*args[:2])
        else:
            self._uses = set()
            keywords = [f"{key}={self._with_tensors(value)}" for key, value in kwargs.items()]
            code = f"{self._constant(_called(func))}({', '.join([*(self._with_tensors(x) for x in args), *keywords])})"
            made = [self._know(x) if is_new else None for x, is_new in zip(results, fresh, strict=True)]
            targets = ", ".join("_" if m is None else m.name for m in made) + ("," if several else "")
            self._write(Does.OPERATE, f"{targets} = {code}" if any(fresh) else code, made)

    def _allocate(self, x: Tensor) -> None:
        self._uses = set()
        made = self._know(x)
        made.open = True
        self._write(Does.ALLOCATE, "", [made])  # the code follows in `finish`

    def _allocation(self, made: Memory) -> str:
        dtype, shape, strides, _ = made.geometry
        return f"{made.name} = {self._constant(self._new)}({shape}, {strides}, {self._constant(dtype)})"

    def _fill(self, x: Tensor) -> None:
        """Zeros; the method takes half as long as the operator."""
        if x.numel() > 0:
            self._uses = set()
            step = Fill(self._place(x), x.nbytes) if x.is_contiguous() else None
            self._write(Does.OPERATE, f"{self._tensor(x)}.zero_()", step=step)

    def _copy(self, into: Tensor, source: Tensor) -> None:
        if into.numel() > 0:
            self._uses = set()
            step = Copy(self._place(into), self._place(source), into.nbytes)
            self._write(Does.OPERATE, f"{self._tensor(into)}.copy_({self._tensor(source)})", step=step)

    # What is launched.

    def call(self, function: Function, *args: Any) -> None:
        """Record a call that was made, in whose arguments tensors stand for their addresses."""
        if self.reason:
            return
        self._uses = set()
        code = ", ".join([self._with_addresses(x) for x in args])
        self._write(Does.LAUNCH, f"{self._constant(function)}({code})")

    def launch(
        self, launcher: Function, before: Sequence[Any], values: Sequence[Any], kernel: Kernel, kinds: Sequence[Any]
    ) -> None:
        """Record a launch by Triton's launcher with these arguments, of which the first ones are not the kernel's.

        `before` is as of `call`, its fourth the stream.  `kinds` are the types of the `values`, by Triton's names; a
        map stands for what `make` makes of it.
        """
        if self.reason or 0 in kernel.grid:
            return
        self._uses = set()
        try:
            params = [x for kind, value in zip(kinds, values, strict=True) for x in self._params(kind, value)]
            step = torch_program.launch(kernel, params)
        except (LookupError, ValueError):  # of a type that isn't known
            step = None
        code = ", ".join([self._with_addresses(x) for x in (*before, *values)])
        self._write(
            Does.LAUNCH, f"{self._constant(launcher)}({code})", step=step, stream=self._with_addresses(before[3])
        )

    def _params(self, kind: Any, x: Any) -> list[Param]:
        """An argument as what a kernel takes: nothing of what it was compiled for."""
        x = self._derived.get(id(x), (x, x))[1]
        if isinstance(kind, tuple):
            parts = [_Code(f"{x.code}[{i}]", x.uses) for i in range(len(kind))] if isinstance(x, _Code) else x
            return [y for pair in zip(kind, parts, strict=True) for y in self._params(*pair)]
        if kind == "constexpr":
            if isinstance(x, _Code):
                self.refuse("a kernel is compiled for a number that follows from addresses")
            return []
        if kind == "nvTmaDesc":
            base, *shape = (self._place(y) if isinstance(y, Tensor | _Code) else y for y in (x.base, *x.shape))
            return [(kind, x._replace(base=base, shape=tuple(shape)))]
        if isinstance(x, Tensor | _Code):
            if not torch_program.is_place(kind):
                raise LookupError(kind)
            return [(kind, self._place(x))]
        return [(kind, torch_program.number(kind, x))]

    def _place(self, x: Any) -> int | Place:
        """An address, or a number that follows from some."""
        x = self._derived.get(id(x), (x, x))[1]
        if isinstance(x, _Code):
            self._uses |= x.uses
            return Place(x.code)
        memory = self._known(x)
        if memory is None or x.data_ptr() == 0:
            return 0
        memory.addressed = True
        return Place(f"p_{memory.name}", x.data_ptr() - memory.address)

    def once(self, function: Function, *args: Any, does: Does = Does.COMPUTE) -> Any:
        """Stands among the arguments of `call` for what `function` makes of these, also with tensors for addresses; the
        same of the same arguments is made once.
        """
        before, self._uses = self._uses, set()
        code = f"{self._constant(function)}({', '.join([self._with_addresses(x) for x in args])})"
        if code not in self._once and not self.reason:
            name = f"o{len(self._once)}"
            self._write(does, f"{name} = {code}")
            self._once[code] = name, self._uses
        self._uses = before
        return _Code(*self._once.get(code, ("None", set())))

    def derive(self, function: Function, pieces: Sequence[Tensor], matrix: Tensor, *others: Any) -> None:
        """Say that arguments to come follow from the addresses of these pieces of memory.

        Of the addresses `function`, which must hold no tensor, makes the address of `matrix`, how many rows it has, and
        the `others`.
        """
        if self.reason:
            return
        self._uses = set()
        code = f"{self._constant(function)}({', '.join([self._with_addresses(x) for x in pieces])})"
        name = f"d{len(self._derived)}"
        self._write(Does.COMPUTE, f"{name} = {code}")
        self._rows[id(matrix)] = _Code(f"{name}[1]", self._uses)
        for x, i in ((matrix, 0), *((x, i) for i, x in enumerate(others, 2))):
            self._derived[id(x)] = x, _Code(f"{name}[{i}]", self._uses)

    def rows(self, x: Tensor) -> Any:
        """How many rows a matrix has, as an argument of `call`."""
        return self._rows.get(id(x), x.shape[0])

    # Code.

    def _write(self, does: Does, code: str, makes: Sequence[Memory | None] = (), **more: Any) -> None:
        self._lines.append(Line(does, code, self._uses, [self._all.index(m) for m in makes if m is not None], **more))

    def _constant(self, x: Any) -> str:
        name = f"c{id(x)}"
        self._constants[name] = x
        return name

    def _plain(self, x: Any) -> str:
        """A number, a word or another constant."""
        if x is None or type(x) in (bool, int, str):
            return repr(x)
        if hasattr(x, "data_ptr") or hasattr(x, "base"):
            self.refuse(f"{type(x).__name__} holds memory")
        return self._constant(x)

    def _known(self, x: Tensor) -> Memory | None:
        found = self._memory.get(x.untyped_storage()._cdata)
        if found is None:
            self.refuse("memory is neither an argument's nor an operator's result")
            return None
        self._uses.add(self._all.index(found))
        return found

    def _with_addresses(self, x: Any) -> str:
        """Code for an argument of a launch: addresses for tensors."""
        if isinstance(x, _Code):
            self._uses |= x.uses
            return x.code
        if id(x) in self._derived:
            return self._with_addresses(self._derived[id(x)][1])
        if isinstance(x, Map):
            return self._with_addresses(self.once(x.make, *x[1:], does=Does.MAP))
        if isinstance(x, Tensor):
            memory = self._known(x)
            if memory is None or x.data_ptr() == 0:
                return "0"
            memory.addressed = True
            more = x.data_ptr() - memory.address
            return f"p_{memory.name}{more:+d}" if more else f"p_{memory.name}"
        if isinstance(x, tuple | list):
            inner = "".join(f"{self._with_addresses(y)}, " for y in x)
            return f"({inner})" if isinstance(x, tuple) else f"[{inner}]"
        return self._plain(x)

    def _with_tensors(self, x: Any) -> str:
        """Code for an argument of an operator: tensors for tensors."""
        if isinstance(x, Tensor):
            return self._tensor(x)
        if isinstance(x, tuple | list):
            inner = "".join(f"{self._with_tensors(y)}, " for y in x)
            return f"({inner})" if isinstance(x, tuple) else f"[{inner}]"
        return self._plain(x)

    def _tensor(self, x: Tensor) -> str:
        memory, geometry = self._known(x), (x.dtype, tuple(x.shape), x.stride(), x.data_ptr())
        if memory is None:
            return "None"
        if memory.open and _is_dense(x) and (x.nbytes, x.data_ptr()) == (memory.bytes, memory.address):
            memory.geometry = geometry  # no view where its first use as a tensor is all of it
        memory.open = False
        if memory.geometry == geometry:
            return memory.name
        more = x.data_ptr() - memory.address if x.numel() else 0
        if more == 0 and x.dtype == memory.geometry[0]:  # 0.6 us in place of 1.0
            return f"{memory.name}.as_strided({tuple(x.shape)}, {x.stride()})"
        if _is_all(x, memory):  # 0.5 us in place of 2.4
            return f"{memory.name}.view({self._constant(x.dtype)})"
        return f"_view({memory.name}, {self._with_tensors((x.dtype, tuple(x.shape), x.stride(), more))})"

    def finish(self, results: Tensors) -> Tape | str:
        """The tape, which returns what the op did; or why there is none."""
        self._uses = set()
        returned = (
            "".join(f"{'None' if x is None else self._with_tensors(x)}, " for x in results) if not self.reason else ""
        )
        if self.reason:
            return self.reason
        for line in self._lines:
            if line.does is Does.ALLOCATE:
                line.code = self._allocation(self._all[line.makes[0]])
        script = Script(self._device, self._lines, self._all, self._uses)
        body = "\n".join(f"    {line}" for line in [*script.write(), f"return ({returned})"])
        source, names = f"def tape({', '.join(self._names)}):\n{body}\n", {**self._constants, **script.constants}
        exec(compile(source, "<onchip tape>", "exec"), names)
        return Tape(names.pop("tape"), [*self._conditions], source, script.small)


class _Code:
    """Code for an argument, and the memory that it needs."""

    def __init__(self, code: str, uses: set[int]) -> None:
        self.code, self.uses = code, uses


def versions(tensors: Tensors) -> list[int | None]:
    """How often each was changed in place; autograd doesn't count for those of inference mode."""
    return [None if x is None or x.is_inference() else x._version for x in tensors]


def _called(func: Any) -> Any:
    """What calls an operator.

    PyTorch's function for Python, if it can take no other overload: by it cuBLAS's product of FP8 numbers takes 4.3 us
    on the made-up GPU in place of 7.0.
    """
    namespace, name = func._schema.name.split("::")
    overloads = [x for x in func._overloadpacket.overloads() if not x.endswith("out")]
    plain = overloads == [func._overloadname] and namespace == "aten"
    return getattr(torch._C._VariableFunctions, name, func._op) if plain else func._op


def _is_dense(x: Tensor) -> bool:
    """Whether it has no gaps, in whatever order its dimensions lie."""
    return x.permute(sorted(range(x.ndim), key=x.stride, reverse=True)).is_contiguous()


def _is_all(x: Tensor, memory: Memory) -> bool:
    """Whether a tensor is all of memory that was made as a row of another dtype."""
    dtype, shape, strides, address = memory.geometry
    whole = x.storage_offset() == 0 and x.data_ptr() == address and not memory.given
    return bool(whole and x.stride() == strides == (1,) and x.nbytes == shape[0] * dtype.itemsize)


def _is_tensor(x: Any) -> bool:
    return isinstance(x, Tensor)


def _is_copy(into: Tensor, source: Tensor) -> bool:
    """Whether a tensor gets no more than the bytes of another, from first to last."""
    if (into.dtype, into.shape, into.device) != (source.dtype, source.shape, source.device):
        return False
    if into.is_conj() != source.is_conj() or into.is_neg() != source.is_neg() or _share(into, source):
        return False
    return bool(into.is_contiguous() and source.is_contiguous())


def _share(a: Tensor, b: Tensor) -> bool:
    return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)
