"""`onchip demo`: checks the options, trains, measures, and writes the files.  Loads the framework only when it runs."""

import importlib
import json
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from onchip.core import files
from onchip.core.machine import choose_framework, require_packages, resolve_device
from onchip.core.names import Device, Framework
from onchip.demo import EXTRAS, MAX_VOCAB, MIN_VOCAB, PACKAGES, SEQUENCE


def run_demo(
    *,
    steps: Annotated[int, typer.Option(help="Training steps in each of the two runs.")] = 150,
    vocab: Annotated[int, typer.Option(help="Entries in the byte-pair tokenizer's vocabulary.")] = 8192,
    tokens: Annotated[int, typer.Option(help="Tokens per step.")] = 1024,
    device: Device = "auto",
    out: Annotated[Path, typer.Option(help="Folder for demo.json, demo.png and demo.html.")] = Path("onchip-demo"),
    seed: Annotated[int, typer.Option(help="Seed for the weights and the batches.")] = 0,
    framework: Framework = None,
    fp8: Annotated[
        bool, typer.Option("--fp8", help="Train a third time, with the linear layers in blockwise FP8 (torch only).")
    ] = False,
    console: Console,
) -> dict[str, Any]:
    """Train a small language model on real English twice, with the framework's loss and with onchip's.

    The results are written into `out`.  The tokenizer may have fewer entries than `vocab` on this corpus; the rest of
    the head's rows are then padding, to which no target points.

    Returns:
        What demo.json holds.

    Raises:
        ImportError: a package that this needs is missing.
        ValueError: an option can't be served; then nothing has run or been written.
    """
    framework = choose_framework(framework)
    if fp8 and framework != "torch":
        raise ValueError(f"--fp8 converts the layers of a PyTorch model; --framework is {framework}: leave one out")
    _check_sizes(steps=steps, vocab=vocab, tokens=tokens, seed=seed)
    tools = ("tokenizers", "matplotlib", "jinja2", "psutil", "pynvml")
    require_packages("demo", (*PACKAGES[framework], *tools), EXTRAS[framework])
    device = resolve_device(device, framework)
    paths = [out / f"demo.{kind}" for kind in ("json", "png", "html")]
    files.check_writable("--out", *paths)

    # These need packages that are known to be here only now.
    from onchip.bench import environment
    from onchip.demo import report, train
    from onchip.demo.model import ModelConfig

    made = importlib.import_module(f"onchip.demo.{framework}_train")
    config = train.TrainConfig(steps=steps, tokens=tokens, seed=seed, device=device, fp8=fp8)
    versions = {name: metadata.version(name) for name in (*PACKAGES[framework], "tokenizers")}
    described = {**environment.describe(device, framework), **versions}
    if device == "cpu" and described["busy_cores"] > 0.2:
        console.print(f"[yellow]Other programs keep {described['busy_cores']} cores busy; this will take longer.[/]")
    if device == "cpu" and described["threads"] is not None:
        # A thread without a core of its own makes all others wait: steps took ten times as long.
        free = described["cores"] - round(described["busy_cores"])
        described["threads"] = max(1, min(described["threads"], free))
    with made.use_device(device, described["threads"]):
        found = train.train_and_measure(framework, made, ModelConfig(vocab=vocab), config, console)
    document = {"environment": described, **found}
    numbers, image, page = paths
    files.replace(numbers, json.dumps(document, indent=1) + "\n")
    files.replace(image, report.picture_png(document))
    files.replace(page, report.html_page(document, out))
    report.print_report(document, console)
    console.print(f"wrote {', '.join(map(str, paths))}", soft_wrap=True)
    return document


def _check_sizes(*, steps: int, vocab: int, tokens: int, seed: int) -> None:
    if steps < 1:
        raise ValueError(f"--steps must be 1 or more; got {steps}")
    if not MIN_VOCAB <= vocab <= MAX_VOCAB:
        raise ValueError(
            f"--vocab must be from {MIN_VOCAB} (byte-level BPE starts from all bytes) to {MAX_VOCAB}; got {vocab}"
        )
    if tokens < SEQUENCE or tokens % SEQUENCE:
        above = -(-max(tokens, 1) // SEQUENCE) * SEQUENCE
        raise ValueError(
            f"--tokens must be a multiple of {SEQUENCE}, the length of a sequence; got {tokens}, try {above}"
        )
    if not 0 <= seed < 2**63:
        raise ValueError(f"--seed must be from 0 to 2**63 - 1; got {seed}")
