"""What `onchip plan` says of the op.  No framework."""

from onchip.core.sizes import DTYPE_BYTES
from onchip.groups.problem import GroupedProblem
from onchip.groups.triton.tiles import copying_rows_pays, plan_numbers
from onchip.plan.asked import Backend, LayerPlan, PlannedCall, PlannedOp, StepPlan
from onchip.plan.gpus import GPUS, faster_memory
from onchip.plan.ways import cuda_refusal, of_layer

# In bfloat16 on an H100: TFLOP/s, and TB/s of the groups' weights that are read or written beside;
# of output, x's gradient and weight's.  Fitted to even groups in results/2026-11-24-h100-grouped_matmul*.json, which
# are within 11%, 9% and 3%.
_RATES = ((955.0, 4.6), (935.0, 5.0), (875.0, 4.4))


def _step(asked: PlannedCall, name: str, backend: str) -> StepPlan:
    """The products of experts: memory as docs/ops/grouped_matmul.md has it, its way through the kernels."""
    (k, n), p, groups, grad = asked.linears[name], asked.problem, asked.experts, asked.gradients
    size, kept = DTYPE_BYTES[p.dtype], "kept until backward: " if grad else ""
    rows = asked.rows or p.tokens
    parts = {f"{kept}the tiles' plan": 4 * plan_numbers(GroupedProblem(p.tokens, rows, groups, n, k, n, p.tokens))}
    if p.weight_dtype != p.dtype:
        parts[f"{kept}autocast's weight"] = size * groups * n * k
    if asked.rows:
        parts[f"{kept}rows, checked"] = 4 * p.tokens
        if grad:
            parts["x's gradient before it is summed up"] = size * p.tokens * k
            parts["rows, sorted"] = 12 * p.tokens + 12 * (rows + 1)
        elif size == 2 and GPUS[asked.gpu].capability == (9, 0) and copying_rows_pays(n, activation=False):
            parts["rows, copied"] = size * p.tokens * k
    return of_layer(asked, (k, n), parts, _ms(asked, (k, n)))


def _ms(asked: PlannedCall, features: tuple[int, int]) -> float | None:
    if not asked.has_rates:
        return None
    weight, memory = features[0] * features[1], faster_memory(asked.gpu)
    flops, weight_bytes = 2 * asked.problem.tokens * weight, DTYPE_BYTES[asked.problem.dtype] * asked.experts * weight
    of = _RATES if asked.gradients else _RATES[:1]
    return 1e-9 * sum(flops / rate + weight_bytes / (beside * memory) for rate, beside in of)


def _grouped_mm_ms(asked: PlannedCall, features: tuple[int, int]) -> float | None:
    """PyTorch's own took about 1.1 times as long, on an H100 in bfloat16."""
    ms = _ms(asked, features)
    return None if ms is None else 1.1 * ms


_LAYER = LayerPlan(
    _step, ("F.grouped_mm", "F.grouped_mm(x, weight.mT, offs=group_offsets)"), _grouped_mm_ms
)  # fmt: skip

PLAN = PlannedOp(
    backends={("torch", "full"): {"triton": Backend(cuda_refusal)}},
    plain=_LAYER.replaced,
    needs=(),
    takes=("in_features", "out_features", "experts", "rows"),
    layer=_LAYER,
    source="Times are predicted with rates measured on an H100, for groups of the same size; for an H200 with its "
    "memory bandwidth from the data sheet.",
)
