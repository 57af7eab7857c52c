"""Logits that are not computed yet, for `onchip.integrations.transformers`.

Within the forward of a patched model that has labels, the head returns `DeferredLogits`, which know the hidden states
and what the model does to the logits next: a scale, a softcap, a slice of the vocabulary, other shapes.
`torch.nn.functional.cross_entropy` of them computes the fused loss; any other operation gets the logits themselves.
None of them outlives the forward: `DeferredCall.settled` replaces them by logits or `SkippedLogits`.
"""

import math
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from onchip.integrations.head_options import TERMS
from onchip.ops.linear_cross_entropy.torch_op import linear_cross_entropy

NAME = "onchip.integrations.transformers"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass
class Report:
    """What `patch` found in the model, and what has happened since."""

    fused: bool
    """Whether the losses of the model are fused."""
    reason: str
    """Why not, or what is fused."""
    losses: int = 0
    """Losses that were fused so far; under torch.compile, in what was compiled."""
    materialized: dict[str, int] = field(default_factory=dict)
    """Which operations in the model's forward asked for the logits themselves, and how often."""

    def __str__(self) -> str:
        asked = "".join(f"\n  logits materialized {n} x for {what}" for what, n in self.materialized.items())
        losses = "1 loss" if self.losses == 1 else f"{self.losses} losses"
        return f"{'fused' if self.fused else 'not fused'}: {self.reason}; {losses} so far{asked}"


class SkippedLogitsError(AttributeError, RuntimeError):
    """Something read logits that weren't computed; an AttributeError too, since hasattr may ask."""

    def __init__(self, *args: object) -> None:
        super().__init__(f"{NAME}: {SKIPPED}")


class SkippedLogits:
    """What a patched model returns in place of logits that it didn't compute; reading it raises."""

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise SkippedLogitsError

    def __getattr__(self, name: str) -> NoReturn:
        raise SkippedLogitsError

    def __eq__(self, other: object) -> NoReturn:
        self._refuse()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {SKIPPED}>"

    __hash__ = object.__hash__
    __array__ = __bool__ = __float__ = __int__ = __len__ = __iter__ = __getitem__ = __setitem__ = __contains__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __pow__ = _refuse
    __matmul__ = __rmatmul__ = __neg__ = __abs__ = __lt__ = __le__ = __gt__ = __ge__ = __ne__ = _refuse

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise SkippedLogitsError


class SkippedByReplica(SkippedLogits):
    """A replica's skipped logits: DataParallel gathers those of all replicas as if each were a sequence."""

    def __init__(self, others: Any = ()) -> None:
        pass

    def __iter__(self) -> Any:
        return iter(())


SKIPPED = (
    "a patched model doesn't compute its logits when it gets labels in training mode; if you need them, call "
    "patch(model, skip_logits=False), or call the model without labels"
)
SKIPPED_LOGITS = SkippedLogits()


def _count(report: Report) -> None:
    """Count one more loss; under torch.compile, which runs this while it traces, one for each compilation."""
    report.losses += 1


# This is what torch.compiler.assume_constant_result does: if it were traced, the number would be guarded, and each call
# compiled anew.
_count._dynamo_marked_constant = True  # type: ignore[attr-defined]


