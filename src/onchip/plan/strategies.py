"""What each strategy of linear_cross_entropy costs in each budget."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from onchip.core.sizes import MIB
from onchip.ops.linear_cross_entropy import spec
from onchip.plan.passes import Call
from onchip.plan.sizes import BUDGETS_MIB, budget_in_mib, budgets, in_mib
from onchip.vocab import memory
from onchip.vocab.memory import Problem
from onchip.vocab.mosaic import memory as mosaic_spec
from onchip.vocab.triton import memory as triton_spec
from onchip.vocab.xla import memory as jax_spec

NO_BOUND = 1 << 62
# The device whose measured rates the predicted times come from.
RATES_OF = "h100"


def problem_of(call: Call) -> Problem:
    """The problem of a call whose gradients are all wanted."""
    sizes = (call.tokens, call.hidden, call.vocab)
    return Problem(*sizes, dtype=call.dtype, weight_dtype=call.weight_dtype, device=call.device)


def plans(call: Call, backend: str, scratch_mib: Sequence[int] | None) -> dict[str, Any]:
    """The part of the document that is the backend's."""
    problem = problem_of(call)
    if backend in _KERNELS:
        return _kernel_plans(_KERNELS[backend], problem, scratch_mib)
    return _product_plans(_PRODUCTS[backend], problem, scratch_mib)


def show(document: dict[str, Any], console: Console) -> None:
    """Print the backend's table."""
    (_kernel_table if document["backend"] in _KERNELS else _product_table)(document, console)


# -------------------------------------------------------------------------- backends of the framework's matrix products

_PRODUCTS: dict[str, ModuleType] = {"torch": memory, "xla": jax_spec}


def _product_plans(planner: ModuleType, problem: Problem, scratch_mib: Sequence[int] | None) -> dict[str, Any]:
    strategies = ("stash", "recompute")
    return {
        "default_scratch_bytes": {s: planner.default_scratch(problem, s) for s in strategies},
        "plans": [_product_row(planner, problem, s, budget) for budget in budgets(scratch_mib) for s in strategies],
    }


