"""linear_cross_entropy with precision='fp8' where the vocabulary is sharded over ranks (`vocab.parallel`).

As without shards, forward makes the gradients for an upstream gradient of 1: each rank makes the statistics of its
shard, one all-gather those of the whole vocabulary, and from these each rank the gradient of its own logits.  Logits
are held in between where all tokens are one chunk, and are else made again.  The ranks' parts of hidden's gradient are
summed in backward, in float32, under the product of the weight's.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.core.backends import choose_backend
from onchip.fp8.torch_operands import Copies, QuantizedWeight, check_unchanged, copies_of
from onchip.frontend.torch_inputs import DTYPES
from onchip.frontend.torch_parallel import Shards
from onchip.frontend.torch_register import Made, Operator, Wanted
from onchip.ops.linear_cross_entropy import fp8_op
from onchip.ops.linear_cross_entropy.fp8_op import Fp8Call, Fp8Outputs
from onchip.ops.linear_cross_entropy.spec import OP
from onchip.ops.linear_cross_entropy.torch_call import Call
from onchip.ops.linear_cross_entropy.torch_shards import check_ranks
from onchip.vocab import parallel
from onchip.vocab.fp8 import memory, walk
from onchip.vocab.fp8.torch import Call as LogitsCall
from onchip.vocab.fp8.walk import QUANTIZERS, SCALE, Parts
from onchip.vocab.torch.loss import Outputs, asked_by, loss_gradient, scaled_rows
from onchip.vocab.torch.softmax import Asked, Running, TokenStats
from onchip.vocab.torch.tiles import Tokens


class ShardedFp8Call(NamedTuple):
    """The arguments of the operator."""

    call: Call
    copies: Copies  # of the rows that are of the vocabulary
    check_weight: bool  # compare the copies, which the caller made, with the weight
    backend: str


class Kept(NamedTuple):
    """What backward is given."""

    loss: fp8_op.Kept  # with this rank's hidden states
    shards: Shards
    shape: tuple[int, ...]  # of these
    rows: int  # of this rank's weight, padding among them


def _forward(arguments: ShardedFp8Call) -> Fp8Outputs:
    call, options, shards = arguments.call, arguments.call.options, arguments.call.shards
    check_ranks(call)
    tokens: Tokens = call.tokens(check_values=options.check_inputs or not call.hidden.is_cuda)
    mine = parallel.local(call)
    if arguments.check_weight:
        check_unchanged(OP, mine.weight, arguments.copies, SCALE, QUANTIZERS[arguments.backend])
    asked = asked_by(options, call.class_weight)
    of_shard = asked._replace(class_weight=parallel.class_weight_of_shard(asked.class_weight, shards))
    source = walk.Source(
        arguments.backend, mine.hidden, mine.weight, arguments.copies, mine.bias, _logits_call(call, tokens)
    )
    there, chunk = shards.rows > 0 and tokens.number > 0, _chunk(arguments, mine)
    known, held = walk.statistics(source, of_shard, chunk) if there else (_nothing(tokens, shards, of_shard), [])
    stats = parallel.combine(OP, shards, known, tokens, of_shard, check_values=options.check_inputs)
    parts = Parts.empty(mine.hidden, mine.weight, call.grads)
    if not there and parts.grad_hidden is not None:
        parts.grad_hidden.zero_()
    if there and any(call.grads):
        row, _ = scaled_rows(tokens, options, tokens.inverse_count, torch.float32)
        made = loss_gradient(options, row, stats.lse, stats.log_prob, shards.vocab, tokens.kept, tokens.classes)
        walk.gradients(source, parts, parallel.gradient_of_shard(made, shards), held, chunk)
    return Fp8Outputs(Outputs.of(options, stats, tokens, call.target.shape), parts)


def _logits_call(call: Call, tokens: Tokens) -> LogitsCall:
    """What is asked of the logits, with targets as this shard numbers them."""
    target = parallel.ids_for_kernels(call.target, call.shards, call.options.ignore_index)
    tau = tokens.temperature
    return LogitsCall(
        target.reshape(-1).contiguous(),
        None,
        tau[:, 0].contiguous() if isinstance(tau, Tensor) else None,
        None,
        1 / tokens.inverse_count,
        parallel.class_weight_of_shard(call.class_weight, call.shards),
        replace(call.options, ignore_index=parallel.IGNORED),
    )


def _chunk(arguments: ShardedFp8Call, mine: Call) -> int:
    """Tokens of a chunk.  Raises ValueError if the budget is too small."""
    problem = mine.problem("cuda" if arguments.backend == "triton" else "cpu")
    return memory.plan(replace(problem, dtype=DTYPES[mine.hidden.dtype]), mine.budget, mine.shards.ranks)


def _nothing(tokens: Tokens, shards: Shards, asked: Asked) -> TokenStats:
    """The statistics over an empty shard, or of no tokens."""
    here = parallel.of_shard(tokens, shards)
    return Running.empty(here.ids, torch.float32).stats(here, 1, asked)


def _fake(arguments: ShardedFp8Call) -> Fp8Outputs:
    call = arguments.call
    mine = parallel.local(call, fake=True)
    return Fp8Outputs(call.empty_outputs(), Parts.empty(mine.hidden, mine.weight, call.grads))


def _save(arguments: ShardedFp8Call, made: Fp8Outputs) -> Kept:
    call = arguments.call
    kept = fp8_op.save(Fp8Call(call, *arguments[1:]), made)
    return Kept(kept, call.shards, tuple(call.hidden.shape), len(call.weight))


def _gradients(kept: Kept, upstreams: Made, wanted: Wanted) -> Made:
    (grad_loss,), shards, loss = upstreams, kept.shards, kept.loss
    assert grad_loss is not None
    upstream, summed, out = fp8_op.upstream_of(loss, grad_loss), None, loss.weight_grad_out
    if wanted[0] and loss.parts.grad_hidden is not None:
        summed = parallel.start_sum(shards, loss.parts.grad_hidden * upstream)
    if wanted[1] and loss.hidden is not None:
        out = None if out is None else out[: shards.rows]
        loss = loss._replace(hidden=parallel.whole_hidden(loss.hidden, shards), weight_grad_out=out)
    _, weight, bias = fp8_op.gradients_of(loss, upstream, (False, *wanted[1:]))
    hidden = None if summed is None else summed().to(loss.dtypes[0])
    return hidden, parallel.padded(weight, kept.rows), parallel.padded(bias, kept.rows)


def _fake_gradients(kept: Kept, upstreams: Made, wanted: Wanted) -> Made:
    parts = kept.loss.parts
    like = next(x for x in (parts.grad_hidden, kept.loss.hidden, parts.grad_bias) if x is not None)
    shapes = kept.shape, (kept.rows, kept.shape[-1]), (kept.rows,)
    there = wanted[0], wanted[1] and kept.loss.weight_grad_out is None, wanted[2]
    sizes = zip(there, shapes, kept.loss.dtypes, strict=True)
    return [like.new_empty(shape, dtype=dtype) if want else None for want, shape, dtype in sizes]


LOSS: Operator[Any, Fp8Outputs] = Operator(
    "linear_cross_entropy_of_shards_in_fp8",
    op=OP,
    forward=_forward,
    fake=_fake,
    save=_save,
    gradients=_gradients,
    fake_gradients=_fake_gradients,
    differentiable=("hidden", "weight", "bias"),
    adds_to={"weight": "weight_grad_out"},
    flops=fp8_op.flops,
    gradient_flops=lambda kept, upstreams, wanted: fp8_op.weight_flops(kept.loss, upstreams, wanted),
)


def arguments_of(call: Call, weight: Tensor | QuantizedWeight, backend: str) -> ShardedFp8Call:
    """The arguments of the operator, of a call."""
    fp8_op.check_options(call.options, grad_bias=call.grads[2])
    chosen, shards = choose_backend(OP, backend, fp8_op.refusals(call.hidden.device)), call.shards
    if shards.rows == 0:  # for which kernels have nothing to do
        chosen = "torch"
    quantized = isinstance(weight, QuantizedWeight)
    if quantized and len(call.weight) > shards.rows:
        raise ValueError(
            f"{OP}: weight was quantised with {len(call.weight) - shards.rows} rows of padding, which would share "
            "scales with rows of the vocabulary; pass the weight itself"
        )
    wanted = "hidden" if call.grads[0] else None
    given = weight if isinstance(weight, QuantizedWeight) else call.weight[: shards.rows]
    copies = copies_of(OP, given, SCALE, QUANTIZERS[chosen], by_block=True, wanted=wanted)
    return ShardedFp8Call(call, copies, quantized and (call.options.check_inputs or not call.weight.is_cuda), chosen)
