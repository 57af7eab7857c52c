"""Logits that are not computed yet, for `onchip.integrations.transformers`.

A patched head returns `DeferredLogits`, which know the hidden states and what the model does to the logits next: a
scale, a softcap, a slice of the vocabulary, other shapes.  `torch.nn.functional.cross_entropy` of them is the fused
loss, and whatever else is asked of them is answered with the logits themselves.
"""

import math
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

if TYPE_CHECKING:
    from onchip.integrations.transformers import Head

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass
class Deferred:
    """What deferred logits are: cap * tanh(scale * product), or scale * product, of the first `vocab` entries.

    The product is the head's of `hidden`, whose rows are the logits' own.
    """

    head: "Head"
    hidden: Tensor
    vocab: int
    autocast: torch.dtype | None  # that was enabled for the head
    versions: list[int] | None  # of the head's parameters
    with_gradients: bool  # whether they were enabled
    scale: float = 1.0
    cap: float | None = None
    parent: "Deferred | None" = None
    replay: Any = None  # makes the logits of the parent's
    value: Tensor | None = None  # the logits, once they were asked for
    version: int = 0  # of value, as it was made

    def logits(self) -> Tensor:
        for other in self.ancestors():
            if other.changed:
                raise RuntimeError(
                    "onchip.integrations.transformers: logits that others were made of have been changed in place "
                    "since; make a copy first"
                )
        stale = self.value is not None and torch.is_grad_enabled() and not self.value.requires_grad
        if self.value is None or (stale and self.with_gradients and not self.changed):
            self.value = self.head(self, onchip="logits") if self.parent is None else self.replay(self.parent.logits())
            self.version = self.value._version
        return self.value

    @property
    def changed(self) -> bool:
        """Whether the logits were changed in place since they were made."""
        return self.value is not None and self.value._version != self.version

    def ancestors(self) -> Iterator["Deferred"]:
        one = self.parent
        while one is not None:
            yield one
            one = one.parent

    def times(self, factor: float) -> "Deferred | None":
        if not (factor > 0 and math.isfinite(factor)):
            return None
        if self.cap is None:
            return replace(self, scale=self.scale * factor)
        return replace(self, cap=self.cap * factor)

    def loss(self, target: Tensor, ignore_index: int, reduction: str, label_smoothing: float) -> Tensor:
        patch, training = self.head.patch, self.head.model.training
        options = dict(patch.options)
        smoothing, z_loss = options.pop("label_smoothing"), options.pop("z_loss")
        if self.cap is not None:
            options["softcap"] = self.cap
        patch.report.losses += 1
        made: Tensor = self.head(
            self,
            onchip="loss",
            target=target,
            vocab=self.vocab,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing or (smoothing if training else 0.0),
            z_loss=z_loss if training else 0.0,
            logit_scale=self.scale if self.cap is None else self.scale * self.cap,
            **options,
        )
        return made


class DeferredLogits(Tensor):
    """Logits that are not computed yet, of a model that `patch` has patched."""

    deferred: Deferred

    @staticmethod
    def of(deferred: Deferred, shape: Any, dtype: torch.dtype) -> "DeferredLogits":
        made: DeferredLogits = Tensor._make_subclass(DeferredLogits, torch.empty(shape, dtype=dtype, device="meta"))
        made.deferred = deferred
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, x = getattr(func, "__name__", ""), args[0] if args else None
        if isinstance(x, DeferredLogits):
            if func in _OF_THE_DEVICE:
                return getattr(x.deferred.hidden, _OF_THE_DEVICE[func])
            if func in _OF_THE_SHAPE:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            made = None if x.deferred.changed else _derived(x, name, func, args[1:], kwargs)
            if made is not None:
                return made
        if func is F.cross_entropy:
            made = _cross_entropy(*args, **kwargs)
            if made is not None:
                return made
        if name == "__get__":
            name = func.__self__.__name__
        args, kwargs = tree_map_only(DeferredLogits, _Asked(name), (args, kwargs))
        return func(*args, **kwargs)


def _getters(*names: str) -> dict[Any, str]:
    return {getattr(Tensor, name).__get__: name for name in names}


# Answered of the hidden states.
_OF_THE_DEVICE = _getters("device", "is_cuda", "is_cpu", "is_meta")
# Answered of the tensor without memory.
_OF_THE_SHAPE = {
    *_getters("shape", "ndim", "dtype", "layout", "itemsize", "nbytes", "requires_grad", "grad_fn", "is_leaf", "grad"),
    *_getters("is_sparse", "is_quantized", "is_nested"),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.ndimension, Tensor.stride, Tensor.__len__),
    *(Tensor.is_floating_point, Tensor.is_complex, Tensor.element_size, Tensor.is_contiguous),
    *(torch.is_floating_point, torch.is_complex, torch.numel),
}
_SAME = {"contiguous", "clone"}
_CASTS = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16}


