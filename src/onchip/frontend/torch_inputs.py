"""What PyTorch's public functions check first, without reading a tensor's values."""

import sys
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd.forward_ad import unpack_dual
from torch.nn import Module, Parameter

from onchip.core.backends import choose_backend
from onchip.frontend import torch_prepared as stated
from onchip.frontend.options import require_positive

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
# The losses take float64 too, by PyTorch's own operations.
LOSS_DTYPES = DTYPES | {torch.float64: "float64"}
DEVICES = ("cpu", "cuda", "meta")
# What takes the head itself where an op takes its weight.
OF_HEADS = {"linear_cross_entropy": "lm_loss", "linear_log_probs": "lm_log_probs", "linear_jsd": "lm_jsd"}
INTEGERS = frozenset(
    (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
)
_STAND_INS = (FakeTensor, FunctionalTensor)
Options = TypeVar("Options")
_MODES = torch._C._TorchDispatchModeKey
_TRACERS = (_MODES.FAKE, _MODES.PROXY, _MODES.FUNCTIONAL)


def dtype_name(dtype: torch.dtype) -> str:
    """ "bfloat16" of torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def options_of(kind: Callable[..., Options], **fields: Any) -> Options:
    """`kind(**fields)`, options that are checked when they are made; equal ones of the same types are one object."""
    if not torch.compiler.is_compiling():
        try:
            made: Options = _kept(kind, **fields)
            return made
        except TypeError:
            pass  # a field has no hash, or is of a wrong type, of which the next line tells
    return kind(**fields)


@lru_cache(maxsize=256, typed=True)
def _kept(kind: Callable[..., Any], **fields: Any) -> Any:
    return kind(**fields)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """What sums over numbers of `dtype` are kept in, and losses: float64 for float64, float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def has_values(x: Tensor) -> bool:
    """Whether the numbers of `x` may be read: not of an empty stand-in for it, nor where torch.compile or make_fx looks
    on, which would trace what is done with them."""
    if torch.compiler.is_compiling() or x.is_meta or isinstance(x, _STAND_INS):
        return False
    return all(torch._C._get_dispatch_mode(key) is None for key in _TRACERS)


def sizes_are_symbols(*tensors: Tensor) -> bool:
    """Whether what is made of the sizes must be right for others: torch.compile traces, or make_fx with symbols."""
    return torch.compiler.is_compiling() or any(isinstance(x.numel(), torch.SymInt) for x in tensors)


def require_tensors(op: str, named: Mapping[str, Any], optional: Collection[str]) -> dict[str, Tensor]:
    """Raise unless all are tensors (or None where `optional`) outside of torch.func and forward mode; return those."""
    refuse_transforms(op)
    for name, x in named.items():
        if not (x is None and name in optional):
            require_tensor(op, name, x)
    tensors = {name: x for name, x in named.items() if x is not None}
    if not torch.compiler.is_compiling() and any(unpack_dual(x).tangent is not None for x in tensors.values()):
        raise RuntimeError(f"{op}: forward-mode differentiation is not supported; use backward()")
    return tensors


def refuse_transforms(op: str) -> None:
    """Raise inside of a transform of torch.func."""
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise RuntimeError(f"{op}: torch.func transforms (grad, vmap, jvp, ...) are not supported; use torch.autograd")


def require_tensor(op: str, name: str, x: Any) -> None:
    """Raise unless `x` is a tensor whose elements this process holds, each at its place and with its sign."""
    if not isinstance(x, Tensor):
        refuse_numpy(op, name, x)
        remedy = _instead_of_module(op, name) if isinstance(x, Module) else ""
        if hasattr(x, "last_hidden_state"):  # what a model of transformers returns
            remedy = "; pass its last_hidden_state"
        raise TypeError(f"{op}: {name} must be a torch.Tensor; got {type(x).__name__}{remedy}")
    if type(x) not in (Tensor, Parameter) and is_dtensor(x):
        raise TypeError(
            f"{op}: {name} is a DTensor; pass {name}.full_tensor(), or {name}.to_local() if that is all this rank "
            "needs; under FSDP2, call the op inside the forward of the module that holds it, where it is a plain tensor"
        )
    if x.is_nested:
        raise TypeError(f"{op}: {name} is a nested tensor; pass torch.cat({name}.unbind()), and the others likewise")
    if x.layout is not torch.strided:
        raise TypeError(f"{op}: {name} is {str(x.layout).removeprefix('torch.')}; pass {name}.to_dense()")
    if x.is_quantized:
        raise TypeError(f"{op}: {name} is {dtype_name(x.dtype)}; pass {name}.dequantize()")
    if not torch.compiler.is_compiling() and x.is_neg():  # kernels would read what is in memory
        raise TypeError(
            f"{op}: {name} is a view that negates what is in memory, as z.conj().imag; pass {name}.resolve_neg()"
        )


def _instead_of_module(op: str, name: str) -> str:
    if op in OF_HEADS and name.endswith("weight"):
        return f"; pass the head, or its model, to {OF_HEADS[op]}, which includes adapters on the head too"
    if name.endswith(("weight", "bias")):
        return f"; pass a parameter of it, as {name}.weight"
    return "; pass a tensor that it returned"


def refuse_numpy(op: str, name: str, x: Any) -> None:
    """Raise for an array of NumPy's."""
    if isinstance(x, np.ndarray):
        raise TypeError(f"{op}: {name} is a numpy.ndarray; pass torch.from_numpy({name})")


def gradients_enabled() -> bool:
    """Whether autograd records: in inference mode it doesn't, even with gradients enabled inside.  torch.compile, which
    can't ask for that mode, traces no call in it.
    """
    return torch.is_grad_enabled() and (torch.compiler.is_compiling() or not torch.is_inference_mode_enabled())


def is_dtensor(x: Tensor) -> bool:
    # To import the module takes long, and without it there is none; another thread may be importing it now.
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(x, kind)


def temperature_tensor(op: str, temperature: Any) -> Tensor | None:
    """The temperature if it is a tensor; numbers are the options' to check."""
    refuse_numpy(op, "temperature", temperature)
    return temperature if isinstance(temperature, Tensor) else None


def check_tensors(op: str, **named: Any) -> dict[str, Tensor]:
    """Raise for arguments of a vocabulary's loss that are no tensors, on different devices or of a wrong dtype.

    Return the tensors.
    """
    tensors = require_tensors(op, named, optional=("bias", "token_weight", "class_weight", "temperature"))
    constants = ("token_weight", "class_weight", "temperature")
    check_kinds(op, tensors, integers=("target", "ids"), constants=constants, dtypes=LOSS_DTYPES)
    return tensors


def check_class_weight(op: str, tensors: Mapping[str, Tensor], of: str) -> None:
    """Raise TypeError unless class_weight, if there is one, is float32 or of the dtype of the tensor `of`."""
    x, other = tensors.get("class_weight"), tensors[of].dtype
    if x is not None and x.dtype not in (torch.float32, other):
        which = "" if other == torch.float32 else f" or {dtype_name(other)}, as {of}"
        raise TypeError(f"{op}: class_weight must be float32{which}; got {dtype_name(x.dtype)}")


def check_kinds(
    op: str,
    tensors: Mapping[str, Tensor],
    *,
    integers: Collection[str],
    constants: Collection[str] = (),
    labels: Collection[str] = (),
    dtypes: Mapping[torch.dtype, str] = DTYPES,
) -> None:
    """Raise unless all lie on the first one's device, `integers` hold integers, `constants` real numbers that need no
    gradient, and all others one of the float `dtypes`.

    Where one of these is float64, so is the first, and all others are but `labels`.
    """
    first, device, dtype = next((name, x.device, x.dtype) for name, x in tensors.items())
    for name, x in tensors.items():
        if x.device != device:
            raise ValueError(f"{op}: {name} is on {x.device} but {first} is on {device}; move it there")
        if name in integers:
            if x.dtype not in INTEGERS:
                raise TypeError(f"{op}: {name} must hold integers; got {dtype_name(x.dtype)}")
        elif name in constants:
            if x.dtype.is_complex or (name == "temperature" and x.dtype == torch.bool):
                raise TypeError(f"{op}: {name} must be real; got {dtype_name(x.dtype)}")
            refuse_gradient(op, name, x)
        elif x.dtype not in dtypes:
            *most, last = dtypes.values()
            raise TypeError(f"{op}: {name} must be {', '.join(most)} or {last}; got {dtype_name(x.dtype)}")
        elif x.dtype != dtype and (x.dtype == torch.float64 or (dtype == torch.float64 and name not in labels)):
            raise TypeError(
                f"{op}: {first} is {dtype_name(dtype)} but {name} is {dtype_name(x.dtype)}; cast one of them"
            )


def choose_torch_backend(op: str, backend: str, device: torch.device, triton: str | None) -> str:
    """Of "triton", which refuses for the reason given if any, and "plain", the framework's own operations."""
    return choose_backend(op, backend, {"triton": triton, "plain": torch_refusal(device)})


def torch_refusal(device: torch.device) -> str | None:
    """Why the framework's own operations can't serve a call on this device, or None."""
    if device.type in DEVICES:
        return None
    return f"it runs on {', '.join(DEVICES)} tensors, not on {device.type!r}"


def refuse_gradient(op: str, name: str, x: Tensor) -> None:
    """Raise if `x` would silently get no gradient."""
    if x.requires_grad and gradients_enabled():
        raise ValueError(f"{op}: {name} gets no gradient from this op; pass {name}.detach()")


def product_dtype(op: str, tensors: Mapping[str, Tensor], whose: str = "") -> torch.dtype:
    """The dtype of hidden @ weight.T + bias: autocast's, or the one of the two first that has fewer digits.

    Of float64 it is float64, which autocast leaves as it is.

    `whose` comes before the tensors' names: "student_" for student_hidden.
    """
    hidden = tensors[f"{whose}hidden"]
    device = hidden.device.type
    if hidden.dtype == torch.float64:
        return torch.float64
    if device != "meta" and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    weight, bias = tensors[f"{whose}weight"], tensors.get(f"{whose}bias")
    both = {hidden.dtype, weight.dtype}
    remedy = "cast one of them, or run under torch.autocast"
    if len(both) > 1 and torch.float32 not in both:
        raise TypeError(
            f"{op}: {whose}hidden is {dtype_name(hidden.dtype)} but {whose}weight is {dtype_name(weight.dtype)}, and "
            f"neither dtype holds the other's numbers; {remedy}"
        )
    if bias is not None and bias.dtype not in both:
        raise TypeError(
            f"{op}: {whose}hidden is {dtype_name(hidden.dtype)} but {whose}bias is {dtype_name(bias.dtype)}; {remedy}"
        )
    return hidden.dtype if weight.dtype == torch.float32 else weight.dtype


def one_dtype(op: str, tensors: Mapping[str, Tensor]) -> torch.dtype:
    """The dtype that all the tensors have, or autocast's, which leaves float64 as it is."""
    (first, x), *others = tensors.items()
    if x.dtype != torch.float64 and (dtype := autocast_dtype(op, x)) is not None:
        return dtype
    for name, other in others:
        if other.dtype != x.dtype:
            raise TypeError(
                f"{op}: {first} is {dtype_name(x.dtype)} but {name} is {dtype_name(other.dtype)}; cast one of them, or "
                "run under torch.autocast"
            )
    return x.dtype


def autocast_dtype(op: str, x: Tensor) -> torch.dtype | None:
    """Autocast's dtype on the device of `x`; None outside of autocast."""
    device = x.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return None
    dtype = torch.get_autocast_dtype(device)
    if dtype not in DTYPES:
        raise TypeError(f"{op}: autocast to {dtype_name(dtype)} is not supported")
    return dtype


def following(x: Tensor, last: int, dtype: torch.dtype, *, dim: int = -1) -> Tensor:
    """What `x` has at the next position of a sequence, the dimension `dim`, and `last` at its end."""
    return stated.call(_following, x, last, dtype, dim)


def _following(x: Tensor, last: int, dtype: torch.dtype, dim: int) -> Tensor:
    made = torch.full(x.shape, last, dtype=dtype, device=x.device)
    size = x.shape[dim]
    if size > 1:
        made.narrow(dim, 0, size - 1).copy_(x.narrow(dim, 1, size - 1))
    return made


def leading_dimensions(x: Tensor) -> list[tuple[int, int]]:
    """(size, stride) of the leading dimensions, those that are one in memory being merged."""
    merged: list[tuple[int, int]] = []
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == stride * size:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    return merged


def copied_rows(*tensors: Tensor | None, columns_apart: bool = True) -> int:
    """Bytes of the copies that viewing [..., C] as [T, C] takes; without `columns_apart`, with columns side by side."""
    return sum(
        x.numel() * x.element_size()
        for x in tensors
        if x is not None and (len(leading_dimensions(x)) > 1 or not (columns_apart or x.stride(-1) == 1))
    )


def copied_weight(weight: Tensor | None, dtype: torch.dtype) -> int:
    """Bytes of the copy that the Triton kernels read in place of `weight`, besides the one that a cast makes."""
    if weight is None or weight.dtype != dtype or not copies_weight(weight, dtype):
        return 0
    return weight.numel() * weight.element_size()


def copies_weight(weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether the Triton kernels read [V, H] `weight` from a contiguous copy in `dtype`, that of their products.

    They read it as it lies if its rows are contiguous, or its columns are and lie a multiple of 16 bytes apart.
    """
    vocab, hidden = weight.shape
    if weight.is_contiguous() or (weight.stride(1) == 1 and weight.stride(0) >= hidden):
        return False
    # A cast leaves no gaps between columns.
    pitch = weight.stride(1) if weight.dtype == dtype else vocab
    return weight.stride(0) != 1 or weight.stride(1) < vocab or pitch * dtype.itemsize % 16 > 0


def check_normalizer(
    op: str, normalizer: float | Tensor | None, reduction: str, of: str, like: Tensor
) -> Tensor | None:
    """The normalizer as a 0-d tensor, so that a new count does not recompile anything.

    `of` names the tensor `like`, on whose device it must be.
    """
    if normalizer is None:
        return None
    if reduction != "mean":
        raise ValueError(f"{op}: normalizer is what reduction='mean' divides by; got reduction={reduction!r}")
    device = like.device
    if not isinstance(normalizer, Tensor):
        refuse_numpy(op, "normalizer", normalizer)
        require_positive(op, "normalizer", normalizer)
        total = accumulator(like.dtype)
        return stated.call(torch.full, (), torch.sym_float(normalizer), dtype=total, device=device)
    require_tensor(op, "normalizer", normalizer)
    if normalizer.ndim != 0:
        raise ValueError(f"{op}: normalizer must be a number or a 0-d tensor; got shape {list(normalizer.shape)}")
    if normalizer.dtype.is_complex or normalizer.dtype == torch.bool:
        raise TypeError(f"{op}: normalizer must be a real number; got {dtype_name(normalizer.dtype)}")
    if normalizer.device not in (device, torch.device("cpu")):
        raise ValueError(f"{op}: normalizer is on {normalizer.device} but {of} is on {device}; move it there")
    refuse_gradient(op, "normalizer", normalizer)
    return normalizer


def check_weight_grad_out(op: str, out: Any, weight: Tensor) -> None:
    """Raise unless `out` can take the weight's gradient."""
    if out is None:
        return
    require_tensor(op, "weight_grad_out", out)
    total = accumulator(weight.dtype)
    if out.dtype != total:
        raise TypeError(f"{op}: weight_grad_out must be {dtype_name(total)}; got {dtype_name(out.dtype)}")
    if out.shape != weight.shape or not out.is_contiguous():
        raise ValueError(
            f"{op}: weight_grad_out must be contiguous, of weight's shape, {list(weight.shape)}; "
            f"got shape {list(out.shape)}, strides {list(out.stride())}"
        )
    if out.device != weight.device:
        raise ValueError(f"{op}: weight_grad_out is on {out.device} but weight is on {weight.device}; move it there")
    if out.requires_grad:
        raise ValueError(f"{op}: weight_grad_out must not require a gradient; pass weight_grad_out.detach()")
    if torch.compiler.is_compiling():
        raise RuntimeError(f"{op}: weight_grad_out is not supported inside torch.compile")
    if torch.is_grad_enabled() and out.is_inference():
        raise ValueError(
            f"{op}: weight_grad_out was created in inference mode, so nothing can be added to it outside; create it "
            "outside inference mode"
        )
