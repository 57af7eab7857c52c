r"""Cross-entropy of logits that exist already, of any dtype, strides and vocabulary, with little extra memory.

For token t with given logits x_t, a_tv = x_tv * logit_scale.  Everything else is as in linear_cross_entropy: the
transformed logits z, the loss, and its gradients with respect to z and a.

Forward keeps lse_t and log p_ty; backward computes p again from x and lse, a chunk of rows at a time, and takes the
target's p - 1 as expm1(log p).  For a reduced loss the Triton kernels compute the gradient in forward, while a row is
in the caches.

Sources: Liger Kernel (arXiv:2410.10989), for a backward that needs the log-sum-exp alone and a gradient that may take
the logits' memory; PaLM (arXiv:2204.02311), for z-loss; Gemma 2 (arXiv:2408.00118), for softcap.

The computation is in `onchip.vocab.rows`; docs/architecture.md shows what lives where.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from onchip.frontend.options import LossOptions, check_options
from onchip.frontend.warm_up import WarmUpCall, ids

OP = "cross_entropy"


@dataclass(frozen=True)
class CrossEntropyOptions(LossOptions):
    """The options that are plain numbers, words and flags; making it checks them."""

    shift: bool = False
    inplace_backward: bool = False

    def __post_init__(self) -> None:
        check_options(OP, self)


def may_overlap(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two elements of a tensor may share memory: anything but nested dimensions, dense or with gaps."""
    if 0 in shape:
        return False
    end = 0  # where the elements of the dimensions so far end, relative to the first
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size > 1):
        if stride <= end:
            return True
        end += stride * (size - 1)
    return False


CALLS = {
    "cross_entropy": WarmUpCall(
        ("vocab",), lambda s, make: {"logits": make(s.tokens, s.vocab), "target": ids(s, make)}
    ),
}
