"""`onchip plan`: what linear_cross_entropy will cost, from the shapes alone.  Imports no framework."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from onchip.core.backends import choose_backend
from onchip.ops._shared.spec import DTYPE_BYTES, MIB
from onchip.ops.linear_cross_entropy import spec, triton_spec
from onchip.ops.linear_cross_entropy.cases import MODELS
from onchip.ops.linear_cross_entropy.spec import Problem

BUDGETS_MIB = (64, 256, 1024, 4096, 16384)
STRATEGIES = ("stash", "recompute")
TRITON_STRATEGIES = ("auto", *STRATEGIES)
NO_BOUND = 1 << 62
# The device whose measured rates the predicted times come from.
RATES_OF = "h100"


def plan_document(
    *,
    tokens: int,
    hidden: int | None,
    vocab: int | None,
    model: str | None,
    dtype: str,
    weight_dtype: str | None,
    device: str,
    backend: str = "auto",
    scratch_mib: Sequence[int] | None,
) -> dict[str, Any]:
    """The plan of a forward and backward with both gradients, for the default budget and some others, as a document.

    Raises:
        ValueError: a size below 1, an unknown model, dtype, device or backend, a backend that can't run it, or too
            little said.
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
        if value not in DTYPE_BYTES:
            raise ValueError(f"{name} must be one of {', '.join(DTYPE_BYTES)}; got {value!r}")
    if device not in ("cuda", "cpu"):
        raise ValueError(f"--device must be cuda or cpu; got {device!r}")
    if scratch_mib is not None and any(mib < 1 for mib in scratch_mib):
        raise ValueError(f"--scratch-mib must be 1 or more; got {min(scratch_mib)}")
    problem = Problem(tokens, hidden, vocab, dtype=dtype, weight_dtype=weight_dtype or dtype, device=device)
    refused = None if device == "cuda" and dtype != "float32" else f"its kernels don't run in {dtype} on {device}"
    chosen = choose_backend(spec.OP, backend, {"triton": refused, "torch": None})
    document = {
        "op": spec.OP,
        "tokens": tokens,
        "hidden": hidden,
        "vocab": vocab,
        "dtype": dtype,
        "weight_dtype": weight_dtype or dtype,
        "device": device,
        "backend": chosen,
        "logits_bytes": {"float32": spec.logits_bytes(problem), dtype: tokens * vocab * DTYPE_BYTES[dtype]},
    }
    return document | (_triton_plans if chosen == "triton" else _torch_plans)(problem, scratch_mib)


# --------------------------------------------------------------------------------------------------- the torch backend


def _torch_plans(problem: Problem, scratch_mib: Sequence[int] | None) -> dict[str, Any]:
    budgets: list[int | None] = [None, *(mib * MIB for mib in scratch_mib or BUDGETS_MIB)]
    return {
        "default_scratch_bytes": {s: spec.default_scratch(problem, s) for s in STRATEGIES},
        "plans": [_torch_row(problem, strategy, budget) for budget in budgets for strategy in STRATEGIES],
    }


def _torch_row(problem: Problem, strategy: str, budget: int | None) -> dict[str, Any]:
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


def _torch_table(document: dict[str, Any], console: Console) -> None:
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


# -------------------------------------------------------------------------------------------------- the Triton backend


def _triton_plans(problem: Problem, scratch_mib: Sequence[int] | None) -> dict[str, Any]:
    rates = triton_spec.RATES[RATES_OF]
    product_ms = spec.flops(problem, "forward") / rates.product / 1e9
    return {
        "default_scratch_bytes": {
            s: max(triton_spec.default_scratch(problem), triton_spec.least_scratch(problem, s))
            for s in TRITON_STRATEGIES
        },
        "rates_of": RATES_OF,
        "three_products_ms": 3 * product_ms,
        "plans": [
            _triton_row(problem, strategy, name, budget)
            for name, budget in _triton_budgets(problem, scratch_mib)
            for strategy in TRITON_STRATEGIES
        ],
        "forward": _triton_forward(problem) | {"product_ms": product_ms},
    }


def _triton_budgets(problem: Problem, scratch_mib: Sequence[int] | None) -> list[tuple[str, int | None]]:
    """Names as the table has them, and bytes; None for the default."""
    if scratch_mib:
        return [("default", None), *((str(mib), mib * MIB) for mib in scratch_mib)]
    sums = 64 * MIB + 4 * problem.tokens * problem.hidden
    eighth = spec.logits_bytes(problem) // 8
    bounds = [(f"{_mib(sums)}*", sums), (f"{_mib(eighth)}**", eighth)]
    bounds += [(str(mib), mib * MIB) for mib in BUDGETS_MIB]
    return [("default", None), *sorted(bounds, key=lambda bound: bound[1]), ("no bound", NO_BOUND)]


