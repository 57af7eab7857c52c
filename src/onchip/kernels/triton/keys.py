"""Gives kernels keys in Triton's cache that are the same in every process."""

from collections.abc import Iterator
from types import CodeType, ModuleType
from typing import Any


def settle(kernel: Any) -> None:
    """Compute the keys of the functions that a kernel calls, then its own.

    A function's key includes the globals that its callees use, but only callees whose keys Triton has computed before.
    So the order of calls in a process would decide whether it finds a kernel that another process compiled.
    """
    _settle(kernel, set())


def _settle(function: Any, seen: set[int]) -> None:
    if id(function) in seen or function.hash is not None:
        return
    seen.add(id(function))
    for callee in _callees(function):
        _settle(callee, seen)
    _ = function.cache_key


def _callees(function: Any) -> Iterator[Any]:
    from triton.runtime.jit import JITCallable  # type: ignore[import-untyped]

    scope, names = function.get_capture_scope(), sorted(names_of(function.fn.__code__))
    for found in (scope.get(name) for name in names):
        if isinstance(found, JITCallable):
            yield found
        elif isinstance(found, ModuleType):
            yield from (x for name in names if isinstance(x := getattr(found, name, None), JITCallable))
        elif getattr(found, "__triton_aggregate__", False):
            yield from (x for x in found.hash_attrs if isinstance(x, JITCallable))


def names_of(code: CodeType) -> set[str]:
    """The names of globals, attributes and outer variables in a function."""
    inner = (names_of(x) for x in code.co_consts if isinstance(x, CodeType))
    return {*code.co_names, *code.co_freevars}.union(*inner)
