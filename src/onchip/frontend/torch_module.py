"""A loss as a module of PyTorch."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from torch import Tensor
from torch.nn import Module

from onchip.core.backends import choose_backend
from onchip.frontend.options import require_positive, scratch_in_bytes


class LossModule(Module):
    """A module that owns the options of a loss and no parameter."""

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
