"""Public functions whose calls are prepared: calls of the same kind have the same checks and launches.

Checking arguments, choosing a backend and planning take several times as long as the launches themselves.  They depend
on the options, on the shapes, strides, dtypes and alignments of tensors, and on their role in autograd, but never on
their numbers (if they do, no call is prepared).  So the first call of a kind just runs, the second states what it does
(torch_prepared.py), and later ones do what was stated and attach autograd's node to the results.  Attaching it runs
hooks for saved tensors, so it happens in each call.
"""

import math
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import fields, is_dataclass
from functools import lru_cache, wraps
from itertools import count
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._C import _len_torch_function_stack
from torch.autograd import forward_ad
from torch.distributed import ProcessGroup
from torch.nn import Parameter
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from onchip.frontend import torch_prepared
from onchip.frontend.torch_builder import Builder, Prepared, versions
from onchip.frontend.torch_inputs import accumulator, gradients_enabled
from onchip.frontend.torch_prepared import SEEN_ONCE, Known, is_shared
from onchip.frontend.torch_refusals import refused_together
from onchip.frontend.torch_register import Made, Operator, Saving, inside_operator

F = TypeVar("F", bound=Callable[..., Any])
Places = Sequence[tuple[Tensor | None, int]]

# What else an argument may be, told apart by its value and its type: 1, 1.0 and True are different options.
_PLAIN = frozenset((type(None), bool, int, float, str, torch.dtype))


def repeatable(function: F) -> F:
    """A decorator: repeat calls of a kind, for a public function that depends on its arguments alone.

    A `normalizer` that is a number becomes a tensor first, as in `check_normalizer`, since each call may have another.
    """
    known = Known()  # a _Known, or the reason why there is none

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        if "normalizer" in kwargs and type(kwargs["normalizer"]) in (int, float):
            kwargs["normalizer"] = _normalizer(kwargs["normalizer"], args, kwargs)
        given: list[Tensor] = []
        kind, found = _kind(args, kwargs, given), None
        if kind is not None:
            kind, found = known.find(kind, given)
            if isinstance(found, _Known) and found.prepared.may_run():
                return found.run(given)
        with refused_together(kwargs.get("check_inputs")):
            if kind is not None and found is None:
                known.remember(kind)
            elif found is SEEN_ONCE:
                made, found = _prepare(function, args, kwargs, given, shared=is_shared(kind))
                known.remember(kind, found)
                return made
            return function(*args, **kwargs)

    return call  # type: ignore[return-value]


def _normalizer(number: float, args: Sequence[Any], kwargs: dict[str, Any]) -> float | Tensor:
    """The number as a tensor on the device of the call's first tensor, if the call can be repeated and it is valid."""
    first = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
    if first is None or type(first) not in (Tensor, Parameter):
        return number
    if not torch_prepared.is_prepared(first) or not 0 < number < math.inf:
        return number
    return torch.full((), float(number), dtype=accumulator(first.dtype), device=first.device)


def _kind(args: Sequence[Any], kwargs: dict[str, Any], given: list[Tensor]) -> Hashable:
    """Everything on which a prepared call relies; its tensors are added to `given`.  None: it can't be prepared."""
    if torch._C._len_torch_dispatch_stack() > 0 or torch._C._are_functorch_transforms_active():
        return None
    if forward_ad._current_level >= 0 or (_len_torch_function_stack() > 0 and _is_watched()):
        return None
    if kwargs.get("check_inputs"):  # values are read in each call
        return None
    rest: list[Any] = [*kwargs]
    for x in (*args, *kwargs.values()) if kwargs else args:
        kind = type(x)
        if kind in _PLAIN:
            rest += kind, x
        elif not _add(x, given, rest):
            if not isinstance(x, ProcessGroup):
                return None
            rest += kind, x.group_name, x.rank(), x.size()
    if not given or not torch_prepared.is_prepared(given[0]):
        return None
    cast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled() else None  # that of CUDA
    try:
        tensors = torch_prepared.kind_of(given, differentiable=True)
    except RuntimeError:  # without storage or strides
        return None
    return gradients_enabled(), cast, tuple(rest), tensors


def _is_watched() -> bool:
    """Whether a mode sees the functions of PyTorch that are called, and may change what they do."""
    return any(type(mode) is not DeviceContext for mode in _get_current_function_mode_stack())


def _add(x: Any, given: list[Tensor], rest: list[Any]) -> bool:
    """Add a tensor, or a tuple or frozen dataclass of such, of tensors and of plain values; False for all else."""
    kind: Any = type(x)
    if kind is Tensor or kind is Parameter:
        if x.is_neg():  # its memory holds other numbers
            return False
        given.append(x)
        if x.requires_grad:  # memory that may be overwritten must not be a leaf's
            base = x._base
            rest += x.is_leaf, base is not None and base.is_leaf
        else:
            rest.append(None)
        return True
    if isinstance(x, tuple):
        parts: Collection[Any] = x
    elif _is_frozen(kind):
        parts = vars(x).values()
    else:
        return False
    rest += kind, len(parts)
    for y in parts:
        if type(y) in _PLAIN:
            rest += type(y), y
        elif not _add(y, given, rest):
            return False
    return True


