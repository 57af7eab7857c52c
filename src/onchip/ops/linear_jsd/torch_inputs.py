"""What the public functions check at their door; values only where reading them is free or was asked for."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from onchip.ops.linear_cross_entropy.torch_inputs import _INTEGERS, DTYPES, _name
from onchip.ops.linear_jsd import spec
from onchip.ops.linear_jsd.spec import Options, Shapes

_OPTIONAL = (
    "student_bias",
    "teacher_hidden",
    "teacher_weight",
    "teacher_bias",
    "teacher_logits",
    "target",
    "token_weight",
)


def check_tensors(op: str, options: Options, named: dict[str, Any], topk: Any) -> tuple[torch.Size, int]:
    """Raise for what can be seen without reading values; return the tokens' shape and the entries that count."""
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise RuntimeError(f"{op}: torch.func transforms (grad, vmap, jvp, ...) are not supported; use torch.autograd")
    for name, x in named.items():
        if not isinstance(x, Tensor) and not (x is None and name in _OPTIONAL):
            raise TypeError(f"{op}: {name} must be a torch.Tensor; got {type(x).__name__}")
    if topk is not None:
        spec.check_topk(op, topk)
        for name in ("indices", "values"):
            x = getattr(topk, name)
            if not isinstance(x, Tensor):
                raise TypeError(f"{op}: teacher_topk.{name} must be a torch.Tensor; got {type(x).__name__}")
        named = named | {"indices": topk.indices, "values": topk.values}
    tensors = {name: x for name, x in named.items() if x is not None}
    if not torch.compiler.is_compiling() and any(unpack_dual(x).tangent is not None for x in tensors.values()):
        raise RuntimeError(f"{op}: forward-mode differentiation is not supported; use backward()")
    shapes: dict[str, Any] = {name: tuple(x.shape) for name, x in tensors.items()}
    leading, size = Shapes(op, **shapes).check(options)
    first = next(iter(tensors))
    device = tensors[first].device
    for name, x in tensors.items():
        shown = f"teacher_topk.{name}" if name in ("indices", "values") else name
        if x.device != device:
            raise ValueError(f"{op}: {shown} is on {x.device} but {first} is on {device}; move it there")
        if name in ("target", "indices"):
            if x.dtype not in _INTEGERS:
                raise TypeError(f"{op}: {shown} must hold integers; got {_name(x.dtype)}")
        elif name == "token_weight":
            if x.dtype.is_complex:
                raise TypeError(f"{op}: {name} must be real; got {_name(x.dtype)}")
        elif x.dtype not in DTYPES:
            raise TypeError(f"{op}: {shown} must be float32, bfloat16 or float16; got {_name(x.dtype)}")
        if name in ("token_weight", "values") and x.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{op}: {shown} gets no gradient from this op; pass it detached")
    return torch.Size(leading), size


def product_dtype(op: str, who: str, named: dict[str, Any]) -> torch.dtype:
    """The dtype of a model's matrix products."""
    hidden = named.get(f"{who}_hidden")
    if hidden is None:
        return torch.float32
    device = hidden.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    for name in (f"{who}_weight", f"{who}_bias"):
        x = named.get(name)
        if x is not None and x.dtype != hidden.dtype:
            raise TypeError(
                f"{op}: {who}_hidden is {_name(hidden.dtype)} but {name} is {_name(x.dtype)}; "
                "cast one of them, or run under torch.autocast"
            )
    return hidden.dtype  # type: ignore[no-any-return]


def check_normalizer(op: str, normalizer: Any, reduction: str, device: torch.device) -> Tensor | None:
    """The normalizer as a 0-d float32 tensor, so that a new count does not recompile anything."""
    if normalizer is None:
        return None
    if reduction != "mean":
        raise ValueError(f"{op}: normalizer is what reduction='mean' divides by; got reduction={reduction!r}")
    if not isinstance(normalizer, Tensor):
        spec.require_positive(op, "normalizer", normalizer)
        return torch.full((), float(normalizer), dtype=torch.float32, device=device)
    if normalizer.ndim != 0:
        raise ValueError(f"{op}: normalizer must be a number or a 0-d tensor; got shape {list(normalizer.shape)}")
    if normalizer.dtype.is_complex or normalizer.dtype == torch.bool:
        raise TypeError(f"{op}: normalizer must be a real number; got {_name(normalizer.dtype)}")
    if normalizer.device not in (device, torch.device("cpu")):
        raise ValueError(f"{op}: normalizer is on {normalizer.device} but the student is on {device}; move it there")
    if normalizer.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{op}: normalizer gets no gradient from this op; pass normalizer.detach()")
    return normalizer


def check_values(
    op: str,
    target: Tensor | None,
    indices: Tensor | None,
    normalizer: Tensor | None,
    *,
    vocab: int,
    ignore_index: int,
    asked: bool,
) -> None:
    """Raise for wrong values: on the CPU always, elsewhere if `asked`, which synchronises."""
    if normalizer is not None and (asked or normalizer.device.type == "cpu"):
        value = float(normalizer)
        if not 0 < value < float("inf"):
            raise ValueError(f"{op}: normalizer must be finite and above 0; got {value}")
    kept = None
    if target is not None and (asked or target.device.type == "cpu"):
        labels = target.to(torch.int64)
        kept = labels != ignore_index
        wrong = kept & ((labels < 0) | (labels >= vocab))
        if bool(wrong.any()):
            where = [int(i) for i in wrong.nonzero()[0]]
            position = f"target[{', '.join(map(str, where))}]" if where else "target"
            raise ValueError(
                f"{op}: {position} is {int(labels[tuple(where)])}, which is neither ignore_index ({ignore_index}) nor "
                f"in [0, {vocab}); {int(wrong.sum())} of {wrong.numel()} targets are out of range"
            )
    if indices is not None and (asked or indices.device.type == "cpu"):
        ids = indices.to(torch.int64)
        wrong = (ids < 0) | (ids >= vocab)
        if kept is not None:
            wrong &= kept[..., None]
        if bool(wrong.any()):
            where = [int(i) for i in wrong.nonzero()[0]]
            raise ValueError(
                f"{op}: teacher_topk.indices[{', '.join(map(str, where))}] is {int(ids[tuple(where)])}, "
                f"which is not in [0, {vocab})"
            )
        ordered = ids.sort(-1).values
        same = (ordered[..., 1:] == ordered[..., :-1]).any(-1)
        if kept is not None:
            same &= kept
        if bool(same.any()):
            raise ValueError(f"{op}: teacher_topk.indices must be distinct within a token; {int(same.sum())} are not")
