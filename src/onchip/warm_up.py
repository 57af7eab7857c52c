"""`onchip warm-up`: compiles an op's kernels for this machine's GPU."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from onchip.core.machine import require_packages
from onchip.core.names import known_op, listed, naming_options, operands, words
from onchip.core.sizes import DTYPE_BYTES
from onchip.frontend.warm_up import calls
from onchip.plan.models import completed_model, model_of_config, named_model

_CALLS = calls()
OPS = tuple(_CALLS)


def _of(size: str) -> str:
    return f"for {listed([op for op, call in _CALLS.items() if size in call.sizes])}."


def run_warm_up(
    op: Annotated[str, operands(OPS)] = "linear_cross_entropy",
    *,
    model: Annotated[
        str | None,
        typer.Option(
            help="A model's name on the Hugging Face Hub, such as llama-3.1-8b.", autocompletion=completed_model
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="A model's config.json, or the folder that holds it.", metavar="FILE")
    ] = None,
    hidden: Annotated[int | None, typer.Option(help="The hidden size, if not the model's.")] = None,
    vocab: Annotated[int | None, typer.Option(help="The size of the vocabulary, if not the model's.")] = None,
    teacher_hidden: Annotated[
        int | None, typer.Option(help="The teacher's hidden size, for linear_jsd. Default: --hidden.")
    ] = None,
    in_features: Annotated[int | None, typer.Option(help=f"Input features, {_of('in_features')}")] = None,
    out_features: Annotated[int | None, typer.Option(help="Output features, for the same ops.")] = None,
    experts: Annotated[int | None, typer.Option(help=f"The number of experts, {_of('experts')}")] = None,
    tokens: Annotated[
        int, typer.Option(help="How many tokens or rows the call has; the kernels are the same for any number.")
    ] = 8192,
    dtype: Annotated[str, words("The inputs' dtype.", *DTYPE_BYTES)] = "bfloat16",
    weight_dtype: Annotated[str | None, words("The weight's dtype, if it differs.", *DTYPE_BYTES)] = None,
    forward: Annotated[bool, typer.Option("--forward", help="Compile for the forward pass only.")] = False,
    frozen: Annotated[bool, typer.Option("--frozen", help="Compile for a weight that needs no gradient.")] = False,
    options: Annotated[
        list[str] | None,
        typer.Option(
            "--option",
            help="An argument to pass to the op, such as softcap=30. Repeat it for more.",
            metavar="NAME=VALUE",
        ),
    ] = None,
    console: Console,
) -> dict[str, Any]:
    """Compile an op's kernels for this machine's GPU before they are needed.

    Returns:
        The GPU's name, the kernels that were compiled, how many were found in Triton's cache, and the seconds it took.

    Raises:
        ImportError: PyTorch is missing.
        ValueError: as `onchip.torch.warm_up`.
    """
    known_op(op, OPS)
    require_packages("warm-up", ("torch",), "torch")
    for name, given in (("--dtype", dtype), ("--weight-dtype", weight_dtype)):
        if given is not None and given not in DTYPE_BYTES:
            raise ValueError(f"{name} must be one of {', '.join(DTYPE_BYTES)}; got {given!r}")
    if model is not None and config is not None:
        raise ValueError("--model and --config both name a model; give one")
    if model is not None or config is not None:
        with naming_options("model", "config", "hidden", "vocab"):
            found = named_model(model) if model is not None else model_of_config(config)  # type: ignore[arg-type]
        hidden, vocab = hidden or found.hidden, vocab or found.vocab
    import torch

    from onchip.torch import warm_up

    sizes = {
        "hidden": hidden, "vocab": vocab, "teacher_hidden": teacher_hidden, "in_features": in_features,
        "out_features": out_features, "experts": experts,
    }  # fmt: skip
    try:
        with naming_options(*sizes, "tokens"):
            made = warm_up(
                op, **sizes, tokens=tokens, dtype=getattr(torch, dtype),
                weight_dtype=None if weight_dtype is None else getattr(torch, weight_dtype), gradients=not forward,
                frozen=frozen, **_options(options or []),
            )  # fmt: skip
    except TypeError as error:
        raise ValueError(f"--option: {error}") from error
    console.print(
        f"{op} on {made.device}: {len(made.compiled)} kernels compiled, {made.found} found in the cache, "
        f"{made.seconds:.1f} s",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    if made.compiled:
        console.print(", ".join(dict.fromkeys(made.compiled)), highlight=False)
    return {"op": op, **made._asdict(), "compiled": list(made.compiled)}


def _options(given: list[str]) -> dict[str, Any]:
    """The options by name: numbers, true, false and none as Python values, everything else as text."""
    found = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(f"--option must be NAME=VALUE, such as softcap=30; got {text!r}")
        found[name] = _value(value)
    return found


def _value(text: str) -> Any:
    known = {"true": True, "false": False, "none": None}
    if text.lower() in known:
        return known[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
