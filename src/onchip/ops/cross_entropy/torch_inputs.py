"""The checks of the public function, which read no values, and the arguments and outputs of its operators."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.frontend import torch_prepared as stated
from onchip.frontend.torch_autograd import graph_is_kept
from onchip.frontend.torch_inputs import LOSS_DTYPES, accumulator
from onchip.frontend.torch_register import Made
from onchip.ops.cross_entropy import spec
from onchip.ops.cross_entropy.spec import OP, Options
from onchip.vocab.rows import memory as row_memory
from onchip.vocab.rows import torch as torch_rows
from onchip.vocab.torch import loss
from onchip.vocab.torch.tiles import Tokens, targets


@dataclass(frozen=True)
class Call:
    """The arguments of both backends' operators."""

    logits: Tensor  # [..., V]
    target: Tensor  # [...]
    token_weight: Tensor | None  # [...]
    token_temperature: Tensor | None  # [...] or []
    normalizer: Tensor | None  # []
    class_weight: Tensor | None  # [V] in the dtype of sums, contiguous; None where token_weight has it
    options: Options
    grads: tuple[bool, ...]  # of logits

    def tokens(self, *, check_values: bool) -> Tokens:
        """Those that count; values are checked on the CPU, and elsewhere if `check_values`."""
        first = (1,) if self.options.shift else ()
        return targets(OP, self, self.vocab, dtype=self.logits.dtype, check_values=check_values, first=first)

    @property
    def vocab(self) -> int:
        """V, of which targets are."""
        return self.logits.shape[-1]

    @property
    def ids(self) -> Tensor:
        """The targets."""
        return self.target

    @property
    def kind(self) -> str:
        """Of the labels."""
        return "ids"


class Outputs(NamedTuple):
    """What both backends compute."""

    out: loss.Outputs
    divisor: Tensor | None = None  # [] float32: what the mean divides by; of backend "triton"
    gradient: Tensor | None = None  # [..., V]: of the loss by the logits, where "triton" makes it in forward


class Kept(NamedTuple):
    """What backward is given."""

    call: Call
    lse: Tensor
    log_prob: Tensor
    divisor: Tensor | None
    gradient: Tensor | None

    @property
    def overwrites(self) -> bool:
        """Whether the gradient takes the logits' memory."""
        return self.call.options.inplace_backward and not graph_is_kept()

    def new_gradient(self) -> Tensor:
        """Memory for the gradient: contiguous whatever the logits' strides, or the logits'."""
        logits = self.call.logits
        # Detached, it still counts as a change of the logits: whatever saved them for its own backward will raise.
        return logits.detach() if self.overwrites else stated.empty_like(logits)


def fake(call: Call) -> Outputs:
    """Empty outputs, without a gradient."""
    return Outputs(loss.Outputs.empty(call, call.logits))


def save(call: Call, made: Outputs) -> Kept:
    return Kept(call, made.out.lse, made.out.log_prob, made.divisor, made.gradient)


def fake_gradients(kept: Kept, upstream: Made, wanted: object) -> Made:
    return [stated.empty_like(kept.call.logits)]


def check_inplace(logits: Tensor) -> None:
    """Raise unless backward can overwrite `logits`; what needs no gradient isn't overwritten, and may be anything."""
    if not (logits.requires_grad and torch.is_grad_enabled()):
        return
    if torch.compiler.is_compiling():
        raise RuntimeError(
            f"{OP}: inplace_backward is not supported inside torch.compile, which plans memory itself; leave it out"
        )
    remedy = "pass inplace_backward=False, or logits that a layer computed"
    if logits.is_leaf:
        raise ValueError(
            f"{OP}: inplace_backward=True would overwrite logits that are a leaf (a parameter or an input that "
            f"requires a gradient); {remedy}"
        )
    if logits._base is not None and logits._base.is_leaf:
        raise ValueError(
            f"{OP}: inplace_backward=True would overwrite logits that are a view of a leaf of shape "
            f"{list(logits._base.shape)}; {remedy}"
        )
    if spec.may_overlap(logits.shape, logits.stride()):
        raise ValueError(
            f"{OP}: inplace_backward=True needs logits whose elements each have a place of their own in memory; got "
            f"shape {list(logits.shape)} with strides {list(logits.stride())} (expanded?); {remedy}"
        )


def row_chunk(call: Call, tokens: Tokens, *, kernels: bool = False, sent: int = 0) -> int:
    """The rows of a chunk, the same in forward and backward: a budget that is too small is refused in forward."""
    options, logits = call.options, call.logits
    flat = torch_rows.flatten(logits) is not None
    problem = row_memory.Problem(
        tokens=call.target.numel(),
        vocab=logits.shape[-1],
        dtype=LOSS_DTYPES[logits.dtype],
        device="cpu" if logits.device.type == "cpu" else "cuda",
        grad=call.grads[0],
        softcap=options.softcap is not None,
        stats=options.return_stats,
        class_weight=call.class_weight is not None and options.label_smoothing > 0,
        triton=kernels,
        sent=sent,
        gathered=not flat or (tokens.index is not None and logits.dtype != accumulator(logits.dtype)),
    )
    return row_memory.plan(problem, "", options.scratch_bytes)
