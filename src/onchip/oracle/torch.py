"""PyTorch's part of all comparisons.  `onchip.oracle.jax` has the same names."""

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

NAME = "torch"
"""The ops' name for the argument with one label per token."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

xp = torch
"""The module with the functions that both frameworks call the same: exp, where, log_softmax, ..."""
linear, log_softmax, logsumexp = F.linear, torch.log_softmax, torch.logsumexp


def default_device(device: str) -> AbstractContextManager[Any]:
    """A context that does nothing: each tensor is put on its device."""
    return nullcontext()


def leaf(x: Any, dtype: torch.dtype, device: str, columns: int | None = None) -> Tensor:
    """`x` in `dtype`, as a leaf that requires grad; with `columns`, a slice of so many, whose rows keep their
    stride.
    """
    tensor = torch.from_numpy(x).to(device=device, dtype=dtype)
    return (tensor if columns is None else tensor[:, :columns].detach()).requires_grad_()


def constant(x: Any, device: str) -> Tensor:
    return torch.as_tensor(x).to(device)  # NumPy's arrays without dimensions are scalars


def as_array(x: Tensor) -> Any:
    """A NumPy array; floats become float64."""
    x = x.detach()
    return (x.double() if x.is_floating_point() else x).cpu().numpy()


def is_array(x: Any) -> bool:
    return isinstance(x, Tensor)


def like(x: Tensor, other: Tensor) -> Tensor:
    """`x` in the dtype of `other`."""
    return x.to(other.dtype)


def take(x: Tensor, indices: Tensor) -> Tensor:
    """The entries of x's last dimension at `indices`."""
    return x.gather(-1, indices)


def computed(x: Tensor, memory: Tensor | None = None) -> Tensor:
    """`memory`, by default a copy of `x`, as a layer's output that depends on `x`: neither a leaf nor a view."""
    if memory is None:
        memory = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x.detach())
    made: Tensor = _Computed.apply(x, memory)
    return made


class _Computed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, memory: Tensor) -> Tensor:
        out = memory.new_empty(0)
        return out.set_(memory.untyped_storage(), memory.storage_offset(), memory.shape, memory.stride())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


def differentiate(
    function: Callable[..., Mapping[str, Any]],
    arguments: Mapping[str, Any],
    keywords: Mapping[str, Any],
    upstream: Mapping[str, Any],
    leaves: Collection[str],
) -> dict[str, Any]:
    """What `function(**arguments, **keywords)` returns, and the gradients of the arguments named by `leaves`.

    Each is a NumPy array under its name, a gradient under `grad_<name>`; None is left out.  `upstream` has the upstream
    gradients of the values, by name.
    """
    made = {name: x for name, x in function(**arguments, **keywords).items() if x is not None}
    pairs = [(x, constant(upstream[name], x.device).to(x)) for name, x in made.items() if name in upstream]
    grads = torch.autograd.grad([x for x, _ in pairs], [arguments[n] for n in leaves], [g for _, g in pairs])
    named = made | {f"grad_{name}": g for name, g in zip(leaves, grads, strict=True)}
    return {name: as_array(x) for name, x in named.items()}
