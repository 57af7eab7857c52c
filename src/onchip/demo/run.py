"""`onchip demo`: checks the options, trains, measures, writes the files.  Loads the framework only once it runs."""

import importlib
import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from onchip.core import files
from onchip.core.machine import choose_framework, require_packages, resolve_device
from onchip.demo import EXTRAS, MAX_VOCAB, MIN_VOCAB, PACKAGES, SEQUENCE

if TYPE_CHECKING:
    from onchip.demo.data import Corpus
    from onchip.demo.model import ModelConfig
    from onchip.demo.train import Run, TrainConfig

COMPARED = ("plain", "onchip")
COMPARED_STEPS = 100
BOUND = 1e-3
"""In float32 the losses of the two trainings differ by less than this over the first `COMPARED_STEPS` steps."""
LAST_STEPS = 20
"""The losses of a training in FP8 and of its baseline are compared over so many, since each step's is noisy."""
PROMPT = "The"
TEMPERATURE = 0.8
SAMPLE_TOKENS = 120


def run_demo(
    *,
    steps: int,
    vocab: int,
    tokens: int,
    device: str,
    out: Path,
    seed: int,
    console: Console,
    framework: str | None = None,
    fp8: bool = False,
) -> dict[str, Any]:
    """Train the same model twice, with the plain loss and with onchip's, and write what came of it into `out`.

    Options are those of the command, see `onchip.cli.demo`.  The tokenizer may have fewer entries than `vocab` on this
    corpus; the rest of the head's rows are then padding, which no target names.

    Returns:
        What demo.json holds.

    Raises:
        ImportError: a package is missing that this needs.
        ValueError: an option that can't be served; nothing has run or been written then.
    """
    framework = choose_framework(framework)
    if fp8 and framework != "torch":
        raise ValueError(f"--fp8 converts the layers of a PyTorch model; --framework is {framework}: leave one out")
    _check_sizes(steps=steps, vocab=vocab, tokens=tokens, seed=seed)
    require_packages("demo", (*PACKAGES[framework], "tokenizers", "matplotlib", "jinja2", "psutil"), EXTRAS[framework])
    device = resolve_device(device, framework)
    paths = [out / f"demo.{kind}" for kind in ("json", "png", "html")]
    files.check_writable("--out", *paths)

    from onchip.bench import environment
    from onchip.demo import report, train
    from onchip.demo.model import ModelConfig

    model = ModelConfig(vocab=vocab)
    config = train.TrainConfig(steps=steps, tokens=tokens, seed=seed, device=device, fp8=fp8)
    versions = {name: metadata.version(name) for name in (*PACKAGES[framework], "tokenizers")}
    described = {**environment.describe(device, framework), **versions}
    if device == "cpu" and described["busy_cores"] > 0.2:
        console.print(f"[yellow]Other work keeps {described['busy_cores']} cores busy; this will take longer.[/]")
    if device == "cpu" and described["threads"] is not None:
        # Threads that wait for one whose core is taken cost far more than they bring: ten times the time was seen.
        free = described["cores"] - round(described["busy_cores"])
        described["threads"] = max(1, min(described["threads"], free))
    with _load(framework).use_device(device, described["threads"]):
        document = _train_and_measure(framework, model, config, described, console)
    picture = report.picture_png(document)
    numbers, image, page = paths
    files.replace(numbers, json.dumps(document, indent=1) + "\n")
    files.replace(image, picture)
    files.replace(page, report.html_page(document, picture))
    report.print_report(document, console)
    console.print(f"wrote {', '.join(map(str, paths))}", soft_wrap=True)
    return document


def _load(framework: str) -> Any:
    """torch_train.py or jax_train.py; both have the same functions."""
    return importlib.import_module(f"onchip.demo.{framework}_train")


