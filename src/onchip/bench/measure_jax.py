"""Time and peak memory of a compiled step of JAX, on the CPU and on CUDA devices.  Knows no op.

A step is a `onchip.bench.jax_steps.Step`; to be timed, it may be any callable without arguments that returns arrays.
"""

import gc
import re
import time
from functools import partial
from typing import Any

import jax

from onchip.bench import timing
from onchip.bench.timing import Step

PACKAGES = ("jax", "jaxlib", "numpy")


def time_once(step: Step, device: str) -> float:
    """Milliseconds of one run, from the call until all that it returns is there."""
    start = time.perf_counter()
    returned = jax.block_until_ready(step())
    elapsed = time.perf_counter() - start
    del returned  # not before the clock stops: giving the gradients back is no part of the step
    return elapsed * 1e3


time_interleaved = partial(timing.time_interleaved, time_once)


def peak_extra_bytes(step: Any, *, device: str) -> int:
    """Peak of the step's temporary memory, as XLA has planned it."""
    return int(step.compilation[0].memory_analysis().temp_size_in_bytes)


def compile_seconds(step: Any) -> float | None:
    """How long tracing and compiling took."""
    return float(step.compilation[1])


def release(device: str) -> None:
    """Collect the cycles that hold arrays after a step ran out of memory."""
    gc.collect()


def threads() -> int | None:
    """XLA uses all cores."""
    return None


def gpu() -> dict[str, Any]:
    """Name and CUDA version of the device that JAX runs on."""
    device = jax.devices("gpu")[0]
    found = re.search(r"cuda (\d+)", device.client.platform_version)
    version = int(found[1]) if found else None  # such as 13000
    return {"gpu": device.device_kind, "cuda": version and f"{version // 1000}.{version % 1000 // 10}"}
