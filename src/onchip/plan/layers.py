"""Plans of ops without budgets: linear layers in FP8, of experts, and of ranks that share them.  No framework."""

from onchip.collectives import problem as collective
from onchip.core.sizes import DTYPE_BYTES
from onchip.fp8 import numbers as fp8
from onchip.groups import problem as grouped
from onchip.groups.triton.tiles import copying_rows_pays, plan_numbers
from onchip.ops.collective_matmul.fp8_cost import fp8_cost
from onchip.plan.asked import LayerPlan, PlannedCall, StepPlan
from onchip.plan.gpus import GPUS, fp8_ms, grouped_ms, product_ms


def _of_layer(
    asked: PlannedCall, features: tuple[int, int], parts: dict[str, int], ms: float | None, sent: int | None = None
) -> StepPlan:
    sizes = {"tokens": asked.problem.tokens, "in_features": features[0], "out_features": features[1]}
    return StepPlan(parts, 3 if asked.gradients else 1, 0, sizes, ms, sent)


def _fp8_step(asked: PlannedCall, name: str, backend: str) -> StepPlan:
    """One linear layer in FP8: memory as docs/ops/fp8_linear.md has it, time by the measured products and quantiser."""
    (k, n), m, grad = asked.linears[name], asked.problem.tokens, asked.gradients
    p = fp8.Problem(m, n, k, asked.problem.dtype)
    saved = {"kept until backward: x and weight in FP8": fp8.saved_bytes(p)} if grad else {}
    forward = {"x in FP8": fp8.quantized_bytes(m, k), "weight in FP8": fp8.block_quantized_bytes(n, k)}
    backward = {"the output's gradient in FP8": fp8.gradient_bytes(p)} if grad else {}
    ms = None
    if backend == "scaled_mm" and asked.measured:
        of_x, of_weight = ((DTYPE_BYTES[d] + 1 + grad) for d in (asked.problem.dtype, asked.problem.weight_dtype))
        moved = of_x * m * k + of_weight * n * k + (of_x * m * n if grad else 0)
        ms = fp8_ms(asked.gpu, (1 + grad) * m * n * k, grad * m * n * k, moved)
    return _of_layer(asked, (k, n), saved | _larger(forward, backward), ms)


def _larger(*phases: dict[str, int]) -> dict[str, int]:
    return max(phases, key=lambda phase: sum(phase.values()))


def _linear_ms(asked: PlannedCall, features: tuple[int, int]) -> float | None:
    """nn.Linear in the same dtype."""
    if not asked.has_rates:
        return None
    return product_ms((3 if asked.gradients else 1) * asked.problem.tokens * features[0] * features[1])


def _grouped_step(asked: PlannedCall, name: str, backend: str) -> StepPlan:
    """The products of experts: memory as docs/ops/grouped_matmul.md has it, its way through the kernels."""
    (k, n), p, groups, grad = asked.linears[name], asked.problem, asked.experts, asked.gradients
    size, kept = DTYPE_BYTES[p.dtype], "kept until backward: " if grad else ""
    rows = asked.rows or p.tokens
    parts = {f"{kept}the tiles' plan": 4 * plan_numbers(grouped.Problem(p.tokens, rows, groups, n, k, n, p.tokens))}
    if p.weight_dtype != p.dtype:
        parts[f"{kept}autocast's weight"] = size * groups * n * k
    if asked.rows:
        parts[f"{kept}rows, checked"] = 4 * p.tokens
        if grad:
            parts["x's gradient before it is summed up"] = size * p.tokens * k
            parts["rows, sorted"] = 12 * p.tokens + 12 * (rows + 1)
        elif size == 2 and GPUS[asked.gpu].capability == (9, 0) and copying_rows_pays(n, activation=False):
            parts["rows, copied"] = size * p.tokens * k
    return _of_layer(asked, (k, n), parts, _grouped_ms(asked, (k, n)))


def _grouped_ms(asked: PlannedCall, features: tuple[int, int]) -> float | None:
    if not asked.has_rates:
        return None
    weight = features[0] * features[1]
    weight_bytes = DTYPE_BYTES[asked.problem.dtype] * asked.experts * weight
    return grouped_ms(asked.gpu, asked.problem.tokens * weight, weight_bytes, gradients=asked.gradients)


def _grouped_mm_ms(asked: PlannedCall, features: tuple[int, int]) -> float | None:
    """PyTorch's own took about 1.1 times as long, on an H100 in bfloat16."""
    ms = _grouped_ms(asked, features)
    return None if ms is None else 1.1 * ms


# Layers that sum up what the ranks have; the others widen what all of them are given.
_ROW_PARALLEL = ("row parallel", "attention out", "down")


def _collective_step(asked: PlannedCall, name: str, backend: str) -> StepPlan:
    """A linear layer that ranks share: memory as docs/ops/collective_matmul.md has it."""
    (k, n), p, ranks = asked.linears[name], asked.problem, asked.ranks
    by_rows = name in _ROW_PARALLEL
    shared, of = (k, "in_features") if by_rows else (n, "out_features")
    if p.tokens % ranks or shared % ranks:
        wrong = ("tokens", p.tokens) if p.tokens % ranks else (f"{of} of {name}", shared)
        raise ValueError(f"plan: {wrong[0]} are {wrong[1]}, which {ranks} ranks can't share evenly")
    k, n = (k // ranks, n) if by_rows else (k, n // ranks)
    rows, fp8_too = p.tokens // ranks, asked.precision == "fp8"
    if fp8_too and ranks > 1 and rows % fp8.BLOCK:
        raise ValueError(
            f"plan: with precision 'fp8' each rank's tokens must be a multiple of {fp8.BLOCK}; {p.tokens} by {ranks} "
            f"ranks are {rows}"
        )
    made = (fp8_cost if fp8_too else collective.cost)(
        collective.SCATTER if by_rows else collective.GATHER,
        collective.Sizes(ranks, rows, n, k),
        DTYPE_BYTES[p.dtype],
        gradients=asked.gradients,
        weight_bytes=DTYPE_BYTES[p.weight_dtype],
    )
    kept = made.kept if fp8_too else {}
    if not fp8_too and p.weight_dtype != p.dtype:
        kept = {"autocast's weight": DTYPE_BYTES[p.dtype] * n * k}
    parts = {f"kept until backward: {what}": size for what, size in kept.items()} | _larger(made.forward, made.backward)
    return _of_layer(asked, (k, n), parts, None, made.sent)


FP8 = LayerPlan(_fp8_step, ("nn.Linear in {dtype}", "F.linear(x, weight)"), _linear_ms)
GROUPED = LayerPlan(
    _grouped_step, ("F.grouped_mm", "F.grouped_mm(x, weight.mT, offs=group_offsets)"), _grouped_mm_ms
)  # fmt: skip
COLLECTIVE = LayerPlan(
    _collective_step, ("one collective", "all_gather and F.linear, or F.linear and reduce_scatter")
)  # fmt: skip
