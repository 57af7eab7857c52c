"""What `onchip plan` says of the op.  No framework."""

from collections.abc import Callable

from onchip.plan.asked import Backend, PlannedCall, PlannedOp, StepPlan, Way
from onchip.plan.document import Baseline
from onchip.plan.plain import EAGER, JIT, Measured, known, of_hidden, of_weight, was_measured
from onchip.plan.ways import mosaic_refusal, mosaic_way, never, of_config, triton_refusal, triton_way
from onchip.vocab import memory
from onchip.vocab.chunks import ChunkConfig, Planner
from onchip.vocab.xla import memory as xla_memory

_LOG_PROBS = Measured(EAGER, "F.linear(hidden, weight).float().log_softmax(-1).gather(-1, ids)", 12, 15.9, 10, 8.3)
_ENTROPY = _LOG_PROBS._replace(
    expression=f"{_LOG_PROBS.expression}, and the entropy", step_bytes=20, step_ps=42.3, bytes=14, ps=16.4
)
_COMPILED = Measured("torch.compile", "the same, compiled", 6, 6.9, 2, 0.9)
_COMPILED_ENTROPY = Measured("torch.compile", "the same, compiled", 10, 8.6, 2, 1.3)


def _of_products(planner: Planner[ChunkConfig], *, both_walks: bool) -> Callable[[PlannedCall], Way]:
    """Forward, and a backward that computes the logits again.  With `both_walks` each has a plan of its own; in JAX one
    plan serves both."""

    def way(asked: PlannedCall) -> Way:
        p, again = asked.wanted, asked.gradients
        strategy = "recompute" if again else "forward"
        walks = ("forward", "recompute") if again and both_walks else (strategy,)

        def step(_: str, budget: int | None) -> StepPlan:
            planner.require(p, strategy, budget)
            plans = [planner.plan(p, walk, budget) for walk in walks]
            parts = max((planner.parts(p, c) for c in plans), key=lambda parts: sum(parts.values()))
            return StepPlan(parts, asked.products + again, p.tokens if again else 0, of_config(plans[-1]), None)

        return Way(step, lambda _: planner.least(p, strategy), lambda _: planner.default(p, strategy))

    return way


def _plain(asked: PlannedCall) -> Baseline:
    if asked.framework == "jax":
        return Baseline(JIT, "jax.nn.log_softmax of the logits")
    return known(asked, _ENTROPY if asked.entropy else _LOG_PROBS, of_hidden(asked) + of_weight(asked))


def _compiled(asked: PlannedCall) -> Baseline | None:
    if asked.framework == "jax" or not was_measured(asked):
        return None
    return known(asked, _COMPILED_ENTROPY if asked.entropy else _COMPILED, of_hidden(asked) + of_weight(asked))


PLAN = PlannedOp(
    backends={
        ("torch", "full"): {
            "triton": Backend(triton_refusal, triton_way),
            "plain": Backend(never, _of_products(memory.PLANNER, both_walks=True)),
        },
        ("jax", "full"): {
            "mosaic_gpu": Backend(mosaic_refusal, lambda asked: mosaic_way(asked, per_token_loss=True)),
            "xla": Backend(never, _of_products(xla_memory.PLANNER, both_walks=False)),
        },
    },
    plain=_plain,
    compiled=_compiled,
    takes=("entropy", "frozen"),
    ids=1,
)
