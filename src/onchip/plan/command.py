"""The command `onchip plan`: its options are the arguments of `plan`, explained by its docstring."""

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from onchip.core.names import flag, listed, naming_options, operands, words
from onchip.core.sizes import DTYPE_BYTES
from onchip.plan import PRECISIONS, plan
from onchip.plan.asked import planned_op
from onchip.plan.gpus import GPUS
from onchip.plan.models import completed_model
from onchip.plan.show import show
from onchip.registry import OPS

_WORDS: Mapping[str, Iterable[str]] = {
    "dtype": DTYPE_BYTES,
    "weight_dtype": DTYPE_BYTES,
    "gpu": GPUS,
    "device": ("cuda", "cpu"),
    "framework": ("torch", "jax"),
    "backend": ("auto", *dict.fromkeys(name for op in OPS for of in planned_op(op).backends.values() for name in of)),
    "precision": PRECISIONS,
}
# Arguments that are another option in the command.
_FORWARD = Annotated[bool, typer.Option("--forward", help="Plan the forward pass only.")]
_RANKS = Annotated[int, typer.Option("--tp", help="How many ranks share the vocabulary or the layers.", metavar="N")]
_ALL = Annotated[
    bool, typer.Option("--all", help="Show many budgets and all strategies, and what the memory is made of.")
]
_SCRATCH = Annotated[
    list[str] | None,
    typer.Option(
        help="A budget to compare: 512MiB, 1.5GiB, a number of bytes, or a fraction of the float32 logits such as "
        "0.125. Repeat it for more.",
        metavar="SIZE",
    ),
]


def run_plan(
    *, console: Console, forward: bool, scratch: list[str] | None, every_budget: bool, **asked: Any
) -> dict[str, Any]:
    """Predict an op's memory and time, and those of what it replaces.

    Returns:
        The `Plan` as a document.

    Raises:
        ValueError: as `onchip.plan.plan`.
    """
    budgets = [_number(text) for text in scratch or ()]
    with naming_options(
        *(name for name in asked if name != "op"),
        tensor_parallel="--tp",
        scratch="--scratch",
        scratch_bytes="--scratch",
    ):
        made = plan(**asked, gradients=not forward, scratch=budgets, every_budget=every_budget)
    show(made, console, every_budget=every_budget)
    document: dict[str, Any] = msgspec.to_builtins(made)
    return document


def _options() -> Iterator[inspect.Parameter]:
    """The command's options: each argument of `plan`, with what the docstring says about it."""
    arguments = str(plan.__doc__).partition("    Args:")[2].partition("    Returns:")[0]
    described = re.split(r"\n {8}(\w+): ", arguments)
    helps = dict(zip(described[1::2], map(" ".join, map(str.split, described[2::2])), strict=True))
    otherwise: dict[str, tuple[str, Any, Any]] = {
        "gradients": ("forward", _FORWARD, False),
        "tensor_parallel": ("tensor_parallel", _RANKS, 1),
        "scratch": ("scratch", _SCRATCH, None),
        "every_budget": ("every_budget", _ALL, False),
    }
    for name, parameter in inspect.signature(plan).parameters.items():
        of: Any
        kind: Any = Path | None if name == "config" else parameter.annotation
        if name in otherwise:
            name, of, default = otherwise[name]
        elif name == "op":
            of, default = Annotated[str, operands(tuple(OPS))], parameter.default
        else:
            said = re.sub(r"`(\w+)`", lambda found: flag(found[1]), helps.get(name, "").replace('"', ""))
            having = [op for op in OPS if name in (*planned_op(op).takes, *planned_op(op).needs)]
            said = said[:1].upper() + said[1:]
            if having:
                said += f" For {listed(having)}."
            flags = (flag(name),) if kind is bool else ()
            offered = completed_model if name == "model" else None
            option = (
                words(said, *_WORDS[name])
                if name in _WORDS
                else typer.Option(*flags, help=said, autocompletion=offered)
            )
            of, default = Annotated[kind, option], parameter.default
        yield parameter.replace(name=name, annotation=of, default=default)


run_plan.__signature__ = inspect.Signature([*_options()])  # type: ignore[attr-defined]


def _number(text: str) -> int | float | str:
    """A budget as scratch_bytes takes it: a text with a unit stays a text."""
    if text.isdecimal():
        return int(text)
    return float(text) if text.replace(".", "", 1).isdecimal() else text
