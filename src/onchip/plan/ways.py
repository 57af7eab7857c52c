"""What can be planned: each op's backends, and what their planners say.  No framework.

A new op is an entry of `OPS`.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from onchip.core.sizes import DTYPE_BYTES
from onchip.ops.linear_jsd import memory as jsd_memory
from onchip.ops.linear_jsd import triton_memory as jsd_triton_memory
from onchip.plan import layers, plain
from onchip.plan.asked import Backend, PlannedCall, PlannedOp, StepPlan, Way
from onchip.plan.gpus import GPUS, faster_memory, fp8_ms, rates
from onchip.vocab import memory
from onchip.vocab.chunks import Config, Planner
from onchip.vocab.fp8 import memory as fp8_memory
from onchip.vocab.mosaic import memory as mosaic_memory
from onchip.vocab.rows import memory as row_memory
from onchip.vocab.triton import planner as triton_planner
from onchip.vocab.xla import memory as xla_memory

# ---------------------------------------------------------------------------------------------- what backends refuse


def _never(asked: PlannedCall) -> None:
    return None


def _triton(asked: PlannedCall) -> str | None:
    p = asked.problem
    # Kernels without products read float32 as well.
    if p.device == "cuda" and (p.dtype != "float32" or not p.hidden):
        return None
    return f"its kernels don't run in {p.dtype} on {p.device}"


def _mosaic(asked: PlannedCall) -> str | None:
    p = asked.problem
    refusal = mosaic_memory.refusal(p, "gpu" if p.device == "cuda" else p.device, weight_layout="vh")
    return refusal or _hopper(asked)


def _fp8_triton(asked: PlannedCall) -> str | None:
    return _only_cuda(asked) or _hopper(asked)


def _hopper(asked: PlannedCall) -> str | None:
    gpu = GPUS[asked.gpu]
    if gpu.capability == (9, 0):
        return None
    return f"it needs compute capability 9.0 (Hopper), and a {gpu.title} has {gpu.capability[0]}.{gpu.capability[1]}"


def _only_cuda(asked: PlannedCall) -> str | None:
    return None if asked.problem.device == "cuda" else f"its kernels don't run on {asked.problem.device}"


def _fp8_capable(asked: PlannedCall) -> str | None:
    gpu = GPUS[asked.gpu]
    lacks = None if gpu.capability >= (8, 9) else f"FP8 needs compute capability 8.9, and a {gpu.title} has 8.0"
    return _only_cuda(asked) or lacks


# ---------------------------------------------------------------------------------------------------- how they run it

Said = tuple[float, int, dict[str, int], float | None]
"""The fields of `StepPlan` behind its memory."""


def _planned(
    planner: Planner[Any],
    p: Any,
    say: Callable[[Any], Said],
    strategies: tuple[str, ...] = ("auto",),
    chosen: Callable[[int | None], str] = lambda budget: "auto",
) -> Way:
    """What a planner of a problem says; `say` of a plan."""

    def step(strategy: str, budget: int | None) -> StepPlan:
        c = planner.plan(p, strategy, budget)
        return StepPlan(planner.parts(p, c), *say(c))

    return Way(step, partial(planner.least, p), partial(planner.default, p), strategies, chosen)


def _kernels(
    planner: Planner[Any],
    p: Any,
    products: tuple[int, int],
    predict: Callable[[Any, Any], float] | None,
    sizes: Callable[[Any], dict[str, int]],
    strategies: tuple[str, ...] = ("auto",),
) -> Way:
    """A backend that keeps as many tokens' logits as the budget allows.

    `products`: of the call, and how many more where all tokens' logits are recomputed.
    """
    needed, again = products

    def say(c: Any) -> Said:
        in_forward = getattr(c, "in_forward", False) or getattr(c, "by_tokens", False)
        recomputed = 0 if in_forward or not p.any_grad else max(0, p.tokens - c.kept)
        ms = None if predict is None else predict(p, c)
        return needed + again * recomputed / max(1, p.tokens), recomputed, sizes(c), ms

    return _planned(planner, p, say, strategies)


def _of_weight_chunks(c: Any) -> dict[str, int]:
    return {"tokens": c.token_chunk, "vocab": c.vocab_chunk, "weight_gradient_rows": c.weight_chunk}


def _of_blocks(c: mosaic_memory.MosaicPlan) -> dict[str, int]:
    return {"tokens": c.token_chunk, "vocab": c.recompute_chunks * c.chunk, "weight_gradient_rows": c.chunk}


def _of_config(c: Config) -> dict[str, int]:
    return {"tokens": c.token_chunk, "vocab": c.vocab_chunk}


def _triton_way(asked: PlannedCall) -> Way:
    p = asked.wanted
    strategies = ("auto", "stash", "recompute") if asked.gradients and not p.ids else ("auto",)
    predict = partial(triton_planner.predict, rates=rates(asked.gpu)) if asked.measured else None
    return _kernels(triton_planner.PLANNER, p, (asked.products, 1), predict, _of_weight_chunks, strategies)


def _mosaic_way(asked: PlannedCall) -> Way:
    strategies = ("auto", "stash", "recompute") if asked.gradients else ("auto",)
    predict = mosaic_memory.predict if asked.measured else None
    return _kernels(mosaic_memory.PLANNER, asked.wanted, (asked.products, 1), predict, _of_blocks, strategies)


def _jsd_problem(asked: PlannedCall, *, stash: bool) -> jsd_memory.Problem:
    student = asked.wanted
    teacher = replace(asked.problem, hidden=asked.teacher_hidden, grad_hidden=False, grad_weight=False)
    return jsd_memory.Problem(student.vocab, student, teacher, stash=stash and asked.gradients)


def _jsd_triton_way(asked: PlannedCall) -> Way:
    p = _jsd_problem(asked, stash=False)
    predict = partial(jsd_triton_memory.predict, rates=rates(asked.gpu)) if asked.measured else None
    return _kernels(jsd_triton_memory.PLANNER, p, (4 if asked.gradients else 2, 2), predict, _of_weight_chunks)


def _jsd_way(planner: Planner[int]) -> Callable[[PlannedCall], Way]:
    def way(asked: PlannedCall) -> Way:
        number = 4 if asked.gradients else 2
        return _planned(planner, _jsd_problem(asked, stash=True), lambda chunk: (number, 0, {"tokens": chunk}, None))

    return way


def _of_products(module: Any) -> Callable[[PlannedCall], Way]:
    """A backend of the framework's own products; `module` has its planner and its choice of a strategy."""

    def way(asked: PlannedCall) -> Way:
        p = asked.wanted

        def say(c: Config) -> Said:
            again = c.strategy == "recompute"
            return asked.products + again, p.tokens if again else 0, _of_config(c), None

        strategies = ("stash", "recompute") if asked.gradients else ("forward",)
        return _planned(module.PLANNER, p, say, strategies, partial(module.choose_strategy, p, "auto"))

    return way


