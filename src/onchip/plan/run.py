"""The front door: checks what is asked, chooses the backend, and hands on to the plans of the op."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console

from onchip.core.backends import choose_backend
from onchip.core.machine import FRAMEWORKS, choose_framework
from onchip.core.sizes import DTYPE_BYTES
from onchip.ops.cross_entropy import spec as cross_entropy
from onchip.ops.linear_cross_entropy import spec
from onchip.ops.linear_jsd import spec as linear_jsd
from onchip.oracle.cases import MODELS
from onchip.plan import passes, strategies
from onchip.plan.passes import Call
from onchip.plan.sizes import in_mib
from onchip.vocab.mosaic import memory as mosaic_spec


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
    if _has_strategies(op, precision):
        return document | strategies.plans(call, chosen, scratch_mib)
    usable = [name for name, reason in refusals.items() if reason is None]
    others = [name for name in usable if backend == "auto" and name != chosen]
    ways = passes.PASSES[op] if precision == "full" else passes.FP8_PASSES
    return document | passes.plans(ways, call, [chosen, *others], scratch_mib)


def _has_strategies(op: str, precision: str) -> bool:
    """Whether the table is one of strategies, or else of passes."""
    return op == spec.OP and precision == "full"


def _refusals(op: str, call: Call) -> dict[str, str | None]:
    """Why each backend has no plan, or None; in the order in which backend="auto" tries them."""
    if call.framework == "torch":
        return {"triton": _triton_refusal(op, call), "torch": None}
    platform = "gpu" if call.device == "cuda" else call.device
    return {"mosaic_gpu": mosaic_spec.refusal(strategies.problem_of(call), platform, weight_layout="vh"), "xla": None}


def _triton_refusal(op: str, call: Call) -> str | None:
    """Why the Triton backend has no plan, or None: float32 it reads and quantises, but has no products of it."""
    if call.device == "cuda" and (call.dtype != "float32" or op == cross_entropy.OP or call.precision == "fp8"):
        return None
    return f"its kernels don't run in {call.dtype} on {call.device}"


def show_plan(document: dict[str, Any], console: Console) -> None:
    """Print the document as a table."""
    logits = " or ".join(f"{in_mib(size)} MiB in {dtype}" for dtype, size in document["logits_bytes"].items())
    sizes = {"T": "tokens", "H": "hidden", "V": "vocab", "teacher's H": "teacher_hidden"}
    shown = " ".join(f"{letter}={document[name]}" for letter, name in sizes.items() if document[name])
    others = {row.get("backend", document["backend"]) for row in document["plans"]} - {document["backend"]}
    backend = f"{document['backend']} backend in {FRAMEWORKS[document['framework']]}{' by default' if others else ''}"
    precision = "" if document["precision"] == "full" else f", precision {document['precision']}"
    console.print(
        f"{document['op']}: {shown} {document['dtype']} on {document['device']},\n"
        f"{backend}{precision}, forward and all gradients\nfull logits: {logits}",
        highlight=False,
    )
    tables = strategies if _has_strategies(document["op"], document["precision"]) else passes
    tables.show(document, console)
