"""Makes the table of docs/guides/stacks.md: tries each integration with the stack that it is for, on the CPU.

    python tools/try_stacks.py [--folder build/stacks] [--megatron REPOSITORY] [--page] [STACK...]

Each stack is installed into its own folder in FOLDER unless it is there; the environment of this Python has everything
else and isn't changed.  Then the stack's examples in docs/guides run, and its check: a small model's loss and gradients
with onchip and by the stack's own functions.  The table is printed and, with --page, written into the page.  The exit
status is 1 if a stack failed.

STACK is a name in the table; without any, all run, in about six minutes.  Megatron-LM's branch comes from REPOSITORY.
"""

import argparse
import datetime
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from stacks.axolotl import axolotl
from stacks.common import PAGE, ROOT, Checked, run_examples
from stacks.flax import flax
from stacks.hugging_face import accelerate, peft, transformers, trl
from stacks.levanter import levanter
from stacks.llamafactory import llamafactory
from stacks.maxtext import maxtext
from stacks.megatron import megatron
from stacks.nemo import nemo
from stacks.torchtitan import torchtitan
from stacks.verl import verl

HEADER = "| stack | version | what is hooked | tested how | on |\n|---|---|---|---|---|"

MEGATRON = "https://github.com/NVIDIA/Megatron-LM"
MEGATRON_COMMIT = "d98e8a64ddf34856e74b24714e3bedb2f5a39553"  # of 2026-08-22


