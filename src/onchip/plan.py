"""`onchip plan`: what an op will cost, from the shapes alone.  Imports no framework.

A row is one way to run the op in one budget: for linear_cross_entropy a strategy, for the other ops and for
precision='fp8' a pass.  All rows are made of what a backend's planner says.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Annotated, Any, NamedTuple

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from onchip.core.backends import choose_backend
from onchip.core.machine import FRAMEWORKS, choose_framework
from onchip.core.names import known_op
from onchip.core.sizes import DTYPE_BYTES, MIB
from onchip.frontend.options import require_positive_int, scratch_in_bytes
from onchip.ops import LOSSES
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


class Way(NamedTuple):
    """One way to run an op: a strategy of linear_cross_entropy, or a pass of the others."""

    name: str
    products: int
    """Matrix products of tokens x hidden x vocab."""
    planner: Planner[Any]
    problem: Any
    plan: Callable[[int | None], Any]
    """The plan in a budget; raises ValueError where it is too small."""
    products_again: int = 0
    """How many more there are where the logits of all tokens are recomputed."""


def run_plan(
    op: Annotated[str, typer.Argument(help=f"One of: {', '.join(LOSSES)}.")] = LOSSES[0],
    *,
    tokens: Annotated[int, typer.Option(help="Tokens in a batch: all leading dimensions multiplied.")],
    hidden: Annotated[int | None, typer.Option(help="Hidden size.")] = None,
    vocab: Annotated[int | None, typer.Option(help="Vocabulary size.")] = None,
    teacher_hidden: Annotated[
        int | None, typer.Option(help="The teacher's hidden size, of linear_jsd. Default: as --hidden.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="A model's name instead of --hidden and --vocab.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    weight_dtype: Annotated[str | None, typer.Option(help="The weight's dtype, if autocast casts it.")] = None,
    device: Annotated[str, typer.Option(help="cuda or cpu: what to plan for, not what is here.")] = "cuda",
    framework: Annotated[
        str, typer.Option(help="torch, or of linear_cross_entropy jax: what to plan for, not what is here.")
    ] = "torch",
    backend: Annotated[
        str,
        typer.Option(
            help="triton or torch, in JAX mosaic_gpu or xla; or auto: what the op would take, and for most ops the "
            "other one too."
        ),
    ] = "auto",
    precision: Annotated[str, typer.Option(help="full, or of linear_cross_entropy in PyTorch fp8.")] = "full",
    scratch: Annotated[
        list[str] | None,
        typer.Option(
            help="A budget: a text like 512MiB, a part of the float32 logits like 0.25, or bytes; may be given several "
            "times."
        ),
    ] = None,
    console: Console,
) -> dict[str, Any]:
    """Tell what an op costs before it runs: scratch, products and chunks per strategy and budget.

    It is the plan of a forward and backward with all gradients, for the default budget and some others.

    Returns:
        What the tables show, as a document.

    Raises:
        ValueError: a size below 1, an unknown model, dtype, device, framework, precision or backend, a backend that
            can't run it, too little said, or what there is no plan of.
    """
    known_op(op, LOSSES)
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
    sizes = {"--tokens": tokens, "--vocab": vocab, "--hidden": hidden, "--teacher-hidden": teacher_hidden}
    for name, size in sizes.items():
        if size is not None and size < 1:
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
    if op == cross_entropy.OP or hidden is None:
        hidden = 0  # it has no product
    teacher = (teacher_hidden or hidden) if op == linear_jsd.OP else 0
    p = Problem(tokens, hidden, vocab, dtype, weight_dtype=weight_dtype or dtype, device=device, op=op)
    refusals = _refusals(p, framework, precision)
    chosen = choose_backend(op, backend, refusals)
    number = tokens * vocab * (2 if op == linear_jsd.OP else 1)
    asked = [_asked(op, text, number) for text in scratch or ()]
    document = {
        "op": op,
        "framework": framework,
        **{name: getattr(p, name) for name in ("tokens", "hidden", "vocab", "dtype", "weight_dtype", "device")},
        "teacher_hidden": teacher,
        "precision": precision,
        "backend": chosen,
        "logits_bytes": {"float32": 4 * number, dtype: number * DTYPE_BYTES[dtype]},
    }
    if op == spec.OP and precision == "full":
        document |= _strategies(p, chosen, asked)
    else:
        served = [name for name, reason in refusals.items() if reason is None and backend == "auto" and name != chosen]
        document["plans"] = [
            {"backend": name, "pass": way.name} | _row(way, p, *budget)
            for name in [chosen, *served]
            for budget in _budgets(asked)
            for way in _PASSES[op, precision](p, name, teacher)
        ]
    _show(document, console)
    return document


def _refusals(p: Problem, framework: str, precision: str) -> dict[str, str | None]:
    """Why each backend has no plan, or None; in the order in which backend="auto" tries them."""
    if framework == "jax":
        platform = "gpu" if p.device == "cuda" else p.device
        return {"mosaic_gpu": mosaic_memory.refusal(p, platform, weight_layout="vh"), "xla": None}
    # The Triton backend reads and quantises float32, but has no products of it.
    runs = p.device == "cuda" and (p.dtype != "float32" or p.op == cross_entropy.OP or precision == "fp8")
    return {"triton": None if runs else f"its kernels don't run in {p.dtype} on {p.device}", "torch": None}


def _asked(op: str, text: str, logits: int) -> int:
    """Bytes of a budget as the command line has it."""
    number = int(text) if text.isdecimal() else float(text) if text.replace(".", "", 1).isdecimal() else text
    budget: int = scratch_in_bytes(op, number, logits)
    require_positive_int(op, "scratch_bytes", budget)
    return budget


def _budgets(asked: Sequence[int], p: Problem | None = None) -> list[tuple[str, int | None]]:
    """Names and bytes: the default budget, which is None, and those asked for or else `BUDGETS_MIB`.

    With a problem there are also two that grow with it, and none at all.
    """
    budgets = [(in_mib(budget), budget) for budget in asked or [mib * MIB for mib in BUDGETS_MIB]]
    if p is None or asked:
        return [("default", None), *budgets]
    sums, eighth = 64 * MIB + 4 * p.tokens * p.hidden, logits_bytes(p) // 8
    budgets += [(f"{in_mib(sums)}*", sums), (f"{in_mib(eighth)}**", eighth)]
    return [("default", None), *sorted(budgets, key=lambda budget: budget[1]), ("no bound", NO_BOUND)]


def in_mib(size: int) -> str:
    """Rounded up, so that what fits in the printed number fits."""
    return str(-(-size // MIB)) if size >= 10 * MIB else f"{-(-10 * size // MIB) / 10:.1f}"


# -------------------------------------------------------------------------------------------------------------- rows


def _row(way: Way, p: Problem, name: str, budget: int | None) -> dict[str, Any]:
    """The plan of one way in one budget, called `name`; without sizes where the budget is too small."""
    bound = None if budget == NO_BOUND else budget
    row: dict[str, Any] = {"products": way.products, "budget": name, "budget_bytes": bound}
    try:
        c = way.plan(budget)
    except ValueError as error:
        return row | {"fits": False, "why": str(error)}
    sizes = _sizes(c)
    chunk = {"tokens": sizes.pop("token_chunk"), "vocab": p.vocab}
    if isinstance(c, Config):
        chunk["vocab"] = c.vocab_chunk
    elif sizes:  # kernels keep what the gradients need of some tokens, and recompute the others' logits
        by_tokens = getattr(c, "in_forward", False) or getattr(c, "by_tokens", False)
        again = max(0, p.tokens - c.kept) if way.problem.any_grad and not by_tokens else 0
        row |= {"by_tokens": True} if by_tokens else {}
        row |= {"products": way.products + way.products_again * again / p.tokens, "again": again}
        chunk |= sizes
    parts = way.planner.parts(way.problem, c)
    return row | {"fits": True, "chunk": chunk, "scratch_bytes": sum(parts.values()), "scratch_parts": parts}


# The JSON has the names of its first version.
_NAMES = {"kept_in_gradient": "stashed", "kept_in_scratch": "overflow", "kept": "held"}


def _sizes(c: Any) -> dict[str, Any]:
    """A plan's sizes by the names of Triton's; Mosaic recomputes logits for several chunks of dW at once."""
    if isinstance(c, int):
        return {"token_chunk": c}
    sizes = asdict(c)
    if isinstance(c, MosaicPlan):
        sizes |= {"vocab_chunk": c.recompute_chunks * c.chunk, "weight_chunk": c.chunk}
        for name in ("strategy", "chunk", "recompute_chunks", "by_tokens"):
            del sizes[name]
    return {_NAMES.get(name, name): x for name, x in sizes.items()}


# ------------------------------------------------------------------------- the strategies of linear_cross_entropy

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


def _strategies(p: Problem, backend: str, asked: Sequence[int]) -> dict[str, Any]:
    """The part of the document that is the backend's."""
    planner, kernels = _PLANNERS[backend], backend in _PRODUCT
    flops = 2 * p.tokens * p.hidden * p.vocab
    products = dict.fromkeys(spec.STRATEGIES, 3) if kernels else {"stash": 3, "recompute": 4}
    ways = [Way(s, number, planner, p, partial(planner.plan, p, s), 1) for s, number in products.items()]
    rows = []
    for name, budget in _budgets(asked, p if kernels else None):
        for way in ways:
            row = {"strategy": way.name, **_row(way, p, name, budget)}
            row |= {"smallest_scratch_bytes": planner.least(p, way.name), "flops": round(flops * row["products"])}
            if row["fits"] and kernels:
                row |= {**_sizes(c := way.plan(budget)), "predicted_ms": planner.cost(p, c)}
            elif not kernels:
                row["auto"] = row["fits"] and _CHOICES[backend](p, "auto", budget) == way.name
                row |= _of_products(backend, p, way.plan(budget)) if row["fits"] else {}
            rows.append(row)
    document = {"default_scratch_bytes": {s: planner.default(p, s) for s in products}, "plans": rows}
    if not kernels:
        return document
    product_ms = flops / _PRODUCT[backend] / 1e9
    alone = _forward_alone(p)
    c = planner.plan(alone, "auto")
    forward = {
        "products": 1,
        "scratch_bytes": planner.scratch_bytes(alone, c),
        "scratch_parts": planner.parts(alone, c),
        "product_ms": product_ms,
        "token_chunk": c.token_chunk,
        "predicted_ms": planner.cost(alone, c),
    }
    return document | {"rates_of": RATES_OF, "three_products_ms": 3 * product_ms, "forward": forward}


