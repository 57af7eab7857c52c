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
from onchip.ops.linear_jsd import triton_spec as linear_jsd_triton
from onchip.ops.linear_log_probs import spec as linear_log_probs
from onchip.ops.linear_log_probs import triton_spec as linear_log_probs_triton

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
        call = _Call(tokens, hidden, vocab, teacher_hidden or hidden, dtype, weight_dtype or dtype, device)
        return _passes_document(op, call, backend, scratch_mib)
    problem = Problem(tokens, hidden, vocab, dtype=dtype, weight_dtype=weight_dtype or dtype, device=device)
    refused = _triton_refusal(op, dtype, device)
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


def _triton_refusal(op: str, dtype: str, device: str) -> str | None:
    """Why the Triton backend has no plan, or None: float32 logits it reads, but has no products of float32."""
    if device == "cuda" and (dtype != "float32" or op == cross_entropy.OP):
        return None
    return f"its kernels don't run in {dtype} on {device}"


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


# ------------------------------------------------------------------------------------------------------ the other ops


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
class _Plan:
    """How one pass is run: the sizes of its chunks by name, and the scratch's parts in bytes.

    `again` are the tokens whose logits are computed a second time; None where a plan can't choose that.
    """

    chunk: dict[str, int]
    scratch_parts: dict[str, int]
    again: int | None = None


@dataclass(frozen=True)
class _Pass:
    """One way to run an op: how many matrix products it has, how many more where all tokens' logits are computed
    again, and its plan for a budget, or ValueError where that is too small."""

    name: str
    products: int
    plan: Callable[[int | None], _Plan]
    products_again: int = 0


def _cross_entropy_passes(call: _Call, *, triton: bool = False) -> list[_Pass]:
    def plan(budget: int | None) -> _Plan:
        p = cross_entropy.Problem(call.tokens, call.vocab, call.dtype, call.device, triton=triton)
        rows = cross_entropy.plan(p, budget)
        return _Plan({"tokens": rows, "vocab": call.vocab}, cross_entropy.scratch_parts(p, rows))

    return [_Pass("forward, and backward", 0, plan)]


def _log_probs_problem(call: _Call, *, entropy: bool, grad: bool = True) -> linear_log_probs.Problem:
    return linear_log_probs.Problem(
        call.tokens,
        call.hidden,
        call.vocab,
        dtype=call.dtype,
        weight_dtype=call.weight_dtype,
        device=call.device,
        entropy=entropy,
        grad_hidden=grad,
        grad_weight=grad,
    )


def _log_probs_passes(call: _Call) -> list[_Pass]:
    def plan(budget: int | None, strategy: str, entropy: bool) -> _Plan:
        p = _log_probs_problem(call, entropy=entropy)
        linear_log_probs.require_scratch(p, budget)
        config = linear_log_probs.plan(p, strategy, budget)
        sizes = {"tokens": config.token_chunk, "vocab": config.vocab_chunk}
        return _Plan(sizes, linear_log_probs.scratch_parts(p, config))

    ways = [("forward", "forward", 1), ("backward", "recompute", 3)]
    return [
        _Pass(f"{name}{', entropy' if entropy else ''}", n, partial(plan, strategy=strategy, entropy=entropy))
        for entropy in (False, True)
        for name, strategy, n in ways
    ]


def _log_probs_triton_passes(call: _Call) -> list[_Pass]:
    def plan(budget: int | None, entropy: bool, grad: bool) -> _Plan:
        p = _log_probs_problem(call, entropy=entropy, grad=grad)
        config = linear_log_probs_triton.plan(p, budget)
        parts = linear_log_probs_triton.scratch_parts(p, config)
        return _triton_plan(call, config, config.held, parts, grad)

    return [
        _Pass(f"{name}{', entropy' if entropy else ''}", n, partial(plan, entropy=entropy, grad=grad), int(grad))
        for entropy in (False, True)
        for name, n, grad in (("forward", 1, False), ("both passes", 3, True))
    ]


