"""What `onchip plan` says of the op.  No framework."""

from functools import partial

from onchip.attention.problem import DEFAULT_SCRATCH, AttentionProblem, least_scratch, rows_of_block, scratch_parts
from onchip.attention.triton.problem import TILE, memory_parts, refusal
from onchip.core.sizes import DTYPE_BYTES
from onchip.plan.asked import Backend, PlannedCall, PlannedOp, StepPlan, Way
from onchip.plan.document import Baseline
from onchip.plan.ways import cuda_refusal, hopper_refusal, never


def _problem(asked: PlannedCall) -> AttentionProblem:
    tokens, size = asked.problem.tokens // asked.batch, asked.head_size
    if asked.heads % asked.key_heads:
        raise ValueError(f"plan: heads are {asked.heads}, no multiple of the {asked.key_heads} key_heads")
    return AttentionProblem(asked.batch, tokens, tokens, asked.heads, asked.key_heads, size, size)


def _way(asked: PlannedCall) -> Way:
    """Blocks of queries over all keys: how many of these a mask hides is data."""
    p, size = _problem(asked), DTYPE_BYTES[asked.problem.dtype]
    parts = partial(scratch_parts, p, size, backward=asked.gradients, softcap=False)

    def step(strategy: str, budget: int | None) -> StepPlan:
        rows = rows_of_block(p, size, budget, backward=asked.gradients, softcap=False)
        return StepPlan(parts(rows), 0, 0, {"queries": rows}, None)

    least = least_scratch(p, size, backward=asked.gradients, softcap=False)
    return Way(step, lambda strategy: least, lambda strategy: max(DEFAULT_SCRATCH, least))


def _refusal(asked: PlannedCall) -> str | None:
    reason = cuda_refusal(asked) or hopper_refusal(asked)
    p = _problem(asked)
    return reason or refusal(p, 1.0, asked.problem.dtype, None, blocked=False, backward=True, sinks=False)


def _kernels(asked: PlannedCall) -> Way:
    """What they take is known from the sizes alone."""
    parts = memory_parts(_problem(asked), 1, backward=asked.gradients, sinks=False)
    least = sum(parts.values())

    def step(strategy: str, budget: int | None) -> StepPlan:
        if budget is not None and budget < least:
            raise ValueError(f"attention: scratch_bytes={budget} is too little; it takes {least}")
        return StepPlan(parts, 0, 0, {"queries": TILE}, None)

    return Way(step, lambda strategy: least, lambda strategy: least)


def _plain(asked: PlannedCall) -> Baseline:
    """The scores and the probabilities, of which backward needs the latter and makes two more."""
    p, size = _problem(asked), DTYPE_BYTES[asked.problem.dtype]
    scores = asked.batch * p.heads * p.queries * p.keys
    return Baseline("eager", "softmax(scale * q @ k.mT + mask) @ v", scores * size * (3 if asked.gradients else 2))


PLAN = PlannedOp(
    backends={("torch", "full"): {"triton": Backend(_refusal, _kernels), "plain": Backend(never, _way)}},
    plain=_plain,
    needs=("heads", "key_heads", "head_size"),
    softcap=False,
    numbers=0,
)
