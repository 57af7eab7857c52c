"""The command `onchip plan`."""

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from onchip.core.names import operands, words
from onchip.core.sizes import DTYPE_BYTES
from onchip.plan import PRECISIONS, plan
from onchip.plan.gpus import GPUS
from onchip.plan.show import show
from onchip.plan.ways import OPS


def run_plan(
    op: Annotated[str, operands(tuple(OPS))] = "linear_cross_entropy",
    *,
    tokens: Annotated[int, typer.Option(help="Tokens in a batch: all leading dimensions multiplied.")],
    model: Annotated[
        str | None, typer.Option(help="A model's name on the Hugging Face Hub, in any case: llama-3.1-8b.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A model's config.json, or its folder.", metavar="FILE")] = None,
    hidden: Annotated[int | None, typer.Option(help="Hidden size.")] = None,
    vocab: Annotated[int | None, typer.Option(help="Vocabulary size.")] = None,
    teacher_hidden: Annotated[
        int | None, typer.Option(help="Of linear_jsd: the teacher's hidden size. Default: as --hidden.")
    ] = None,
    in_features: Annotated[
        int | None, typer.Option(help="Of fp8_linear, grouped_matmul and collective_matmul, with --out-features.")
    ] = None,
    out_features: Annotated[int | None, typer.Option(help="Of the same.")] = None,
    experts: Annotated[int | None, typer.Option(help="Of grouped_matmul: groups of rows.")] = None,
    rows: Annotated[int | None, typer.Option(help="Of grouped_matmul: rows of x, if it is read by an index.")] = None,
    dtype: Annotated[str, words("The inputs' dtype.", *DTYPE_BYTES)] = "bfloat16",
    weight_dtype: Annotated[str | None, words("The weight's dtype, if autocast casts it.", *DTYPE_BYTES)] = None,
    forward: Annotated[bool, typer.Option("--forward", help="Of forward alone, without gradients.")] = False,
    frozen: Annotated[
        bool, typer.Option("--frozen", help="Of linear_cross_entropy and linear_log_probs: the weight is frozen.")
    ] = False,
    weight_grad_out: Annotated[
        bool,
        typer.Option(
            "--weight-grad-out",
            help="Of linear_cross_entropy in PyTorch: the weight's gradient is added to a tensor of yours.",
        ),
    ] = False,
    entropy: Annotated[bool, typer.Option("--entropy", help="Of linear_log_probs: with the entropy.")] = False,
    gpu: Annotated[str | None, words("Whose times to predict. Default: h100.", *GPUS)] = None,
    device: Annotated[str, words("What to plan for, not what is here.", "cuda", "cpu")] = "cuda",
    framework: Annotated[str, words("What to plan for, not what is here.", "torch", "jax")] = "torch",
    backend: Annotated[
        str,
        words("Default: what the op would take.", "auto", "triton", "torch", "mosaic_gpu", "xla", "scaled_mm", "ring"),
    ] = "auto",
    precision: Annotated[
        str, words("fp8 is of linear_cross_entropy and collective_matmul in PyTorch.", *PRECISIONS)
    ] = "full",
    tensor_parallel: Annotated[
        int,
        typer.Option(
            "--tp",
            help="Ranks that share the vocabulary, or of collective_matmul the layers; the plan is of one of them.",
            metavar="N",
        ),
    ] = 1,
    sequence_parallel: Annotated[
        bool, typer.Option("--sequence-parallel", help="Each of them has the hidden states of its part of the tokens.")
    ] = False,
    link: Annotated[
        float | None,
        typer.Option(
            help="GB/s from one of them to another, each way. Default: 80% of the data sheet's NVLink or PCIe.",
            metavar="RATE",
        ),
    ] = None,
    scratch: Annotated[
        list[str] | None,
        typer.Option(
            help="A budget: 512MiB, 1.5GiB, a part of the float32 logits such as 0.125, or bytes; may be given several "
            "times.",
            metavar="SIZE",
        ),
    ] = None,
    every_budget: Annotated[
        bool, typer.Option("--all", help="Many budgets with all strategies, and what the memory consists of.")
    ] = False,
    console: Console,
) -> dict[str, Any]:
    """Tell what an op costs before it runs: memory and time, beside what it replaces.

    Returns:
        The `Plan` as a document.

    Raises:
        ValueError: as `onchip.plan.plan`.
    """
    made = plan(
        op,
        tokens=tokens,
        hidden=hidden,
        vocab=vocab,
        model=model,
        config=config,
        teacher_hidden=teacher_hidden,
        in_features=in_features,
        out_features=out_features,
        experts=experts,
        rows=rows,
        dtype=dtype,
        weight_dtype=weight_dtype,
        gradients=not forward,
        frozen=frozen,
        weight_grad_out=weight_grad_out,
        entropy=entropy,
        device=device,
        gpu=gpu,
        framework=framework,
        backend=backend,
        precision=precision,
        tensor_parallel=tensor_parallel,
        sequence_parallel=sequence_parallel,
        link=link,
        scratch=[_number(text) for text in scratch or ()],
        every_budget=every_budget,
    )
    show(made, console, every_budget=every_budget)
    document: dict[str, Any] = msgspec.to_builtins(made)
    return document


def _number(text: str) -> int | float | str:
    """A budget as scratch_bytes takes it: a text with a unit stays one."""
    if text.isdecimal():
        return int(text)
    return float(text) if text.replace(".", "", 1).isdecimal() else text