@dataclass
class DeferredCall:
    """A call of a patched model with labels, for as long as its forward lasts."""

    model: Any
    options: Mapping[str, Any]  # of linear_cross_entropy
    skip_logits: bool | None
    report: Report
    thread: int = 0
    losses: int = 0
    open: bool = True

    def is_here(self) -> bool:
        """Whether the call is this thread's."""
        return self.open and (torch.compiler.is_compiling() or self.thread == threading.get_ident())

    def loss(self, made: "Deferred", target: Tensor, **asked: Any) -> Tensor:
        """The fused loss for rows of logits."""
        options = dict(self.options)
        terms = {name: options.pop(name) for name in TERMS}
        if self.model.training:
            asked |= {name: asked.get(name) or x for name, x in terms.items()}
        if made.cap is not None:
            options["softcap"] = made.cap
        options["logit_scale"] = made.scale if made.cap is None else made.scale * made.cap
        self.losses += 1
        _count(self.report)

        def of(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
            if made.vocab < len(weight):
                weight, bias = weight[: made.vocab], None if bias is None else bias[: made.vocab]
            return linear_cross_entropy(hidden, weight, target, bias, **asked, **options)

        loss: Tensor = made.apply(of)
        return loss

    def compute(self, reason: str) -> None:
        """Let the head compute the logits, for whatever takes them, and say so once."""
        who = reason.partition(",")[0]
        self.require_no_options(f"the logits are computed for {reason}")
        asked = self.report.materialized
        asked[who] = asked.get(who, 0) + 1
        if asked[who] == 1:
            warn(f"the logits are computed and stored for {reason}.  The results are right, and memory isn't saved")

    def require_no_options(self, why: str) -> None:
        require_no_options(self.model, self.options, why)

    def settled(self, outputs: Any) -> Any:
        """The model's result, with nothing deferred left in it."""
        skip = self.skip_logits
        if skip is None:
            skip = self.model.training and torch.is_grad_enabled()
        if not self.losses:
            skip = False
            if not isinstance(outputs, dict) or outputs.get("loss") is not None:
                self.require_no_options("it isn't F.cross_entropy of flat logits; let model.loss_function end in that")
        skipped = SkippedByReplica() if getattr(self.model, "_is_replica", False) else SKIPPED_LOGITS

        def value(x: Any) -> Any:
            if not isinstance(x, DeferredLogits):
                return x
            return skipped if skip else x.deferred.logits()

        if isinstance(outputs, dict):
            for key, x in list(outputs.items()):
                if isinstance(x, DeferredLogits):
                    outputs[key] = value(x)
        elif isinstance(outputs, tuple | list):
            return type(outputs)([value(x) for x in outputs])
        return value(outputs)


def require_no_options(model: Any, options: Mapping[str, Any], why: str) -> None:
    """Raise where a loss would have to do without what `patch` was asked to add to it."""
    named = [name for name in TERMS if options[name]]
    if model.training and named:
        raise RuntimeError(
            f"{NAME}: {' and '.join(named)} can't be added to this loss: {why}; or leave "
            f"{'them' if len(named) > 1 else 'it'} out of patch"
        )


@dataclass
class Deferred:
    """What deferred logits are: cap * tanh(scale * product), or scale * product, of the first `vocab` entries.

    The product is that of `hidden`, whose rows are the logits' own, with the head's weight.
    """

    call: DeferredCall
    hidden: Tensor
    of_head: Callable[..., Any]  # (f, hidden) -> f(hidden, weight, bias), called where the weight is in memory
    vocab: int
    autocast: torch.dtype | None  # autocast's dtype in the head's call, if it was enabled
    with_gradients: bool  # whether gradients were enabled then
    guarded: bool  # whether anything that takes the logits' gradient raises
    scale: float = 1.0
    cap: float | None = None
    parent: "Deferred | None" = None
    replay: Any = None  # makes the logits from the parent's
    value: Tensor | None = None  # the logits, once they were asked for
    version: int = 0  # of value, as it was made

    def apply(self, f: Callable[..., Any]) -> Any:
        with torch.autocast(self.hidden.device.type, self.autocast, enabled=self.autocast is not None):
            return self.of_head(f, self.hidden)

    def logits(self) -> Tensor:
        stale = self.value is not None and torch.is_grad_enabled() and not self.value.requires_grad
        if self.value is None or (stale and self.with_gradients and not self.changed):
            if any(other.changed for other in self.ancestors()):
                raise RuntimeError(
                    f"{NAME}: logits that others were made of have been changed in place since; make a copy first"
                )
            self.value = self.apply(F.linear) if self.parent is None else self.replay(self.parent.logits())
            self.version = _version(self.value)
        return self.value

    @property
    def changed(self) -> bool:
        """Whether the logits were changed in place since they were made."""
        return self.value is not None and _version(self.value) != self.version

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


def _version(x: Tensor) -> int:
    """How often the tensor was changed in place; inference tensors have no count."""
    return x._version if torch.compiler.is_compiling() or not x.is_inference() else 0


class _Guard(torch.autograd.Function):
    """Gives deferred logits a place in the graph: an autograd.Function that takes them, skips `__torch_function__`."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, deferred: Deferred, shape: Any, dtype: torch.dtype) -> Any:
        return _unwritten(deferred, shape, dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> NoReturn:
        raise RuntimeError(
            f"{NAME}: the model's forward passed its logits to an autograd.Function, but they aren't computed; call "
            "unpatch(model), or let the model's loss end in F.cross_entropy"
        )


class DeferredLogits(Tensor):
    """Logits that are not computed yet, of a model that `patch` has patched."""

    deferred: Deferred

    @staticmethod
    def of(deferred: Deferred, shape: Any, dtype: torch.dtype) -> "DeferredLogits":
        if deferred.guarded and torch.is_grad_enabled():
            anchor = torch.empty(0, requires_grad=True)
            made: DeferredLogits = _Guard.apply(anchor, deferred, shape, dtype)
            return made
        return _unwritten(deferred, shape, dtype)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, x = getattr(func, "__name__", ""), args[0] if args else None
        if isinstance(x, DeferredLogits):
            if func in _AS_THEY_ARE or _is_for_compiler(name):
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


def _is_for_compiler(name: str) -> bool:
    """Whether torch.compile asks for this, to tell tensors apart by their properties."""
    if torch.compiler.is_dynamo_compiling() or name not in _FOR_COMPILER:
        return False
    asks: str = sys._getframe(2).f_globals.get("__name__", "")
    return asks.startswith(("torch._dynamo", "torch._subclasses"))


def _unwritten(deferred: Deferred, shape: Any, dtype: torch.dtype) -> DeferredLogits:
    """Deferred logits of this shape, whose memory is a single NaN."""
    one = torch.full((), math.nan, dtype=dtype, device=deferred.hidden.device)
    made: DeferredLogits = Tensor._make_subclass(DeferredLogits, one.expand(shape))
    made.deferred = deferred
    return made


def _getters(*names: str) -> set[Any]:
    return {getattr(Tensor, name).__get__ for name in names}


# Questions that the tensor without memory answers.
_AS_THEY_ARE = {
    *_getters("shape", "ndim", "dtype", "layout", "itemsize", "nbytes", "requires_grad", "grad_fn", "is_leaf", "grad"),
    *_getters("device", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested"),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.ndimension, Tensor.__len__, Tensor.get_device),
    *(Tensor.is_floating_point, Tensor.is_complex, Tensor.element_size, Tensor.is_inference),
    *(torch.is_floating_point, torch.is_complex, torch.numel, torch.is_inference),
}
# The same, if torch.compile asks: it does for tensors that enter a graph after a graph break.
_FOR_COMPILER = {"stride", "storage_offset", "untyped_storage", "is_mkldnn", "is_conj", "is_neg", "_is_view", "__get__"}
_SAME = {"contiguous", "clone"}
_CASTS = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16}


class _Asked:
    """Makes logits, and says what asked for them."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, x: "DeferredLogits") -> Tensor:
        call = x.deferred.call
        if not call.open:
            raise RuntimeError(
                f"{NAME}: these stand for the logits of a forward that has ended; don't keep the head's result, or "
                "call unpatch(model)"
            )
        asked = call.report.materialized
        first = self.name not in asked
        asked[self.name] = asked.get(self.name, 0) + 1
        if first and not torch.compiler.is_compiling():
            warn(
                f"the logits {list(x.shape)} are computed and stored, because {self.name} asks for them in the model's "
                "forward.  The results are right, but no memory is saved.  To save it, let model.loss_function end in "
                "F.cross_entropy of logits.view(-1, vocab), or call onchip.torch.lm_loss on the head and hidden states"
            )
        return x.deferred.logits()


def warn(what: str) -> None:
    """Warn, at the innermost line that is neither PyTorch's nor ours."""
    depth, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("torch", "onchip"):
        depth, frame = depth + 1, frame.f_back
    warnings.warn(f"{NAME}: {what}", stacklevel=depth)


def _derived(x: DeferredLogits, name: str, func: Any, rest: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The deferred logits after a scale, softcap, slice, reshape or cast; None for any other function."""
    old, shape, dtype = x.deferred, x.shape, x.dtype
    new: Deferred | None = None
    if old.with_gradients and not torch.is_grad_enabled():
        return None  # as in an autograd.Function's forward, whose backward would be bypassed
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
        new, shape = _rows_of(x, rest[0]) if name == "__getitem__" else _reshaped(x, func, rest, kwargs)
    if new is None or dtype not in DTYPES:
        return None
    made = replace(new, parent=old, replay=lambda z: func(z, *rest, **kwargs), value=None)
    return DeferredLogits.of(made, shape, dtype)


def _is_device_of(y: Any, hidden: Tensor) -> bool:
    if isinstance(y, bool | torch.memory_format):
        return True
    device = torch.device(y) if isinstance(y, str | torch.device) else hidden.device
    return device.type == hidden.device.type and device.index in (None, hidden.device.index)


def _rows_of(x: DeferredLogits, index: Any) -> tuple[Deferred | None, Any]:
    """Some rows of the logits, with the whole vocabulary or its first entries; None for any other index."""
    index = index if isinstance(index, tuple) else (index,)
    if any(not isinstance(i, int | slice | type(Ellipsis)) or isinstance(i, bool) for i in index):
        return None, x.shape
    if Ellipsis in index:
        at = index.index(Ellipsis)
        index = (*index[:at], *[slice(None)] * (x.dim() - len(index) + 1), *index[at + 1 :])
    every = (*index, *[slice(None)] * (x.dim() - len(index)))
    last = every[-1]
    if not isinstance(last, slice) or last.start not in (None, 0) or last.step not in (None, 1):
        return None, x.shape
    vocab = len(range(*last.indices(x.shape[-1])))
    rows = x.deferred.hidden[every[:-1]]
    return replace(x.deferred, hidden=rows, vocab=vocab), (*rows.shape[:-1], vocab)


def _reshaped(x: DeferredLogits, func: Any, rest: Any, kwargs: Any) -> tuple[Deferred | None, Any]:
    """The same logits in another shape; None if that cuts or joins rows."""
    made = func(torch.empty(x.shape, dtype=x.dtype, device="meta"), *rest, **kwargs)
    if made.dtype != x.dtype or made.dim() == 0 or made.shape[-1] != x.shape[-1]:
        return None, x.shape
    rows = x.deferred.hidden.reshape(*made.shape[:-1], x.deferred.hidden.shape[-1])
    return replace(x.deferred, hidden=rows), made.shape


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
    """The fused loss; None if the logits have to be computed."""
    if not isinstance(input, DeferredLogits) or isinstance(target, DeferredLogits):
        return None
    call = input.deferred.call
    plain = weight is None and size_average is None and reduce is None and reduction in ("mean", "sum", "none")
    changed = input.deferred.changed or any(x.changed for x in input.deferred.ancestors())
    if not plain or input.dim() != 2 or target.is_floating_point() or changed or not call.open:
        call.require_no_options("it isn't that of flat logits and labels, or has class weights; flatten them")
        return None
    return call.loss(
        input.deferred, target, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
    )
