"""The benchmark of linear_log_probs: its inputs and its peers.

Backward starts from a loss: the mean of the log-probabilities, plus the mean entropy if the case asks for it.
"""

from collections.abc import Callable, Sequence
from typing import Any

from onchip.bench.benchmark import Benchmark, BenchProblem, draw_linear
from onchip.bench.peers import Implementation, needs, own, plain_peers
from onchip.core.sizes import MIB
from onchip.ops.linear_log_probs import checks
from onchip.oracle.checks import op_in

Values = Callable[..., Any]
"""Log-probabilities [T], or with them entropies [T], of (hidden [T, H], weight [V, H], ids [T], *, entropy)."""


def _make(fw: Any, case: checks.LogProbsCase, device: str, dtype: str) -> BenchProblem:
    return BenchProblem(
        case, device, draw_linear(fw, case, device, dtype), {"entropy": bool(case.options.get("entropy"))}
    )


def _rows(fw: Any, z: Any, ids: Any, entropy: bool) -> tuple[Any, ...]:
    log_p = fw.log_softmax(z, -1)
    picked = fw.take(log_p, ids[:, None])[:, 0]
    return (picked, -(fw.xp.exp(log_p) * log_p).sum(-1)) if entropy else (picked,)


_TRL_FUNCTIONS = "selective_log_softmax, entropy_from_logits"


def _trl() -> Values:
    import torch.nn.functional as F
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    def values(hidden: Any, weight: Any, ids: Any, entropy: bool) -> Any:
        logits = F.linear(hidden, weight)
        return selective_log_softmax(logits, ids), entropy_from_logits(logits) if entropy else None

    return values


def _implementations(fw: Any) -> Sequence[Implementation]:
    op, backends = op_in(fw, "linear_log_probs"), op_in(fw, "linear_log_probs", "BACKENDS")

    def load(backend: str, small: bool = False) -> Values:
        def values(hidden: Any, weight: Any, ids: Any, entropy: bool) -> Any:
            scratch = 64 * MIB + 4 * hidden.shape[0] * hidden.shape[1] if small else None
            out = op(hidden, weight, ids, entropy=entropy, backend=backend, scratch_bytes=scratch)
            return (out.log_prob, out.entropy) if entropy else out

        return values

    def plain(wide: bool) -> Values:
        return lambda h, w, ids, entropy: _rows(fw, fw.logits(h, w, wide), ids, entropy)

    common = (*own(load, backends), *plain_peers(fw.NAME, plain))
    if fw.NAME == "jax":
        return common
    return (
        *common,
        *own(load, (), ", 64 MiB + 4TH", small=True),
        Implementation("trl", _trl, needs("trl", "trl"), {"functions": _TRL_FUNCTIONS}, "trl"),
    )


def _forward(problem: BenchProblem) -> Sequence[str]:
    return ("log_prob", "entropy") if problem.options["entropy"] else ("log_prob",)


TORCH, JAX = (
    Benchmark(framework, checks.SUITES, _implementations, _make, _rows, forward=_forward)
    for framework in ("torch", "jax")
)