def _product_row(planner: ModuleType, problem: Problem, strategy: str, budget: int | None) -> dict[str, Any]:
    need = planner.scratch_at_least(problem, strategy)
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
    config = planner.plan(problem, strategy, budget)
    row["auto"] = planner.choose_strategy(problem, "auto", budget) == strategy
    row |= {
        "token_chunk": config.token_chunk,
        "vocab_chunk": config.vocab_chunk,
        "chunks": -(-problem.tokens // config.token_chunk) * (-(-problem.vocab // config.vocab_chunk)),
        "scratch_bytes": planner.scratch_bytes(problem, config),
        "scratch_parts": planner.scratch_parts(problem, config),
    }
    # XLA decides what it writes.
    return row | ({"written_per_chunk": spec.written_per_chunk(problem, config)} if planner is memory else {})


def _product_table(document: dict[str, Any], console: Console) -> None:
    written = any("written_per_chunk" in row for row in document["plans"])
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    columns = ("budget", "strategy", "prods", "chunk", "chunks", "scratch", *(("tile", "dH", "dW") if written else ()))
    for column in columns:
        table.add_column(column, justify="left" if column in ("strategy", "chunk") else "right", no_wrap=True)
    for row in document["plans"]:
        name = f"[bold]{row['strategy']} *[/]" if row["auto"] else row["strategy"]
        cells = _product_cells(row) if row["fits"] else _needs(row, columns=3)
        table.add_row(budget_in_mib(row["budget_bytes"]), name, str(row["products"]), *cells)
    console.print(table)
    console.print(
        "All sizes in MiB; * is what strategy='auto' takes.\n"
        "prods: matrix products, forward and backward together.  chunk: tokens x vocab.\n"
        "scratch: peak above inputs and returned gradients." + (_WRITTEN if written else ""),
        highlight=False,
    )


_WRITTEN = """
tile, dH, dW: written per chunk, of logits and their gradient, and of the two
gradients of hidden and weight."""


def _product_cells(row: dict[str, Any]) -> list[str]:
    cells = [f"{row['token_chunk']}x{row['vocab_chunk']}", str(row["chunks"]), in_mib(row["scratch_bytes"])]
    written = row.get("written_per_chunk")
    if written is None:
        return cells
    tile = written["logits"] + written.get("their gradient", 0)
    return cells + [in_mib(size) for size in (tile, written["hidden gradient"], written["weight gradient"])]


def _needs(row: dict[str, Any], columns: int) -> list[str]:
    """The cells, up to that of the scratch, of a budget that is too small."""
    return ["[dim]needs[/]", *[""] * (columns - 2), f"[dim]{in_mib(row['smallest_scratch_bytes'])}[/]"]


# -------------------------------------------------------------------------------------- backends that keep exponentials


@dataclass(frozen=True)
class _Kernels:
    """The planner of a backend that keeps exponentials as far as there is room, and what is its own about it."""

    planner: ModuleType
    smallest: Callable[[Problem, str, int], int]
    """Bytes that a strategy needs; the budget may have a say in it."""
    sizes: Callable[[Any], dict[str, Any]]
    """Of a plan, by the names that a `TritonConfig` has."""
    predict: Callable[[Problem, Any], float]
    product: float
    """TFLOP/s of the products."""


def _mosaic_sizes(config: mosaic_spec.MosaicPlan) -> dict[str, Any]:
    """Logits are made again for several chunks of the weight's gradient at once."""
    return {
        "token_chunk": config.token_chunk,
        "vocab_chunk": config.again_chunks * config.chunk,
        "weight_chunk": config.chunk,
        "stashed": config.kept,
        "overflow": config.overflow,
        "halves": config.halves,
    }


_RATES = triton_spec.RATES[RATES_OF]
_KERNELS = {
    "triton": _Kernels(
        triton_spec,
        lambda problem, strategy, _: triton_spec.least_scratch(problem, strategy),
        asdict,
        partial(triton_spec.predict, rates=_RATES),
        _RATES.product,
    ),
    "mosaic_gpu": _Kernels(
        mosaic_spec, mosaic_spec.least_scratch, _mosaic_sizes, mosaic_spec.predict, mosaic_spec.PRODUCT
    ),
}


def _kernel_plans(kernels: _Kernels, problem: Problem, scratch_mib: Sequence[int] | None) -> dict[str, Any]:
    product_ms = spec.flops(problem, "forward") / kernels.product / 1e9
    return {
        "default_scratch_bytes": {s: kernels.planner.default_scratch(problem, s) for s in spec.STRATEGIES},
        "rates_of": RATES_OF,
        "three_products_ms": 3 * product_ms,
        "plans": [
            _kernel_row(kernels, problem, strategy, name, budget)
            for name, budget in _bounds(problem, scratch_mib)
            for strategy in spec.STRATEGIES
        ],
        "forward": _forward(kernels, problem) | {"product_ms": product_ms},
    }


def _bounds(problem: Problem, scratch_mib: Sequence[int] | None) -> list[tuple[str, int | None]]:
    """Names as the table has them, and bytes; None for the default."""
    if scratch_mib:
        return [("default", None), *((str(mib), mib * MIB) for mib in scratch_mib)]
    sums = 64 * MIB + 4 * problem.tokens * problem.hidden
    eighth = memory.logits_bytes(problem) // 8
    bounds = [(f"{in_mib(sums)}*", sums), (f"{in_mib(eighth)}**", eighth)]
    bounds += [(str(mib), mib * MIB) for mib in BUDGETS_MIB]
    return [("default", None), *sorted(bounds, key=lambda bound: bound[1]), ("no bound", NO_BOUND)]


def _kernel_row(kernels: _Kernels, problem: Problem, strategy: str, name: str, budget: int | None) -> dict[str, Any]:
    planner = kernels.planner
    bound = planner.default_scratch(problem, strategy) if budget is None else budget
    need = kernels.smallest(problem, strategy, bound)
    row: dict[str, Any] = {
        "strategy": strategy,
        "budget": name,
        "budget_bytes": None if budget == NO_BOUND else budget,
        "smallest_scratch_bytes": need,
        "fits": need <= bound,
    }
    if not row["fits"]:
        return row
    config = planner.plan(problem, strategy, budget)
    again = max(0, problem.tokens - config.held)  # those held are rounded up to whole blocks
    return row | {
        "products": 3 + again / problem.tokens,
        "flops": spec.flops(problem, "stash") + 2 * again * problem.hidden * problem.vocab,
        **kernels.sizes(config),
        "again": again,
        "scratch_bytes": planner.scratch_bytes(problem, config),
        "scratch_parts": planner.scratch_parts(problem, config),
        "predicted_ms": kernels.predict(problem, config),
    }


def _forward(kernels: _Kernels, problem: Problem) -> dict[str, Any]:
    """The plan where no gradient is wanted, in the default budget."""
    alone = replace(problem, grad_hidden=False, grad_weight=False)
    config = kernels.planner.plan(alone, "auto")
    return {
        "products": 1,
        "token_chunk": config.token_chunk,
        "scratch_bytes": kernels.planner.scratch_bytes(alone, config),
        "scratch_parts": kernels.planner.scratch_parts(alone, config),
        "predicted_ms": kernels.predict(alone, config),
    }


def _kernel_table(document: dict[str, Any], console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    for column in ("budget", "strategy", "prods", "in dW", "kept", "again", "chunk", "of dW", "scratch", "ms"):
        table.add_column(column, justify="left" if column == "strategy" else "right", no_wrap=True)
    for row in document["plans"]:
        strategy = row["strategy"]
        cells = _kernel_cells(row, document["tokens"]) if row["fits"] else _needs(row, columns=7)
        table.add_row(row["budget"] if strategy == spec.STRATEGIES[0] else "", strategy, *cells)
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
        f"Without gradients: {in_mib(forward['scratch_bytes'])} MiB of scratch, {forward['token_chunk']} tokens "
        f"at a time,\n{_ms(forward['predicted_ms'])} ms; the product alone: {_ms(forward['product_ms'])} ms.",
        highlight=False,
        soft_wrap=True,
    )


def _kernel_cells(row: dict[str, Any], tokens: int) -> list[str]:
    in_dw = min(row["stashed"], tokens)
    return [
        f"{row['products']:.2f}",
        *map(str, (in_dw, tokens - in_dw - row["again"], row["again"])),
        str(row["vocab_chunk"]) if row["again"] else "-",
        str(row["weight_chunk"]),
        in_mib(row["scratch_bytes"]),
        _ms(row["predicted_ms"]),
    ]


def _ms(ms: float) -> str:
    return f"{ms:.2f}" if ms < 100 else f"{ms:.0f}"
