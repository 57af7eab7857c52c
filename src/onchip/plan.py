"""`onchip plan`: what linear_cross_entropy will cost, from the shapes alone.  Imports no framework."""

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from onchip.ops.linear_cross_entropy import spec
from onchip.ops.linear_cross_entropy.cases import MODELS
from onchip.ops.linear_cross_entropy.spec import MIB, Problem

BUDGETS_MIB = (64, 256, 1024, 4096, 16384)
STRATEGIES = ("stash", "recompute")


def plan_document(
    *,
    tokens: int,
    hidden: int | None,
    vocab: int | None,
    model: str | None,
    dtype: str,
    weight_dtype: str | None,
    device: str,
    scratch_mib: Sequence[int] | None,
) -> dict[str, Any]:
    """The plan of a forward and backward with both gradients, for the default budget and some others, as a document.

    Raises:
        ValueError: a size below 1, an unknown model, dtype or device, or too little said.
    """
    if model is not None:
        if model not in MODELS:
            raise ValueError(f"no model {model!r}; there is: {', '.join(MODELS)}. Or give --hidden and --vocab")
        hidden, vocab = hidden or MODELS[model][0], vocab or MODELS[model][1]
    if hidden is None or vocab is None:
        raise ValueError("give --hidden and --vocab, or --model")
    for name, size in (("--tokens", tokens), ("--hidden", hidden), ("--vocab", vocab)):
        if size < 1:
            raise ValueError(f"{name} must be 1 or more; got {size}")
    for name, value in (("--dtype", dtype), ("--weight-dtype", weight_dtype or dtype)):
        if value not in spec.DTYPE_BYTES:
            raise ValueError(f"{name} must be one of {', '.join(spec.DTYPE_BYTES)}; got {value!r}")
    if device not in ("cuda", "cpu"):
        raise ValueError(f"--device must be cuda or cpu; got {device!r}")
    if scratch_mib is not None and any(mib < 1 for mib in scratch_mib):
        raise ValueError(f"--scratch-mib must be 1 or more; got {min(scratch_mib)}")
    problem = Problem(tokens, hidden, vocab, dtype=dtype, weight_dtype=weight_dtype or dtype, device=device)
    budgets: list[int | None] = [None, *(mib * MIB for mib in scratch_mib or BUDGETS_MIB)]
    return {
        "op": spec.OP,
        "tokens": tokens,
        "hidden": hidden,
        "vocab": vocab,
        "dtype": dtype,
        "weight_dtype": weight_dtype or dtype,
        "device": device,
        "logits_bytes": {"float32": spec.logits_bytes(problem), dtype: tokens * vocab * spec.DTYPE_BYTES[dtype]},
        "default_scratch_bytes": {s: spec.default_scratch(problem, s) for s in STRATEGIES},
        "plans": [_row(problem, strategy, budget) for budget in budgets for strategy in STRATEGIES],
    }


def _row(problem: Problem, strategy: str, budget: int | None) -> dict[str, Any]:
    need = spec.scratch_at_least(problem, strategy)
    row: dict[str, Any] = {
        "strategy": strategy,
        "budget_bytes": budget,
        "products": spec.products(problem, strategy),
        "flops": spec.flops(problem, strategy),
        "smallest_scratch_bytes": need,
        "fits": budget is None or need <= budget,
        "auto": False,
    }
    if not row["fits"]:
        return row
    config = spec.plan(problem, strategy, budget)
    row["auto"] = spec.choose_strategy(problem, "auto", budget) == strategy
    return row | {
        "token_chunk": config.token_chunk,
        "vocab_chunk": config.vocab_chunk,
        "chunks": -(-problem.tokens // config.token_chunk) * (-(-problem.vocab // config.vocab_chunk)),
        "scratch_bytes": spec.scratch_bytes(problem, config),
        "scratch_parts": spec.scratch_parts(problem, config),
        "written_per_chunk": spec.written_per_chunk(problem, config),
    }


def show_plan(document: dict[str, Any], console: Console) -> None:
    """Print the document as a table."""
    logits = " or ".join(f"{_mib(size)} MiB in {dtype}" for dtype, size in document["logits_bytes"].items())
    console.print(
        f"{document['op']}: T={document['tokens']} H={document['hidden']} V={document['vocab']} {document['dtype']} "
        f"on {document['device']}, forward and both gradients\nfull logits: {logits}",
        highlight=False,
    )
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("budget", "strategy", "prods", "chunk", "chunks", "scratch", "tile", "dH", "dW"):
        table.add_column(column, justify="left" if column in ("strategy", "chunk") else "right", no_wrap=True)
    for row in document["plans"]:
        budget = "default" if row["budget_bytes"] is None else _mib(row["budget_bytes"])
        name = f"[bold]{row['strategy']} *[/]" if row["auto"] else row["strategy"]
        if row["fits"]:
            written = row["written_per_chunk"]
            cells = [
                f"{row['token_chunk']}x{row['vocab_chunk']}",
                str(row["chunks"]),
                _mib(row["scratch_bytes"]),
                _mib(written["logits"] + written.get("their gradient", 0)),
                _mib(written["hidden gradient"]),
                _mib(written["weight gradient"]),
            ]
        else:
            cells = ["[dim]needs[/]", "", f"[dim]{_mib(row['smallest_scratch_bytes'])}[/]"]
        table.add_row(budget, name, str(row["products"]), *cells)
    console.print(table)
    console.print(
        "All sizes in MiB; * is what strategy='auto' takes.\n"
        "prods: matrix products, forward and backward together.  chunk: tokens x vocab.\n"
        "scratch: peak above inputs and returned gradients.\n"
        "tile, dH, dW: written per chunk, of logits and their gradient, and of the two\n"
        "gradients of hidden and weight.",
        highlight=False,
    )


def _mib(size: int) -> str:
    """Rounded up, so that what fits in the printed number fits."""
    return str(-(-size // MIB)) if size >= 10 * MIB else f"{-(-10 * size // MIB) / 10:.1f}"
