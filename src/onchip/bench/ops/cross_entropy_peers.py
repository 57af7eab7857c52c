"""Functions for the same loss, of this package and others, for `onchip bench`; others are imported when asked for."""

from collections.abc import Callable
from typing import Any

from onchip.bench.peers import NARROW, Peer, always, compiled, gpu_only, no_compiler, only_narrow, optional, own
from onchip.ops.cross_entropy.torch_op import BACKENDS, cross_entropy

Loss = Callable[[Any, Any], Any]
"""Mean cross-entropy of (logits [T, V], target [T]) over the tokens whose target is not -100."""
# Of a peer whose `config` has this: backward, or forward already, overwrites the logits.
IN_PLACE = "inplace"


def _own(backend: str, inplace: bool) -> Loss:
    return lambda logits, target: cross_entropy(logits, target, backend=backend, inplace_backward=inplace)


def _eager() -> Loss:
    import torch.nn.functional as F

    return F.cross_entropy


def _eager_float32() -> Loss:
    import torch.nn.functional as F

    return lambda logits, target: F.cross_entropy(logits.float(), target)


def _compiled() -> Loss:
    return compiled(_eager_float32())


def _liger(inplace: bool) -> Loss:
    from liger_kernel.transformers import LigerCrossEntropyLoss

    loss: Loss = LigerCrossEntropyLoss()
    return loss


def _quack(inplace: bool) -> Loss:
    from quack.cross_entropy import cross_entropy

    return lambda logits, target: cross_entropy(logits, target, reduction="mean", inplace_backward=inplace)


OWN = (*own(_own, BACKENDS, inplace=False), *own(_own, BACKENDS, ", in place", inplace=True))
PEERS = (
    Peer("torch eager", _eager, always),
    Peer("torch eager, float32 logits", _eager_float32, only_narrow),
    Peer("torch.compile, float32 logits", _compiled, no_compiler),
    # It writes the gradient over the logits in forward.
    optional("liger", "liger-kernel", _liger, gpu_only("liger-kernel", ("float32", *NARROW)), inplace=True),
    optional("quack", "quack-kernels", _quack, gpu_only("quack-kernels", ("float32", *NARROW)), inplace=False),
    optional("quack, in place", "quack-kernels", _quack, gpu_only("quack-kernels", ("float32", *NARROW)), inplace=True),
)
