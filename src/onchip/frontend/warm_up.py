"""The arguments with which `warm_up` calls the ops.  No framework."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from onchip.registry import OPS


class Sizes(NamedTuple):
    """The sizes of any op; 0 for those that aren't given."""

    tokens: int
    hidden: int
    vocab: int
    teacher_hidden: int
    in_features: int
    out_features: int
    experts: int


Make = Callable[..., Any]
"""Zeros of a shape; `of_weight`, `constant` and the name of a `dtype` where they aren't a trained input's."""


class WarmUpCall(NamedTuple):
    """A function with kernels to compile."""

    sizes: Sequence[str]
    """The sizes that must be given."""
    arguments: Callable[[Sizes, Make], dict[str, Any]]


def calls() -> dict[str, WarmUpCall]:
    """The calls of all ops, by the function's name in `onchip.torch`."""
    return {name: call for op in OPS.values() if op.warms_up for name, call in op.entry("CALLS").items()}


def head(s: Sizes, make: Make) -> dict[str, Any]:
    return {"hidden": make(s.tokens, s.hidden), "weight": make(s.vocab, s.hidden, of_weight=True)}


def ids(s: Sizes, make: Make) -> Any:
    return make(s.tokens, dtype="int64")
