"""Makes the table of docs/support.md: runs the tests that need no GPU with each version of the libraries that onchip
uses.

    python tools/versions.py [--folder build/versions] [--page] [NAME...]

With each Triton the kernels are compiled ahead of time, with each JAX they are lowered for CUDA, and with the latest
transformers, PEFT and TRL the integrations run.  Each version is installed into its own folder in FOLDER unless it is
there; the environment of this Python has everything else and isn't changed.  The table is printed and, with --page,
written into the page.  The exit status is 1 if a test failed.

NAME is a name in the table, such as "triton 3.9.0"; without any, all run, in about an hour on two cores.
"""

import argparse
import datetime
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TRITON = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")
JAX = {"0.10.2": "3.11", "0.11.2": "3.12", "0.12.0": "3.12"}  # and the Python that it is for
# Without their dependencies, but for what these need another version of.
INTEGRATIONS = ("transformers==5.24.0", "peft", "trl", "accelerate", "tokenizers", "huggingface_hub")

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "support.md"
HEADER = "| with | Python | tests | passed | failed | on |\n|---|---|---|---|---|---|\n"
# What the JAX environments have beside JAX, and numbers that its interpreter knows.
BESIDE_JAX = ("numpy<2.4", "absl-py", "pytest", "jsonschema", "typer", "rich", "msgspec")
COMPILED = ("tests/test_compiled.py", "tests/test_launch.py")
MOSAIC = "lower or kernels_are_the_same or shared_memory"
LOWERED = (
    "tests/linear_cross_entropy/test_mosaic_*.py",
    "tests/grouped_matmul/test_gm_mosaic.py",
    "tests/fp8_linear/test_fp8_jax.py",
    "tests/linear_log_probs/test_llp_mosaic.py",
    "tests/test_lowered.py",
    "tests/vocab/test_rows_mosaic.py",
    "tests/linear_jsd/test_jsd_mosaic.py",
    "tests/attention/test_attention_mosaic.py",
)


@dataclass(frozen=True)
class Trial:
    """A row of the table: what is installed, and which tests run with it."""

    name: str
    tests: str
    files: tuple[str, ...]
    packages: tuple[str, ...]
    python: str | None = None
    """The Python of an environment of its own; None for this one, with the packages in front."""
    options: tuple[str, ...] = ()


def trials() -> Iterator[Trial]:
    for version in TRITON:
        yield Trial(f"triton {version}", "compiled for GPUs", COMPILED, (f"triton=={version}",))
    for version, python in JAX.items():
        packages, options = (f"jax[cpu]=={version}", *BESIDE_JAX), ("--noconftest", "-p", "on_hopper", "-k", MOSAIC)
        yield Trial(f"jax {version}", "lowered for CUDA", LOWERED, packages, python, options)
    yield Trial("transformers", "tests/integrations", ("tests/integrations/test_*.py",), INTEGRATIONS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="; ".join(trial.name for trial in trials()))
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "versions", help="where versions are installed")
    parser.add_argument("--page", action="store_true", help=f"write the rows into {PAGE.relative_to(ROOT)}")
    given = parser.parse_args()
    known = {trial.name: trial for trial in trials()}
    unknown = [name for name in given.names if name not in known]
    if unknown:
        parser.error(f"there is no {', '.join(unknown)}; there are {', '.join(known)}")
    rows, failed = [], 0
    for name in given.names or known:
        started = time.monotonic()
        row, failures = run(known[name], given.folder.resolve() / name.replace(" ", "-"))
        print(f"{name}: {failures} failed, {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
        rows.append(row)
        failed += failures
        if given.page:
            write(name, row)
    print(HEADER + "\n".join(rows))
    return failed > 0


def run(trial: Trial, folder: Path) -> tuple[str, int]:
    """The trial's row, and how many tests failed: 1 if they couldn't be run."""
    python = install(trial, folder)
    paths = [*([] if trial.python else [str(folder)]), str(ROOT / "src"), str(ROOT / "tests")]
    environment = {"OMP_NUM_THREADS": "1"} | os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    files = sorted(str(path) for pattern in trial.files for path in ROOT.glob(pattern) if "gpu" not in path.name)
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *trial.options, *files]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    last = (ran.stdout.strip().splitlines() or [""])[-1]
    passed, failed, errors = (int((re.search(rf"(\d+) {x}", last) or [0, 0])[1]) for x in ("passed", "failed", "error"))
    failed = failed + errors or int(passed == 0)
    if failed:
        print(ran.stdout, ran.stderr, sep="\n", file=sys.stderr)
    version = trial.python or ".".join(map(str, sys.version_info[:2]))
    cells = (installed(trial, folder), version, trial.tests, passed, failed, datetime.date.today())
    return "|".join(("", *(f" {cell} " for cell in cells), "")), failed


def install(trial: Trial, folder: Path) -> str:
    """The Python to run the tests with, once the packages are installed."""
    if trial.python is None:
        if not folder.exists():
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
            subprocess.run([*pip, *trial.packages], check=True)
        return sys.executable
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([find_python(trial.python), "-m", "venv", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *trial.packages], check=True)
    return str(python)


def find_python(version: str) -> str:
    """The Python from the PATH, or pyenv's."""
    of_pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    found = str(of_pyenv[-1]) if of_pyenv else shutil.which(f"python{version}")
    if found is None:
        raise SystemExit(f"there is no Python {version}")
    return found


def installed(trial: Trial, folder: Path) -> str:
    """What the row is for; for integrations, the versions that exist today."""
    if trial.packages != INTEGRATIONS:
        return trial.name.replace("triton", "Triton").replace("jax", "JAX")
    names = {"transformers": "transformers", "peft": "PEFT", "trl": "TRL"}
    found = {name: next(folder.glob(f"{name}-*.dist-info")).name.split("-")[1].removesuffix(".dist") for name in names}
    return ", ".join(f"{shown} {found[name]}" for name, shown in names.items())


def write(name: str, row: str) -> None:
    """Write a row in place of the one that begins alike, or after the table's last one."""
    text = PAGE.read_text(encoding="utf-8")
    before, table = text.split(HEADER)
    rows, blank, after = table.partition("\n\n")
    begins = row.split("|")[1] if name != "transformers" else " transformers"
    lines = [line for line in rows.splitlines() if not line.split("|")[1].startswith(begins)]
    order = ["Triton", "JAX", "transformers"]
    made = sorted([*lines, row], key=lambda line: (order.index(line.split()[1].rstrip(",")), line))
    PAGE.write_text(before + HEADER + "\n".join(made) + blank + after, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