def _triton_row(problem: Problem, strategy: str, name: str, budget: int | None) -> dict[str, Any]:
    need = triton_spec.least_scratch(problem, strategy)
    row: dict[str, Any] = {
        "strategy": strategy,
        "budget": name,
        "budget_bytes": None if budget == NO_BOUND else budget,
        "smallest_scratch_bytes": need,
        "fits": budget is None or need <= budget,
    }
    if not row["fits"]:
        return row
    config = triton_spec.plan(problem, strategy, budget)
    again = max(0, problem.tokens - config.held)  # those held are rounded up to whole blocks
    return row | {
        "products": 3 + again / problem.tokens,
        "flops": spec.flops(problem, "stash") + 2 * again * problem.hidden * problem.vocab,
        **asdict(config),
        "again": again,
        "scratch_bytes": triton_spec.scratch_bytes(problem, config),
        "scratch_parts": triton_spec.scratch_parts(problem, config),
        "predicted_ms": triton_spec.predict(problem, config, triton_spec.RATES[RATES_OF]),
    }


def _triton_forward(problem: Problem) -> dict[str, Any]:
    """The plan where no gradient is wanted, in the default budget."""
    alone = replace(problem, grad_hidden=False, grad_weight=False)
    config = triton_spec.plan(alone)
    return {
        "products": 1,
        "token_chunk": config.token_chunk,
        "scratch_bytes": triton_spec.scratch_bytes(alone, config),
        "scratch_parts": triton_spec.scratch_parts(alone, config),
        "predicted_ms": triton_spec.predict(alone, config, triton_spec.RATES[RATES_OF]),
    }


def _triton_table(document: dict[str, Any], console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    for column in ("budget", "strategy", "prods", "in dW", "kept", "again", "chunk", "of dW", "scratch", "ms"):
        table.add_column(column, justify="left" if column == "strategy" else "right", no_wrap=True)
    for row in document["plans"]:
        if row["fits"]:
            in_dw = min(row["stashed"], document["tokens"])
            cells = [
                f"{row['products']:.2f}",
                *map(str, (in_dw, document["tokens"] - in_dw - row["again"], row["again"])),
                str(row["vocab_chunk"]) if row["again"] else "-",
                str(row["weight_chunk"]),
                _mib(row["scratch_bytes"]),
                _ms(row["predicted_ms"]),
            ]
        else:
            cells = ["[dim]needs[/]", *[""] * 5, f"[dim]{_mib(row['smallest_scratch_bytes'])}[/]"]
        strategy = row["strategy"]
        table.add_row(row["budget"] if strategy == TRITON_STRATEGIES[0] else "", strategy, *cells)
    console.print(table)
    forward = document["forward"]
    if any(row["budget"].endswith("*") for row in document["plans"]):
        console.print("*: 64 MiB and 4TH bytes; **: an eighth of the float32 logits.", highlight=False)
    console.print(
        "Budgets and scratch in MiB.  scratch: peak above inputs and returned gradients.\n"
        "prods: matrix products, forward and backward together.\n"
        "in dW, kept, again: tokens whose logits' exponentials wait in the memory of\n"
        "weight's gradient, in scratch, or are computed again.\n"
        "chunk: columns of logits computed again at a time.  of dW: rows of weight's\n"
        "gradient at a time.\n"
        f"ms: predicted for an {document['rates_of']}; three products alone: {_ms(document['three_products_ms'])} ms.\n"
        f"Without gradients: {_mib(forward['scratch_bytes'])} MiB of scratch, {forward['token_chunk']} tokens "
        f"at a time,\n{_ms(forward['predicted_ms'])} ms; the product alone: {_ms(forward['product_ms'])} ms.",
        highlight=False,
        soft_wrap=True,
    )


# ------------------------------------------------------------------------------------------------------------- printing


def show_plan(document: dict[str, Any], console: Console) -> None:
    """Print the document as a table."""
    logits = " or ".join(f"{_mib(size)} MiB in {dtype}" for dtype, size in document["logits_bytes"].items())
    console.print(
        f"{document['op']}: T={document['tokens']} H={document['hidden']} V={document['vocab']} {document['dtype']} "
        f"on {document['device']},\n{document['backend']} backend, forward and both gradients\nfull logits: {logits}",
        highlight=False,
    )
    (_triton_table if document["backend"] == "triton" else _torch_table)(document, console)


def _mib(size: int) -> str:
    """Rounded up, so that what fits in the printed number fits."""
    return str(-(-size // MIB)) if size >= 10 * MIB else f"{-(-10 * size // MIB) / 10:.1f}"


def _ms(ms: float) -> str:
    return f"{ms:.2f}" if ms < 100 else f"{ms:.0f}"
