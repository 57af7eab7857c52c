"""A plan as `onchip plan` prints it: sentences and a table that fit 60 columns."""

import re
import textwrap
from collections.abc import Callable

from rich.console import Console

from onchip.core.machine import FRAMEWORKS
from onchip.core.tables import print_table
from onchip.plan.document import Plan, Row
from onchip.plan.gpus import GPUS
from onchip.plan.words import budget_text, memory_text, time_text

_Cell = Callable[[Plan, Row], str]


def _budget(plan: Plan, row: Row) -> str:
    if row.scratch_bytes is not None:
        return budget_text(row.scratch_bytes)
    return "" if row.budget_bytes is None else memory_text(row.budget_bytes)


def _memory(plan: Plan, row: Row) -> str:
    return f"*{memory_text(row.needs_bytes)}" if row.memory_bytes is None else memory_text(row.memory_bytes)


def _products(plan: Plan, row: Row) -> str:
    return f"{row.products:.2f}" if row.products else ""


def _again(plan: Plan, row: Row) -> str:
    again = row.recomputed_tokens
    return "" if again is None else f"{100 * again / max(1, plan.sizes['tokens']):.0f}%"


def _of_chunk(name: str) -> _Cell:
    return lambda plan, row: str((row.chunk or {}).get(name, ""))


# Headings, what they mean, and a row's cell.  A table has those columns that its rows fill.
_BUDGETS: dict[str, tuple[str, _Cell]] = {
    "": ("", lambda plan, row: row.name),
    "strategy": ("what to pass as strategy.", lambda plan, row: row.strategy),
    "budget": ("what to pass as scratch_bytes; for 'default', nothing.", _budget),
    "memory": ("at the peak, above inputs, results and returned gradients.", _memory),
    "time": ("predicted, for {passes}.", lambda plan, row: time_text(row.ms)),
    "products": ("matrix products of tokens x hidden x vocab.", _products),
    "recomputed": ("tokens whose logits backward computes again.", _again),
}
_LAYERS: dict[str, tuple[str, _Cell]] = {
    "layer": ("", lambda plan, row: row.name),
    "in": ("", _of_chunk("in_features")),
    "out": ("", _of_chunk("out_features")),
    "memory": ("at the peak, above inputs, results and returned gradients.", _memory),
    "sent": (
        "by each rank, in {passes}.",
        lambda plan, row: "" if row.sent_bytes is None else memory_text(row.sent_bytes),
    ),
    "time": ("predicted, for {passes}.", lambda plan, row: time_text(row.ms)),
    "plain": ("its predicted time, in the same dtype.", lambda plan, row: time_text(row.plain_ms)),
}
_NAMES = {
    "teacher_hidden": "the teacher's hidden",
    "vocab": "vocabulary",
    "key_heads": "key heads",
    "head_size": "head size",
    "value_size": "value size",
}


def show(plan: Plan, console: Console, *, every_budget: bool) -> None:
    """Print the verdict, the table, what its columns mean, and what the numbers leave out."""

    def say(text: str, style: str = "") -> None:
        console.print(_folded(text, console.width), style=style, highlight=False, markup=False)

    passes = "forward and backward" if plan.gradients else "forward only"
    sizes = ", ".join(
        f"{size} tokens" if name == "tokens" else f"{_NAMES.get(name, name)} {size}"
        for name, size in plan.sizes.items()
    )
    where = "the CPU" if plan.gpu is None else f"one {GPUS[plan.gpu].title}"
    precision = "" if plan.precision == "full" else f", precision {plan.precision}"
    of = f"{plan.model}: " if plan.model else ""
    dtype = plan.dtype if plan.weight_dtype == plan.dtype else f"{plan.dtype}, weight in {plan.weight_dtype}"
    weight = ", the weight frozen" if plan.frozen else ", with weight_grad_out" if plan.weight_grad_out else ""
    say(f"{plan.op}, {passes}{weight}{precision}")
    say(f"{of}{sizes}, {dtype}")
    say(f"{FRAMEWORKS[plan.framework]} on {where}, backend {plan.backend}")
    say("")
    say(plan.verdict, "bold")
    say("")
    layers = plan.logits_bytes is None
    baseline = plan.baseline.name.partition(" ")[0]
    made = {baseline if name == "plain" else name: x for name, x in (_LAYERS if layers else _BUDGETS).items()}
    named = all(row.name in ("smallest", "default", "fastest", "largest") for row in plan.rows)
    left_out = {"strategy"} if not every_budget else set()
    left_out |= set() if named else {"budget"}  # the rows' names say it
    columns = {name: column for name, column in made.items() if name not in left_out and _tells(plan, name, column[1])}
    cells = [[cell(plan, row) for _, cell in columns.values()] for row in plan.rows]
    right = [name for name in columns if name not in ("", "layer", "strategy")]
    print_table(console, list(columns), cells, right=right, gap=1 if every_budget else 2)  # so that it fits 60 columns
    say("")
    for name, (meaning, _) in columns.items():
        if meaning:
            say(f"{name}: {meaning.format(passes=passes)}")
    if not all(row.fits for row in plan.rows):
        say("*: the budget is too small; the call needs this much.")
    if plan.exchanges:
        say("")
        _show_exchanges(plan, console)
        say("")
    if not layers:
        say(f"{plan.baseline.name}: {plan.baseline.expression}")
        if plan.compiled:
            say(f"{plan.compiled.name}: {plan.compiled.expression}")
    for note in plan.notes:
        say(note)
    if every_budget and not layers:
        say("")
        say("memory by default:")
        for name, size in (plan.row("default").memory_parts or {}).items():
            if size:
                say(f"  {memory_text(size)}: {name}")


def _show_exchanges(plan: Plan, console: Console) -> None:
    """What ranks send each other."""
    cells = [[x.name, x.kind, memory_text(x.bytes), time_text(x.ms), time_text(x.exposed_ms)] for x in plan.exchanges]
    heads = ("ranks exchange", "by", "sent", "time", "exposed")
    print_table(console, heads, cells, right=heads[2:])
    hidden = " ".join(f"{x.name} is sent while {x.hidden_under} is computed." for x in plan.exchanges if x.hidden_under)
    text = f"sent: by each rank.\nexposed: the time that no computation hides. {hidden}"
    for line in text.splitlines():
        console.print(_folded(line, console.width), highlight=False, markup=False)


def _folded(text: str, width: int) -> str:
    """Wrapped between words, but not between a number and its unit."""
    together = re.sub(r"(?<=\d) (?=([KMG]iB|ms)\b)", "\N{NO-BREAK SPACE}", text)
    wrapped = textwrap.fill(together, width, break_on_hyphens=False, break_long_words=False)
    return wrapped.replace("\N{NO-BREAK SPACE}", " ")


def _tells(plan: Plan, name: str, cell: _Cell) -> bool:
    """Whether a column says anything."""
    cells = {cell(plan, row) for row in plan.rows}
    return not cells <= {"", "-", "0%"}
