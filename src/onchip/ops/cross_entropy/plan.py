"""What `onchip plan` says of the op.  No framework."""

from functools import partial
from typing import Any

from onchip.core.sizes import DTYPE_BYTES
from onchip.plan.asked import Backend, PlannedCall, PlannedOp, Way
from onchip.plan.document import Baseline
from onchip.plan.gpus import faster_memory, rates
from onchip.plan.plain import EAGER, JIT, Measured, was_measured
from onchip.plan.ways import Said, hopper_refusal, never, planned, triton_refusal
from onchip.vocab.rows import memory

_CROSS_ENTROPY = Measured(EAGER, "F.cross_entropy(logits.float(), target)", 12, 16.9, 8, 8.3)


def _problem(asked: PlannedCall, **way: Any) -> memory.RowsProblem:
    of = asked.problem
    return memory.RowsProblem(of.tokens, of.vocab, of.dtype, of.device, grad=asked.gradients, softcap=of.softcap, **way)


def _mosaic_refusal(asked: PlannedCall) -> str | None:
    device = asked.problem.device
    refusal = memory.mosaic_refusal(_problem(asked), "gpu" if device == "cuda" else device)
    return refusal or hopper_refusal(asked)


def _rows_way(asked: PlannedCall, *, triton: bool = False, **way: Any) -> Way:
    p = _problem(asked, triton=triton, **way)

    def say(rows: int) -> Said:
        ms = None
        if triton and asked.measured:
            # Read once, and the gradient written: results/2026-11-22-h100-cross_entropy.json, where rows are long.
            per_byte = 2 * 0.41 if asked.gradients else 0.34
            ms = 1e-9 * per_byte * p.tokens * p.vocab * DTYPE_BYTES[p.dtype] / faster_memory(asked.gpu)
        return 0, 0, {"tokens": rows}, ms

    return planned(memory.PLANNER, p, say)


def _plain(asked: PlannedCall) -> Baseline:
    if asked.framework == "jax":
        return Baseline(JIT, "jax.nn.log_softmax of the logits")
    p = asked.problem
    return _CROSS_ENTROPY.plain(asked, 0, after_peak=asked.gradients * DTYPE_BYTES[p.dtype] * p.tokens * p.vocab)


def _compiled(asked: PlannedCall) -> Baseline | None:
    """torch.compile's kernels keep two numbers per token; with few tokens the time is that of four launches."""
    if asked.framework == "jax" or not was_measured(asked):
        return None
    p, ms = asked.problem, None
    if asked.has_rates:
        ps = 2.67 if asked.gradients else 1.24
        ms = 1e-9 * ps * p.tokens * p.vocab / faster_memory(asked.gpu) + 4e-3 * rates(asked.gpu).launch
    return Baseline("torch.compile", "the same, compiled", 8 * p.tokens + 1024, ms)


PLAN = PlannedOp(
    backends={
        ("torch", "full"): {
            "triton": Backend(triton_refusal, partial(_rows_way, triton=True)),
            "plain": Backend(never, _rows_way),
        },
        ("jax", "full"): {
            "mosaic_gpu": Backend(_mosaic_refusal, partial(_rows_way, mosaic=True)),
            "xla": Backend(never, partial(_rows_way, xla=True)),
        },
    },
    plain=_plain,
    compiled=_compiled,
    needs=("vocab",),
)
