"""What `onchip plan` says of the op.  No framework."""

from onchip.collectives import problem
from onchip.core.sizes import DTYPE_BYTES
from onchip.fp8 import numbers
from onchip.ops.collective_matmul.fp8_cost import fp8_cost
from onchip.plan.asked import Backend, LayerPlan, PlannedCall, PlannedOp, StepPlan
from onchip.plan.ways import larger, never, of_layer, triton_refusal

# Layers that sum up what the ranks have; the others widen what all of them are given.
_ROW_PARALLEL = ("row parallel", "attention out", "down")


def _step(asked: PlannedCall, name: str, backend: str) -> StepPlan:
    """A linear layer that ranks share; docs/ops/collective_matmul.md has the same formulas of memory."""
    (k, n), p, ranks = asked.linears[name], asked.problem, asked.ranks
    by_rows = name in _ROW_PARALLEL
    shared, name_of = (k, "in_features") if by_rows else (n, "out_features")
    if p.tokens % ranks or shared % ranks:
        wrong = ("tokens", p.tokens) if p.tokens % ranks else (f"{name_of} of {name}", shared)
        raise ValueError(f"plan: {wrong[0]} are {wrong[1]}, which {ranks} ranks can't share evenly")
    k, n = (k // ranks, n) if by_rows else (k, n // ranks)
    rows, fp8_too = p.tokens // ranks, asked.precision == "fp8"
    if fp8_too and ranks > 1 and rows % numbers.BLOCK:
        raise ValueError(
            f"plan: with precision 'fp8' each rank's tokens must be a multiple of {numbers.BLOCK}; {p.tokens} by "
            f"{ranks} ranks are {rows}"
        )
    sizes = problem.SCATTER if by_rows else problem.GATHER, problem.CollectiveSizes(ranks, rows, n, k)
    each, gradients = DTYPE_BYTES[p.dtype], asked.gradients
    if backend == "ring":
        of = fp8_cost if fp8_too else problem.cost
        made = of(*sizes, each, gradients=gradients, weight_bytes=DTYPE_BYTES[p.weight_dtype])
    else:
        made = problem.cost_at_once(*sizes, each, gradients=gradients, mapped=backend == "symmetric")
    kept = made.kept if fp8_too else {}
    if not fp8_too and p.weight_dtype != p.dtype:
        kept = {"autocast's weight": DTYPE_BYTES[p.dtype] * n * k}
    parts = {f"kept until backward: {what}": size for what, size in kept.items()} | larger(made.forward, made.backward)
    return of_layer(asked, (k, n), parts, None, made.sent)


_LAYER = LayerPlan(
    _step, ("one collective", "all_gather and F.linear, or F.linear and reduce_scatter")
)  # fmt: skip


def _mapped_refusal(asked: PlannedCall) -> str | None:
    """Why "symmetric" can't serve the call, or None, if the ranks are GPUs of one host."""
    if asked.ranks == 1:
        return "nothing travels"
    return "it runs on GPUs alone" if asked.problem.device != "cuda" else triton_refusal(asked)


def _gpu_refusal(asked: PlannedCall) -> str | None:
    return None if asked.problem.device == "cuda" else "on the CPU the ring is taken"


PLAN = PlannedOp(
    backends={
        ("torch", "full"): {
            "collective": Backend(_gpu_refusal),
            "symmetric": Backend(_mapped_refusal),
            "ring": Backend(never),
        },
        ("torch", "fp8"): {"ring": Backend(never)},
    },
    plain=_LAYER.replaced,
    needs=(),
    takes=("in_features", "out_features", "tensor_parallel"),
    layer=_LAYER,
)