class _Asked:
    """Makes logits, and says what asked for them."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, x: "DeferredLogits") -> Tensor:
        asked = x.deferred.head.patch.report.materialized
        first = self.name not in asked
        asked[self.name] = asked.get(self.name, 0) + 1
        if first and not torch.compiler.is_compiling():
            warn(f"the logits {list(x.shape)} are computed and stored, because {self.name} asks for them")
        return x.deferred.logits()


def warn(what: str) -> None:
    """At the line that isn't PyTorch's or ours."""
    depth, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("torch", "onchip"):
        depth, frame = depth + 1, frame.f_back
    warnings.warn(f"onchip.integrations.transformers: {what}", stacklevel=depth)


def _derived(x: DeferredLogits, name: str, func: Any, rest: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What a scale, a softcap, a slice, a shape or a dtype makes of deferred logits; None for anything else."""
    old, shape, dtype = x.deferred, x.shape, x.dtype
    new: Deferred | None = None
    number = len(rest) == 1 and not kwargs and isinstance(rest[0], int | float) and not isinstance(rest[0], bool)
    if name in _SAME:
        new = old
    elif name in _CASTS:
        new, dtype = old, _CASTS[name]
    elif name in ("to", "type"):
        casts = [y for y in (*rest, *kwargs.values()) if isinstance(y, torch.dtype)]
        others = [y for y in (*rest, *kwargs.values()) if not isinstance(y, torch.dtype)]
        if len(casts) < 2 and all(_is_device_of(y, old.hidden) for y in others):
            new, dtype = old, casts[0] if casts else dtype
    elif name in ("mul", "multiply", "__mul__", "__rmul__") and number:
        new = old.times(float(rest[0]))
    elif name in ("div", "divide", "true_divide", "__truediv__") and number and rest[0]:
        new = old.times(1 / float(rest[0]))
    elif name == "tanh" and not rest and old.cap is None:
        new = replace(old, cap=1.0)
    elif name in ("view", "reshape", "flatten", "squeeze", "unsqueeze", "__getitem__"):
        new, shape = _reshaped(x, name, rest, kwargs)
    if new is None or dtype not in DTYPES:
        return None
    made = replace(new, parent=old, replay=lambda z: func(z, *rest, **kwargs), value=None)
    return DeferredLogits.of(made, shape, dtype)


def _is_device_of(y: Any, hidden: Tensor) -> bool:
    if isinstance(y, bool | torch.memory_format):
        return True
    device = torch.device(y) if isinstance(y, str | torch.device) else hidden.device
    return device.type == hidden.device.type and device.index in (None, hidden.device.index)


def _reshaped(x: DeferredLogits, name: str, rest: Any, kwargs: Any) -> tuple[Deferred | None, Any]:
    """The rows likewise; whatever the last dimension takes part in must leave it whole, but for its first entries."""
    old, hidden = x.deferred, x.deferred.hidden
    nothing = None, x.shape
    if kwargs:
        return nothing
    if name == "__getitem__":
        index = rest[0] if isinstance(rest[0], tuple) else (rest[0],)
        if any(not isinstance(i, int | slice | type(Ellipsis)) or isinstance(i, bool) for i in index):
            return nothing
        if Ellipsis in index:
            at = index.index(Ellipsis)
            index = (*index[:at], *[slice(None)] * (x.dim() - len(index) + 1), *index[at + 1 :])
        index = (*index, *[slice(None)] * (x.dim() - len(index)))
        last = index[-1]
        if not isinstance(last, slice) or last.start not in (None, 0) or last.step not in (None, 1):
            return nothing
        vocab = len(range(*last.indices(x.shape[-1])))
        rows = hidden[index[:-1]]
        return replace(old, hidden=rows, vocab=vocab), (*rows.shape[:-1], vocab)
    sizes = list(rest[0]) if len(rest) == 1 and isinstance(rest[0], tuple | list) else list(rest)
    if name in ("view", "reshape"):
        if not all(isinstance(n, int | torch.SymInt) for n in sizes) or len(sizes) < 1:
            return nothing
        if sizes[-1] == -1 and x.numel() == math.prod(sizes[:-1]) * x.shape[-1]:
            sizes[-1] = x.shape[-1]
        if sizes[-1] != x.shape[-1]:
            return nothing
        rows = hidden.reshape(*sizes[:-1], hidden.shape[-1])
    elif name == "flatten":
        start = sizes[0] if sizes else 0
        end = sizes[1] if len(sizes) > 1 else -1
        if end % x.dim() == x.dim() - 1:
            return nothing
        rows = hidden.flatten(start, end)
    else:
        if len(sizes) != 1 or sizes[0] % (x.dim() + (name == "unsqueeze")) >= x.dim() - (name == "squeeze"):
            return nothing
        rows = getattr(hidden, name)(sizes[0] if sizes[0] >= 0 else sizes[0] % (x.dim() + (name == "unsqueeze")))
    return replace(old, hidden=rows), (*rows.shape[:-1], x.shape[-1])


def _cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """The fused loss; None where the logits have to be computed."""
    if not isinstance(input, DeferredLogits) or isinstance(target, DeferredLogits):
        return None
    plain = weight is None and size_average is None and reduce is None and reduction in ("mean", "sum", "none")
    if not plain or input.dim() != 2 or target.is_floating_point():
        return None
    if input.deferred.changed or any(x.changed for x in input.deferred.ancestors()):
        return None
    return input.deferred.loss(target, ignore_index, reduction, label_smoothing)
