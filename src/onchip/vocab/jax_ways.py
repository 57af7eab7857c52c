"""The ways to compute a head's loss in JAX: the backends of each platform, best first, and why one can't serve a call.

A way is a module with these functions and names::

    refusal(problem, platform, weight_layout, strategy)     why it can't serve a call, or None
    plan(problem, strategy, budget)     hashable, with a field `strategy`; raises ValueError
    select(plan, labels)           the rows that tokens are put in
    forward(plan, wanted, needs, call) -> (TokenStats, LabelSums, saved)    sums if labels are for every entry
    backward(plan, needs, saved, upstream) -> Projection of gradients    the gradients of a loss
    gradients(plan, needs, saved, gradient) -> the same    for a `TokenGradient` with respect to the final logits
    Saved(call, stats)             the part of what forward saves that suffices for gradients
    SEQUENTIAL                     whether vmap has to call it one by one

`needs` says which gradients are wanted; if none is, `plan.strategy` is 'forward' and nothing is saved.  Gradients of
ignored tokens are exact zeros.  They run under jit, vmap and scan; T, H and V are at least 1.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any, Literal

import jax

from onchip.frontend.jax_types import WeightLayout
from onchip.vocab.chunks import ChunkConfig
from onchip.vocab.memory import Problem
from onchip.vocab.mosaic import op as mosaic
from onchip.vocab.rows import memory as row_memory
from onchip.vocab.rows import mosaic_op as mosaic_rows
from onchip.vocab.rows.memory import RowsProblem
from onchip.vocab.xla import walk as xla
from onchip.vocab.xla.parallel import Shard
from onchip.vocab.xla.tiles import XlaProjection

# Best first, by platform.
BACKENDS = {"cpu": ("xla", "mosaic_gpu"), "gpu": ("mosaic_gpu", "xla"), "tpu": ("xla", "mosaic_gpu")}
Backend = Literal["auto", "mosaic_gpu", "triton", "xla"]
MODULES: dict[str, ModuleType] = {"xla": xla, "mosaic_gpu": mosaic}
ROWS: dict[str, ModuleType] = {"xla": xla, "mosaic_gpu": mosaic_rows}
"""The ways for logits that exist already, whose gradients are of these.  They have `of_logits`, which makes the source
of a call, and `row_plan` makes their plans."""


def refusals(
    problem: Problem,
    platform: str,
    weight_layout: WeightLayout = "vh",
    strategy: str = "auto",
    shard: Shard | None = None,
) -> dict[str, str | None]:
    """Why each backend of the platform, best first, can't serve a call, or None; `problem` is this device's."""
    names = BACKENDS.get(platform, ("xla",))
    made = {name: MODULES[name].refusal(problem, platform, weight_layout, strategy) for name in names}
    if shard is None:
        return made
    split: dict[str, str] = {}
    if strategy == "stash":
        split["xla"] = "strategy='stash' needs the softmax of a whole vocabulary at once; pass strategy='recompute'"
    if shard.padded and (problem.softcap or problem.smoothing or problem.labels):
        split["mosaic_gpu"] = (
            "it takes padding of a split vocabulary only without softcap, label_smoothing and labels for every entry; "
            "leave those out, or pass backend='xla'"
        )
    return {name: split.get(name, reason) for name, reason in made.items()}


def refusals_of(device: str, dtype: str, given: Mapping[str, Any]) -> dict[str, str | None]:
    """The same for a head on this device, by what is known about it."""
    from onchip.oracle.jax import platform_of

    given = {"hidden": 128, "vocab": 1024, "weight_layout": "vh", "strategy": "auto", **given}
    problem = Problem(1, given["hidden"], given["vocab"], dtype=dtype, device=device, compacted=True)
    return refusals(problem, platform_of(device), given["weight_layout"], given["strategy"])


def row_refusals(problem: RowsProblem, platform: str) -> dict[str, str | None]:
    """Why each backend of the platform, best first, can't serve a call with logits, or None."""
    reasons = {"xla": None, "mosaic_gpu": mosaic_rows.refusal(problem, platform)}
    return {name: reasons[name] for name in BACKENDS.get(platform, ("xla",))}


def row_refusals_of(device: str, dtype: str, given: Mapping[str, Any]) -> dict[str, str | None]:
    """The same for logits on this device, by what is known about them."""
    from onchip.oracle.jax import platform_of

    problem = RowsProblem(1, given.get("vocab", 1024), dtype, device)
    return row_refusals(problem, platform_of(device))


def row_plan(problem: RowsProblem, backend: str, budget: int | None, *, once: bool = False) -> ChunkConfig:
    """How many rows are taken at a time, and the strategy: 'stash' if forward makes the gradient, as it may if `once`;
    raises ValueError if the budget is too small."""
    problem = replace(problem, xla=backend == "xla", mosaic=backend == "mosaic_gpu")
    strategy = "stash" if once and problem.mosaic and mosaic_rows.at_once(problem) else "forward"
    return ChunkConfig(strategy, row_memory.plan(problem, "", budget), problem.vocab)


def way_to(backend: str, of: XlaProjection | jax.Array) -> tuple[ModuleType, Any]:
    """The module of a backend for a head or for logits, and the source of its calls."""
    if isinstance(of, XlaProjection):
        return MODULES[backend], of
    way = ROWS[backend]
    return way, way.of_logits(of)


def each(backend: ModuleType, run: Any) -> Any:
    """Run kernels on one element after the other under vmap."""
    return jax.custom_batching.sequential_vmap(run) if backend.SEQUENTIAL else run
