"""Arguments and outputs of the operators in PyTorch for soft labels."""

from typing import NamedTuple

import torch
from torch import Tensor

from onchip.frontend import torch_prepared as stated
from onchip.frontend.torch_inputs import LOSS_DTYPES
from onchip.frontend.torch_parallel import Shards
from onchip.frontend.torch_register import Made, Wanted
from onchip.ops.cross_entropy.spec import OP, Options
from onchip.vocab.chunks import Config
from onchip.vocab.rows import memory as row_memory
from onchip.vocab.rows import torch as torch_rows
from onchip.vocab.torch import labels
from onchip.vocab.torch.loss import Outputs
from onchip.vocab.torch.tiles import Tokens


class SoftCall(NamedTuple):
    """The arguments of the operators."""

    logits: Tensor  # [..., V]
    ids: Tensor  # [..., K]; dense [...], and they mean nothing
    labels: Tensor  # [..., K], or dense [..., V]
    token_weight: Tensor | None  # [...]
    class_weight: Tensor | None  # [V] in the dtype of sums, contiguous
    token_temperature: Tensor | None  # [...] or []
    normalizer: Tensor | None  # []
    options: Options
    kind: str  # of the labels: 'probs', 'log_probs' or 'dense'
    grads: tuple[bool, ...]  # of logits
    shards: Shards

    @property
    def dense(self) -> bool:
        """Whether every entry has a label."""
        return self.kind == "dense"

    @property
    def dtype(self) -> torch.dtype:
        """Of the logits."""
        return self.logits.dtype

    @property
    def vocab(self) -> int:
        """V, of which ids are."""
        return self.shards.vocab if self.shards.there else self.logits.shape[-1]

    @property
    def number(self) -> int:
        """T."""
        return self.logits.shape[:-1].numel()

    @property
    def several(self) -> int:
        """K."""
        return 1 if self.dense else self.ids.shape[-1]

    def tokens(self, *, check_values: bool) -> Tokens:
        """All of them; values are always checked on the CPU."""
        return labels.tokens(OP, self, check_values=check_values)

    def problem(self, *, triton: bool = False, sent: int = 0) -> row_memory.Problem:
        """What memory depends on."""
        options, logits = self.options, self.logits
        return row_memory.Problem(
            tokens=self.number,
            vocab=logits.shape[-1],
            dtype=LOSS_DTYPES[logits.dtype],
            device="cpu" if logits.device.type == "cpu" else "cuda",
            grad=self.grads[0],
            softcap=options.softcap is not None,
            gathered=torch_rows.flatten(logits) is None or (self.dense and torch_rows.flatten(self.labels) is None),
            class_weight=self.class_weight is not None and options.label_smoothing > 0,
            ids=0 if self.dense else self.several,
            stats=options.return_stats and not self.dense,
            labels=LOSS_DTYPES[self.labels.dtype] if self.dense else "",
            triton=triton,
            sent=sent,
        )

    def config(self, sent: int = 0) -> Config:
        """The same in forward and backward: a budget that is too small is refused in forward."""
        rows = row_memory.plan(self.problem(sent=sent), "", self.options.scratch_bytes)
        return Config("forward", rows, self.logits.shape[-1])


class SoftMade(NamedTuple):
    """What the operators return."""

    out: Outputs


class Kept(NamedTuple):
    """What backward is given."""

    call: SoftCall
    lse: Tensor
    log_prob: Tensor
    largest: Tensor | None
    mass: Tensor | None


def fake(call: SoftCall) -> SoftMade:
    return SoftMade(Outputs.empty(call, call.logits))


def save(call: SoftCall, made: SoftMade) -> Kept:
    return Kept(call, made.out.lse, made.out.log_prob, made.out.largest, made.out.mass)


def fake_gradients(kept: Kept, upstream: Made, wanted: Wanted) -> list[Tensor]:
    """Contiguous, whatever the logits' strides."""
    return [stated.empty_like(kept.call.logits)]
