"""What the losses replace: expressions of the framework's own functions, by measurements on an H100.  No framework."""

from typing import NamedTuple

from onchip.core.sizes import DTYPE_BYTES
from onchip.plan.asked import Plain, PlannedCall
from onchip.plan.gpus import faster_memory, product_ms, rates

# Launches of a plain step, and of its forward alone: what few tokens take.
_STEP_KERNELS, _KERNELS = 8, 4


class _Measured(NamedTuple):
    """What an expression was measured to take for each logit, of a step and of forward alone."""

    name: str
    expression: str
    step_bytes: int
    step_ps: float
    bytes: int
    ps: float

    def plain(self, asked: PlannedCall, products: int, *, after_peak: int) -> Plain:
        """`products`: hidden sizes summed over all products.  `after_peak`: bytes of gradients that are not there yet
        at the peak.
        """
        p = asked.problem
        logits = p.tokens * p.vocab
        per_logit, ps = (self.step_bytes, self.step_ps) if asked.gradients else (self.bytes, self.ps)
        # Behind the peak there are the logits' gradient in its dtype, and what is made of it.
        size = max(per_logit * logits - after_peak, DTYPE_BYTES[p.dtype] * logits)
        ms = None
        if asked.has_rates:
            kernels = (_STEP_KERNELS if asked.gradients else _KERNELS) * 1e-3 * rates(asked.gpu).launch
            ms = product_ms(products * logits) + 1e-9 * ps * logits / faster_memory(asked.gpu) + kernels
        return Plain(self.name, self.expression, size, ms)


# Bytes follow from what autograd keeps.  Times are those of results/2026-11-21-h100-linear_cross_entropy.json and
# results/2026-11-22-h100-*.json: of linear_log_probs, linear_jsd, cross_entropy and linear_cross_entropy-jax.
_EAGER, _JIT = "eager PyTorch", "plain JAX"
_LOSS = _Measured(_EAGER, "F.cross_entropy(F.linear(hidden, weight).float(), target)", 12, 17.0, 8, 8.4)
_CROSS_ENTROPY = _Measured(_EAGER, "F.cross_entropy(logits.float(), target)", 12, 16.9, 8, 8.3)
_LOG_PROBS = _Measured(_EAGER, "F.linear(hidden, weight).float().log_softmax(-1).gather(-1, ids)", 12, 15.9, 10, 8.3)
_ENTROPY = _LOG_PROBS._replace(
    expression=f"{_LOG_PROBS.expression}, and the entropy", step_bytes=20, step_ps=42.3, bytes=14, ps=16.4
)
_COMPILED_JSD = _Measured("torch.compile", "the divergence of two float32 softmaxes, compiled", 8, 13.9, 4, 5.7)
_XLA = _Measured(_JIT, "the loss of hidden @ weight.T in 16 bits, under jax.jit", 6, 5.2, 2, 1.5)


def _of_hidden(asked: PlannedCall) -> int:
    """Bytes of hidden's gradient."""
    p = asked.problem
    return DTYPE_BYTES[p.hidden_dtype] * p.tokens * p.hidden if asked.gradients else 0


def _of_weight(asked: PlannedCall) -> int:
    p = asked.problem
    return DTYPE_BYTES[p.weight_dtype] * p.vocab * p.hidden * p.grad_weight if asked.gradients else 0


def _was_measured(asked: PlannedCall) -> bool:
    """Whether memory was, of what XLA or TorchInductor compiles."""
    return asked.problem.device == "cuda" and asked.problem.dtype != "float32"


def _known(asked: PlannedCall, measured: _Measured, after_peak: int) -> Plain:
    return measured.plain(asked, asked.products * asked.problem.hidden, after_peak=after_peak)


def loss(asked: PlannedCall) -> Plain:
    if asked.framework == "torch":
        return _known(asked, _LOSS, _of_hidden(asked) + _of_weight(asked))
    return _known(asked, _XLA, 0) if _was_measured(asked) else Plain(*_XLA[:2])


def log_probs(asked: PlannedCall) -> Plain:
    if asked.framework == "jax":
        return Plain(_JIT, "jax.nn.log_softmax of the logits")
    return _known(asked, _ENTROPY if asked.entropy else _LOG_PROBS, _of_hidden(asked) + _of_weight(asked))


def cross_entropy(asked: PlannedCall) -> Plain:
    if asked.framework == "jax":
        return Plain(_JIT, "jax.nn.log_softmax of the logits")
    p = asked.problem
    return _CROSS_ENTROPY.plain(asked, 0, after_peak=asked.gradients * DTYPE_BYTES[p.dtype] * p.tokens * p.vocab)


def jsd(asked: PlannedCall) -> Plain:
    if asked.framework == "jax":
        return Plain(_JIT, "the divergence of two softmaxes")
    p = asked.problem
    if not _was_measured(asked):
        return Plain(*_COMPILED_JSD[:2])
    # A product for each model's logits, and two for the student's gradients.
    products = p.hidden * (3 if asked.gradients else 1) + asked.teacher_hidden
    return _COMPILED_JSD.plain(asked, products, after_peak=asked.gradients * DTYPE_BYTES[p.dtype] * p.tokens * p.hidden)
