"""The cost of a call with precision='fp8': formulas for memory and messages.  No framework."""

from onchip.collectives.problem import SCATTER, CollectiveSizes, Cost, sums
from onchip.fp8.numbers import block_quantized_bytes, quantized_bytes


def fp8_cost(op: str, s: CollectiveSizes, bytes_each: int, *, gradients: bool, weight_bytes: int) -> Cost:
    """As `cost` of `onchip.collectives.problem`, for x and a result of one dtype.

    Neither x nor the weight is kept, only their copies in FP8, which are counted.
    """
    steps, tokens = s.ranks - 1, s.ranks * s.rows
    arriving = min(steps, 2)
    # With several ranks, blocks that travel are packed into memory of their own.
    buffers = 1 + arriving if steps else 0
    weight_sum = {"the weight's gradient in float32": 4 * s.n * s.k} if weight_bytes < 4 else {}
    weight = {"weight in FP8": block_quantized_bytes(s.n, s.k)}
    if op == SCATTER:
        of_g = quantized_bytes(s.rows, s.n) + quantized_bytes(s.n, s.rows)
        kept = {"x in FP8": quantized_bytes(s.k, tokens), "weight in FP8": block_quantized_bytes(s.k, s.n)}
        forward = {"x in FP8": quantized_bytes(tokens, s.k), **weight, **sums(s, s.n, 4)}
        backward = {
            "the output's gradient in FP8": of_g,
            "blocks that travel": buffers * (of_g + 4 * s.n),
            "a block of x, and of its gradient": quantized_bytes(s.k, s.rows) + bytes_each * s.rows * s.k,
            **weight_sum,
        }
        sent = steps * (4 * s.rows * s.n + (of_g + 4 * s.n if gradients else 0))
        return Cost(kept if gradients else {}, forward, backward if gradients else {}, sent)
    of_x, turned = quantized_bytes(s.rows, s.k), quantized_bytes(s.k, s.rows)
    kept = {"x in FP8": turned, "weight in FP8": block_quantized_bytes(s.k, s.n)}
    forward = {
        "x in FP8": of_x,
        **weight,
        "blocks that travel": buffers * of_x,
        "a block's product": bytes_each * s.rows * s.n,
    }
    of_sums, of_weight = sums(s, s.k, 4), {"blocks that travel": buffers * turned} | weight_sum
    backward = {"the output's gradient in FP8": quantized_bytes(tokens, s.n) + quantized_bytes(s.n, tokens)}
    backward |= of_sums if sum(of_sums.values()) > sum(of_weight.values()) else of_weight
    sent = steps * (of_x + (turned + 4 * s.rows * s.k if gradients else 0))
    return Cost(kept if gradients else {}, forward, backward if gradients else {}, sent)
