"""cross_entropy for PyTorch of logits whose vocabulary is sharded over ranks (`vocab.parallel`): both backends."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.frontend.torch_autograd import graph_is_kept
from onchip.frontend.torch_parallel import Shards
from onchip.frontend.torch_register import Made, Operator, Wanted
from onchip.kernels.triton.launch import device_of
from onchip.ops.cross_entropy.spec import OP
from onchip.ops.cross_entropy.torch_inputs import Call, row_chunk
from onchip.vocab import parallel
from onchip.vocab.agreement import require_agreement
from onchip.vocab.chunks import Config
from onchip.vocab.rows import torch as torch_rows
from onchip.vocab.rows import walk as row_walk
from onchip.vocab.rows.launches import flat, launch_rows
from onchip.vocab.torch import walk
from onchip.vocab.torch.loss import Outputs, asked_by, loss_gradient, scaled_rows
from onchip.vocab.torch.tiles import Tokens, targets


@dataclass(frozen=True)
class ShardedCall(Call):
    """The arguments of the operator, this rank's; class_weight is of the whole vocabulary."""

    shards: Shards
    kernels: bool
    """Whether ranks run kernels, which take ignored tokens too."""

    @property
    def runs_kernels(self) -> bool:
        """Whether this rank does: an empty shard has nothing for them, and says the same to other ranks without."""
        return self.kernels and self.shards.rows > 0

    def tokens(self, *, check_values: bool) -> Tokens:
        return targets(
            OP, self, self.vocab, dtype=self.logits.dtype, check_values=check_values, compact=not self.kernels
        )

    @property
    def vocab(self) -> int:
        return self.shards.vocab

    @property
    def mine(self) -> Tensor:
        """[..., rows]: this rank's logits without padding."""
        return self.logits[..., : self.shards.rows]


class ShardedOutputs(NamedTuple):
    """What the operator returns."""

    out: Outputs


class Kept(NamedTuple):
    """What backward is given."""

    call: ShardedCall
    lse: Tensor
    log_prob: Tensor

    @property
    def overwrites(self) -> bool:
        """Whether the gradient takes the logits' memory."""
        return self.call.options.inplace_backward and not graph_is_kept()


def _chunk(call: ShardedCall, tokens: Tokens) -> int:
    if not call.shards.rows:
        return 1
    sent = parallel.sent_bytes(tokens.total, 1, call.shards, call.logits)
    return row_chunk(replace(call, logits=call.mine), tokens, kernels=call.kernels, sent=sent)


def _forward(call: ShardedCall) -> ShardedOutputs:
    options, logits = call.options, call.logits
    values = (call.target, call.token_weight, call.normalizer, call.class_weight, call.token_temperature)
    require_agreement(OP, call, (logits.shape[:-1], logits.dtype), *values, split={"logits": logits})
    tokens = call.tokens(check_values=options.check_inputs)
    config = Config("forward", _chunk(call, tokens), max(1, call.shards.rows))
    asked = asked_by(options, call.class_weight)
    if call.runs_kernels:
        stats = row_walk.of_targets_of_shard(OP, call, call.target, tokens, asked)
    else:
        stats = walk.statistics_of(OP, torch_rows.Rows(call.mine), options, call.shards, tokens, config, asked)
    return ShardedOutputs(Outputs.of(call, stats, tokens))


def _fake(call: ShardedCall) -> ShardedOutputs:
    return ShardedOutputs(Outputs.empty(call, call.logits))


def _save(call: ShardedCall, made: ShardedOutputs) -> Kept:
    return Kept(call, made.out.lse, made.out.log_prob)


def _gradients(kept: Kept, upstream: Made, wanted: Wanted) -> Made:
    call, (grad_loss,) = kept.call, upstream
    assert grad_loss is not None
    tokens, logits, rows = call.tokens(check_values=False), call.logits, call.shards.rows
    # Detached, it still counts as a change of the logits.
    out = logits.detach() if kept.overwrites else torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if call.runs_kernels:
        _launch(kept, tokens, grad_loss, out[..., :rows])
    elif rows > 0:
        _walk(kept, tokens, grad_loss, out[..., :rows])
    out[..., rows:].zero_()
    return [out]


def _launch(kept: Kept, tokens: Tokens, grad_loss: Tensor, out: Tensor) -> None:
    """Write the gradient of this rank's logits, by a kernel."""
    call, options = kept.call, kept.call.options
    if out.numel() == 0:
        return
    if kept.overwrites:  # kernels write past autograd
        torch.autograd.graph.increment_version(out)
    with device_of(out):
        launch_rows(
            "gradients", out if kept.overwrites else call.mine, out, call.target, call.token_weight,
            call.token_temperature, options, class_weight=call.class_weight,
            divisor=(1 / tokens.inverse_count).to(torch.float32), lse=flat(kept.lse), log_prob=flat(kept.log_prob),
            grad_loss=flat(grad_loss), PER_TOKEN=options.reduction == "none", UNLESS_ONE=False,
            start=call.shards.start, whole=call.vocab,
        )  # fmt: skip


def _walk(kept: Kept, tokens: Tokens, grad_loss: Tensor, out: Tensor) -> None:
    """The same by PyTorch's operations."""
    call, options = kept.call, kept.call.options
    row, _ = scaled_rows(tokens, options, tokens.upstream(grad_loss, options.reduction), torch.float32)
    lse, log_prob = (tokens.take(x.reshape(-1)) for x in (kept.lse, kept.log_prob))
    gradient = loss_gradient(options, row, lse, log_prob[:, None], call.vocab, tokens)
    here, mine = parallel.of_shard(tokens, call.shards), parallel.gradient_of_shard(gradient, call.shards)
    torch_rows.write_gradient(call.mine, options, here, _chunk(call, tokens), mine, out)


LOSS = Operator(
    "cross_entropy_of_shards",
    op=OP,
    forward=_forward,
    fake=_fake,
    save=_save,
    gradients=_gradients,
    fake_gradients=lambda kept, upstream, wanted: [
        torch.empty_like(kept.call.logits, memory_format=torch.contiguous_format)
    ],
    differentiable=("logits",),
    overwrites=lambda kept: kept.overwrites,
)