def _train_and_measure(
    framework: str, model: "ModelConfig", config: "TrainConfig", environment: dict[str, Any], console: Console
) -> dict[str, Any]:
    """All that takes time; returns the document."""
    from onchip.demo import data, train

    begin = time.perf_counter()
    text = data.load_text()
    tokenizer = data.load_tokenizer(text, model.vocab)
    corpus = data.encode_corpus(tokenizer, text)
    console.print(
        f"corpus: {len(text):,} characters, {len(corpus.train) + len(corpus.held_out):,} tokens; "
        f"tokenizer: {tokenizer.get_vocab_size():,} entries; head: {model.vocab:,} rows",
        highlight=False,
    )

    made = _load(framework)
    trainers = made.make_trainers(model, config)
    runs = {name: train.Run(trainer) for name, trainer in trainers.items()}
    _train_with_progress(runs, config, corpus, console)
    held_out = {name: train.held_out_loss(trainer, config, corpus) for name, trainer in trainers.items()}
    console.print("measuring head and loss ...")
    batch = data.random_batch(corpus.train, config.tokens, np.random.default_rng(config.seed))
    arguments = trainers["onchip"].loss_arguments(*batch)
    costs = train.measure_head(framework, made.LOSSES, config.device, *arguments)
    sample = train.sample_text(
        trainers["onchip"], tokenizer, prompt=PROMPT, tokens=SAMPLE_TOKENS, temperature=TEMPERATURE, seed=config.seed
    )

    return {
        "settings": {"framework": framework, **asdict(config), "dtype": "float32", "model": asdict(model)},
        "environment": environment,
        "corpus": {
            "name": "pydoc_data.topics",
            "characters": len(text),
            "train_tokens": len(corpus.train),
            "held_out_tokens": len(corpus.held_out),
            "tokenizer_entries": tokenizer.get_vocab_size(),
        },
        "expressions": made.EXPRESSIONS,
        "losses": {name: run.losses for name, run in runs.items()},
        "held_out_loss": held_out,
        "difference": _difference(runs["plain"].losses, runs["onchip"].losses),
        "fp8": _fp8_difference(runs, held_out, made.fp8_baseline(config.device)) if config.fp8 else None,
        "train_seconds": {name: run.seconds for name, run in runs.items()},
        "head_and_loss": costs,
        "extra_bytes_are": made.MEMORY_SOURCE,
        "measure_repeats": train.MEASURE_REPEATS,
        "logits_bytes": 4 * config.tokens * model.vocab,
        "sample": {"prompt": PROMPT, "temperature": TEMPERATURE, "tokens": SAMPLE_TOKENS, "text": sample},
        "seconds": time.perf_counter() - begin,
    }


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


def _train_with_progress(runs: Mapping[str, "Run"], config: "TrainConfig", corpus: "Corpus", console: Console) -> None:
    from onchip.demo.train import train_in_step

    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=config.steps)
        for _ in train_in_step(runs, config, corpus):
            plain, onchip = (runs[name].losses[-1] for name in COMPARED)
            told = f"plain {plain:.4f}  onchip {onchip:.4f}  difference {abs(plain - onchip):.1e}"
            told += "".join(f"  {name} {run.losses[-1]:.4f}" for name, run in runs.items() if name not in COMPARED)
            progress.update(task, advance=1, description=told)


def _difference(plain: list[float], onchip: list[float]) -> dict[str, Any]:
    per_step = [abs(a - b) for a, b in zip(plain, onchip, strict=True)]
    largest = max(per_step[:COMPARED_STEPS])
    return {
        "per_step": per_step,
        "compared_steps": min(COMPARED_STEPS, len(per_step)),
        "largest_in_compared_steps": largest,
        "largest": max(per_step),
        "bound": BOUND,
        "within_bound": largest < BOUND,
    }


def _fp8_difference(runs: Mapping[str, "Run"], held_out: Mapping[str, float], baseline: str) -> dict[str, Any]:
    """How far the training in FP8 is from its baseline: signed, above 0 where FP8's loss is the higher one."""
    per_step = [a - b for a, b in zip(runs["fp8"].losses, runs[baseline].losses, strict=True)]
    last = per_step[-LAST_STEPS:]
    return {
        "baseline": baseline,
        "per_step": per_step,
        "largest": max(map(abs, per_step)),
        "last_steps": len(last),
        "mean_of_last_steps": sum(last) / len(last),
        "held_out": held_out["fp8"] - held_out[baseline],
    }
