"""The checks of soft labels in PyTorch's cross-entropies."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from onchip.frontend.topk import TopK, check_labels, most_log_prob, raise_for_log_prob
from onchip.frontend.torch_inputs import LOSS_DTYPES, check_kinds, refuse_gradient, require_tensors


def is_soft(target: Any, of: Any) -> bool:
    """Whether the target is probabilities: a `TopK`, or floating point with as many dimensions as hidden or logits."""
    if isinstance(target, TopK):
        return True
    return (
        isinstance(target, Tensor) and isinstance(of, Tensor) and target.is_floating_point() and target.ndim == of.ndim
    )


def check_label_tensors(
    op: str,
    target: Any,
    given: Mapping[str, Any],
    token_weight: Any,
    class_weight: Any,
    temperature: Tensor | None,
    *,
    soft: bool = True,
) -> dict[str, Tensor]:
    """The tensors, those that are `given` among them, where all are of the right kind; `soft`: as `is_soft` says."""
    labels = {"target": target}
    if isinstance(target, TopK):
        check_labels(op, "target", target)
        labels = {"target.indices": target.indices, "target.values": target.values}
    constants = {"token_weight": token_weight, "class_weight": class_weight, "temperature": temperature}
    tensors = require_tensors(op, {**given, **labels, **constants}, optional=("bias", *constants))
    names, integers = (("target", "target.values"), "target.indices") if soft else ((), "target")
    check_kinds(op, tensors, integers=(integers,), constants=tuple(constants), labels=names, dtypes=LOSS_DTYPES)
    for name in names:
        if name in tensors:
            refuse_gradient(op, name, tensors[name])
    return tensors


def _eps(x: Tensor) -> float:
    return torch.finfo(x.dtype).eps


def _no_log_probs(values: Tensor) -> Tensor:
    return values > most_log_prob(_eps(values))


def log_probs_or_nan(values: Tensor) -> Tensor:
    """Log-probabilities as they are, and NaN for what can't be one."""
    return values.masked_fill(_no_log_probs(values), float("nan"))


def check_log_probs(
    op: str, name: str, values: Tensor, kept: Tensor | None = None, first: tuple[int, ...] = ()
) -> None:
    """Raise for a number [..., K], of the argument `name`, that can't be a log-probability; reads them.

    `kept` [...] says which tokens count; `first` is where the caller has the first number, in the last dimensions.
    """
    wrong = _no_log_probs(values)
    if kept is not None:
        wrong = wrong & kept[..., None]
    if bool(wrong.any()):
        where = [int(i) for i in wrong.nonzero()[0]]
        value = float(values[tuple(where)])
        offset = (0,) * (len(where) - len(first)) + first
        raise_for_log_prob(op, name, [i + j for i, j in zip(where, offset, strict=True)], value, _eps(values))
