"""One implementation in a process of its own: its first calls, and then calls of ever new lengths."""

import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from onchip.bench.harness import BenchedOp, one_line
from onchip.bench.peers import Implementation, no_compiler
from onchip.bench.timing import Step
from onchip.registry import OPS

MODE = "forward+backward"
COMPILED = "torch.compile(dynamic=True)"
# Of a case's tokens: with 8192, from 3000 to 9000.
SHORTEST, LONGEST = 3000 / 8192, 9000 / 8192
ANOTHER = 7001 / 8192
# The plain expressions of the ops, the first that can run.
_EAGER = "torch eager, float32 logits", "torch eager", "torch nn.Linear", "torch F.grouped_mm"


@dataclass(frozen=True)
class AskedLengths:
    """What one process measures."""

    op: str
    case: Any
    impl: str
    device: str
    dtype: str
    number: int
    """How many lengths to measure; 0 for the first calls alone."""


def implementations(op: BenchedOp, device: str, dtype: str) -> list[Implementation]:
    """This package's op with its defaults, the framework's plain expression, the same compiled for any length, and
    Liger's.
    """
    by_name = {impl.name: impl for impl in op.IMPLEMENTATIONS}
    found = [by_name[name] for name in ("onchip auto",) if name in by_name]
    eager = [by_name[name] for name in _EAGER if name in by_name]
    if eager:
        plain = next((impl for impl in eager if impl.unavailable(device, dtype) is None), eager[0])
        compiled = replace(plain, name=COMPILED, load=lambda: _compiled(plain.load()), unavailable=no_compiler)
        found += [plain, compiled]
    # Not where it overwrites the logits: each step would need a copy of them.
    return found + [impl for impl in op.IMPLEMENTATIONS if impl.name == "liger" and impl.steps is None]


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    return torch.compile(function, dynamic=True)


def lengths(tokens: int, number: int) -> list[int]:
    """Numbers of tokens, the same in each run."""
    draw = random.Random(1)
    return [draw.randrange(round(SHORTEST * tokens), round(LONGEST * tokens)) for _ in range(number)]


def of_tokens(case: Any, tokens: int) -> Any:
    """The case with so many tokens; if it has groups, their sizes are drawn anew."""
    names = {x.name for x in fields(case)}
    if "sizes" in names:
        draw, groups = random.Random(tokens), len(case.sizes)
        ends = sorted(draw.randrange(tokens + 1) for _ in range(groups - 1))
        return replace(case, sizes=tuple(b - a for a, b in zip([0, *ends], [*ends, tokens], strict=True)))
    return replace(case, **{"tokens" if "tokens" in names else "m": tokens})


def tokens_of(case: Any) -> int:
    found: int = case.tokens if hasattr(case, "tokens") else case.m
    return found


def shortened(op: Any, problem: Any, tokens: int) -> Any:
    """The problem with only its first tokens, in the same memory."""
    case = of_tokens(problem.case, tokens) if hasattr(problem, "case") else None
    if hasattr(problem, "arrays"):
        by_token = 0, len(op.leaves)  # beside the first leaf, the first of what gets no gradient
        arrays = [_first(x, tokens) if i in by_token else x for i, x in enumerate(problem.arrays)]
        return replace(problem, case=case, arrays=tuple(arrays))
    changes: dict[str, Any] = {"x": _first(problem.x, tokens), "grad_out": _first(problem.grad_out, tokens)}
    if case is not None:
        sizes = op.fw.xp.asarray(case.sizes, dtype=problem.sizes.dtype, device=problem.sizes.device)
        changes |= {"case": case, "sizes": sizes}
    return replace(problem, **changes)


def _first(x: Any, rows: int) -> Any:
    return x.detach()[:rows].requires_grad_(x.requires_grad)


def measure(asked: AskedLengths, op: BenchedOp, tell: Callable[[str], None]) -> dict[str, Any]:
    """Milliseconds of the calls by kind, and whether the result was right."""
    fw, device = op.fw, asked.device
    impl = next(x for x in implementations(op, device, asked.dtype) if x.name == asked.impl)
    tokens = tokens_of(asked.case)
    several = lengths(tokens, asked.number)
    tell("inputs")
    problem = op.make_problem(of_tokens(asked.case, round(LONGEST * tokens)), device, asked.dtype)
    function = impl.load()

    def step(length: int) -> Step:
        return op.plain_steps(shortened(op, problem, length), function)[MODE]

    def wall(length: int) -> float:
        run = step(length)
        fw.wait(device)
        start = time.perf_counter()
        returned = run()
        fw.wait(device)
        elapsed = time.perf_counter() - start
        del returned
        return elapsed * 1e3

    found: dict[str, Any] = {}
    for name, length in (("first", tokens), ("second", tokens), ("another", round(ANOTHER * tokens))):
        tell(f"{name} call")
        found[name] = [wall(length)]
    if several:
        for name in ("new", "again"):
            tell(f"{len(several)} lengths, {name}")
            found[name] = [wall(length) for length in several]
        tell(f"{len(several)} lengths, queued")
        runs = [step(length) for length in several]
        fw.wait(device)
        start = time.perf_counter()
        for run in runs:
            run()
        fw.wait(device)
        found["queued"] = [(time.perf_counter() - start) * 1e3 / len(runs)]
        tell("the device's time")
        found["device"] = [fw.time_once(run, device) for run in runs] if device == "cuda" else None
    tell("checking")
    least = shortened(op, problem, min([tokens, *several]))
    returned = op.plain_steps(least, function)[MODE]()
    found["errors"] = op.check(op.reference(least), MODE, returned)
    found["version"] = impl.version()
    found["config"] = dict(impl.options)
    return found


def serve(parent: Any, caches: str) -> None:
    """Import PyTorch, say so, receive an `AskedLengths`, and send what is done and at last what was found or failed."""
    os.dup2(2, 1)  # a library's own words
    os.environ |= {f"{name}_CACHE_DIR": str(Path(caches) / name.lower()) for name in ("TRITON", "TORCHINDUCTOR")}
    import_module("onchip.torch")
    parent.send("ready")
    asked: AskedLengths = parent.recv()
    try:
        parent.send(measure(asked, OPS[asked.op].entry("bench:TORCH"), parent.send))
    except Exception as error:
        parent.send({"failure": one_line(error)})
