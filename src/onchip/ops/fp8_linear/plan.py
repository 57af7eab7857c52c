"""What `onchip plan` says of the op.  No framework."""

from onchip.core.sizes import DTYPE_BYTES
from onchip.fp8 import numbers
from onchip.plan.asked import Backend, LayerPlan, PlannedCall, PlannedOp, StepPlan
from onchip.plan.gpus import GPUS, fp8_ms, product_ms
from onchip.plan.ways import cuda_refusal, fp8_triton_refusal, larger, of_layer


def _fp8_capable(asked: PlannedCall) -> str | None:
    gpu = GPUS[asked.gpu]
    lacks = None if gpu.capability >= (8, 9) else f"FP8 needs compute capability 8.9, and the {gpu.title} has 8.0"
    return cuda_refusal(asked) or lacks


def _step(asked: PlannedCall, name: str, backend: str) -> StepPlan:
    """One linear layer in FP8: memory as docs/ops/fp8_linear.md has it, time by the measured products and quantiser."""
    (k, n), m, grad = asked.linears[name], asked.problem.tokens, asked.gradients
    p = numbers.Fp8Problem(m, n, k, asked.problem.dtype)
    saved = {"kept until backward: x and weight in FP8": numbers.saved_bytes(p)} if grad else {}
    forward = {"x in FP8": numbers.quantized_bytes(m, k), "weight in FP8": numbers.block_quantized_bytes(n, k)}
    backward = {"the output's gradient in FP8": numbers.gradient_bytes(p)} if grad else {}
    ms = None
    if backend == "scaled_mm" and asked.measured:
        of_x, of_weight = ((DTYPE_BYTES[d] + 1 + grad) for d in (asked.problem.dtype, asked.problem.weight_dtype))
        moved = of_x * m * k + of_weight * n * k + (of_x * m * n if grad else 0)
        ms = fp8_ms(asked.gpu, (1 + grad) * m * n * k, grad * m * n * k, moved)
    return of_layer(asked, (k, n), saved | larger(forward, backward), ms)


def _linear_ms(asked: PlannedCall, features: tuple[int, int]) -> float | None:
    """nn.Linear in the same dtype."""
    if not asked.has_rates:
        return None
    return product_ms((3 if asked.gradients else 1) * asked.problem.tokens * features[0] * features[1])


_LAYER = LayerPlan(_step, ("nn.Linear in {dtype}", "F.linear(x, weight)"), _linear_ms)

PLAN = PlannedOp(
    backends={("torch", "full"): {"scaled_mm": Backend(fp8_triton_refusal), "triton": Backend(_fp8_capable)}},
    plain=_LAYER.replaced,
    needs=(),
    takes=("in_features", "out_features"),
    layer=_LAYER,
    fp8=True,
)
