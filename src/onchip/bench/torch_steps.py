"""PyTorch's part of all benchmarks.  `onchip.bench.jax_steps` has the same names.

A step is a callable without arguments that returns the tensors it leaves behind (loss, gradients).
"""

import gc
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd.profiler import profile
from torch.nn import functional
from torch.profiler import ProfilerActivity

from onchip.bench import timing
from onchip.bench.peers import IGNORED
from onchip.bench.timing import Step
from onchip.oracle.reference import loss_of_lse
from onchip.oracle.torch import NAME, computed, default_device, linear, log_softmax, take, xp
from onchip.oracle.torch import constant as ids

__all__ = ["NAME", "default_device", "ids", "linear", "log_softmax", "take", "xp"]

PACKAGES = ("torch", "numpy", "triton")
PLAIN = "torch eager"
"""The implementation whose errors in 16 bits are the yardstick."""
parameter = torch.nn.Parameter
in_float64 = torch.no_grad
"""The context in which results are checked."""

# Milliseconds that the device is kept waiting before a step that was never timed.
_HEAD_START = 10.0
_CYCLES = 1_800_000  # of the device's clock in about a millisecond
# Milliseconds that the host took to launch a step, each time that it was timed.
_ASKED: "WeakKeyDictionary[Step, list[float]]" = WeakKeyDictionary()


def time_once(step: Step, device: str, in_step: Callable[[], None] = lambda: None) -> float:
    """Milliseconds of one run; on CUDA the device's, with the host ahead of it.  `in_step` waits for other ranks."""
    if device == "cpu":
        in_step()
        start = time.perf_counter()
        returned = step()
        elapsed = time.perf_counter() - start
        del returned  # not before the clock stops: giving the gradients back is no part of the step
        return elapsed * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # The device waits so that the host gets ahead of it, as in a training step: what is timed is the device's work and
    # not the time that Python takes to launch it.
    asked = _ASKED.setdefault(step, [])
    head_start = min(_HEAD_START, 0.5 + 2 * asked[-1]) if asked else _HEAD_START
    torch.cuda._sleep(int(head_start * _CYCLES))
    # In a model other layers run in between, and L2 holds none of a step's inputs.  This reads, so that nothing is left
    # to write back either.
    _as_large_as_l2(torch.cuda.current_device()).amax()
    in_step()
    begin.record()
    start = time.perf_counter()
    step()
    asked.append((time.perf_counter() - start) * 1e3)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


