"""Run random calls from the command line: exit code 1 if one fails, which Hypothesis simplifies and prints."""

import argparse
import os
import random
import sys
import time
import warnings
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

from fuzz.call import program, run
from fuzz.draw import TABLES, calls
from onchip.core.machine import FRAMEWORKS, installed_frameworks, resolve_device

# Each framework's share of the calls: JAX takes seconds to compile each.
SHARES = {"torch": 9, "jax": 1}
# How many Hypothesis draws at a time.  Then what JAX compiled for them is dropped: hardly any of it is used twice.
AT_A_TIME = 100


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description="Compare random legal calls with the oracles.")
    parser.add_argument("ops", nargs="*", help=f"any of {', '.join(TABLES)}; by default all")
    parser.add_argument("--framework", choices=FRAMEWORKS, help="by default all that are installed")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto takes cuda if available"
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to go on (default: 60)")
    parser.add_argument("--calls", type=int, help="stop after this many calls")
    parser.add_argument("--seed", type=int, help="the same seed draws the same calls on the same machine")
    asked = parser.parse_args(arguments)
    for op in asked.ops:
        if op not in TABLES:
            parser.error(f"there are no random calls of {op}")
    frameworks = [asked.framework] if asked.framework else installed_frameworks()
    # Other processes may use the same GPU.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    first = random.SystemRandom().randrange(1_000_000) if asked.seed is None else asked.seed
    print(f"random calls for {asked.seconds:g} s, seed {first}", flush=True)
    targets = [(f, d, op) for f in frameworks for d in _devices(asked.device, f) for op in asked.ops or TABLES
               for _ in range(SHARES[f])]  # fmt: skip
    done = Done()
    end = time.monotonic() + asked.seconds
    while not done.failing and time.monotonic() < end and done.calls != asked.calls:
        most = min(AT_A_TIME, asked.calls - done.calls) if asked.calls else AT_A_TIME
        try:
            some(targets, f"{first} {done.calls}", most, end, done)
        except Exception as error:
            done.error = f"{type(error).__name__}: {error}"
        if "jax" in frameworks:
            import_module("jax").clear_caches()
    print(f"{done.calls} calls, {done.comparisons} comparisons, {int(bool(done.failing))} failures, seed {first}")
    if done.failing:
        print(f"a call fails: {done.error}; as a program:\n{done.failing}")
    return int(bool(done.failing))


@dataclass
class Done:
    calls: int = 0
    comparisons: int = 0
    error: str = ""
    failing: str = ""
    """The last call that failed, as a program; it is the simplest that Hypothesis tried."""


def some(targets: Any, of: str, most: int, end: float, done: Done) -> None:
    """Run `most` calls of a seed, or as many as there is time for; raises what the simplest raised that failed."""

    def one(call: Any) -> None:
        if not done.failing and time.monotonic() > end:
            return
        try:
            compared = attempt(call)
        except Exception:
            done.failing = program(call)
            raise
        if not done.failing:
            done.calls, done.comparisons = done.calls + 1, done.comparisons + compared

    how = settings(
        max_examples=most, deadline=None, database=None, print_blob=False, report_multiple_bugs=False,
        phases=(Phase.generate, Phase.shrink), suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    seed(of)(how(given(calls(targets))(one)))()


def attempt(call: Any) -> int:
    """How many comparisons a call made; raises what it raised, a warning of onchip's among it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*onchip.*")
        return len(run(call))


def _devices(device: str, framework: str) -> list[str]:
    """Where calls run: of "auto" on the CPU, and on CUDA where there is one."""
    found = resolve_device(device, framework)
    return ["cpu", "cuda"] if device == "auto" and found == "cuda" else [found]


if __name__ == "__main__":
    sys.exit(main())
