"""Draw calls until the time is over; shrink the first that fails, and print it as a program."""

import itertools
import os
import random
import re
import time
import warnings
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

from rich.console import Console
from rich.markup import escape

from fuzz.call import program, run
from fuzz.draw import Call, draw, legal, simpler
from fuzz.judge import Wrong
from onchip.core.machine import resolve_device

SHRINK_SECONDS = 60.0
# Of so many calls, each framework's share: JAX compiles each for seconds.
_SHARES = {"torch": 9, "jax": 1}
# What JAX has compiled is dropped after so many calls: hardly any of it is used twice.
_CLEAR_EVERY = 100


def run_fuzz(
    frameworks: Sequence[str],
    ops: Sequence[str],
    device: str,
    console: Console,
    *,
    seconds: float,
    seed: int | None,
    most: int | None = None,
) -> dict[str, Any]:
    """Run random calls of the ops in each framework for so many seconds, or until there were `most`.

    Returns the numbers of calls and comparisons, the seed, and the first failing call as a program, shrunk for a minute
    at most.  Of `device` "auto", calls are drawn for the CPU and for CUDA where a framework sees a device.
    """
    # Other processes may use the same GPU.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    seed = random.SystemRandom().randrange(1_000_000) if seed is None else seed
    console.print(f"random calls for {seconds:g} s, seed {seed}", highlight=False)
    targets = [(f, d, op) for f in frameworks for d in _devices(device, f) for op in ops for _ in range(_SHARES[f])]
    end = time.monotonic() + seconds
    comparisons = 0
    failure: dict[str, str] | None = None
    with console.status("") as status:
        for calls, call in enumerate(drawn(seed, targets), start=1):
            error, compared = attempt(call)
            comparisons += compared
            progress = f"{calls} calls, {comparisons} comparisons"
            status.update(f"{progress}, {max(0.0, end - time.monotonic()):.0f} s left")
            if error is not None:
                status.update(f"{progress}; one fails, which is made simpler")
                call, error = shrunk(call, error)
                failure = {"error": f"{type(error).__name__}: {error}", "program": program(call)}
            if failure is not None or calls == most or time.monotonic() > end:
                break
            if "jax" in frameworks and calls % _CLEAR_EVERY == 0:
                import_module("jax").clear_caches()
    console.print(f"{progress}, {int(failure is not None)} failures, seed {seed}", highlight=False)
    if failure is not None:
        console.print(f"[red bold]a call fails:[/] {escape(failure['error'])}; as a program:", highlight=False)
        console.out(failure["program"], highlight=False)
    return {"ok": failure is None, "calls": calls, "comparisons": comparisons, "seed": seed, "failure": failure}


def drawn(seed: int, targets: Sequence[tuple[str, str, str]]) -> Iterator[Call]:
    """The calls of a seed, without end: the same ones on the same machine."""
    for number in itertools.count():
        rng = random.Random(f"{seed} {number}")
        call = draw(rng, *rng.choice(targets))
        refusals = import_module(f"onchip.ops.{call['op']}.checks").plain_refusals
        reasons = refusals(call["device"], call["dtype"], call["framework"], call)
        usable = [name for name, reason in reasons.items() if reason is None]
        yield legal({**call, "backend": rng.choice(("auto", *usable))})


def attempt(call: Call) -> tuple[Exception | None, int]:
    """Run a call: what it raised, a warning of onchip's among it, and how many comparisons it made."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*onchip.*")
            return None, len(run(call))
    except Exception as error:
        return error, 0


def shrunk(call: Call, error: Exception) -> tuple[Call, Exception]:
    """The simplest call found that fails like this one, with its error: one value after another is made simpler."""
    end, kind, improved = time.monotonic() + SHRINK_SECONDS, _kind(error), True
    while improved:
        improved = False
        for candidate in simpler(call):
            if time.monotonic() > end:
                return call, error
            found, _ = attempt(candidate)
            if found is not None and _kind(found) == kind:
                call, error, improved = candidate, found, True
                break
    return call, error


def _kind(error: Exception) -> str:
    """Errors that are alike but for their numbers; all wrong results are."""
    return "" if isinstance(error, Wrong) else type(error).__name__ + re.sub(r"\d+", "", str(error))[:60]


def _devices(device: str, framework: str) -> list[str]:
    """Where calls run: of "auto" on the CPU, and on CUDA where there is one."""
    found = resolve_device(device, framework)
    return ["cpu", "cuda"] if device == "auto" and found == "cuda" else [found]
