"""Compile kernels before they are needed."""

import time
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.frontend import torch_ahead
from onchip.frontend.warm_up import Sizes, calls
from onchip.kernels.triton import compiling
from onchip.kernels.triton.launch import asks
from onchip.kernels.triton.versions import interpreted, settings

OP = "warm_up"


class WarmUp(NamedTuple):
    """What `warm_up` did."""

    device: str
    """The GPU's name."""
    compiled: tuple[str, ...]
    """Names of the kernels that were compiled; one appears several times if several variants of it were compiled."""
    found: int
    """How many other kernels were in Triton's cache already."""
    seconds: float


def warm_up(
    op: str,
    *,
    hidden: int | None = None,
    vocab: int | None = None,
    teacher_hidden: int | None = None,
    in_features: int | None = None,
    out_features: int | None = None,
    experts: int | None = None,
    tokens: int = 8192,
    dtype: torch.dtype = torch.bfloat16,
    weight_dtype: torch.dtype | None = None,
    gradients: bool = True,
    frozen: bool = False,
    device: torch.device | str | int | None = None,
    **options: Any,
) -> WarmUp:
    """Compile an op's kernels before they are needed, so that later processes on such GPUs find them in Triton's cache.

    It calls the op once, forward and backward, on zeros in GPU memory, and prepares the kernels for other numbers of
    tokens.  Kernels depend on sizes, dtypes, options and the GPU's model, but not on the number of tokens.  Pass the
    sizes and options that the training will use.  In a job of several ranks let one call it, before the others start.

    Args:
        op: the name of a function of `onchip.torch`; `onchip warm-up --help` lists those that it knows.
        hidden: H, for ops whose name begins with linear; for linear_jsd the student's.
        vocab: V, for ops that have a vocabulary.
        teacher_hidden: the teacher's H, for linear_jsd.  Default: `hidden`.
        in_features: K, for a linear layer in FP8, or for those of experts.
        out_features: N, for the same ops.
        experts: the number of experts.
        tokens: T, or the number of rows.
        dtype: dtype of the inputs.
        weight_dtype: dtype of the weight, if it is another one, as in mixed precision.
        gradients: False to run the forward pass only, under `torch.no_grad`.
        frozen: True if the weight gets no gradient, as under LoRA.
        device: a CUDA device.  Default: the current one.
        options: the op's other arguments, such as `softcap=30.0`, `reduction="none"` or `strategy="recompute"`.

    Returns:
        `WarmUp`: the GPU's name, the names of the kernels that were compiled, how many were in the cache already, and
        the seconds that it took.

    Raises:
        ValueError: there is no such op, a size that it needs is missing, there is no CUDA device, or the op refuses
            its options.
        TypeError: the op has no such option.

    Memory: the inputs, their gradients, and the memory of the call, which `onchip plan` prints.

    Example:
        >>> from onchip.torch import warm_up
        >>> warm_up("linear_cross_entropy", hidden=4096, vocab=128256)  # doctest: +SKIP
        WarmUp(device='NVIDIA H100 80GB HBM3', compiled=('add_targets', ...), found=0, seconds=...)
    """
    if op not in (known := calls()):
        raise ValueError(f"{OP}: op must be one of {', '.join(known)}; got {op!r}")
    given = {
        "hidden": hidden, "vocab": vocab, "teacher_hidden": teacher_hidden, "in_features": in_features,
        "out_features": out_features, "experts": experts,
    }  # fmt: skip
    for name, size in (*given.items(), ("tokens", tokens)):
        if size is None and name in known[op].sizes:
            raise ValueError(f"{OP}: {op} needs {' and '.join(known[op].sizes)}; {name} is missing")
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise ValueError(f"{OP}: {name} must be an int of 1 or more; got {size!r}")
    where = _device(device)

    def make(*shape: int, dtype: str | None = None, of_weight: bool = False, constant: bool = False) -> Tensor:
        trained = (weight_dtype or of_inputs) if of_weight else of_inputs
        made = torch.zeros(shape, dtype=getattr(torch, dtype) if dtype else trained, device=where)
        return made.requires_grad_(made.is_floating_point() and not constant and not (of_weight and frozen))

    of_inputs, function, current = dtype, getattr(import_module("onchip.torch"), op), torch.cuda.device(where)
    start = time.perf_counter()
    with current, compiling.told() as told, torch_ahead.warming(_compile), torch.set_grad_enabled(gradients):
        arguments = known[op].arguments(Sizes(tokens, **{name: size or 0 for name, size in given.items()}), make)
        returned = function(**arguments, **options)
        if gradients:
            leaves = [x for x in arguments.values() if x.requires_grad]
            returned = returned if isinstance(returned, tuple) else (returned,)
            outputs = [x for x in returned if isinstance(x, Tensor) and x.requires_grad]
            torch.autograd.grad(outputs, leaves, [torch.ones_like(x) for x in outputs], allow_unused=True)
        torch.cuda.synchronize(where)
    name = torch.cuda.get_device_name(where)
    return WarmUp(name, tuple(sorted(told.compiled)), len(told.found), time.perf_counter() - start)


def _device(device: torch.device | str | int | None) -> torch.device:
    if not torch.cuda.is_available():
        raise ValueError(f"{OP}: kernels are compiled for the GPU of this machine, but PyTorch sees no CUDA device")
    if interpreted():
        raise ValueError(f"{OP}: Triton's interpreter compiles nothing; run without TRITON_INTERPRET")
    where = torch.device("cuda" if device is None else device)
    if where.type != "cuda":
        raise ValueError(f"{OP}: device must be a CUDA device; got {str(where)!r}")
    return torch.device("cuda", torch.cuda.current_device() if where.index is None else where.index)


def _compile(launches: list[Any]) -> None:
    if launches:
        compiling.compile_all(asks(launches, settings().driver.active.get_current_device()))
