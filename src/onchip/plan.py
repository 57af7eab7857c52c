"""`onchip plan`: what an op will cost, from the shapes alone.  Imports no framework.

A row is one way to run the op in one budget: of linear_cross_entropy a strategy, of the other ops and of
precision='fp8' a pass.  All rows are made of what a backend's planner says.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from onchip.core.backends import choose_backend
from onchip.core.machine import FRAMEWORKS, choose_framework
from onchip.core.sizes import DTYPE_BYTES, MIB
from onchip.ops.cross_entropy import spec as cross_entropy
from onchip.ops.linear_cross_entropy import spec
from onchip.ops.linear_jsd import memory as jsd_memory
from onchip.ops.linear_jsd import spec as linear_jsd
from onchip.ops.linear_jsd import triton_memory as jsd_triton_memory
from onchip.ops.linear_log_probs import spec as linear_log_probs
from onchip.oracle.cases import MODELS
from onchip.vocab import memory
from onchip.vocab.chunks import Config, Planner
from onchip.vocab.fp8 import memory as fp8_memory
from onchip.vocab.memory import Problem, logits_bytes
from onchip.vocab.mosaic import memory as mosaic_memory
from onchip.vocab.mosaic.memory import MosaicPlan
from onchip.vocab.rows import memory as row_memory
from onchip.vocab.triton import memory as triton_memory
from onchip.vocab.xla import memory as xla_memory

BUDGETS_MIB = (64, 256, 1024, 4096, 16384)
NO_BOUND = 1 << 62
# The device whose measured rates the predicted times come from.
RATES_OF = "h100"


@dataclass(frozen=True)
class Call:
    """What was asked for."""

    framework: str
    tokens: int
    hidden: int
    vocab: int
    teacher_hidden: int
    """Of linear_jsd; of other ops 0."""
    dtype: str
    weight_dtype: str
    device: str
    precision: str
    """Of linear_cross_entropy; of other ops "full"."""

    def problem(self, *, grad: bool = True, **options: Any) -> Problem:
        """That of a linear loss."""
        sizes = {name: getattr(self, name) for name in ("tokens", "hidden", "vocab", "dtype", "weight_dtype", "device")}
        return Problem(**sizes | options, grad_hidden=grad, grad_weight=grad)


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
    framework: str = "torch",
    precision: str = "full",
    scratch_mib: Sequence[int] | None,
) -> dict[str, Any]:
    """The plan of a forward and backward with all gradients, for the default budget and some others, as a document.

    Raises:
        ValueError: a size below 1, an unknown model, dtype, device, framework, precision or backend, a backend that
            can't run it, too little said, or what there is no plan of.
    """
    choose_framework(framework)  # raises for another word
    if framework != "torch" and op != spec.OP:
        raise ValueError(
            f"--framework {framework} is for {spec.OP} alone; leave it out for the plan of {op} in "
            f"{FRAMEWORKS['torch']}"
        )
    if precision not in spec.PRECISIONS:
        raise ValueError(f"--precision must be {' or '.join(spec.PRECISIONS)}; got {precision!r}")
    if precision != "full" and (op != spec.OP or framework != "torch"):
        raise ValueError(f"--precision {precision} is for {spec.OP} in {FRAMEWORKS['torch']} alone; leave it out")
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
    if framework == "jax" and weight_dtype not in (None, dtype):
        raise ValueError(
            f"--weight-dtype is {weight_dtype} and --dtype {dtype}, but in JAX weight has hidden's dtype; leave "
            "--weight-dtype out"
        )
    if device not in ("cuda", "cpu"):
        raise ValueError(f"--device must be cuda or cpu; got {device!r}")
    if scratch_mib is not None and any(mib < 1 for mib in scratch_mib):
        raise ValueError(f"--scratch-mib must be 1 or more; got {min(scratch_mib)}")
    teacher = (teacher_hidden or hidden) if op == linear_jsd.OP else 0
    call = Call(framework, tokens, hidden, vocab, teacher, dtype, weight_dtype or dtype, device, precision)
    refusals = _refusals(op, call)
    chosen = choose_backend(op, backend, refusals)
    number = tokens * vocab * (2 if op == linear_jsd.OP else 1)
    document = {
        "op": op,
        **asdict(call),
        "backend": chosen,
        "logits_bytes": {"float32": 4 * number, dtype: number * DTYPE_BYTES[dtype]},
    }
    if op == spec.OP and precision == "full":
        return document | _strategies(call, chosen, scratch_mib)
    usable = [name for name, reason in refusals.items() if reason is None]
    others = [name for name in usable if backend == "auto" and name != chosen]
    ways = PASSES[op] if precision == "full" else FP8_PASSES
    rows = (
        {"backend": name} | _pass_row(way, call, budget)
        for name in [chosen, *others]
        for _, budget in _budgets(scratch_mib)
        for way in ways[name](call)
    )
    return document | {"plans": list(rows)}


def _refusals(op: str, call: Call) -> dict[str, str | None]:
    """Why each backend has no plan, or None; in the order in which backend="auto" tries them."""
    if call.framework == "jax":
        platform = "gpu" if call.device == "cuda" else call.device
        return {"mosaic_gpu": mosaic_memory.refusal(call.problem(), platform, weight_layout="vh"), "xla": None}
    # The Triton backend reads and quantises float32, but has no products of it.
    runs = call.device == "cuda" and (call.dtype != "float32" or op == cross_entropy.OP or call.precision == "fp8")
    return {"triton": None if runs else f"its kernels don't run in {call.dtype} on {call.device}", "torch": None}


def _budgets(scratch_mib: Sequence[int] | None) -> list[tuple[str, int | None]]:
    """As tables say it, and in bytes: the default one, which is None, and those asked for or else `BUDGETS_MIB`."""
    return [("default", None), *((str(mib), mib * MIB) for mib in scratch_mib or BUDGETS_MIB)]


def in_mib(size: int) -> str:
    """Rounded up, so that what fits in the printed number fits."""
    return str(-(-size // MIB)) if size >= 10 * MIB else f"{-(-10 * size // MIB) / 10:.1f}"


# ------------------------------------------------------------------------------------------- strategies and budgets

# Backends of the framework's matrix products, and those whose kernels keep exponentials as far as there is room.
_PLANNERS: dict[str, Planner[Any]] = {
    "torch": memory.PLANNER,
    "xla": xla_memory.PLANNER,
    "triton": triton_memory.PLANNER,
    "mosaic_gpu": mosaic_memory.PLANNER,
}
# TFLOP/s of the products of those kernels.
_PRODUCT = {"triton": triton_memory.RATES[RATES_OF].product, "mosaic_gpu": mosaic_memory.PRODUCT}
_CHOICES = {"torch": memory.choose_strategy, "xla": xla_memory.choose_strategy}


def _strategies(call: Call, backend: str, scratch_mib: Sequence[int] | None) -> dict[str, Any]:
    """The part of the document that is the backend's."""
    planner, p = _PLANNERS[backend], call.problem()
    kernels = backend in _PRODUCT
    strategies = spec.STRATEGIES if kernels else spec.STRATEGIES[1:]
    budgets = _bounds(p) if kernels and not scratch_mib else _budgets(scratch_mib)
    rows = []
    for name, budget in budgets:
        for strategy in strategies:
            need = planner.least(p, strategy)
            fits = need <= (planner.default(p, strategy) if budget is None else budget)
            row = {"strategy": strategy, "budget_bytes": None if budget == NO_BOUND else budget}
            row |= {"smallest_scratch_bytes": need, "fits": fits}
            make = _kernel_row if kernels else _product_row
            rows.append(row | ({"budget": name} if kernels else {}) | make(backend, p, strategy, budget, fits=fits))
    document = {"default_scratch_bytes": {s: planner.default(p, s) for s in strategies}, "plans": rows}
    if not kernels:
        return document
    product_ms = flops(p, "forward") / _PRODUCT[backend] / 1e9
    alone = replace(p, grad_hidden=False, grad_weight=False)
    forward = {"products": 1} | _planned(planner, alone, c := planner.plan(alone, "auto")) | {"product_ms": product_ms}
    forward |= {"token_chunk": c.token_chunk, "predicted_ms": planner.cost(alone, c)}
    return document | {"rates_of": RATES_OF, "three_products_ms": 3 * product_ms, "forward": forward}


