"""What PyTorch modules share: those of a loss, and layers that replace an nn.Linear."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.nn import Linear, Module

from onchip.core.backends import choose_backend
from onchip.frontend.options import require_positive, scratch_in_bytes
from onchip.frontend.torch_types import Result

L = TypeVar("L", bound=Linear)
F = TypeVar("F")


def typed_as(of: F) -> Callable[[Any], F]:
    """A decorator: what it is put on has the types of `of`."""
    return lambda _: of


def stand_in(cls: type[L], linear: Module) -> L:
    """A `cls` that shares the parameters of `linear`, with its hooks and its training mode.

    The caller sets the other attributes of `cls`.  Errors speak for `cls.from_linear`.
    """
    require_linear(f"{cls.__name__}.from_linear", linear)
    made = cls.__new__(cls)
    made.__dict__.update(linear.__dict__)  # as copy.copy does
    made._compiled_call_impl = None  # what `linear.compile()` made runs that layer
    made._parameters = linear._parameters.copy()
    return made


def require_linear(name: str, linear: Module) -> None:
    """Raise unless `linear` is an nn.Linear whose forward is its own."""
    if type(linear) is not Linear:
        raise TypeError(f"{name}: it takes a torch.nn.Linear; got {described(linear)}")
    if "forward" in vars(linear):
        raise TypeError(
            f"{name}: linear.forward was replaced, and would run instead of this class's; convert the layer before that"
        )


def main_grad_of(name: str, weight: Tensor) -> Tensor | None:
    """What backward is to add the weight's gradient to, of a layer with main_grad=True; None: there is no backward."""
    if not torch.is_grad_enabled() or not weight.requires_grad:
        return None
    out: Tensor | None = getattr(weight, "main_grad", None)
    if out is None:
        raise ValueError(f"{name}: main_grad=True needs weight.main_grad, a float32 tensor of weight's shape")
    return out


def described(x: Any) -> str:
    """Its class, for an error: whose it is, where another library's may be called as PyTorch's."""
    kind = type(x)
    own = "" if kind.__module__.startswith(("torch.", "onchip.")) else f" of {kind.__module__}"
    replaced = isinstance(x, Module) and "forward" in vars(x)
    return kind.__name__ + own + (" whose forward was replaced" if replaced else "")


class LossModule(Module, Generic[Result]):
    """A module that holds the options of a loss and no parameters."""

    def __init__(self, op: str, options: type, backends: Sequence[str], given: Mapping[str, Any]) -> None:
        """`given` are the arguments of the module, by name: the fields of `options`, normalizer and backend."""
        super().__init__()
        self.scratch_bytes, self.normalizer, self.backend = (
            given["scratch_bytes"],
            given["normalizer"],
            given["backend"],
        )
        checked = {"scratch_bytes": scratch_in_bytes(op, self.scratch_bytes, 1)}  # a part is of each call's own logits
        self.options: Any = options(**{field.name: given[field.name] for field in fields(options)} | checked)
        choose_backend(op, self.backend, dict.fromkeys(backends))
        if self.normalizer is not None and not isinstance(self.normalizer, Tensor):
            require_positive(op, "normalizer", self.normalizer)

    def keywords(self, **given: Any) -> dict[str, Any]:
        """What the op is called with: what is given and not None overrides the module's own."""
        own = {field.name: getattr(self.options, field.name) for field in fields(self.options)}
        own |= {"scratch_bytes": self.scratch_bytes, "normalizer": self.normalizer, "backend": self.backend}
        return own | {name: x for name, x in given.items() if x is not None}

    def extra_repr(self) -> str:
        """The options that differ from their defaults."""
        defaults = vars(type(self.options)())
        given = vars(self.options) | {"scratch_bytes": self.scratch_bytes}
        return ", ".join(f"{k}={v!r}" for k, v in given.items() if v != defaults[k])