def _jsd_problem(call: _Call, *, grad: bool, stash: bool) -> linear_jsd.Problem:
    dtypes = (call.dtype, call.dtype, call.weight_dtype)
    student = linear_jsd.Head(call.hidden, call.vocab, *dtypes, grad, grad)
    teacher = linear_jsd.Head(call.teacher_hidden, call.vocab, *dtypes)
    return linear_jsd.Problem(call.tokens, call.vocab, student, teacher, device=call.device, stash=stash)


def _jsd_passes(call: _Call) -> list[_Pass]:
    def plan(budget: int | None, grad: bool) -> _Plan:
        p = _jsd_problem(call, grad=grad, stash=grad)
        chunk = linear_jsd.plan(p, budget)
        return _Plan({"tokens": chunk, "vocab": call.vocab}, linear_jsd.scratch_parts(p, chunk))

    return [
        _Pass("forward alone", 2, partial(plan, grad=False)),
        _Pass("forward with gradients", 4, partial(plan, grad=True)),
    ]


def _jsd_triton_passes(call: _Call) -> list[_Pass]:
    def plan(budget: int | None, grad: bool) -> _Plan:
        p = _jsd_problem(call, grad=grad, stash=False)
        config = linear_jsd_triton.plan(p, budget)
        return _triton_plan(call, config, config.held, linear_jsd_triton.scratch_parts(p, config), grad)

    return [
        _Pass("forward", 2, partial(plan, grad=False)),
        _Pass("both passes", 4, partial(plan, grad=True), products_again=2),
    ]


def _triton_plan(call: _Call, config: Any, held: int, parts: dict[str, int], grad: bool) -> _Plan:
    again = max(0, call.tokens - held) if grad else 0  # those held are rounded up to whole blocks
    sizes = asdict(config)
    return _Plan({"tokens": sizes.pop("token_chunk"), "vocab": call.vocab} | sizes, parts, again)


# By backend, in the order in which backend="auto" tries them.
_PASSES: dict[str, dict[str, Callable[[_Call], list[_Pass]]]] = {
    cross_entropy.OP: {"triton": partial(_cross_entropy_passes, triton=True), "torch": _cross_entropy_passes},
    linear_log_probs.OP: {"triton": _log_probs_triton_passes, "torch": _log_probs_passes},
    linear_jsd.OP: {"triton": _jsd_triton_passes, "torch": _jsd_passes},
}


def _passes_document(op: str, call: _Call, backend: str, scratch_mib: Sequence[int] | None) -> dict[str, Any]:
    """The plans of the backend that was named, or of all that can run with that one first which the op would take."""
    refusals = {
        name: _triton_refusal(op, call.dtype, call.device) if name == "triton" else None for name in _PASSES[op]
    }
    chosen = choose_backend(op, backend, refusals)
    others = [name for name, reason in refusals.items() if backend == "auto" and name != chosen and reason is None]
    budgets: list[int | None] = [None, *(mib * MIB for mib in scratch_mib or BUDGETS_MIB)]
    number = call.tokens * call.vocab * (2 if op == linear_jsd.OP else 1)
    return {
        "op": op,
        **asdict(call),
        "backend": chosen,
        "logits_bytes": {"float32": 4 * number, call.dtype: number * DTYPE_BYTES[call.dtype]},
        "plans": [
            {"backend": name} | _pass_row(one, call, budget)
            for name in (chosen, *others)
            for budget in budgets
            for one in _PASSES[op][name](call)
        ],
    }


def _pass_row(one: _Pass, call: _Call, budget: int | None) -> dict[str, Any]:
    row: dict[str, Any] = {"pass": one.name, "products": one.products, "budget_bytes": budget}
    try:
        plan = one.plan(budget)
    except ValueError as error:
        return row | {"fits": False, "why": str(error)}
    if plan.again is not None:
        row |= {"products": one.products + one.products_again * plan.again / call.tokens, "again": plan.again}
    scratch = sum(plan.scratch_parts.values())
    return row | {"fits": True, "chunk": plan.chunk, "scratch_bytes": scratch, "scratch_parts": plan.scratch_parts}