def _bounds(p: Problem) -> list[tuple[str, int | None]]:
    """The budgets that plans are shown for, and two that grow with the problem."""
    sums = 64 * MIB + 4 * p.tokens * p.hidden
    eighth = logits_bytes(p) // 8
    bounds = [(f"{in_mib(sums)}*", sums), (f"{in_mib(eighth)}**", eighth)]
    bounds += [(str(mib), mib * MIB) for mib in BUDGETS_MIB]
    return [("default", None), *sorted(bounds, key=lambda bound: bound[1]), ("no bound", NO_BOUND)]


def _planned(planner: Planner[Any], p: Any, c: Any) -> dict[str, Any]:
    return {"scratch_bytes": planner.scratch_bytes(p, c), "scratch_parts": planner.parts(p, c)}


def products(p: Problem, strategy: str) -> int:
    """Matrix products of 2 T V H floating-point operations each, over forward and backward."""
    logits = 2 if strategy == "recompute" else 1
    return logits + (int(p.grad_hidden) + int(p.grad_weight) if strategy != "forward" else 0)


def flops(p: Problem, strategy: str) -> int:
    """Floating-point operations of the matrix products over forward and backward."""
    return 2 * p.tokens * p.hidden * p.vocab * products(p, strategy)


def _product_row(backend: str, p: Problem, strategy: str, budget: int | None, *, fits: bool) -> dict[str, Any]:
    row = {"products": products(p, strategy), "flops": flops(p, strategy), "auto": False}
    if not fits:
        return row
    c: Config = _PLANNERS[backend].plan(p, strategy, budget)
    chunks = -(-p.tokens // c.token_chunk) * (-(-p.vocab // c.vocab_chunk))
    row |= {"auto": _CHOICES[backend](p, "auto", budget) == strategy}
    row |= {"token_chunk": c.token_chunk, "vocab_chunk": c.vocab_chunk, "chunks": chunks}
    # XLA decides what it writes.
    written = {"written_per_chunk": written_per_chunk(p, c)} if backend == "torch" else {}
    return row | _planned(_PLANNERS[backend], p, c) | written


def written_per_chunk(p: Problem, c: Config) -> dict[str, int]:
    """Bytes that each chunk writes to device memory in making the gradients: the tile, and what is accumulated."""
    element = 4 if p.device == "cpu" else DTYPE_BYTES[p.dtype]
    columns = p.vocab if c.strategy == "stash" else c.vocab_chunk
    written = {"logits": 4 * c.token_chunk * columns}
    if element != 4:
        written["their gradient"] = element * c.token_chunk * columns
    return written | {"hidden gradient": 4 * c.token_chunk * p.hidden, "weight gradient": 4 * columns * p.hidden}


def _kernel_row(backend: str, p: Problem, strategy: str, budget: int | None, *, fits: bool) -> dict[str, Any]:
    if not fits:
        return {}
    planner = _PLANNERS[backend]
    c = planner.plan(p, strategy, budget)
    kept = c.kept if isinstance(c, MosaicPlan) else c.held
    again = max(0, p.tokens - kept)  # those kept are rounded up to whole blocks
    return {
        "products": 3 + again / p.tokens,
        "flops": flops(p, "stash") + 2 * again * p.hidden * p.vocab,
        **_kernel_sizes(c),
        "again": again,
        **_planned(planner, p, c),
        "predicted_ms": planner.cost(p, c),
    }


def _kernel_sizes(c: Any) -> dict[str, Any]:
    """Of a plan, by the names that Triton's have; Mosaic makes logits again for several chunks of dW at once."""
    if not isinstance(c, MosaicPlan):
        return asdict(c)
    sizes = {"token_chunk": c.token_chunk, "vocab_chunk": c.recompute_chunks * c.chunk, "weight_chunk": c.chunk}
    return sizes | {"stashed": c.kept_in_gradient, "overflow": c.kept_in_scratch, "halves": c.halves}


# ------------------------------------------------------------------------------------------------ passes and budgets


@dataclass(frozen=True)
class _Pass:
    """One pass of an op: its matrix products, how many more where all tokens' logits are computed again, its plan for a
    budget (ValueError where that is too small), and the plan's scratch."""

    name: str
    products: int
    plan: Callable[[int | None], Any]
    parts: Callable[[Any], dict[str, int]]
    products_again: int = 0
    grad: bool = True


def _planned_pass(name: str, products: int, planner: Planner[Any], p: Any, strategy: str = "", **more: Any) -> _Pass:
    return _Pass(name, products, partial(planner.plan, p, strategy), partial(planner.parts, p), **more)


def _cross_entropy_passes(call: Call, *, triton: bool = False) -> list[_Pass]:
    p = row_memory.Problem(call.tokens, call.vocab, call.dtype, call.device, triton=triton)
    return [_planned_pass("forward, and backward", 0, row_memory.PLANNER, p)]


def _log_probs_passes(call: Call, *, triton: bool = False) -> list[_Pass]:
    made = []
    for stats in (False, True):
        problem = partial(call.problem, stats=stats, op=linear_log_probs.OP, ids=1)
        entropy = ", entropy" if stats else ""
        if triton:
            for name, n, grad in (("forward", 1, False), ("both passes", 3, True)):
                p, more = problem(grad=grad), {"products_again": int(grad), "grad": grad}
                made.append(_planned_pass(f"{name}{entropy}", n, triton_memory.PLANNER, p, "auto", **more))
        else:
            p = problem()
            made.append(_Pass(f"forward{entropy}", 1, partial(_log_probs_forward, p), partial(memory.scratch_parts, p)))
            made.append(_planned_pass(f"backward{entropy}", 3, memory.PLANNER, p, "recompute"))
    return made


def _log_probs_forward(p: Problem, budget: int | None) -> Config:
    memory.PLANNER.require(p, "recompute", budget)  # forward refuses what backward couldn't run in
    return memory.plan(p, "forward", budget)


def _jsd_passes(call: Call, *, triton: bool = False) -> list[_Pass]:
    dtypes = (call.dtype, call.dtype, call.weight_dtype)
    names = ("forward", "both passes") if triton else ("forward alone", "forward with gradients")
    planner: Planner[Any] = jsd_triton_memory.PLANNER if triton else jsd_memory.PLANNER
    made = []
    for name, n, grad in zip(names, (2, 4), (False, True), strict=True):
        student = jsd_memory.Head(call.hidden, call.vocab, *dtypes, grad, grad)
        teacher = jsd_memory.Head(call.teacher_hidden, call.vocab, *dtypes)
        stash = grad and not triton
        p = jsd_memory.Problem(call.tokens, call.vocab, student, teacher, device=call.device, stash=stash)
        made.append(_planned_pass(name, n, planner, p, products_again=2 * int(grad and triton), grad=grad))
    return made


def _fp8_passes(call: Call, *, device: str) -> list[_Pass]:
    problems = (call.problem(device=device, grad=False), call.problem(device=device))
    return [
        _Pass(name, n, partial(fp8_memory.plan, p), partial(fp8_memory.scratch_parts, p))
        for name, n, p in zip(("forward", "both passes"), (1, 3), problems, strict=True)
    ]


# By backend, in the order in which backend="auto" tries them.
PASSES: dict[str, dict[str, Callable[[Call], list[_Pass]]]] = {
    op: {"triton": partial(passes, triton=True), "torch": passes}
    for op, passes in (
        (cross_entropy.OP, _cross_entropy_passes),
        (linear_log_probs.OP, _log_probs_passes),
        (linear_jsd.OP, _jsd_passes),
    )
}
# Of linear_cross_entropy with precision='fp8'.  What the framework's own products take is what they take on the CPU.
FP8_PASSES: dict[str, Callable[[Call], list[_Pass]]] = {
    "triton": partial(_fp8_passes, device="cuda"),
    "torch": partial(_fp8_passes, device="cpu"),
}


def _pass_row(way: _Pass, call: Call, budget: int | None) -> dict[str, Any]:
    row: dict[str, Any] = {"pass": way.name, "products": way.products, "budget_bytes": budget}
    try:
        c = way.plan(budget)
    except ValueError as error:
        return row | {"fits": False, "why": str(error)}
    sizes = {"token_chunk": c} if isinstance(c, int) else asdict(c)
    chunk = {"tokens": sizes.pop("token_chunk"), "vocab": call.vocab}
    if isinstance(c, Config):
        chunk["vocab"] = c.vocab_chunk
    elif sizes:  # kernels keep what the gradients need of some tokens, and compute the others' logits again
        again = max(0, call.tokens - c.held) if way.grad else 0
        row |= {"products": way.products + way.products_again * again / call.tokens, "again": again}
        chunk |= sizes
    parts = way.parts(c)
    return row | {"fits": True, "chunk": chunk, "scratch_bytes": sum(parts.values()), "scratch_parts": parts}


# ------------------------------------------------------------------------------------------------------------ tables

_Cells = Callable[[Mapping[str, Any]], Iterable[str]]


def show_plan(document: Mapping[str, Any], console: Console) -> None:
    """Print the document as tables."""
    rows = document["plans"]
    logits = " or ".join(f"{in_mib(size)} MiB in {dtype}" for dtype, size in document["logits_bytes"].items())
    sizes = {"T": "tokens", "H": "hidden", "V": "vocab", "teacher's H": "teacher_hidden"}
    shown = " ".join(f"{letter}={document[name]}" for letter, name in sizes.items() if document[name])
    others = {row.get("backend", document["backend"]) for row in rows} - {document["backend"]}
    backend = f"{document['backend']} backend in {FRAMEWORKS[document['framework']]}{' by default' if others else ''}"
    precision = "" if document["precision"] == "full" else f", precision {document['precision']}"
    console.print(
        f"{document['op']}: {shown} {document['dtype']} on {document['device']},\n"
        f"{backend}{precision}, forward and all gradients\nfull logits: {logits}",
        highlight=False,
    )
    if "pass" in rows[0]:
        _show_passes(rows, console)
    elif "forward" in document:
        _show_kernels(document, console)
    else:
        _show_products(rows, console)


def _show(
    console: Console, columns: Sequence[str], rows: Iterable[Mapping[str, Any]], cells: _Cells, **style: Any
) -> None:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), **style)
    for column in columns:
        left = column in ("strategy", "pass") or (column == "chunk" and "chunks" in columns)
        table.add_column(column, justify="left" if left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*cells(row))
    console.print(table)


