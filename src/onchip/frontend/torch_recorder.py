"""Recorders, which write down what an op allocates and launches: the lines of a tape."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from onchip.frontend import torch_program
from onchip.frontend.torch_program import Copy, Fill, Kernel, Launch, Map, Place
from onchip.frontend.torch_script import ALIGNED, Does, Line, Memory, Script, realigned, view

Function = Callable[..., Any]
Tensors = Sequence[Tensor | None]

_NEW = {
    **dict.fromkeys(("aten::empty", "aten::new_empty", "aten::empty_strided", "aten::new_empty_strided"), "empty"),
    **dict.fromkeys(("aten::zeros", "aten::new_zeros", "aten::zeros_like"), "zero"),
    "aten::empty_like": "empty",
}

_BY_VALUE = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


class Attached(NamedTuple):
    """That an operator's outputs were connected by autograd, while a call was recorded."""

    operator: Any
    saving: Any
    """What its node keeps; None: it has no node."""
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
        self._lines: list[str] = []
        self._memory: dict[int, _Memory] = {}
        self._all: list[_Memory] = []
        self._constants: dict[str, Any] = {"_aligned": _aligned, "_view": _view}
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
            self._know(name, x, given=True)
        elif known.geometry[-1] != x.data_ptr():  # the same tensor twice is always that: see `kind_of`
            self.refuse("two arguments share memory")

    def _know(self, name: str, x: Tensor, *, given: bool = False) -> None:
        made = self._memory[x.untyped_storage()._cdata] = _Memory(name, x, given=given)
        self._all.append(made)
        if x.is_cuda and not given and made.address % _ALIGNED:
            self.refuse("memory is not aligned as PyTorch's allocator does")

    def refuse(self, reason: str) -> None:
        """Make no tape of this call."""
        self.reason = self.reason or reason

    def require(self, condition: Callable[[], bool]) -> None:
        """Let the tape be run only where this holds."""
        self._conditions[condition] = None

    def attached(self, operator: Any, saving: Any, inputs: Tensors, before: Tensors, after: Tensors) -> None:
        """Note that these outputs were connected to these inputs."""
        self.operators.append(Attached(operator, saving, inputs, before, after, versions(after)))

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
        self._uses, kind = set(), _NEW.get(name)
        targets = [f"m{len(self._all) + sum(fresh[:i])}" if is_new else "_" for i, is_new in enumerate(fresh)]
        if kind is not None:
            self._write(f"{targets[0]} = {self._allocation(results[0])}")
        elif name == "aten::zero_":  # the method takes half as long
            self._write(f"{self._tensor(args[0])}.zero_()")
        else:
            keywords = [f"{key}={self._with_tensors(value)}" for key, value in kwargs.items()]
            code = f"{self._constant(func)}({', '.join([*(self._with_tensors(x) for x in args), *keywords])})"
            self._write(f"{', '.join(targets)}{',' if several else ''} = {code}" if any(fresh) else code)
        for target, x, is_new in zip(targets, results, fresh, strict=True):
            if not is_new:
                continue
            self._know(target, x)
            self._uses = {int(target[1:])}
            self._write(f"p_{target} = {target}.data_ptr()")
            if kind is not None and x.is_cuda:
                self._write(
                    f"if p_{target} & {_ALIGNED - 1}: {target} = _aligned({target}); p_{target} = {target}.data_ptr()"
                )
            if kind == "zero":
                self._write(f"{target}.zero_()")

    def _allocation(self, x: Tensor) -> str:
        shape, strides = self._with_tensors(tuple(x.shape)), self._with_tensors(x.stride())
        kind = f"dtype={self._constant(x.dtype)}, device={self._constant(x.device)}"
        return f"{self._constant(torch.empty_strided)}({shape}, {strides}, {kind})"

    # What is launched.

    def call(self, function: Function, *args: Any) -> None:
        """Record a call that was made, in whose arguments tensors stand for their addresses."""
        if self.reason:
            return
        self._uses = set()
        code = ", ".join([self._with_addresses(x) for x in args])
        self._write(f"{self._constant(function)}({code})")

    def once(self, function: Function, *args: Any) -> Any:
        """Stands among the arguments of `call` for what `function` makes of these, also with tensors for addresses; the
        same of the same arguments is made once.
        """
        before, self._uses = self._uses, set()
        code = f"{self._constant(function)}({', '.join([self._with_addresses(x) for x in args])})"
        if code not in self._once and not self.reason:
            name = f"o{len(self._once)}"
            self._write(f"{name} = {code}")
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
        self._write(f"{name} = {code}")
        self._rows[id(matrix)] = _Code(f"{name}[1]", self._uses)
        for x, i in ((matrix, 0), *((x, i) for i, x in enumerate(others, 2))):
            self._derived[id(x)] = x, _Code(f"{name}[{i}]", self._uses)

    def rows(self, x: Tensor) -> Any:
        """How many rows a matrix has, as an argument of `call`."""
        return self._rows.get(id(x), x.shape[0])

    # Code.

    def _write(self, line: str) -> None:
        self._lines.append(line)
        for i in self._uses:
            self._all[i].used = len(self._lines) - 1

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

    def _known(self, x: Tensor) -> _Memory | None:
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
        if isinstance(x, Tensor):
            memory = self._known(x)
            if memory is None or x.data_ptr() == 0:
                return "0"
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
        memory = self._known(x)
        if memory is None or memory.geometry == (x.dtype, tuple(x.shape), x.stride(), x.data_ptr()):
            return "None" if memory is None else memory.name
        more = x.data_ptr() - memory.address if x.numel() else 0
        return f"_view({memory.name}, {self._with_tensors((x.dtype, tuple(x.shape), x.stride(), more))})"

    def finish(self, results: Tensors) -> Tape | str:
        """The tape, which returns what the op did; or why there is none."""
        self._uses = set()
        returned = (
            "".join(f"{'None' if x is None else self._with_tensors(x)}, " for x in results) if not self.reason else ""
        )
        if self.reason:
            return self.reason
        freed: dict[int, list[str]] = {}
        for i, memory in enumerate(self._all):
            if not memory.given and i not in self._uses:
                freed.setdefault(memory.used, []).append(memory.name)
        lines = [f"p_{m.name} = {m.name}.data_ptr()" for m in self._all if m.given]
        for i, line in enumerate(self._lines):
            lines.append(line)
            if i in freed:
                lines.append(f"del {', '.join(freed[i])}")
        body = "\n".join(f"    {line}" for line in [*lines, f"return ({returned})"])
        exec(compile(f"def tape({', '.join(self._names)}):\n{body}\n", "<onchip tape>", "exec"), self._constants)
        return Tape(self._constants.pop("tape"), [*self._conditions])


class _Code:
    """Code for an argument, and the memory that it needs."""

    def __init__(self, code: str, uses: set[int]) -> None:
        self.code, self.uses = code, uses


def versions(tensors: Tensors) -> list[int | None]:
    """How often each was changed in place; autograd doesn't count for those of inference mode."""
    return [None if x is None or x.is_inference() else x._version for x in tensors]


def _is_tensor(x: Any) -> bool:
    return isinstance(x, Tensor)