def _of_products(backend: str, p: Problem, c: Config) -> dict[str, Any]:
    """What a row of the framework's own products has beside the others."""
    chunks = -(-p.tokens // c.token_chunk) * (-(-p.vocab // c.vocab_chunk))
    row = {"token_chunk": c.token_chunk, "vocab_chunk": c.vocab_chunk, "chunks": chunks}
    # XLA decides what it writes.
    return row | ({"written_per_chunk": written_per_chunk(p, c)} if backend == "torch" else {})


def written_per_chunk(p: Problem, c: Config) -> dict[str, int]:
    """Bytes that each chunk writes to device memory in making the gradients: the tile, and what is accumulated."""
    element = 4 if p.device == "cpu" else DTYPE_BYTES[p.dtype]
    columns = p.vocab if c.strategy == "stash" else c.vocab_chunk
    written = {"logits": 4 * c.token_chunk * columns}
    if element != 4:
        written["their gradient"] = element * c.token_chunk * columns
    return written | {"hidden gradient": 4 * c.token_chunk * p.hidden, "weight gradient": 4 * columns * p.hidden}


# ------------------------------------------------------------------------------------------ the passes of other ops


def _forward_alone(p: Problem) -> Problem:
    return replace(p, grad_hidden=False, grad_weight=False)


def _cross_entropy_passes(asked: Problem, backend: str, _: int) -> list[Way]:
    p = row_memory.Problem(asked.tokens, asked.vocab, asked.dtype, asked.device, triton=backend == "triton")
    return [Way("forward, and backward", 0, row_memory.PLANNER, p, partial(row_memory.PLANNER.plan, p, ""))]


def _log_probs_passes(asked: Problem, backend: str, _: int) -> list[Way]:
    ways = []
    for stats in (False, True):
        p, entropy = replace(asked, stats=stats, ids=1), ", entropy" if stats else ""
        alone = _forward_alone(p)
        if backend == "triton":
            planner = triton_memory.PLANNER
            ways.append(Way(f"forward{entropy}", 1, planner, alone, partial(planner.plan, alone, "auto")))
            ways.append(Way(f"both passes{entropy}", 3, planner, p, partial(planner.plan, p, "auto"), 1))
        else:
            backward = partial(memory.plan, p, "recompute")
            ways.append(Way(f"forward{entropy}", 1, memory.PLANNER, p, partial(_log_probs_forward, p)))
            ways.append(Way(f"backward{entropy}", 3, memory.PLANNER, p, backward))
    return ways


def _log_probs_forward(p: Problem, budget: int | None) -> Config:
    memory.PLANNER.require(p, "recompute", budget)  # forward refuses what backward couldn't run in
    return memory.plan(p, "forward", budget)


def _jsd_passes(asked: Problem, backend: str, teacher_hidden: int) -> list[Way]:
    triton = backend == "triton"
    names = ("forward", "both passes") if triton else ("forward alone", "forward with gradients")
    planner: Planner[Any] = jsd_triton_memory.PLANNER if triton else jsd_memory.PLANNER
    ways = []
    for name, products, grad in zip(names, (2, 4), (False, True), strict=True):
        student = asked if grad else _forward_alone(asked)
        teacher = replace(_forward_alone(asked), hidden=teacher_hidden)
        p = jsd_memory.Problem(asked.vocab, student, teacher, stash=grad and not triton)
        ways.append(Way(name, products, planner, p, partial(planner.plan, p, ""), 2))
    return ways


def _fp8_passes(asked: Problem, backend: str, _: int) -> list[Way]:
    # The framework's own products take what they take on the CPU.
    both = replace(asked, device="cuda" if backend == "triton" else "cpu")
    return [
        Way(name, products, fp8_memory.PLANNER, p, partial(fp8_memory.plan, p))
        for name, products, p in (("forward", 1, _forward_alone(both)), ("both passes", 3, both))
    ]


# Of the problem asked for, the backend and the teacher's hidden size.
_PASSES: dict[tuple[str, str], Callable[[Problem, str, int], list[Way]]] = {
    (cross_entropy.OP, "full"): _cross_entropy_passes,
    (linear_log_probs.OP, "full"): _log_probs_passes,
    (linear_jsd.OP, "full"): _jsd_passes,
    (spec.OP, "fp8"): _fp8_passes,
}


# ------------------------------------------------------------------------------------------------------------- table

# Every column, in their order; a table has those that its rows fill.
_LEFT = ("strategy", "pass")
_COLUMNS = (
    "budget", *_LEFT, "prods", "tokens", "chunk", "chunks", "in dW", "kept", "again", "of V", "of dW", "scratch",
    "tile", "dH", "dW", "ms",
)  # fmt: skip
_LEGEND = {
    "strategy": "*: what strategy='auto' takes.",
    "prods": "prods: matrix products, of both passes where they are planned together.",
    "tokens": "tokens: of a chunk, with all of the vocabulary.",
    "chunk": "chunk: tokens x vocab.",
    "in dW": "in dW, kept: tokens whose logits' exponentials wait in the memory of weight's\ngradient, or in scratch; "
    "by n: forward computes the gradients,\nn tokens at a time.",
    "again": "again: tokens whose logits are recomputed in backward.",
    "of V": "of V, of dW: columns of those logits, and rows of weight's gradient, at a time.",
    "scratch": "scratch: peak above inputs, results and returned gradients.",
    "tile": "tile, dH, dW: written per chunk, of logits, hidden's gradient and weight's.",
}


def _show(document: Mapping[str, Any], console: Console) -> None:
    """Print the document: what was asked for, a table for each backend, and what its columns mean."""
    say = partial(console.print, highlight=False, soft_wrap=True)
    rows = document["plans"]
    tables: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        tables.setdefault(row.get("backend", document["backend"]), []).append(row)
    logits = " or ".join(f"{in_mib(size)} MiB in {dtype}" for dtype, size in document["logits_bytes"].items())
    sizes = {"T": "tokens", "H": "hidden", "V": "vocab", "teacher's H": "teacher_hidden"}
    shown = " ".join(f"{letter}={document[name]}" for letter, name in sizes.items() if document[name])
    default = " by default" if len(tables) > 1 else ""
    precision = "" if document["precision"] == "full" else f", precision {document['precision']}"
    say(f"{document['op']}: {shown} {document['dtype']} on {document['device']},")
    say(
        f"{document['backend']} backend in {FRAMEWORKS[document['framework']]}{default}{precision}, "
        "forward and all gradients"
    )
    say(f"full logits: {logits}")
    filled: set[str] = set()
    for backend, own in tables.items():
        if "pass" in own[0]:
            say(f"\nbackend {backend!r}:")
        filled |= _show_table(own, document["tokens"], console)
        if "pass" in own[0]:
            largest = [row for row in own if row["budget_bytes"] is None][-1]
            parts = "".join(f"\n  {name}: {in_mib(size)}" for name, size in largest["scratch_parts"].items() if size)
            say(f"scratch in the default budget, {largest['pass']}:{parts}")
    say("\nBudgets, scratch and what is written in MiB.")
    if any(row["budget"].endswith("*") for row in rows):
        say("Budgets with *: 64 MiB and 4TH bytes; with **: an eighth of the float32 logits.")
    for column, words in _LEGEND.items():
        if column in filled and (column != "strategy" or "auto" in rows[0]):
            say(words)
    if forward := document.get("forward"):
        product, three, least = (
            _ms(ms) for ms in (forward["product_ms"], document["three_products_ms"], forward["predicted_ms"])
        )
        say(f"ms: predicted for an {document['rates_of']}; three products alone: {three} ms.")
        tokens, scratch = forward["token_chunk"], in_mib(forward["scratch_bytes"])
        say(f"Without gradients: {scratch} MiB of scratch, {tokens} tokens at a time,")
        say(f"{least} ms; the product alone: {product} ms.")


def _show_table(rows: Sequence[Mapping[str, Any]], tokens: int, console: Console) -> set[str]:
    """Returns the columns that it has."""
    cells = [_cells(row, tokens) for row in rows]
    filled = {column for made in cells for column in made}
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    columns = [column for column in _COLUMNS if column in filled]
    for column in columns:
        table.add_column(column, justify="left" if column in _LEFT else "right", no_wrap=True)
    for made in cells:
        table.add_row(*(made.get(column, "") for column in columns))
    console.print(table)
    return filled


def _cells(row: Mapping[str, Any], tokens: int) -> dict[str, str]:
    """A row's cells, by column."""
    products = row["products"]
    name = {column: row[column] for column in _LEFT if column in row}
    if row.get("auto"):
        name = {"strategy": f"[bold]{row['strategy']} *[/]"}
    cells = {"budget": row["budget"], **name}
    if not row["fits"]:
        if "smallest_scratch_bytes" not in row:
            return cells | {"scratch": "[dim]too small[/]"}
        return cells | {"prods": "[dim]needs[/]", "scratch": f"[dim]{in_mib(row['smallest_scratch_bytes'])}[/]"}
    cells["prods"] = f"{products:.2f}" if "again" in row else str(products)
    cells["scratch"] = in_mib(row["scratch_bytes"])
    chunk = row["chunk"]
    if "again" not in row:
        cells["chunk"] = f"{chunk['tokens']}x{chunk['vocab']}"
    elif "pass" in row:
        cells["tokens"] = str(chunk["tokens"])
    elif "by_tokens" in row:
        cells |= {"in dW": "by", "kept": str(chunk["tokens"])}
    else:
        in_dw = min(chunk["stashed"], tokens)
        cells |= {"in dW": str(in_dw), "kept": str(tokens - in_dw - row["again"])}
    if "again" in row:
        columns = str(chunk["vocab_chunk"]) if row["again"] else "-"
        rows = "-" if "by_tokens" in row else str(chunk["weight_chunk"] or "-")
        cells |= {"again": str(row["again"]), "of V": columns, "of dW": rows}
    if "chunks" in row:
        cells["chunks"] = str(row["chunks"])
    if written := row.get("written_per_chunk"):
        tile = written["logits"] + written.get("their gradient", 0)
        sizes = (tile, written["hidden gradient"], written["weight gradient"])
        cells |= {column: in_mib(size) for column, size in zip(("tile", "dH", "dW"), sizes, strict=True)}
    if "predicted_ms" in row:
        cells["ms"] = _ms(row["predicted_ms"])
    return cells


def _ms(ms: float) -> str:
    return f"{ms:.2f}" if ms < 100 else f"{ms:.0f}"
