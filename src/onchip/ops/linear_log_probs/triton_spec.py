"""How the Triton backend cuts a problem: as linear_cross_entropy does, whose planner this asks.  No framework."""

from onchip.ops.linear_log_probs.spec import OP, Problem
from onchip.vocab import memory
from onchip.vocab.triton import memory as triton_spec
from onchip.vocab.triton.memory import TritonConfig


def head_problem(p: Problem) -> memory.Problem:
    """The problem as linear_cross_entropy's planner knows it."""
    return memory.Problem(
        p.tokens,
        p.hidden,
        p.vocab,
        dtype=p.dtype,
        hidden_dtype=p.hidden_dtype,
        weight_dtype=p.weight_dtype,
        device="cuda",
        grad_hidden=p.grad_hidden,
        grad_weight=p.grad_weight,
        grad_bias=p.grad_bias,
        per_token_loss=True,
        softcap=p.softcap,
        stats=p.entropy or p.top1,
        copied=p.copied,
    )


def id_bytes(p: Problem) -> int:
    """Bytes of what there is of each token and each id beside linear_cross_entropy's vectors."""
    return (48 + 72 * p.ids) * p.tokens


def scratch_parts(p: Problem, c: TritonConfig) -> dict[str, int]:
    """Peak memory above inputs, results and returned gradients, in bytes, part by part."""
    return triton_spec.scratch_parts(head_problem(p), c) | {"ids": id_bytes(p)}


def scratch_bytes(p: Problem, c: TritonConfig) -> int:
    """Peak memory above inputs, results and returned gradients, in bytes."""
    return sum(scratch_parts(p, c).values())


def least_scratch(p: Problem) -> int:
    """Bytes of scratch that the problem needs at all."""
    return triton_spec.least_scratch(head_problem(p), "auto") + id_bytes(p)


def default_scratch(p: Problem) -> int:
    """What linear_cross_entropy's default is, and what ids take beside it."""
    return triton_spec.default_scratch(head_problem(p)) + id_bytes(p)


def plan(p: Problem, budget: int | None = None) -> TritonConfig:
    """The plan of the least predicted time whose scratch fits the budget.

    Raises:
        ValueError: nothing fits.
    """
    need = least_scratch(p)
    if budget is not None and need > budget:
        raise ValueError(
            f"{OP}: scratch_bytes={budget} is too small for T={p.tokens}, H={p.hidden}, V={p.vocab} in {p.dtype}: "
            f"the smallest chunk needs {need} bytes; raise scratch_bytes"
        )
    return triton_spec.plan(head_problem(p), "auto", None if budget is None else budget - id_bytes(p))
