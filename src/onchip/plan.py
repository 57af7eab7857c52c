"""`onchip plan`: what an op will cost, from the shapes alone.  Imports no framework."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from onchip.core.backends import choose_backend
from onchip.ops._shared.cases import MODELS
from onchip.ops._shared.spec import DTYPE_BYTES, MIB
from onchip.ops.cross_entropy import spec as cross_entropy
from onchip.ops.linear_cross_entropy import spec, triton_spec
from onchip.ops.linear_cross_entropy.spec import Problem
from onchip.ops.linear_jsd import spec as linear_jsd
from onchip.ops.linear_log_probs import spec as linear_log_probs

BUDGETS_MIB = (64, 256, 1024, 4096, 16384)
STRATEGIES = ("stash", "recompute")
TRITON_STRATEGIES = ("auto", *STRATEGIES)
NO_BOUND = 1 << 62
# The device whose measured rates the predicted times come from.
RATES_OF = "h100"


def plan_document(
    op: str = spec.OP,
    *,
    tokens: int,
    hidden: int | None,
    vocab: int | None,
    teacher_hidden: int | None = None,
    model: str | None,
    dtype: str,
    weight_dtype: str | None,
    device: str,
    backend: str = "auto",
    scratch_mib: Sequence[int] | None,
) -> dict[str, Any]:
    """The plan of a forward and backward with all gradients, for the default budget and some others, as a document.

    Raises:
        ValueError: a size below 1, an unknown model, dtype, device or backend, a backend that can't run it, or too
            little said.
    """
    if model is not None:
        if model not in MODELS:
            raise ValueError(f"no model {model!r}; there is: {', '.join(MODELS)}. Or give --hidden and --vocab")
        hidden, vocab = hidden or MODELS[model][0], vocab or MODELS[model][1]
    if vocab is None or (hidden is None and op != cross_entropy.OP):
        raise ValueError("give --hidden and --vocab, or --model")
    hidden = 0 if op == cross_entropy.OP or hidden is None else hidden  # it has no product
    sizes = {"--tokens": tokens, "--vocab": vocab} | ({} if op == cross_entropy.OP else {"--hidden": hidden})
    for name, size in (sizes | ({} if teacher_hidden is None else {"--teacher-hidden": teacher_hidden})).items():
        if size < 1:
            raise ValueError(f"{name} must be 1 or more; got {size}")
    for name, value in (("--dtype", dtype), ("--weight-dtype", weight_dtype or dtype)):
        if value not in DTYPE_BYTES:
            raise ValueError(f"{name} must be one of {', '.join(DTYPE_BYTES)}; got {value!r}")
    if device not in ("cuda", "cpu"):
        raise ValueError(f"--device must be cuda or cpu; got {device!r}")
    if scratch_mib is not None and any(mib < 1 for mib in scratch_mib):
        raise ValueError(f"--scratch-mib must be 1 or more; got {min(scratch_mib)}")
    if op != spec.OP:
        choose_backend(op, backend, {"torch": None})
        call = _Call(tokens, hidden, vocab, teacher_hidden or hidden, dtype, weight_dtype or dtype, device)
        return _plain_document(op, call, scratch_mib)
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


# --------------------------------------------------------------------------------- the other ops, on the torch backend


@dataclass(frozen=True)
class _Call:
    """What was asked for."""

    tokens: int
    hidden: int
    vocab: int
    teacher_hidden: int
    dtype: str
    weight_dtype: str
    device: str


@dataclass(frozen=True)
class _Pass:
    """One way to run an op: how much it multiplies, and its plan for a budget, or ValueError where that is too small.

    A plan is the sizes of the chunks by name, and the parts of the scratch in bytes.
    """

    name: str
    products: int
    plan: Callable[[int | None], tuple[dict[str, int], dict[str, int]]]


def _cross_entropy_passes(call: _Call) -> list[_Pass]:
    def plan(budget: int | None) -> tuple[dict[str, int], dict[str, int]]:
        p = cross_entropy.Problem(call.tokens, call.vocab, call.dtype, call.device)
        rows = cross_entropy.plan(p, budget)
        return {"tokens": rows, "vocab": call.vocab}, cross_entropy.scratch_parts(p, rows)

    return [_Pass("forward, and backward", 0, plan)]


def _log_probs_passes(call: _Call) -> list[_Pass]:
    def plan(budget: int | None, strategy: str, entropy: bool) -> tuple[dict[str, int], dict[str, int]]:
        p = linear_log_probs.Problem(
            call.tokens,
            call.hidden,
            call.vocab,
            dtype=call.dtype,
            weight_dtype=call.weight_dtype,
            device=call.device,
            entropy=entropy,
        )
        linear_log_probs.require_scratch(p, budget)
        config = linear_log_probs.plan(p, strategy, budget)
        sizes = {"tokens": config.token_chunk, "vocab": config.vocab_chunk}
        return sizes, linear_log_probs.scratch_parts(p, config)

    ways = [("forward", "forward", 1), ("backward", "recompute", 3)]
    return [
        _Pass(f"{name}{', entropy' if entropy else ''}", n, partial(plan, strategy=strategy, entropy=entropy))
        for entropy in (False, True)
        for name, strategy, n in ways
    ]


def _jsd_passes(call: _Call) -> list[_Pass]:
    def plan(budget: int | None, grad: bool) -> tuple[dict[str, int], dict[str, int]]:
        dtypes = (call.dtype, call.dtype, call.weight_dtype)
        student = linear_jsd.Head(call.hidden, call.vocab, *dtypes, grad, grad)
        teacher = linear_jsd.Head(call.teacher_hidden, call.vocab, *dtypes)
        p = linear_jsd.Problem(call.tokens, call.vocab, student, teacher, device=call.device, stash=grad)
        chunk = linear_jsd.plan(p, budget)
        return {"tokens": chunk, "vocab": call.vocab}, linear_jsd.scratch_parts(p, chunk)

    return [
        _Pass("forward alone", 2, partial(plan, grad=False)),
        _Pass("forward with gradients", 4, partial(plan, grad=True)),
    ]


_PASSES: dict[str, Callable[[_Call], list[_Pass]]] = {
    cross_entropy.OP: _cross_entropy_passes,
    linear_log_probs.OP: _log_probs_passes,
    linear_jsd.OP: _jsd_passes,
}


def _plain_document(op: str, call: _Call, scratch_mib: Sequence[int] | None) -> dict[str, Any]:
    budgets: list[int | None] = [None, *(mib * MIB for mib in scratch_mib or BUDGETS_MIB)]
    number = call.tokens * call.vocab * (2 if op == linear_jsd.OP else 1)
    return {
        "op": op,
        **asdict(call),
        "backend": "torch",
        "logits_bytes": {"float32": 4 * number, call.dtype: number * DTYPE_BYTES[call.dtype]},
        "plans": [_plain_row(one, budget) for budget in budgets for one in _PASSES[op](call)],
    }


def _plain_row(one: _Pass, budget: int | None) -> dict[str, Any]:
    row: dict[str, Any] = {"pass": one.name, "products": one.products, "budget_bytes": budget}
    try:
        chunk, parts = one.plan(budget)
    except ValueError as error:
        return row | {"fits": False, "why": str(error)}
    return row | {"fits": True, "chunk": chunk, "scratch_bytes": sum(parts.values()), "scratch_parts": parts}


def _plain_table(document: dict[str, Any], console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("budget", "pass", "prods", "chunk", "scratch"):
        table.add_column(column, justify="left" if column == "pass" else "right", no_wrap=True)
    for row in document["plans"]:
        budget = "default" if row["budget_bytes"] is None else _mib(row["budget_bytes"])
        cells = ["[dim]too small[/]", ""]
        if row["fits"]:
            cells = [f"{row['chunk']['tokens']}x{row['chunk']['vocab']}", _mib(row["scratch_bytes"])]
        table.add_row(budget, row["pass"], str(row["products"]), *cells)
    console.print(table)
    largest = [row for row in document["plans"] if row["budget_bytes"] is None][-1]
    parts = "".join(f"\n  {name}: {_mib(size)}" for name, size in largest["scratch_parts"].items() if size)
    console.print(
        "All sizes in MiB.  prods: matrix products of the pass.  chunk: tokens x vocab.\n"
        "scratch: peak above inputs, results and returned gradients.  Its parts in the\n"
        f"default budget, {largest['pass']}:{parts}",
        highlight=False,
    )


# ------------------------------------------------------------------------------------------------------------- printing


def show_plan(document: dict[str, Any], console: Console) -> None:
    """Print the document as a table."""
    logits = " or ".join(f"{_mib(size)} MiB in {dtype}" for dtype, size in document["logits_bytes"].items())
    sizes = {"T": "tokens", "H": "hidden", "V": "vocab", "teacher's H": "teacher_hidden"}
    if document["op"] != linear_jsd.OP:
        del sizes["teacher's H"]
    shown = " ".join(f"{letter}={document[name]}" for letter, name in sizes.items() if document[name])
    console.print(
        f"{document['op']}: {shown} {document['dtype']} on {document['device']},\n{document['backend']} backend, "
        f"forward and all gradients\nfull logits: {logits}",
        highlight=False,
    )
    if document["op"] != spec.OP:
        _plain_table(document, console)
    elif document["backend"] == "triton":
        _triton_table(document, console)
    else:
        _torch_table(document, console)


def _mib(size: int) -> str:
    """Rounded up, so that what fits in the printed number fits."""
    return str(-(-size // MIB)) if size >= 10 * MIB else f"{-(-10 * size // MIB) / 10:.1f}"


def _ms(ms: float) -> str:
    return f"{ms:.2f}" if ms < 100 else f"{ms:.0f}"