@lru_cache
def _is_frozen(kind: type) -> bool:
    """Whether it is a frozen dataclass."""
    return is_dataclass(kind) and bool(vars(kind)["__dataclass_params__"].frozen)


class _Known(NamedTuple):
    """How a call is repeated.  Its functions pick from the prepared call's tensors."""

    prepared: Prepared
    operator: Operator[Any, Any] | None
    """The operator that attaches autograd; None if no gradient is needed."""
    outputs: Callable[[Made], Made]
    """Picks the operator's outputs, with the link."""
    inputs: Callable[[Made], Made]
    """Picks the differentiable tensors."""
    kept: Callable[[Made], Made]
    """Picks the tensors that forward keeps for backward."""
    saving: Saving | None
    """What else it keeps."""
    result: Callable[[Made], Any]
    """Makes what the caller gets, of the operator's outputs and of these tensors."""

    def run(self, given: Sequence[Tensor]) -> Any:
        prepared, first = self.prepared, given[0]
        if torch_prepared.needs_context(prepared, first):
            with inside_operator(first):
                there = prepared.tensors(given)
        else:
            there = prepared.tensors(given)
        if self.operator is None or self.saving is None:
            return self.result(there)
        made = self.operator.connect(self.saving, self.kept(there), self.outputs(there), self.inputs(there), plain=True)
        return self.result([*made, *there])


def _prepare(
    function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], given: list[Tensor], *, shared: bool
) -> tuple[Any, _Known | str]:
    """The result of a call, and how to repeat it, or why it can't be repeated."""
    told = Builder(given, shared=shared)
    with told:
        result = function(*args, **kwargs)
    seen = told.attached
    if len(seen) > 1:
        told.refuse("it calls several operators")
    fresh: list[Tensor | None] = []  # the operator's outputs, what it keeps, and other tensors of the result
    outputs: Made = ()
    for made in seen:
        fresh.extend(made.before)
        outputs = made.after
        if versions(outputs) != made.versions:
            told.refuse("an output is changed in place")
        fresh.extend(x for x in made.kept if x is not None and not _is_in(x, (*fresh, *given)))
    for x in _leaves(result):
        if not _is_in(x, (*outputs, *given, *fresh)):
            if x.requires_grad:
                told.refuse("the result isn't what the operator made")
            fresh.append(x)
    prepared = told.finish(fresh)
    if isinstance(prepared, str):
        return result, prepared
    of_given: Places = [(None, 0), *zip(given, count(1))]
    there: Places = [*zip(fresh, prepared.results, strict=True), *of_given]
    if not seen or seen[0].saving is None:
        return result, _Known(prepared, None, tuple, tuple, tuple, None, _maker(result, there))
    ((operator, saving, of_node, inputs, before, after, _),) = seen
    try:
        differentiable = _picker(inputs, there[len(before) :])  # no output of the operator is one
    except LookupError:
        return result, "a differentiable tensor is made of the arguments"
    maker = _maker(result, [*zip(after, count()), *[(x, len(after) + i) for x, i in there]])
    outputs_of, kept_of = _picker(before, there), _picker(of_node, there)
    return result, _Known(prepared, operator, outputs_of, differentiable, kept_of, saving, maker)


def _picker(tensors: Made, there: Places) -> Callable[[Made], Made]:
    """A function that picks these from a list where tensors have these places."""
    places = [_place(x, there) for x in tensors]
    return itemgetter(*places) if len(places) > 1 else lambda there: [there[i] for i in places]


def _is_in(x: Tensor, tensors: Sequence[Tensor | None]) -> bool:
    return any(x is y for y in tensors)


def _place(x: Tensor | None, there: Places) -> int:
    for y, i in there:
        if y is x:
            return i
    raise LookupError


def _leaves(x: Any) -> list[Tensor]:
    """The tensors of a result."""
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, tuple):
        return [y for part in x for y in _leaves(part)]
    if is_dataclass(x):
        return [y for f in fields(x) for y in _leaves(getattr(x, f.name))]
    return []


def _maker(result: Any, places: Places) -> Callable[[Made], Any]:
    """A function that makes such a result from a list where tensors have these places."""
    if isinstance(result, Tensor):
        place = _place(result, places)
        return lambda there: there[place]
    if isinstance(result, tuple):
        parts = [_maker(x, places) for x in result]
        of = getattr(result, "_make", tuple)
        return lambda there: of([part(there) for part in parts])
    if is_dataclass(result) and not isinstance(result, type):
        kind = type(result)
        named = {f.name: _maker(getattr(result, f.name), places) for f in fields(result)}
        return lambda there: kind(**{name: part(there) for name, part in named.items()})
    return lambda there: result
