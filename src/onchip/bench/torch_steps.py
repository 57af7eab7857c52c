"""PyTorch's part of all benchmarks.  `onchip.bench.jax_steps` has the same names."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from onchip.bench.measure import PACKAGES, compile_seconds, gpu, peak_extra_bytes, release, threads, time_interleaved
from onchip.bench.timing import Step
from onchip.oracle.torch import NAME, computed, default_device, linear, log_softmax, take, xp
from onchip.oracle.torch import constant as ids

__all__ = [
    "NAME",
    "PACKAGES",
    "compile_seconds",
    "default_device",
    "gpu",
    "ids",
    "linear",
    "log_softmax",
    "peak_extra_bytes",
    "release",
    "take",
    "threads",
    "time_interleaved",
    "xp",
]

_CHUNK_BYTES = 1 << 29
PLAIN = "torch eager"
"""The implementation whose errors in 16 bits are the yardstick."""


def device_of(x: Tensor) -> str:
    return x.device.type


def free_bytes(device: str) -> int | None:
    """Memory that this process can have of a GPU; None for the CPU."""
    if device != "cuda":
        return None
    free: int = torch.cuda.mem_get_info()[0]
    return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


def drawer(device: str) -> Callable[..., Tensor]:
    """A function that draws matrices of normal numbers on the device, the same ones in each run."""
    rng = torch.Generator(device).manual_seed(0)

    def normal(rows: int, columns: int, std: float = 1.0, mean: float = 0.0, dtype: str = "float32") -> Tensor:
        # Drawn in the dtype: the device might not hold them in float32.
        drawn = torch.randn(rows, columns, generator=rng, device=device, dtype=getattr(torch, dtype))
        return drawn.mul_(std).add_(mean)

    return normal


def leaf(x: Tensor, dtype: str, columns: int | None = None) -> Tensor:
    """`x` in `dtype`, as a leaf that requires grad; with `columns`, a slice of them whose rows keep their stride."""
    return x.to(getattr(torch, dtype))[:, :columns].detach().requires_grad_()


def constant(x: Tensor, dtype: str) -> Tensor:
    """`x` in `dtype`."""
    return x.to(getattr(torch, dtype))


# ------------------------------------------------------------------------------------------------------------ steps


def steps(
    function: Callable[..., Any], arguments: Sequence[Tensor], leaves: int, upstream: Sequence[Tensor] = ()
) -> dict[str, Step]:
    """The steps of `function`, which returns a loss or several tensors; None among them is dropped.

    'forward' returns these; 'forward+backward' adds the gradients by the first `leaves` arguments, with the `upstream`
    gradients, or if there are none, of the sum of the means.
    """

    def made(*arguments: Tensor) -> list[Tensor]:
        returned = function(*arguments)
        return [x for x in (returned if isinstance(returned, tuple) else (returned,)) if x is not None]

    def forward() -> Sequence[Tensor]:
        # Detached as well: some functions look at requires_grad alone and would compute gradients.
        with torch.no_grad():
            return made(*(x.detach() for x in arguments))

    def both() -> Sequence[Tensor]:
        values = made(*arguments)
        if upstream:
            gradients = torch.autograd.grad(values, arguments[:leaves], upstream)
        else:
            loss: Any = values[0] if values[0].ndim == 0 else sum(x.float().mean() for x in values)
            gradients = torch.autograd.grad(loss, arguments[:leaves])
        return [*(x.detach() for x in values), *gradients]

    return {"forward": forward, "forward+backward": both}


def products(mode: str, hidden: Tensor, weight: Tensor, *constants: tuple[Tensor, Tensor]) -> Step:
    """The matrix products alone, into existing buffers: the logits of (hidden, weight) and of each pair of `constants`,
    then both gradients of the first."""
    hidden, weight = hidden.detach(), weight.detach()
    pairs = [(h, w, h.new_empty(len(h), len(w))) for h, w in ((hidden, weight), *constants)]
    if mode == "forward":
        return lambda: [torch.mm(h, w.T, out=out) for h, w, out in pairs]
    logits, to_hidden, to_weight = pairs[0][2], torch.empty_like(hidden), torch.empty_like(weight)
    return lambda: [
        *(torch.mm(h, w.T, out=out) for h, w, out in pairs),
        torch.mm(logits, weight, out=to_hidden),
        torch.mm(logits.T, hidden, out=to_weight),
    ]


def copies(x: Tensor, rows: int) -> Step:
    """Reads and writes the first `rows`."""
    x = x.detach()[:rows]
    out = torch.empty_like(x)
    return lambda: [out.copy_(x)]


# ------------------------------------------------------------------------------------------------------ correctness


def relative_error(out: Tensor, ref: Tensor) -> float:
    """||out - ref|| / ||ref||, in float64 and a few rows at a time."""
    if out.shape != ref.shape:
        raise ValueError(f"a result has shape {list(out.shape)} where {list(ref.shape)} is right")
    blocks = zip(torch.atleast_1d(out).split(4096), torch.atleast_1d(ref).split(4096), strict=True)
    error = norm = 0.0
    for o, r in blocks:
        error += float((o.double() - r).square().sum())
        norm += float(r.double().square().sum())
    return math.sqrt(error / norm)


def wide(x: Tensor) -> Tensor:
    """In float64."""
    return x.detach().double()


def in_float64(function: Callable[..., Any], *arguments: Tensor) -> Any:
    return function(*(x.detach() for x in arguments))


def gradient(function: Callable[[Tensor], Sequence[Tensor]], z: Tensor) -> tuple[Sequence[Tensor], Tensor]:
    """What `function(z)` returns, and the gradient of its sum."""
    z = z.detach().requires_grad_()
    with torch.enable_grad():
        values = function(z)
    (g,) = torch.autograd.grad([x.sum() for x in values], z)
    return [x.detach() for x in values], g


def scan_rows(
    one: Callable[..., tuple[Any, Sequence[Tensor]]], start: Any, arrays: Sequence[Tensor], row_bytes: int
) -> tuple[Any, list[Tensor]]:
    """`one(carry, *rows of the arrays)` over chunks of half a GiB of rows, of `row_bytes` each.

    Returns the last carry, and what the chunks made, concatenated.
    """
    chunk = max(1, _CHUNK_BYTES // row_bytes)
    carry, parts = start, []
    for rows in zip(*(x.split(chunk) for x in arrays), strict=True):
        carry, made = one(carry, *rows)
        parts.append(made)
    return carry, [torch.cat(x) for x in zip(*parts, strict=True)]


# ------------------------------------------------------------------------------------------------ the plain expression


def logits(hidden: Tensor, weight: Tensor, wide: bool) -> Tensor:
    """[T, V] in hidden's dtype, then widened to float32 if `wide`."""
    made = linear(hidden, weight)
    return made.float() if wide else made


