"""Time and peak memory of a step of PyTorch, on the CPU and on CUDA devices.  Knows no op.

A step is a callable without arguments that returns the tensors it leaves behind (loss, gradients).
"""

import contextlib
import ctypes
import gc
import threading
import time
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

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
    """Peak memory while `step` runs, above what lived before it and above the tensors that it returns.

    On CUDA it is the allocator's peak.  On the CPU it is the process's resident set, so it also holds what a matrix
    product takes inside, and what other threads allocate meanwhile: the lower peak of two runs counts.  Run the step
    once before, so that one-time set-up does not count.
    """
    peak_during = _cuda_peak if device == "cuda" else _resident_peak

    def extra_bytes() -> int:
        gc.collect()
        with peak_during() as peak:
            returned = step()
        returned_bytes: int = sum(t.numel() * t.element_size() for t in returned)
        return peak() - returned_bytes

    return max(0, min(extra_bytes() for _ in range(1 if device == "cuda" else 2)))


@contextlib.contextmanager
def _cuda_peak() -> Iterator[Callable[[], int]]:
    """Yield a function that tells, after the block, how far the allocator's memory rose above its size at the start."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    yield lambda: torch.cuda.max_memory_allocated() - before
    torch.cuda.synchronize()


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


@contextlib.contextmanager
def _resident_peak() -> Iterator[Callable[[], int]]:
    """The same of the process's resident set, which Linux knows to a quarter of a MiB on a few cores."""
    with _exact_frees():
        try:
            Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark VmHWM
        except OSError:
            with _sampled_peak() as peak:
                yield peak
            return
        before = _status_bytes("VmRSS")
        result: list[int] = []
        yield lambda: result[0]
        result.append(_status_bytes("VmHWM") - before)


_LARGE = 256 << 10


class _MallocInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`: ten sizes, of which only the total of the free blocks matters here."""

    _fields_ = [("_before", ctypes.c_size_t * 8), ("fordblks", ctypes.c_size_t), ("_after", ctypes.c_size_t)]


@contextlib.contextmanager
def _exact_frees() -> Iterator[None]:
    """Have glibc fetch every large block from the system and return it when freed, so that resident means in use.

    Left alone, glibc keeps freed blocks of up to 32 MiB.  Whether the next block fits into a kept one depends on what
    ran before, and the peak would come out too low or too high by as much.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        yield
        return
    libc.mallinfo2.restype = _MallocInfo
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    m_trim_threshold, m_mmap_threshold = -1, -3  # <malloc.h>
    libc.mallopt(m_mmap_threshold, _LARGE)
    libc.malloc_trim(0)  # the pages of blocks that were freed before; the address ranges stay with malloc
    # Take those ranges away from it until the step is over.  A block that is never written to takes no memory.
    taken = []
    size = 1 << 30
    while size >= _LARGE:
        free = libc.mallinfo2().fordblks
        block = libc.malloc(size)
        if libc.mallinfo2().fordblks + size <= free:
            taken.append(block)
        else:  # it came from the system: no such range is left
            libc.free(block)
            size //= 2
    try:
        yield
    finally:
        for block in taken:
            libc.free(block)
        # Where glibc's own adjustment ends once large blocks were freed; setting a threshold has switched that off.
        libc.mallopt(m_mmap_threshold, 32 << 20)
        libc.mallopt(m_trim_threshold, 64 << 20)


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


@contextlib.contextmanager
def _sampled_peak() -> Iterator[Callable[[], int]]:
    """The same by samples every millisecond, where the kernel keeps no high-water mark that can be reset."""
    import psutil  # type: ignore[import-untyped]

    process = psutil.Process()
    before = highest = process.memory_info().rss
    done = threading.Event()

    def sample() -> None:
        nonlocal highest
        while not done.wait(1e-3):
            highest = max(highest, process.memory_info().rss)

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield lambda: highest - before
    finally:
        done.set()
        thread.join()
