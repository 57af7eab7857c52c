"""cross_entropy for PyTorch with soft labels of logits whose vocabulary is sharded over ranks (`vocab.parallel`).

Labels of K ids are the same on each rank, with ids of the whole vocabulary; of labels for every entry each rank has
those of its shard (`vocab.torch.dense`).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from onchip.frontend.torch_parallel import Shards
from onchip.frontend.torch_register import Made, Operator, Wanted
from onchip.ops.cross_entropy import plain_soft
from onchip.ops.cross_entropy.soft_call import SoftCall, SoftMade, fake
from onchip.ops.cross_entropy.spec import OP, Options
from onchip.vocab import parallel
from onchip.vocab.agreement import require_agreement
from onchip.vocab.chunks import Config
from onchip.vocab.rows import torch as torch_rows
from onchip.vocab.torch import dense, walk
from onchip.vocab.torch.loss import Outputs, asked_by
from onchip.vocab.torch.tiles import Tokens


class ShardedCall(NamedTuple):
    """The arguments of the operator, this rank's; class_weight is of the whole vocabulary."""

    rows: SoftCall
    shards: Shards

    @property
    def options(self) -> Options:
        return self.rows.options

    @property
    def grads(self) -> tuple[bool, ...]:
        return self.rows.grads

    def tokens(self, *, check_values: bool) -> Tokens:
        """With ids of the whole vocabulary."""
        return self.rows.tokens(check_values=check_values)

    @property
    def mine(self) -> SoftCall:
        """Without padding, and with the class weights of this rank's entries."""
        rows, call = self.shards.rows, self.rows
        return call._replace(
            logits=call.logits[..., :rows],
            labels=call.labels[..., :rows] if call.dense else call.labels,
            class_weight=parallel.class_weight_of_shard(call.class_weight, self.shards),
        )

    def config(self) -> Config:
        """As of a `SoftCall`, of this rank's shard."""
        if not self.shards.rows:
            return Config("forward", 1, 1)
        several = dense.SENT if self.rows.dense else self.rows.several
        return self.mine.config(parallel.sent_bytes(self.rows.number, several, self.shards, self.rows.logits))


class Kept(NamedTuple):
    """What backward is given."""

    call: ShardedCall
    lse: Tensor
    log_prob: Tensor
    largest: Tensor | None
    mass: Tensor | None


def _forward(call: ShardedCall) -> SoftMade:
    rows, options, shards = call.rows, call.options, call.shards
    values = (rows.token_weight, rows.normalizer, rows.class_weight, rows.token_temperature)
    labels = None if rows.dense else rows.labels
    sizes = rows.logits.shape[:-1], rows.logits.dtype, rows.dense, rows.kind
    require_agreement(OP, call, sizes, rows.ids, labels, *values, split={"logits": rows.logits})
    tokens, config, mine = call.tokens(check_values=options.check_inputs), call.config(), call.mine
    source, weight = torch_rows.Rows(mine.logits), rows.class_weight
    if rows.dense:
        made = dense.dense_stats(OP, source, options, shards, tokens, config, mine.labels, weight)
        return SoftMade(dense.outputs_of(rows, made, tokens))
    stats = walk.statistics_of(OP, source, options, shards, tokens, config, asked_by(options, weight))
    return SoftMade(Outputs.of(rows, stats, tokens))


def _save(call: ShardedCall, made: SoftMade) -> Kept:
    return Kept(call, made.out.lse, made.out.log_prob, made.out.largest, made.out.mass)


def _gradients(kept: Kept, upstream: Made, wanted: Wanted) -> Made:
    call, shards, rows = kept.call, kept.call.shards, kept.call.rows
    tokens, mine = call.tokens(check_values=False), call.mine
    out = torch.empty(mine.logits.shape, dtype=mine.logits.dtype, device=mine.logits.device)
    if out.numel() > 0 and rows.dense:
        whole = dense.Whole.of(shards.vocab, rows.class_weight)
        plain_soft.write_dense(kept, mine, whole, tokens, call.config(), upstream, out)
    elif out.numel() > 0:
        gradient = plain_soft.gradient_of_ids(kept, rows, tokens, upstream, shards.vocab)
        here, gradient = parallel.of_shard(tokens, shards), parallel.gradient_of_shard(gradient, shards)
        torch_rows.write_gradient(mine.logits, call.options, here, call.config().token_chunk, gradient, out)
    padding = rows.logits.shape[-1] - shards.rows
    return [torch.nn.functional.pad(out, (0, padding)) if padding else out]


LOSS = Operator(
    "cross_entropy_soft_of_shards",
    op=OP,
    forward=_forward,
    fake=lambda call: fake(call.rows),
    save=_save,
    gradients=_gradients,
    fake_gradients=lambda kept, upstream, wanted: [
        torch.empty_like(kept.call.rows.logits, memory_format=torch.contiguous_format)
    ],
    differentiable=("logits",),
)