def _passes_table(document: dict[str, Any], console: Console) -> None:
    by_backend: dict[str, list[dict[str, Any]]] = {}
    for row in document["plans"]:
        by_backend.setdefault(row["backend"], []).append(row)
    # Of plans that compute some logits again: how many tokens', and in what pieces.
    again = {backend for backend, rows in by_backend.items() if any("again" in row for row in rows)}
    for backend, rows in by_backend.items():
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
        sizes = ("tokens", "again", "of V", "of dW") if backend in again else ("chunk",)
        for column in ("budget", "pass", "prods", *sizes, "scratch"):
            table.add_column(column, justify="left" if column == "pass" else "right", no_wrap=True)
        for row in rows:
            budget = "default" if row["budget_bytes"] is None else _mib(row["budget_bytes"])
            table.add_row(budget, row["pass"], *_pass_cells(row, backend in again))
        largest = [row for row in rows if row["budget_bytes"] is None][-1]
        parts = "".join(f"\n  {name}: {_mib(size)}" for name, size in largest["scratch_parts"].items() if size)
        console.print(f"\nbackend {backend!r}:", highlight=False)
        console.print(table)
        console.print(f"scratch in the default budget, {largest['pass']}:{parts}", highlight=False, soft_wrap=True)
    console.print(
        "\nAll sizes in MiB.  scratch: peak above inputs, results and returned gradients.\n"
        "prods: matrix products of the pass.  chunk: tokens x vocab." + (_AGAIN if again else ""),
        highlight=False,
    )


_AGAIN = """
tokens: of a chunk, with all of the vocabulary.  again: tokens whose logits are
computed again in backward, so many columns of V at a time.  of dW: rows of
weight's gradient at a time."""


def _pass_cells(row: dict[str, Any], again: bool) -> list[str]:
    if not row["fits"]:
        return [str(row["products"]), "[dim]too small[/]"]
    chunk, scratch = row["chunk"], _mib(row["scratch_bytes"])
    if not again:
        return [str(row["products"]), f"{chunk['tokens']}x{chunk['vocab']}", scratch]
    columns = str(chunk["vocab_chunk"]) if row["again"] else "-"
    rows = str(chunk["weight_chunk"] or "-")
    return [f"{row['products']:.2f}", str(chunk["tokens"]), str(row["again"]), columns, rows, scratch]


# ------------------------------------------------------------------------------------------------------------- printing


def show_plan(document: dict[str, Any], console: Console) -> None:
    """Print the document as a table."""
    logits = " or ".join(f"{_mib(size)} MiB in {dtype}" for dtype, size in document["logits_bytes"].items())
    sizes = {"T": "tokens", "H": "hidden", "V": "vocab", "teacher's H": "teacher_hidden"}
    if document["op"] != linear_jsd.OP:
        del sizes["teacher's H"]
    shown = " ".join(f"{letter}={document[name]}" for letter, name in sizes.items() if document[name])
    others = {row.get("backend", document["backend"]) for row in document["plans"]} - {document["backend"]}
    console.print(
        f"{document['op']}: {shown} {document['dtype']} on {document['device']},\n{document['backend']} backend"
        f"{' by default' if others else ''}, forward and all gradients\nfull logits: {logits}",
        highlight=False,
    )
    if document["op"] != spec.OP:
        _passes_table(document, console)
    elif document["backend"] == "triton":
        _triton_table(document, console)
    else:
        _torch_table(document, console)


def _mib(size: int) -> str:
    """Rounded up, so that what fits in the printed number fits."""
    return str(-(-size // MIB)) if size >= 10 * MIB else f"{-(-10 * size // MIB) / 10:.1f}"


def _ms(ms: float) -> str:
    return f"{ms:.2f}" if ms < 100 else f"{ms:.0f}"