@dataclass(frozen=True)
class Stack:
    """What a row of the table is made from."""

    distribution: str
    check: Callable[[], Checked]
    packages: tuple[str, ...] = ()  # to install; none: the environment has it
    pages: tuple[str, ...] = ()  # of docs/guides, whose examples run first
    processes: int = 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stacks", nargs="*", metavar="STACK", help=", ".join(STACKS))
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "stacks", help="where stacks are installed")
    parser.add_argument("--megatron", default=MEGATRON, metavar="REPOSITORY", help="a clone of Megatron-LM, or its URL")
    parser.add_argument("--page", action="store_true", help=f"write the rows into {PAGE.relative_to(ROOT)}")
    parser.add_argument("--check", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    unknown = [name for name in given.stacks if name not in STACKS]
    if unknown:
        parser.error(f"there is no stack {', '.join(unknown)}; the stacks are {', '.join(STACKS)}")
    if given.check:
        return check(given.stacks[0])
    print(HEADER, flush=True)
    failed = 0
    for name in given.stacks or STACKS:
        row = run(name, given.folder.resolve() / name.replace(" ", "_"), given.megatron)
        print(row or f"| {name} | failed | | | |", flush=True)
        failed += row is None
        if row and given.page:
            write(name, row)
    return failed > 0


def run(name: str, folder: Path, megatron: str) -> str | None:
    """The stack's row, or None with its process's output on stderr."""
    stack = STACKS[name]
    if stack.packages and not folder.exists():
        try:
            install(name, folder, megatron)
        except subprocess.CalledProcessError as error:
            print(error, file=sys.stderr)
            return None
    paths = [str(folder), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {"OMP_NUM_THREADS": "1"} | os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={stack.processes}"]
    command = [sys.executable, "-W", "ignore", *(launcher if stack.processes > 1 else []), __file__, "--check", name]
    with tempfile.TemporaryDirectory() as empty:
        ran = subprocess.run(command, cwd=empty, env=environment, capture_output=True, text=True, timeout=900)
    # Not the exit status: gloo's threads abort now and then where a process ends.
    rows = [line for line in ran.stdout.splitlines() if line.startswith(f"| {name} |")]
    if not rows:
        print(ran.stdout, ran.stderr, sep="\n", file=sys.stderr)
    return rows[0] if rows else None


def install(name: str, folder: Path, megatron: str) -> None:
    """Install the stack and what it imports, without their dependencies; the environment's packages aren't changed."""
    with tempfile.TemporaryDirectory() as made:
        if STACKS[name].packages == (MEGATRON,):
            git = ["git", "-C", made]
            subprocess.run([*git, "init", "--quiet"], check=True)
            subprocess.run([*git, "fetch", "--quiet", "--depth=1", megatron, MEGATRON_COMMIT], check=True)
            subprocess.run([*git, "checkout", "--quiet", "FETCH_HEAD"], check=True)
        else:
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", made]
            command += ["--ignore-requires-python"]  # MaxText asks for 3.12, and what is used of it runs with 3.11
            subprocess.run([*command, *STACKS[name].packages], check=True)
        shutil.copytree(made, folder, ignore=shutil.ignore_patterns(".git"))


def check(name: str) -> int:
    """Run the stack's examples and its check; print its row."""
    stack = STACKS[name]
    for page in stack.pages:
        run_examples(page, name)
    hooked, how = stack.check()
    version = importlib.metadata.version(stack.distribution) if stack.distribution else f"main, {MEGATRON_COMMIT[:9]}"
    if os.environ.get("RANK", "0") == "0":
        print("|".join(("", *(f" {cell} " for cell in (name, version, hooked, how, datetime.date.today())), "")))
    return 0


def write(name: str, row: str) -> None:
    """Put the stack's row into the page's table, in the place of its old one."""
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(re.sub(rf"^\| {name} \|.*$", lambda _: row, text, flags=re.MULTILINE), encoding="utf-8")


STACKS = {
    "transformers": Stack("transformers", transformers),
    "PEFT": Stack("peft", peft),
    "TRL": Stack("trl", trl),
    "accelerate": Stack("accelerate", accelerate),
    "torchtitan": Stack(
        "torchtitan",
        torchtitan,
        (
            "torchtitan==0.3.0",
            "spmd_types==0.2.3",
            "docstring_parser==0.18.0",
            "einops==0.8.2",
            "tensorboard==2.21.0",
            "torch_checkpointing==0.1.1",
            "torchdata==0.11.0",
            "typeguard==4.6.0",
            "tyro==1.0.17",
        ),
        processes=2,
    ),
    "verl": Stack(
        "verl",
        verl,
        (
            "verl==0.9.1",
            "antlr4-python3-runtime==4.13.2",
            "attrs==26.1.0",
            "cloudpickle==3.1.2",
            "codetiming==1.4.0",
            "hydra-core==1.3.8",
            "importlib_metadata==10.2.0",
            "jsonschema==4.26.0",
            "jsonschema_specifications==2025.9.1",
            "msgpack==1.2.4",
            "omegaconf==2.4.0",
            "orjson==3.13.0",
            "pyvers==0.2.3",
            "ray==2.60.0",
            "referencing==0.37.0",
            "rpds_py==2026.9.1",
            "tensordict==0.15.3",
        ),
        ("stacks.md",),
    ),
    "axolotl": Stack("axolotl", axolotl, ("axolotl==0.19.0", "addict==2.4.0")),
    "NeMo Automodel": Stack("nemo-automodel", nemo, ("nemo-automodel==0.7.0",)),
    "LLaMA-Factory": Stack(
        "llamafactory",
        llamafactory,
        ("llamafactory==0.9.5", "antlr4-python3-runtime==4.13.2", "omegaconf==2.4.0", "torchdata==0.11.0"),
        ("stacks.md",),
    ),
    "Megatron-LM": Stack("", megatron, (MEGATRON,), ("stacks.md",)),
    "Flax": Stack("flax", flax),
    "Levanter": Stack(
        "marin-levanter",
        levanter,
        ("marin-levanter==0.2.227.dev40316220070", "braceexpand==0.1.7", "jaxtyping==0.3.11"),
    ),
    "MaxText": Stack(
        "maxtext",
        maxtext,
        (
            "maxtext==0.2.5",
            "antlr4-python3-runtime==4.13.2",
            "omegaconf==2.4.0",
            "jaxtyping==0.3.11",
            "wadler_lindig",
        ),
    ),
}
"""In the page's order."""


if __name__ == "__main__":
    sys.exit(main())
