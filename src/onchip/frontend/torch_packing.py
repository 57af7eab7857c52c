"""Objects as the arguments of operators: NamedTuples and frozen dataclasses whose fields are tensors, dtypes, numbers,
words and flags, and other such objects.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from functools import lru_cache, partial
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

# The time that torch.library takes in Python grows with the square of the number of arguments, so everything but
# tensors travels in four of them: with an argument for each number a call took 0.24 ms.
LISTS = ("SymInt[] sizes", "float[] numbers", "bool[] flags", "str words")
_LIST_OF: dict[Any, int] = {int: 0, float: 1, bool: 2, str: 3, torch.dtype: 3}
_DTYPES = {x: name for name, x in vars(torch).items() if isinstance(x, torch.dtype)}


class _Leaf(NamedTuple):
    """A field that isn't itself an object with fields."""

    path: str  # "options.softcap"
    kind: type
    optional: bool
    many: bool

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]


class Packing:
    """How a class's objects travel as arguments of an operator."""

    def __init__(self, cls: type) -> None:
        leaves: list[_Leaf] = []
        makers: dict[str, Any] = {}
        # Code of its own, as a NamedTuple has, since every call runs it.
        self._make = eval(f"lambda t, r: {_source(cls, '', leaves, makers)}", makers)
        self.of_tensors = [leaf for leaf in leaves if leaf.kind is Tensor]
        self.of_rest = [leaf for leaf in leaves if leaf.kind is not Tensor]
        self.tensors_of, self.rest_of = (reader([leaf.path for leaf in x]) for x in (self.of_tensors, self.of_rest))
        names = [leaf.name for leaf in self.of_tensors]
        self.tensors = [x.name if names.count(x.name) == 1 else x.path.replace(".", "_") for x in self.of_tensors]
        self._decoded = lru_cache(maxsize=256)(lambda *lists: self.decode(lists))

    def schema(self, mutated: Sequence[str] = ()) -> str:
        letters = {name: f"({'abcdef'[i]}!)" for i, name in enumerate(mutated)}
        tensors = [
            f"Tensor{letters.get(name, '')}{'?' if leaf.optional else ''} {name}"
            for name, leaf in zip(self.tensors, self.of_tensors, strict=True)
        ]
        return ", ".join([*tensors, *LISTS])

    def build(self, tensors: Sequence[Tensor | None], rest: Sequence[Any]) -> Any:
        """The object with these tensors and these other values, in the order of its fields."""
        return self._make(iter(tensors), iter(rest))

    def encode(self, rest: Sequence[Any]) -> tuple[Any, ...]:
        """Everything that isn't a tensor, as an operator takes it."""
        lists: tuple[list[Any], ...] = [], [], [], []
        sizes, _, flags, words = lists
        for leaf, value in zip(self.of_rest, rest, strict=True):
            if leaf.optional:
                flags.append(value is not None)
                if value is None:
                    continue
            if leaf.many:
                sizes.append(len(value))
            for x in value if leaf.many else (value,):
                lists[_LIST_OF[leaf.kind]].append(_DTYPES[x] if leaf.kind is torch.dtype else x)
        return sizes, lists[1], flags, ",".join(words)

    def decode(self, lists: Sequence[Any]) -> Sequence[Any]:
        """What `encode` was given."""
        iterators = [iter(x) for x in (*lists[:3], lists[3].split(","))]
        sizes, _, flags, _ = iterators
        rest: list[Any] = []
        for leaf in self.of_rest:
            if leaf.optional and not next(flags):
                rest.append(None)
                continue
            values = [next(iterators[_LIST_OF[leaf.kind]]) for _ in range(next(sizes) if leaf.many else 1)]
            if leaf.kind is torch.dtype:
                values = [getattr(torch, x) for x in values]
            rest.append(tuple(values) if leaf.many else values[0])
        return rest

    def pack(self, x: Any) -> tuple[Any, ...]:
        return (*self.tensors_of(x), *self.encode(self.rest_of(x)))

    def unpack(self, args: Sequence[Any]) -> Any:
        """What `pack` was given; the numbers may be symbols."""
        count = len(self.tensors)
        return self.build(args[:count], self.decode(args[count:]))

    def unpack_numbers(self, args: Sequence[Any]) -> Any:
        """The same for numbers, which are looked up if they were there before."""
        count = len(self.tensors)
        sizes, numbers, flags, words = args[count:]
        return self.build(args[:count], self._decoded((*sizes,), (*numbers,), (*flags,), words))


def _source(cls: Any, path: str, leaves: list[_Leaf], makers: dict[str, Any]) -> str:
    """Code that makes a `cls`, which may be generic, from the next tensors (t) and the next other values (r).

    Adds its leaves to `leaves`, and the functions that the code calls to `makers`.
    """
    of, cls = get_args(cls), get_origin(cls) or cls
    given = dict(zip(getattr(cls, "__parameters__", ()), of, strict=True))
    hints, parts = get_type_hints(cls), []
    for name in [x.name for x in fields(cls)] if is_dataclass(cls) else cls._fields:
        hint = given.get(hints[name], hints[name])
        optional = isinstance(hint, UnionType)
        kinds = [x for x in get_args(hint) if x is not NoneType] if optional else [hint]
        many = get_origin(kinds[0]) is tuple
        kind = get_args(kinds[0])[0] if many else kinds[0]
        kind = str if get_origin(kind) is Literal else kind
        if kind is Tensor or kind in _LIST_OF:
            leaves.append(_Leaf(path + name, kind, optional, many))
            parts.append(f"{name}=next({'t' if kind is Tensor else 'r'})")
        else:
            assert not optional, f"{cls.__name__}.{name}: {hint}"
            parts.append(f"{name}={_source(kind, f'{path}{name}.', leaves, makers)}")
    maker = f"make_{len(makers)}"
    makers[maker] = partial(_unchecked, cls) if is_dataclass(cls) else cls
    return f"{maker}({', '.join(parts)})"


def _unchecked(cls: Any, **values: Any) -> Any:
    """Makes a dataclass without its checks: they ran when the call was made, and values may be symbols here."""
    made: Any = object.__new__(cls)
    made.__dict__.update(values)
    return made


def reader(paths: Sequence[str]) -> Callable[[Any], tuple[Any, ...]]:
    """A function that reads these fields of an object."""
    made: Callable[[Any], tuple[Any, ...]] = eval(f"lambda x: ({''.join(f'x.{path}, ' for path in paths)})")
    return made


packing_of: Callable[[Any], Packing] = lru_cache(maxsize=None)(Packing)
"""How a class's objects travel; made once."""
