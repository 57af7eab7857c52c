"""The benchmark of linear_jsd: its inputs and its peers.

Its cases take the mean over all tokens, temperature 1 and a constant teacher, so that every peer can run them.
"""

from collections.abc import Callable, Sequence
from typing import Any

from onchip.bench.benchmark import Benchmark, BenchProblem, draw_layer
from onchip.bench.peers import NARROW, Implementation, gpu_only, optional, own, plain_peers
from onchip.ops.linear_jsd import checks
from onchip.ops.linear_jsd.checks import plain_divergence
from onchip.oracle.checks import op_in

Loss = Callable[..., Any]
"""Mean divergence of (student's hidden [T, Hs] and weight [V, Hs], teacher's [T, Ht] and [V, Ht], *, beta)."""


def _make(fw: Any, case: checks.JsdCase, device: str, dtype: str) -> BenchProblem:
    """The inputs: two models with heads of their own."""
    normal = fw.drawer(device)
    student = [fw.leaf(x, dtype) for x in draw_layer(normal, case, case.hidden)]
    teacher = [fw.constant(x, dtype) for x in draw_layer(normal, case, case.teacher_hidden or case.hidden)]
    return BenchProblem(case, device, (*student, *teacher), {"beta": float(case.options.get("beta", 0.5))})


def _rows(fw: Any, z: Any, teacher_hidden: Any, teacher_weight: Any, beta: float) -> tuple[Any]:
    u = fw.wide(teacher_hidden) @ teacher_weight.T
    return (plain_divergence(fw.log_softmax(z, -1), fw.log_softmax(u, -1), beta),)


def _liger() -> Loss:
    import torch
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    def loss(h: Any, w: Any, x: Any, v: Any, beta: float) -> Any:
        # It needs labels, for a hard loss that has weight 0 here.
        labels = torch.zeros(len(h), dtype=torch.int64, device=h.device)
        soft = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=beta)
        out = soft(h, w, x, v, labels, None, None)
        return out[0] if isinstance(out, tuple) else out

    return loss


def _implementations(fw: Any) -> Sequence[Implementation]:
    op = op_in(fw, "linear_jsd")

    def load(backend: str) -> Loss:
        return lambda h, w, x, v, beta: op(h, w, x, v, beta=beta, backend=backend)

    def plain(wide: bool) -> Loss:
        def loss(h: Any, w: Any, x: Any, v: Any, beta: float) -> Any:
            ls, lt = (fw.log_softmax(fw.logits(*head, wide), -1) for head in ((h, w), (x, v)))
            return plain_divergence(ls, lt, beta).mean()

        return loss

    common = (*own(load, op_in(fw, "linear_jsd", "BACKENDS")), *plain_peers(fw.NAME, plain))
    if fw.NAME == "jax":
        return common
    return (*common, optional("liger", "liger-kernel", _liger, gpu_only("liger-kernel", ("float32", *NARROW))))


TORCH, JAX = (Benchmark(framework, checks.SUITES, _implementations, _make, _rows) for framework in ("torch", "jax"))
