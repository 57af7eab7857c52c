"""Functions for the same values, of this package and others, for `onchip bench`; others are imported when asked for."""

from collections.abc import Callable
from typing import Any

from onchip.bench.peers import Peer, always, compiled, no_compiler, not_installed, only_narrow, own
from onchip.core.sizes import MIB
from onchip.ops.linear_log_probs.torch_op import BACKENDS, linear_log_probs

Values = Callable[[Any, Any, Any, bool], tuple[Any, Any]]
"""(log-probabilities [T], entropies [T] or None) of (hidden [T, H], weight [V, H], ids [T], with the entropy?)."""


def _own(backend: str, small: bool) -> Values:
    def values(hidden: Any, weight: Any, ids: Any, entropy: bool) -> tuple[Any, Any]:
        scratch = 64 * MIB + 4 * hidden.numel() if small else None
        out = linear_log_probs(hidden, weight, ids, entropy=entropy, backend=backend, scratch_bytes=scratch)
        return (out.log_prob, out.entropy) if entropy else (out, None)

    return values


def _eager(wide: bool) -> Values:
    import torch.nn.functional as F

    def values(hidden: Any, weight: Any, ids: Any, entropy: bool) -> tuple[Any, Any]:
        logits = F.linear(hidden, weight)
        log_p = F.log_softmax(logits.float() if wide else logits, -1)
        picked = log_p.gather(1, ids[:, None])[:, 0]
        return picked, -(log_p.exp() * log_p).sum(-1) if entropy else None

    return values


def _trl() -> Values:
    import torch.nn.functional as F
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    def values(hidden: Any, weight: Any, ids: Any, entropy: bool) -> tuple[Any, Any]:
        logits = F.linear(hidden, weight)
        return selective_log_softmax(logits, ids), entropy_from_logits(logits) if entropy else None

    return values


def _no_trl(device: str, dtype: str) -> str | None:
    return None if not_installed("trl") is None else "trl is not installed; pip install trl"


OWN = (*own(_own, BACKENDS, small=False), *own(_own, (), ", 64 MiB + 4TH", small=True))
PEERS = (
    Peer("torch eager", lambda: _eager(wide=False), always),
    Peer("torch eager, float32 logits", lambda: _eager(wide=True), only_narrow),
    Peer("torch.compile, float32 logits", lambda: compiled(_eager(wide=True)), no_compiler),
    Peer("trl", _trl, _no_trl, {"functions": "selective_log_softmax, entropy_from_logits"}, "trl"),
)