def _log_probs_of_products(planner: Planner[Config], *, both_walks: bool) -> Callable[[PlannedCall], Way]:
    """Forward, and a backward that computes the logits again; `both_walks`: each plans for itself, where JAX has one
    plan for both."""

    def way(asked: PlannedCall) -> Way:
        p, again = asked.wanted, asked.gradients
        strategy = "recompute" if again else "forward"
        walks = ("forward", "recompute") if again and both_walks else (strategy,)

        def step(_: str, budget: int | None) -> StepPlan:
            planner.require(p, strategy, budget)
            plans = [planner.plan(p, walk, budget) for walk in walks]
            parts = max((planner.parts(p, c) for c in plans), key=lambda parts: sum(parts.values()))
            return StepPlan(parts, asked.products + again, p.tokens if again else 0, _of_config(plans[-1]), None)

        return Way(step, lambda _: planner.least(p, strategy), lambda _: planner.default(p, strategy))

    return way


def _fp8_way(asked: PlannedCall, *, triton: bool) -> Way:
    p = asked.wanted

    def step(_: str, budget: int | None) -> StepPlan:
        chunk = fp8_memory.plan(p, budget)
        ms = None
        # Smaller chunks than the default's were not measured.
        if triton and asked.measured and chunk >= min(p.tokens, fp8_memory.DEFAULT_CHUNK):
            product, logits = p.tokens * p.hidden * p.vocab, p.tokens * p.vocab
            # The weight is read and quantised in both orientations.  Logits are written, read, and quantised in both.
            of_weight = (DTYPE_BYTES[p.dtype] + 1 + asked.gradients) * p.vocab * p.hidden
            outputs, weights = (2 * product, product * p.grad_weight) if p.any_grad else (product, 0)
            ms = fp8_ms(asked.gpu, outputs, weights, of_weight + (6 if p.any_grad else 4) * logits)
        return StepPlan(fp8_memory.scratch_parts(p, chunk), asked.products, 0, {"tokens": chunk}, ms)

    planner = fp8_memory.PLANNER
    return Way(step, lambda _: planner.least(p, ""), lambda _: fp8_memory.scratch_bytes(p, fp8_memory.plan(p, None)))


