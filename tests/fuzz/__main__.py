"""Run random calls from the command line: exit code 1 if one fails."""

import argparse
import sys

from rich.console import Console

from fuzz.draw import TABLES
from fuzz.run import run_fuzz
from onchip.core.machine import FRAMEWORKS, installed_frameworks


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description="Random legal calls against float64 oracles.")
    parser.add_argument("ops", nargs="*", help=f"of {', '.join(TABLES)}; by default all")
    parser.add_argument("--framework", choices=FRAMEWORKS, help="by default those that are installed")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--calls", type=int, help="stop after so many")
    parser.add_argument("--seed", type=int, help="the same seed draws the same calls on the same machine")
    asked = parser.parse_args(arguments)
    for op in asked.ops:
        if op not in TABLES:
            parser.error(f"there are no random calls of {op}")
    frameworks = [asked.framework] if asked.framework else installed_frameworks()
    found = run_fuzz(
        frameworks, asked.ops or [*TABLES], asked.device, Console(),
        seconds=asked.seconds, most=asked.calls, seed=asked.seed,
    )  # fmt: skip
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