def _needs(row: Mapping[str, Any], columns: int) -> list[str]:
    """The cells, up to that of the scratch, of a budget that is too small."""
    return ["[dim]needs[/]", *[""] * (columns - 2), f"[dim]{in_mib(row['smallest_scratch_bytes'])}[/]"]


def _show_products(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    written = any("written_per_chunk" in row for row in rows)

    def cells(row: Mapping[str, Any]) -> list[str]:
        name = f"[bold]{row['strategy']} *[/]" if row["auto"] else row["strategy"]
        first = [_budget(row), name, str(row["products"])]
        if not row["fits"]:
            return first + _needs(row, columns=3)
        first += [f"{row['token_chunk']}x{row['vocab_chunk']}", str(row["chunks"]), in_mib(row["scratch_bytes"])]
        w = row.get("written_per_chunk")
        if w is None:
            return first
        tile = w["logits"] + w.get("their gradient", 0)
        return first + [in_mib(size) for size in (tile, w["hidden gradient"], w["weight gradient"])]

    columns = ("budget", "strategy", "prods", "chunk", "chunks", "scratch", *(("tile", "dH", "dW") if written else ()))
    _show(console, columns, rows, cells)
    console.print(
        "All sizes in MiB; * is what strategy='auto' takes.\n"
        "prods: matrix products, forward and backward together.  chunk: tokens x vocab.\n"
        "scratch: peak above inputs and returned gradients." + (_WRITTEN if written else ""),
        highlight=False,
    )


_WRITTEN = """
tile, dH, dW: written per chunk, of logits and their gradient, and of the two
gradients of hidden and weight."""


def _budget(row: Mapping[str, Any]) -> str:
    return "default" if row["budget_bytes"] is None else in_mib(row["budget_bytes"])


def _show_kernels(document: Mapping[str, Any], console: Console) -> None:
    tokens, forward = document["tokens"], document["forward"]

    def cells(row: Mapping[str, Any]) -> list[str]:
        first = [row["budget"] if row["strategy"] == spec.STRATEGIES[0] else "", row["strategy"]]
        if not row["fits"]:
            return first + _needs(row, columns=7)
        in_dw, again = min(row["stashed"], tokens), row["again"]
        first += [f"{row['products']:.2f}", *map(str, (in_dw, tokens - in_dw - again, again))]
        first += [str(row["vocab_chunk"]) if again else "-", str(row["weight_chunk"])]
        return [*first, in_mib(row["scratch_bytes"]), _ms(row["predicted_ms"])]

    columns = ("budget", "strategy", "prods", "in dW", "kept", "again", "chunk", "of dW", "scratch", "ms")
    _show(console, columns, document["plans"], cells, show_edge=False, pad_edge=False)
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


def _ms(ms: float) -> str:
    return f"{ms:.2f}" if ms < 100 else f"{ms:.0f}"


def _show_passes(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    any_again = False
    for backend in dict.fromkeys(row["backend"] for row in rows):
        own = [row for row in rows if row["backend"] == backend]
        # Of plans that compute some logits again: how many tokens', and in what pieces.
        again = any("again" in row for row in own)
        any_again |= again

        def cells(row: Mapping[str, Any], again: bool = again) -> list[str]:
            first = [_budget(row), row["pass"]]
            if not row["fits"]:
                return [*first, str(row["products"]), "[dim]too small[/]"]
            chunk, scratch = row["chunk"], in_mib(row["scratch_bytes"])
            if not again:
                return [*first, str(row["products"]), f"{chunk['tokens']}x{chunk['vocab']}", scratch]
            columns, of_weight = str(chunk["vocab_chunk"]) if row["again"] else "-", str(chunk["weight_chunk"] or "-")
            return [
                *first,
                f"{row['products']:.2f}",
                str(chunk["tokens"]),
                str(row["again"]),
                columns,
                of_weight,
                scratch,
            ]

        largest = [row for row in own if row["budget_bytes"] is None][-1]
        parts = "".join(f"\n  {name}: {in_mib(size)}" for name, size in largest["scratch_parts"].items() if size)
        sizes = ("tokens", "again", "of V", "of dW") if again else ("chunk",)
        console.print(f"\nbackend {backend!r}:", highlight=False)
        _show(console, ("budget", "pass", "prods", *sizes, "scratch"), own, cells, show_edge=False, pad_edge=False)
        console.print(f"scratch in the default budget, {largest['pass']}:{parts}", highlight=False, soft_wrap=True)
    console.print(
        "\nAll sizes in MiB.  scratch: peak above inputs, results and returned gradients.\n"
        "prods: matrix products of the pass.  chunk: tokens x vocab." + (_AGAIN if any_again else ""),
        highlight=False,
    )


_AGAIN = """
tokens: of a chunk, with all of the vocabulary.  again: tokens whose logits are
computed again in backward, so many columns of V at a time.  of dW: rows of
weight's gradient at a time."""