@lru_cache
def _as_large_as_l2(device: int) -> Tensor:
    """A tensor twice as large as the device's L2 cache."""
    size = torch.cuda.get_device_properties(device).L2_cache_size
    return torch.zeros(2 * size // 4, dtype=torch.float32, device=device)


def wait(device: str) -> None:
    """Wait until the device is done."""
    if device == "cuda":
        torch.cuda.synchronize()


time_interleaved = partial(timing.time_interleaved, time_once)


def peak_extra_bytes(step: Step, *, device: str) -> int:
    """The allocator's peak while `step` runs, above what lived before it and above the tensors that it returns.

    Run the step once before, so that one-time set-up does not count.
    """
    gc.collect()
    if device != "cuda":
        returned, peak = _cpu_peak(step)
        return max(0, peak - sum(t.numel() * t.element_size() for t in returned))
    return max(_cuda_extra(step) for _ in range(3))


def _cuda_extra(step: Step) -> int:
    """How far the memory that the step asked for rose above its size at the start, and above what it returns.

    This counts what was asked for, not what was given: the allocator's free blocks can be up to 1 MiB too large.
    Autograd's threads may free what the last step used only while this one runs, on a busy machine up to 9 ms later, so
    that it seems to take less: hence the pause, and more than one try.
    """
    time.sleep(0.02)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    returned = step()
    torch.cuda.synchronize()
    extra: int = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    extra -= sum(t.numel() * t.element_size() for t in returned)
    return max(0, extra)


def _cpu_peak(step: Step) -> tuple[Sequence[Tensor], int]:
    """The same on the CPU, from the sizes that the allocator reports to the profiler, since it keeps no peak."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler would print that it starts and stops
    with profile(profile_memory=True, use_kineto=True) as profiled:
        returned = step()
    events: Any = profiled.kineto_results
    memory = sorted((e for e in events.events() if e.name() == "[memory]"), key=lambda e: e.start_ns())
    return returned, max(accumulate((e.nbytes() for e in memory), initial=0))


def beside(step: Step, device: str) -> dict[str, Any]:
    """Fields of a row that this framework can tell."""
    return {"host_ms": host_ms(step), "kernels": kernels(step, device)}


def host_ms(step: Step) -> float | None:
    """The median time that the host took to launch a step while the step was timed, without its first run.  The host
    doesn't wait for the device.  None on the CPU.
    """
    times = _ASKED.get(step, [])[1:]
    return statistics.median(times) if times else None


def kernels(step: Step, device: str) -> int | None:
    """How many kernels one run of the step launches; None where nothing counts them."""
    if device == "cpu":
        return None
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profiled:
        step()
        torch.cuda.synchronize()
    on_device = [e.name for e in profiled.events() or () if e.device_type.name == "CUDA"]
    return sum(not name.startswith("Mem") for name in on_device) or None  # but copies and fills by the driver


def release(device: str) -> None:
    """Free what steps have left behind: reference cycles that hold tensors after an error, and the allocator's cache,
    which only PyTorch can reuse.
    """
    if device == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def threads() -> int | None:
    """Threads that an operator uses on the CPU."""
    return torch.get_num_threads()


def gpu() -> dict[str, Any]:
    """Name, memory and CUDA version of the current device."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {"gpu": properties.name, "gpu_bytes": properties.total_memory, "cuda": torch.version.cuda}


# ----------------------------------------------------------------------------------------------------------- inputs


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
    """The steps of `function`, which returns a loss or several tensors; a None among them is dropped.

    'forward' returns these.  'forward+backward' adds the gradients of the first `leaves` arguments, for the `upstream`
    gradients or, if there are none, for the sum of the means.
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


def gradient_alone(function: Callable[..., Tensor], arguments: Sequence[Tensor], which: int, upstream: Tensor) -> Step:
    """A step that computes one argument's gradient, for a forward pass that ran once before."""
    made: list[Tensor] = []

    def alone() -> Sequence[Tensor]:
        if not made:
            made.append(function(*arguments))
        return torch.autograd.grad(made[0], [arguments[which]], upstream, retain_graph=True)

    return alone


def without_gradients(function: Callable[..., list[Tensor]], *arguments: Tensor) -> Step:
    """A step that runs `function` without recording a graph."""
    return lambda: function(*(x.detach() for x in arguments))


def under_autocast(function: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    """`function` under autocast to `dtype`."""

    def run(first: Tensor, *others: Any, **options: Any) -> Any:
        with torch.autocast(first.device.type, dtype):
            return function(first, *others, **options)

    return run


def products(
    mode: str, hidden: Tensor, weight: Tensor, *constants: tuple[Tensor, Tensor], frozen: bool = False
) -> Step:
    """The matrix products alone, into existing buffers: the logits of (hidden, weight) and of each pair of `constants`,
    then the gradients of hidden and weight; a `frozen` weight has none.
    """
    hidden, weight = hidden.detach(), weight.detach()
    pairs = [(h, w, h.new_empty(len(h), len(w))) for h, w in ((hidden, weight), *constants)]
    if mode == "forward":
        return lambda: [torch.mm(h, w.T, out=out) for h, w, out in pairs]
    logits, to_hidden = pairs[0][2], torch.empty_like(hidden)
    to_weight = None if frozen else torch.empty_like(weight)
    return lambda: [
        *(torch.mm(h, w.T, out=out) for h, w, out in pairs),
        torch.mm(logits, weight, out=to_hidden),
        *([] if to_weight is None else [torch.mm(logits.T, hidden, out=to_weight)]),
    ]


def copies(x: Tensor, rows: int) -> Step:
    """Reads and writes the first `rows`."""
    x = x.detach()[:rows]
    out = torch.empty_like(x)
    return lambda: [out.copy_(x)]


# ------------------------------------------------------------------------------------------------------ correctness


def wide(x: Tensor) -> Tensor:
    """`x` in float64."""
    return x.detach().double()


def wide_rows(x: Tensor, start: int, size: int) -> Tensor:
    """So many rows of a matrix in float64; rows of zeros may follow."""
    return wide(x[start : start + size])


def wide_matrix(x: Tensor, i: int) -> Tensor:
    """Matrix number i of several, in float64."""
    return wide(x[i])


def added(x: Tensor, columns: slice, y: Tensor) -> Tensor:
    """`x` [B, N, D] with `y` added to these of its N; it may be x itself."""
    x[:, columns] += y
    return x


def gradient(function: Callable[..., Sequence[Tensor]], z: Tensor, *others: Tensor) -> tuple[Sequence[Tensor], Tensor]:
    """What `function(z, *others)` returns, and the gradient of its sum with respect to `z`."""
    z = z.detach().requires_grad_()
    with torch.enable_grad():
        values = function(z, *others)
        (g,) = torch.autograd.grad([x.sum() for x in values], z)
    return [x.detach() for x in values], g


# ------------------------------------------------------------------------------------------------ the plain expression


def logits(hidden: Tensor, weight: Tensor, wide: bool) -> Tensor:
    """Logits [T, V] in hidden's dtype, then widened to float32 if `wide`."""
    made = linear(hidden, weight)
    return made.float() if wide else made


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    **of_lse: float,
) -> Tensor:
    """The mean over the tokens whose target is not IGNORED; with reduction="none", each token's loss."""
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    loss: Tensor = functional.cross_entropy(logits, target, label_smoothing=label_smoothing, reduction=reduction)
    if any(of_lse.values()):
        kept = target != IGNORED
        more = loss_of_lse(logits.float().logsumexp(-1), **of_lse) * kept
        loss = loss + (more if loss.ndim else more.sum() / kept.sum())
    return loss


# ------------------------------------------------------------------------------------------------------- in place


def over_its_input(function: Callable[[Tensor, Tensor], Tensor], logits: Tensor, target: Tensor) -> Step:
    """A step of 'forward+backward' that writes its gradient over its logits, a copy of the problem's.

    From the second run on, it reads the previous run's gradient instead of logits: the time doesn't depend on values.
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
