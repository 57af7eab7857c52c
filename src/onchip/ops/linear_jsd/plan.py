"""What `onchip plan` says of the op.  No framework."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from onchip.core.sizes import DTYPE_BYTES
from onchip.ops.linear_jsd import memory, triton_memory
from onchip.plan.asked import Backend, PlannedCall, PlannedOp, Way
from onchip.plan.document import Baseline
from onchip.plan.gpus import rates
from onchip.plan.plain import JIT, Measured, was_measured
from onchip.plan.ways import Said, hopper_refusal, kernels, never, of_weight_chunks, planned, triton_refusal
from onchip.vocab.chunks import Planner

_COMPILED = Measured("torch.compile", "the divergence of two float32 softmaxes, compiled", 8, 13.9, 4, 5.7)


def _problem(asked: PlannedCall, *, stash: bool) -> memory.JsdProblem:
    student = asked.wanted
    teacher = replace(asked.problem, hidden=asked.teacher_hidden, grad_hidden=False, grad_weight=False)
    return memory.JsdProblem(student.vocab, student, teacher, stash=stash and asked.gradients)


def _triton_way(asked: PlannedCall) -> Way:
    p = _problem(asked, stash=False)
    predict = partial(triton_memory.predict, rates=rates(asked.gpu)) if asked.measured else None
    return kernels(triton_memory.PLANNER, p, (4 if asked.gradients else 2, 2), predict, of_weight_chunks)


def _mosaic_refusal(asked: PlannedCall) -> str | None:
    device = asked.problem.device
    refusal = memory.mosaic_refusal(_problem(asked, stash=True), "gpu" if device == "cuda" else device)
    return refusal or hopper_refusal(asked)


def _mosaic_way(asked: PlannedCall) -> Way:
    number, p = 4 if asked.gradients else 2, _problem(asked, stash=True)

    def say(c: memory.JsdMosaicPlan) -> Said:
        if c.way != "again":
            return number, 0, {"tokens": c.chunk}, None
        return number + len(p.layers), p.tokens, {"tokens": c.chunk, "vocab": c.columns}, None

    return planned(memory.MOSAIC_PLANNER, p, say)


def _way(planner: Planner[int]) -> Callable[[PlannedCall], Way]:
    def way(asked: PlannedCall) -> Way:
        number = 4 if asked.gradients else 2
        return planned(planner, _problem(asked, stash=True), lambda chunk: (number, 0, {"tokens": chunk}, None))

    return way


def _plain(asked: PlannedCall) -> Baseline:
    if asked.framework == "jax":
        return Baseline(JIT, "the divergence of two softmaxes")
    p = asked.problem
    if not was_measured(asked):
        return Baseline(*_COMPILED[:2])
    # A product for each model's logits, and two for the student's gradients.
    products = p.hidden * (3 if asked.gradients else 1) + asked.teacher_hidden
    return _COMPILED.plain(asked, products, after_peak=asked.gradients * DTYPE_BYTES[p.dtype] * p.tokens * p.hidden)


PLAN = PlannedOp(
    backends={
        ("torch", "full"): {
            "triton": Backend(triton_refusal, _triton_way),
            "plain": Backend(never, _way(memory.PLANNER)),
        },
        ("jax", "full"): {
            "mosaic_gpu": Backend(_mosaic_refusal, _mosaic_way),
            "xla": Backend(never, _way(memory.JAX_PLANNER)),
        },
    },
    plain=_plain,
    takes=("teacher_hidden",),
    logits=2,
    softcap=False,
    numbers=0,
)
