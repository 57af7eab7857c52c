"""Parts that the plans of several ops share: why a backend refuses, and what a planner says.  Imports no framework."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from onchip.plan.asked import PlannedCall, StepPlan, Way
from onchip.plan.gpus import GPUS, rates
from onchip.vocab.chunks import ChunkConfig, Planner
from onchip.vocab.mosaic import memory as mosaic_memory
from onchip.vocab.triton import planner as triton_planner

# ---------------------------------------------------------------------------------------------- what backends refuse


def never(asked: PlannedCall) -> None:
    return None


def triton_refusal(asked: PlannedCall) -> str | None:
    p = asked.problem
    # Kernels without products read float32 as well.
    if p.device == "cuda" and (p.dtype != "float32" or not p.hidden):
        return None
    return f"its kernels don't run in {p.dtype} on {p.device}"


def fp8_triton_refusal(asked: PlannedCall) -> str | None:
    return cuda_refusal(asked) or hopper_refusal(asked)


def mosaic_refusal(asked: PlannedCall) -> str | None:
    p = asked.problem
    refusal = mosaic_memory.refusal(p, "gpu" if p.device == "cuda" else p.device, weight_layout="vh")
    return refusal or hopper_refusal(asked)


def hopper_refusal(asked: PlannedCall) -> str | None:
    gpu = GPUS[asked.gpu]
    if gpu.capability == (9, 0):
        return None
    return f"it needs compute capability 9.0 (Hopper), and the {gpu.title} has {gpu.capability[0]}.{gpu.capability[1]}"


def cuda_refusal(asked: PlannedCall) -> str | None:
    return None if asked.problem.device == "cuda" else f"its kernels don't run on {asked.problem.device}"


# ---------------------------------------------------------------------------------------------------- how they run it

Said = tuple[float, int, dict[str, int], float | None]
"""The fields of `StepPlan` after its memory."""


def planned(
    planner: Planner[Any],
    p: Any,
    say: Callable[[Any], Said],
    strategies: tuple[str, ...] = ("auto",),
    chosen: Callable[[int | None], str] = lambda budget: "auto",
) -> Way:
    """What a planner says of a problem; `say` gives what its plan costs."""

    def step(strategy: str, budget: int | None) -> StepPlan:
        c = planner.plan(p, strategy, budget)
        return StepPlan(planner.parts(p, c), *say(c))

    return Way(step, partial(planner.least, p), partial(planner.default, p), strategies, chosen)


def kernels(
    planner: Planner[Any],
    p: Any,
    products: tuple[int, int],
    predict: Callable[[Any, Any], float] | None,
    sizes: Callable[[Any], dict[str, int]],
    strategies: tuple[str, ...] = ("auto",),
) -> Way:
    """A backend that keeps as many tokens' logits as the budget allows.

    `products`: how many the call takes, and how many more if the logits of all tokens are recomputed.
    """
    needed, again = products

    def say(c: Any) -> Said:
        in_forward = getattr(c, "in_forward", False) or getattr(c, "by_tokens", False)
        recomputed = 0 if in_forward or not p.any_grad else max(0, p.tokens - c.kept)
        ms = None if predict is None else predict(p, c)
        cut = sizes(c) | {"tokens": min(c.token_chunk, p.tokens)}  # which has room for the whole tile of the last ones
        return needed + again * recomputed / max(1, p.tokens), recomputed, cut, ms

    return planned(planner, p, say, strategies)


def of_weight_chunks(c: Any) -> dict[str, int]:
    return {"tokens": c.token_chunk, "vocab": c.vocab_chunk, "weight_gradient_rows": c.weight_chunk}


def of_config(c: ChunkConfig) -> dict[str, int]:
    return {"tokens": c.token_chunk, "vocab": c.vocab_chunk}


def triton_way(asked: PlannedCall) -> Way:
    p = asked.wanted
    strategies = ("auto", "stash", "recompute") if asked.gradients and not p.ids else ("auto",)
    predict = partial(triton_planner.predict, rates=rates(asked.gpu)) if asked.measured else None
    return kernels(triton_planner.PLANNER, p, (asked.products, 1), predict, of_weight_chunks, strategies)


def mosaic_way(asked: PlannedCall, **of_op: Any) -> Way:
    """The Mosaic GPU backend; `of_op` are fields of the problem that are the same for every call of an op."""
    p = replace(asked.wanted, **of_op)
    strategies = ("auto", "stash", "recompute") if asked.gradients and not p.ids else ("auto",)
    predict = mosaic_memory.predict if asked.measured else None
    return kernels(mosaic_memory.PLANNER, p, (asked.products, 1), predict, _of_blocks, strategies)


def _of_blocks(c: mosaic_memory.MosaicPlan) -> dict[str, int]:
    return {"tokens": c.token_chunk, "vocab": c.recompute_chunks * c.chunk, "weight_gradient_rows": c.chunk}


def of_products(module: Any) -> Callable[[PlannedCall], Way]:
    """A backend made of the framework's own products; `module` has its planner and its choice of a strategy."""

    def way(asked: PlannedCall) -> Way:
        p = asked.wanted

        def say(c: ChunkConfig) -> Said:
            again = c.strategy == "recompute"
            return asked.products + again, p.tokens if again else 0, of_config(c), None

        strategies = ("stash", "recompute") if asked.gradients else ("forward",)
        return planned(module.PLANNER, p, say, strategies, partial(module.choose_strategy, p, "auto"))

    return way


def of_layer(
    asked: PlannedCall, features: tuple[int, int], parts: dict[str, int], ms: float | None, sent: int | None = None
) -> StepPlan:
    """The step of one linear layer, for an op without budgets."""
    sizes = {"tokens": asked.problem.tokens, "in_features": features[0], "out_features": features[1]}
    return StepPlan(parts, 3 if asked.gradients else 1, 0, sizes, ms, sent)


def larger(*phases: dict[str, int]) -> dict[str, int]:
    """What is in memory at the peak of these phases, which follow each other."""
    return max(phases, key=lambda phase: sum(phase.values()))
