"""Time and peak memory of a step of PyTorch, on the CPU and on CUDA devices.  Knows no op.

A step is a callable without arguments that returns the tensors it leaves behind (loss, gradients).
"""

import gc
import os
import time
from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd.profiler import profile

from onchip.bench import timing
from onchip.bench.timing import Step

PACKAGES = ("torch", "numpy", "triton")

# Milliseconds that the device is kept waiting before a step that was never timed.
_HEAD_START = 10.0
_CYCLES = 1_800_000  # of the device's clock in about a millisecond
# Milliseconds that the host took to launch a step when it was last timed.
_ASKED: "WeakKeyDictionary[Step, float]" = WeakKeyDictionary()


def time_once(step: Step, device: str) -> float:
    """Milliseconds of one run: on CUDA of the device, with the host ahead of it."""
    if device == "cpu":
        start = time.perf_counter()
        returned = step()
        elapsed = time.perf_counter() - start
        del returned  # not before the clock stops: giving the gradients back is no part of the step
        return elapsed * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # The device waits so that the host gets ahead of it, as in a training step: what is timed is the device's work and
    # not the time that Python takes to launch it.
    head_start = min(_HEAD_START, 0.5 + 2 * _ASKED.get(step, _HEAD_START))
    torch.cuda._sleep(int(head_start * _CYCLES))
    # In a model other layers run in between, and L2 holds none of a step's inputs.  This reads, so that nothing is left
    # to write back either.
    _as_large_as_l2(torch.cuda.current_device()).amax()
    begin.record()
    start = time.perf_counter()
    step()
    _ASKED[step] = (time.perf_counter() - start) * 1e3
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


@lru_cache
def _as_large_as_l2(device: int) -> Tensor:
    """A tensor of twice the size of the device's L2."""
    size = torch.cuda.get_device_properties(device).L2_cache_size
    return torch.zeros(2 * size // 4, dtype=torch.float32, device=device)


time_interleaved = partial(timing.time_interleaved, time_once)


def peak_extra_bytes(step: Step, *, device: str) -> int:
    """The allocator's peak while `step` runs, above what lived before it and above the tensors that it returns.

    Run the step once before, so that one-time set-up does not count.
    """
    gc.collect()
    returned, peak = (_cuda_peak if device == "cuda" else _cpu_peak)(step)
    return max(0, peak - sum(t.numel() * t.element_size() for t in returned))


def _cuda_peak(step: Step) -> tuple[Sequence[Tensor], int]:
    """What the step returns, and how far allocated memory rose above its size at the start."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    returned = step()
    torch.cuda.synchronize()
    return returned, torch.cuda.max_memory_allocated() - before


def _cpu_peak(step: Step) -> tuple[Sequence[Tensor], int]:
    """The same on the CPU, whose allocator keeps no peak: from the sizes that it reports to the profiler."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler would print that it starts and stops
    with profile(profile_memory=True, use_kineto=True) as profiled:
        returned = step()
    events: Any = profiled.kineto_results
    memory = sorted((e for e in events.events() if e.name() == "[memory]"), key=lambda e: e.start_ns())
    return returned, max(accumulate((e.nbytes() for e in memory), initial=0))


def compile_seconds(step: Step) -> float | None:
    """Unknown: a compiled function compiles in its first run."""
    return None


def release(device: str) -> None:
    """Free what steps have left behind: cycles that hold tensors after an error, and the allocator's cache, which only
    PyTorch's own allocations can reuse."""
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