def _fp8_torch_way(asked: PlannedCall) -> Way:
    # The framework's own products take what they take on the CPU.
    return _fp8_way(replace(asked, problem=replace(asked.problem, device="cpu")), triton=False)


def _rows_way(asked: PlannedCall, *, triton: bool = False, xla: bool = False) -> Way:
    of = asked.problem
    p = row_memory.Problem(
        of.tokens, of.vocab, of.dtype, of.device, grad=asked.gradients, softcap=of.softcap, triton=triton, xla=xla
    )

    def say(rows: int) -> Said:
        ms = None
        if triton and asked.measured:
            # Read once, and the gradient written: results/2026-11-22-h100-cross_entropy.json, where rows are long.
            per_byte = 2 * 0.41 if asked.gradients else 0.34
            ms = 1e-9 * per_byte * p.tokens * p.vocab * DTYPE_BYTES[p.dtype] / faster_memory(asked.gpu)
        return 0, 0, {"tokens": rows}, ms

    return _planned(row_memory.PLANNER, p, say)


# --------------------------------------------------------------------------------------------------------- the table

_TORCH_LOSS = {"triton": Backend(_triton, _triton_way), "torch": Backend(_never, _of_products(memory))}
OPS: dict[str, PlannedOp] = {
    "linear_cross_entropy": PlannedOp(
        backends={
            ("torch", "full"): _TORCH_LOSS,
            ("torch", "fp8"): {
                "triton": Backend(_fp8_triton, partial(_fp8_way, triton=True)),
                "torch": Backend(_never, _fp8_torch_way),
            },
            ("jax", "full"): {
                "mosaic_gpu": Backend(_mosaic, _mosaic_way),
                "xla": Backend(_never, _of_products(xla_memory)),
            },
        },
        plain=plain.loss,
        takes=("frozen", "weight_grad_out"),
    ),
    "linear_log_probs": PlannedOp(
        backends={
            ("torch", "full"): {
                "triton": Backend(_triton, _triton_way),
                "torch": Backend(_never, _log_probs_of_products(memory.PLANNER, both_walks=True)),
            },
            ("jax", "full"): {"xla": Backend(_never, _log_probs_of_products(xla_memory.PLANNER, both_walks=False))},
        },
        plain=plain.log_probs,
        takes=("entropy", "frozen"),
        ids=1,
    ),
    "cross_entropy": PlannedOp(
        backends={
            ("torch", "full"): {
                "triton": Backend(_triton, partial(_rows_way, triton=True)),
                "torch": Backend(_never, _rows_way),
            },
            ("jax", "full"): {"xla": Backend(_never, partial(_rows_way, xla=True))},
        },
        plain=plain.cross_entropy,
        needs=("vocab",),
    ),
    "linear_jsd": PlannedOp(
        backends={
            ("torch", "full"): {
                "triton": Backend(_triton, _jsd_triton_way),
                "torch": Backend(_never, _jsd_way(jsd_memory.PLANNER)),
            },
            ("jax", "full"): {"xla": Backend(_never, _jsd_way(jsd_memory.JAX_PLANNER))},
        },
        plain=plain.jsd,
        takes=("teacher_hidden",),
        logits=2,
        softcap=False,
        numbers=0,
    ),
    "fp8_linear": PlannedOp(
        backends={("torch", "full"): {"scaled_mm": Backend(_fp8_triton), "triton": Backend(_fp8_capable)}},
        plain=layers.FP8.replaced,
        needs=(),
        takes=("in_features", "out_features"),
        layer=layers.FP8,
    ),
    "grouped_matmul": PlannedOp(
        backends={("torch", "full"): {"triton": Backend(_only_cuda)}},
        plain=layers.GROUPED.replaced,
        needs=(),
        takes=("in_features", "out_features", "experts", "rows"),
        layer=layers.GROUPED,
        source="Times are predicted with rates measured on an H100, for groups of the same size; for an H200 with its "
        "memory bandwidth from the data sheet.",
    ),
    "collective_matmul": PlannedOp(
        backends={("torch", x): {"ring": Backend(_never)} for x in ("full", "fp8")},
        plain=layers.COLLECTIVE.replaced,
        needs=(),
        takes=("in_features", "out_features", "tensor_parallel"),
        layer=layers.COLLECTIVE,
    ),
}
