"""What the losses replace: expressions of the framework's own functions, as they were measured on an H100.

Imports no framework.
"""

from typing import NamedTuple

from onchip.core.sizes import DTYPE_BYTES
from onchip.plan.asked import PlannedCall
from onchip.plan.document import Baseline
from onchip.plan.gpus import faster_memory, product_ms, rates

# How many kernels a plain step launches, and its forward alone: with few tokens, launches take most of the time.
_STEP_KERNELS, _KERNELS = 8, 4


class Measured(NamedTuple):
    """What an expression takes for each logit: bytes and picoseconds, for a whole step and for its forward alone.

    The bytes follow from what autograd keeps.  The times are from results/2026-11-2[12]-h100-*.json.
    """

    name: str
    expression: str
    step_bytes: int
    step_ps: float
    bytes: int
    ps: float

    def plain(self, asked: PlannedCall, products: int, *, after_peak: int) -> Baseline:
        """The expression's memory and time.

        `products`: the hidden size, summed over all products.  `after_peak`: bytes of gradients that don't exist yet at
        the peak.
        """
        p = asked.problem
        logits = p.tokens * p.vocab
        per_logit, ps = (self.step_bytes, self.step_ps) if asked.gradients else (self.bytes, self.ps)
        # After the peak, the logits' gradient in the inputs' dtype and the gradients made from it are in memory.
        size = max(per_logit * logits - after_peak, DTYPE_BYTES[p.dtype] * logits)
        ms = None
        if asked.has_rates:
            kernels = (_STEP_KERNELS if asked.gradients else _KERNELS) * 1e-3 * rates(asked.gpu).launch
            ms = product_ms(products * logits) + 1e-9 * ps * logits / faster_memory(asked.gpu) + kernels
        return Baseline(self.name, self.expression, size, ms)


EAGER, JIT = "eager PyTorch", "plain JAX"


def of_hidden(asked: PlannedCall) -> int:
    """Bytes of hidden's gradient."""
    p = asked.problem
    return DTYPE_BYTES[p.hidden_dtype] * p.tokens * p.hidden if asked.gradients else 0


def of_weight(asked: PlannedCall) -> int:
    p = asked.problem
    return DTYPE_BYTES[p.weight_dtype] * p.vocab * p.hidden * p.grad_weight if asked.gradients else 0


def was_measured(asked: PlannedCall) -> bool:
    """Whether the memory of what XLA or TorchInductor compiles was measured."""
    return asked.problem.device == "cuda" and asked.problem.dtype != "float32"


def known(asked: PlannedCall, measured: Measured, after_peak: int) -> Baseline:
    return measured.plain(asked, asked.products * asked.problem.hidden, after_peak=after_peak)
