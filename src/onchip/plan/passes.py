"""What each pass of an op costs in each budget, by backend."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from onchip.ops.cross_entropy import spec as cross_entropy
from onchip.ops.linear_jsd import spec as linear_jsd
from onchip.ops.linear_jsd import triton_spec as linear_jsd_triton
from onchip.ops.linear_log_probs import spec as linear_log_probs
from onchip.ops.linear_log_probs import triton_spec as linear_log_probs_triton
from onchip.plan.sizes import budget_in_mib, budgets, in_mib
from onchip.vocab.fp8 import memory as fp8_spec
from onchip.vocab.memory import Problem as LinearCrossEntropy
from onchip.vocab.rows import memory as row_memory


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


def _cross_entropy_passes(call: Call, *, triton: bool = False) -> list[_Pass]:
    def plan(budget: int | None) -> _Plan:
        p = row_memory.Problem(call.tokens, call.vocab, call.dtype, call.device, triton=triton)
        rows = row_memory.plan(p, budget)
        return _Plan({"tokens": rows, "vocab": call.vocab}, row_memory.scratch_parts(p, rows))

    return [_Pass("forward, and backward", 0, plan)]


def _log_probs_problem(call: Call, *, entropy: bool, grad: bool = True) -> linear_log_probs.Problem:
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


def _log_probs_passes(call: Call) -> list[_Pass]:
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


def _log_probs_triton_passes(call: Call) -> list[_Pass]:
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


def _fp8_passes(call: Call, *, device: str) -> list[_Pass]:
    def plan(budget: int | None, grad: bool) -> _Plan:
        sizes = (call.tokens, call.hidden, call.vocab)
        p = LinearCrossEntropy(*sizes, dtype=call.dtype, device=device, grad_hidden=grad, grad_weight=grad)
        chunk = fp8_spec.plan(p, budget)
        return _Plan({"tokens": chunk, "vocab": call.vocab}, fp8_spec.scratch_parts(p, chunk))

    return [_Pass("forward", 1, partial(plan, grad=False)), _Pass("both passes", 3, partial(plan, grad=True))]


def _jsd_problem(call: Call, *, grad: bool, stash: bool) -> linear_jsd.Problem:
    dtypes = (call.dtype, call.dtype, call.weight_dtype)
    student = linear_jsd.Head(call.hidden, call.vocab, *dtypes, grad, grad)
    teacher = linear_jsd.Head(call.teacher_hidden, call.vocab, *dtypes)
    return linear_jsd.Problem(call.tokens, call.vocab, student, teacher, device=call.device, stash=stash)


def _jsd_passes(call: Call) -> list[_Pass]:
    def plan(budget: int | None, grad: bool) -> _Plan:
        p = _jsd_problem(call, grad=grad, stash=grad)
        chunk = linear_jsd.plan(p, budget)
        return _Plan({"tokens": chunk, "vocab": call.vocab}, linear_jsd.scratch_parts(p, chunk))

    return [
        _Pass("forward alone", 2, partial(plan, grad=False)),
        _Pass("forward with gradients", 4, partial(plan, grad=True)),
    ]


def _jsd_triton_passes(call: Call) -> list[_Pass]:
    def plan(budget: int | None, grad: bool) -> _Plan:
        p = _jsd_problem(call, grad=grad, stash=False)
        config = linear_jsd_triton.plan(p, budget)
        return _triton_plan(call, config, config.held, linear_jsd_triton.scratch_parts(p, config), grad)

    return [
        _Pass("forward", 2, partial(plan, grad=False)),
        _Pass("both passes", 4, partial(plan, grad=True), products_again=2),
    ]


def _triton_plan(call: Call, config: Any, held: int, parts: dict[str, int], grad: bool) -> _Plan:
    again = max(0, call.tokens - held) if grad else 0  # those held are rounded up to whole blocks
    sizes = asdict(config)
    return _Plan({"tokens": sizes.pop("token_chunk"), "vocab": call.vocab} | sizes, parts, again)


# By backend, in the order in which backend="auto" tries them.
PASSES: dict[str, dict[str, Callable[[Call], list[_Pass]]]] = {
    cross_entropy.OP: {"triton": partial(_cross_entropy_passes, triton=True), "torch": _cross_entropy_passes},
    linear_log_probs.OP: {"triton": _log_probs_triton_passes, "torch": _log_probs_passes},
    linear_jsd.OP: {"triton": _jsd_triton_passes, "torch": _jsd_passes},
}

# Of linear_cross_entropy with precision='fp8'.  What the framework's own products take is what they take on the CPU.
FP8_PASSES: dict[str, Callable[[Call], list[_Pass]]] = {
    "triton": partial(_fp8_passes, device="cuda"),
    "torch": partial(_fp8_passes, device="cpu"),
}


def plans(
    ways: Mapping[str, Callable[[Call], list[_Pass]]],
    call: Call,
    backends: Sequence[str],
    scratch_mib: Sequence[int] | None,
) -> dict[str, Any]:
    """The document's rows: the plans of each of the backends, in each budget, of each of its passes in `ways`."""
    return {
        "plans": [
            {"backend": name} | _pass_row(one, call, budget)
            for name in backends
            for budget in budgets(scratch_mib)
            for one in ways[name](call)
        ]
    }


def _pass_row(one: _Pass, call: Call, budget: int | None) -> dict[str, Any]:
    row: dict[str, Any] = {"pass": one.name, "products": one.products, "budget_bytes": budget}
    try:
        plan = one.plan(budget)
    except ValueError as error:
        return row | {"fits": False, "why": str(error)}
    if plan.again is not None:
        row |= {"products": one.products + one.products_again * plan.again / call.tokens, "again": plan.again}
    scratch = sum(plan.scratch_parts.values())
    return row | {"fits": True, "chunk": plan.chunk, "scratch_bytes": scratch, "scratch_parts": plan.scratch_parts}


def show(document: dict[str, Any], console: Console) -> None:
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
            budget = budget_in_mib(row["budget_bytes"])
            table.add_row(budget, row["pass"], *_pass_cells(row, backend in again))
        largest = [row for row in rows if row["budget_bytes"] is None][-1]
        parts = "".join(f"\n  {name}: {in_mib(size)}" for name, size in largest["scratch_parts"].items() if size)
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
    chunk, scratch = row["chunk"], in_mib(row["scratch_bytes"])
    if not again:
        return [str(row["products"]), f"{chunk['tokens']}x{chunk['vocab']}", scratch]
    columns = str(chunk["vocab_chunk"]) if row["again"] else "-"
    rows = str(chunk["weight_chunk"] or "-")
    return [f"{row['products']:.2f}", str(chunk["tokens"]), str(row["again"]), columns, rows, scratch]
