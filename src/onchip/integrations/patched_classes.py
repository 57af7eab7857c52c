"""Subclasses of single modules' classes, for `onchip.integrations.transformers`.

A function in a module's `__dict__` would follow neither `copy.deepcopy` nor the replicas of DataParallel.  A class
does; when an instance is unpickled, its class is made again from the class that it replaces.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

BASE = "_onchip_base"


def derived(base: type, name: str, members: dict[str, Any], again: Callable[[type], type]) -> type:
    """A subclass of `base`; `again(base)` gives the same one where an instance is copied or unpickled."""
    own: Any = base

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        how, (kind, *given), *more = own.__reduce_ex__(self, max(int(protocol), 2))
        return (_new, (again, base), *more) if kind is made else (how, (kind, *given), *more)

    named = {"__module__": base.__module__, "__qualname__": name, "__doc__": base.__doc__, BASE: base}
    made: type = type(base)(name, (base,), {**members, **named, "__reduce_ex__": __reduce_ex__})
    return made


def _new(again: Callable[[type], type], base: type) -> Any:
    kind: Any = again(base)
    return kind.__new__(kind)


def is_derived(module: nn.Module) -> bool:
    """Whether its class, or one that another library made of it since, is ours."""
    return hasattr(type(module), BASE)


def own_class(module: nn.Module) -> Any:
    """The class that ours was made of, or its class."""
    return getattr(type(module), BASE, type(module))


def restore_class(module: nn.Module) -> None:
    """Give it its own class back; one that another library made of ours, as fully_shard does, stays."""
    if BASE in type(module).__dict__:
        module.__class__ = own_class(module)
