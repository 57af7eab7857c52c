"""What `onchip plan` says of the op.  No framework."""

from collections.abc import Callable, Mapping
from functools import partial

from onchip.attention.mosaic import problem as mosaic
from onchip.attention.problem import (
    DEFAULT_SCRATCH,
    MOSAIC_SIZES,
    XLA_ROWS,
    AttentionProblem,
    least_scratch,
    rows_of_block,
    scratch_parts,
    xla_parts,
)
from onchip.attention.triton.problem import (
    LARGEST_HEAD,
    TILE,
    is_fused,
    is_wide,
    memory_parts,
    refusal,
)
from onchip.core.sizes import DTYPE_BYTES
from onchip.plan.asked import Backend, PlannedCall, PlannedOp, StepPlan, Way
from onchip.plan.document import Baseline
from onchip.plan.ways import cuda_refusal, hopper_refusal, never


def _problem(asked: PlannedCall) -> AttentionProblem:
    tokens, size = asked.problem.tokens // asked.batch, asked.head_size
    if asked.heads % asked.key_heads:
        raise ValueError(f"plan: heads is {asked.heads}, but key_heads is {asked.key_heads}, which must divide it")
    return AttentionProblem(asked.batch, tokens, tokens, asked.heads, asked.key_heads, size, asked.value_size or size)


def _way(asked: PlannedCall) -> Way:
    """Blocks of queries over all keys; how many of these the mask hides isn't known here."""
    p, size = _problem(asked), DTYPE_BYTES[asked.problem.dtype]
    parts = partial(scratch_parts, p, size, backward=asked.gradients, softcap=False)

    def step(strategy: str, budget: int | None) -> StepPlan:
        rows = rows_of_block(p, size, budget, backward=asked.gradients, softcap=False)
        return StepPlan(parts(rows), 0, 0, {"queries": rows}, None)

    least = least_scratch(p, size, backward=asked.gradients, softcap=False)
    return Way(step, lambda strategy: least, lambda strategy: max(DEFAULT_SCRATCH, least))


def _refusal(asked: PlannedCall) -> str | None:
    p = _problem(asked)
    reason = cuda_refusal(asked)
    if reason is None and is_wide(p) and hopper_refusal(asked):
        reason = f"heads have at most {LARGEST_HEAD} numbers on GPUs other than Hopper, not {max(p.size, p.value_size)}"
    return reason or refusal(p, 1.0, asked.problem.dtype, None, blocked=False, backward=True, sinks=False)


def _kernels(asked: PlannedCall) -> Way:
    """The kernels' memory, which follows from the sizes; on Hopper a budget decides which make the gradients.  With
    heads of 65 to 128 numbers that of others than full and causal masks may be less.
    """
    p, gradients = _problem(asked), asked.gradients
    parts = partial(memory_parts, p, 1, backward=gradients, sinks=False)
    least, may_fuse = sum(parts().values()), gradients and hopper_refusal(asked) is None

    def of_budget(budget: int | None) -> dict[str, int]:
        how = {"stop": False, "sinks": False, "whole": True}
        return parts(fused=may_fuse and is_fused(p, 1, budget, (True, True, True), **how))

    return _of_parts(of_budget, least, TILE)


def _fixed(parts: Mapping[str, int], rows: int) -> Way:
    """A backend that takes the same memory whatever the budget, which must suffice."""
    return _of_parts(lambda budget: dict(parts), sum(parts.values()), rows)


def _of_parts(parts: Callable[[int | None], dict[str, int]], least: int, rows: int) -> Way:
    """A backend that takes this memory within a budget, and `least` bytes at least."""

    def step(strategy: str, budget: int | None) -> StepPlan:
        if budget is not None and budget < least:
            raise ValueError(f"attention: scratch_bytes={budget} is too small; the call needs {least} bytes")
        return StepPlan(parts(budget), 0, 0, {"queries": rows}, None)

    return Way(step, lambda strategy: least, lambda strategy: sum(parts(None).values()))


def _mosaic_refusal(asked: PlannedCall) -> str | None:
    if asked.problem.dtype == "float32":
        return "it is for bfloat16 and float16, not float32"
    if (most := max(asked.head_size, asked.value_size)) > MOSAIC_SIZES[-1][0]:
        return f"heads have at most {MOSAIC_SIZES[-1][0]} numbers, not {most}"
    return cuda_refusal(asked) or hopper_refusal(asked)


def _mosaic(asked: PlannedCall) -> Way:
    """As `_kernels`: a budget decides which make the gradients, and of some masks the memory may be less."""
    p, gradients = _problem(asked), asked.gradients
    parts = partial(mosaic.memory_parts, p, backward=gradients)

    def of_budget(budget: int | None) -> dict[str, int]:
        return parts(fused=gradients and mosaic.fits_one_kernel(p, budget))

    return _of_parts(of_budget, sum(parts().values()), TILE)


def _xla(asked: PlannedCall) -> Way:
    p = _problem(asked)
    return _fixed(xla_parts(p, 4, backward=asked.gradients), min(XLA_ROWS, p.queries))


def _plain(asked: PlannedCall) -> Baseline:
    """The scores and the probabilities, of which backward needs the latter and makes two more."""
    p, size = _problem(asked), DTYPE_BYTES[asked.problem.dtype]
    scores = asked.batch * p.heads * p.queries * p.keys
    expression = "softmax(scale * q @ k.mT + mask) @ v; SDPA's fused kernels and others don't store the scores either"
    return Baseline("eager", expression, scores * size * (3 if asked.gradients else 2))


PLAN = PlannedOp(
    backends={
        ("torch", "full"): {"triton": Backend(_refusal, _kernels), "plain": Backend(never, _way)},
        ("jax", "full"): {"mosaic_gpu": Backend(_mosaic_refusal, _mosaic), "xla": Backend(never, _xla)},
    },
    plain=_plain,
    needs=("heads", "key_heads", "head_size"),
    takes=("value_size",),
    softcap=False,
    numbers=0,
)
