"""Functions for the same loss, of this package and others, for `onchip bench`; others are imported when asked for."""

import math
from collections.abc import Callable
from typing import Any

from onchip.bench.peers import Peer, always, compiled, gpu_only, no_compiler, only_narrow, optional, own
from onchip.ops.linear_jsd.torch_op import BACKENDS, linear_jsd

Loss = Callable[[Any, Any, Any, Any, float], Any]
"""Mean divergence of (student's hidden [T, Hs] and weight [V, Hs], teacher's [T, Ht] and [V, Ht], beta)."""


def _own(backend: str) -> Loss:
    return lambda h, w, x, v, beta: linear_jsd(h, w, x, v, beta=beta, backend=backend)


def _eager(wide: bool) -> Loss:
    import torch
    import torch.nn.functional as F

    def loss(h: Any, w: Any, x: Any, v: Any, beta: float) -> Any:
        z, u = F.linear(h, w), F.linear(x, v)
        ls, lt = (F.log_softmax(y.float() if wide else y, -1) for y in (z, u))
        if beta == 0:
            return (lt.exp() * (lt - ls)).sum(-1).mean()
        if beta == 1:
            return (ls.exp() * (ls - lt)).sum(-1).mean()
        lm = torch.logaddexp(ls + math.log(1 - beta), lt + math.log(beta))
        terms = (1 - beta) * ls.exp() * (ls - lm) + beta * lt.exp() * (lt - lm)
        return terms.sum(-1).mean()

    return loss


def _liger() -> Loss:
    import torch
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    def loss(h: Any, w: Any, x: Any, v: Any, beta: float) -> Any:
        # It wants labels, for a hard loss whose weight is 0 here.
        labels = torch.zeros(len(h), dtype=torch.int64, device=h.device)
        soft = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=beta)
        out = soft(h, w, x, v, labels, None, None)
        return out[0] if isinstance(out, tuple) else out

    return loss


OWN = own(_own, BACKENDS)
PEERS = (
    Peer("torch eager", lambda: _eager(wide=False), always),
    Peer("torch eager, float32 logits", lambda: _eager(wide=True), only_narrow),
    Peer("torch.compile, float32 logits", lambda: compiled(_eager(wide=True)), no_compiler),
    optional("liger", "liger-kernel", _liger, gpu_only("liger-kernel", ("float32", "float16", "bfloat16"))),
)