cross_entropy = torch.nn.functional.cross_entropy
"""The mean over the tokens whose target is not IGNORED."""


# ------------------------------------------------------------------------------------------------------- in place


def over_its_input(function: Callable[[Tensor, Tensor], Tensor], logits: Tensor, target: Tensor) -> Step:
    """A step of 'forward+backward' that writes its gradient over its logits, a copy of the problem's.

    From the second run on it finds the gradient of the run before there: the time depends on no value.
    """
    anchor = torch.empty(0, requires_grad=True)
    memory: list[Tensor] = []

    def both() -> Sequence[Tensor]:
        first = not memory
        if first:
            whole = logits.new_empty(logits.shape[0], logits.stride(0))
            memory.append(whole[:, : logits.shape[1]].copy_(logits.detach()))
        given = computed(anchor, memory[0])
        loss = function(given, target)
        (gradient,) = torch.autograd.grad(loss, given)
        # The first run returns it for the check; its memory is not the step's.
        return [loss.detach(), gradient] if first else [loss.detach()]

    return both


# ------------------------------------------------------------------------------------------------------ linear layers


def parameter(x: Tensor) -> Tensor:
    return torch.nn.Parameter(x)


def all_finite(x: Tensor) -> bool:
    return bool(x.sum(dtype=torch.float32).isfinite())


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in full float32, whatever precision an imported peer has set."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        return a.detach().float() @ b.detach().float()
    finally:
        torch.set_float32_matmul_precision(before)
