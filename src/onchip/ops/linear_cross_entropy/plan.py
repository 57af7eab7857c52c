"""What `onchip plan` says of the op.  No framework."""

from dataclasses import replace
from functools import partial

from onchip.core.sizes import DTYPE_BYTES
from onchip.plan.asked import Backend, PlannedCall, PlannedOp, StepPlan, Way
from onchip.plan.document import Baseline
from onchip.plan.gpus import fp8_ms
from onchip.plan.plain import EAGER, JIT, Measured, known, of_hidden, of_weight, was_measured
from onchip.plan.ways import (
    fp8_triton_refusal,
    mosaic_refusal,
    mosaic_way,
    never,
    of_products,
    triton_refusal,
    triton_way,
)
from onchip.vocab import memory
from onchip.vocab.fp8 import memory as fp8_memory
from onchip.vocab.xla import memory as xla_memory

_LOSS = Measured(EAGER, "F.cross_entropy(F.linear(hidden, weight).float(), target)", 12, 17.0, 8, 8.4)
_COMPILED = Measured("torch.compile", "the same, compiled, with logits in 16 bits", 2, 2.7, 2, 1.0)
_XLA = Measured(JIT, "the loss of hidden @ weight.T in 16 bits, under jax.jit", 6, 5.2, 2, 1.5)


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


def _plain(asked: PlannedCall) -> Baseline:
    if asked.framework == "torch":
        return known(asked, _LOSS, of_hidden(asked) + of_weight(asked))
    return known(asked, _XLA, 0) if was_measured(asked) else Baseline(*_XLA[:2])


def _compiled(asked: PlannedCall) -> Baseline | None:
    if asked.framework != "torch" or asked.precision != "full" or not was_measured(asked):
        return None
    return known(asked, _COMPILED, 0)


PLAN = PlannedOp(
    backends={
        ("torch", "full"): {
            "triton": Backend(triton_refusal, triton_way),
            "plain": Backend(never, of_products(memory)),
        },
        ("torch", "fp8"): {
            "triton": Backend(fp8_triton_refusal, partial(_fp8_way, triton=True)),
            "plain": Backend(never, _fp8_torch_way),
        },
        ("jax", "full"): {
            "mosaic_gpu": Backend(mosaic_refusal, mosaic_way),
            "xla": Backend(never, of_products(xla_memory)),
        },
    },
    plain=_plain,
    compiled=_compiled,
    takes=("frozen", "weight_grad_out"),
)
