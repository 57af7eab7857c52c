"""The Triton kernels on one shard of a vocabulary, with `vocab.torch.parallel` between forward and backward.

Exponentials are kept as for a whole vocabulary: relative to a shift for each token that this rank chose, which the
token's factor exp(shift - lse) corrects.  Hidden's gradient comes first, and is summed over the ranks while the
weight's products run.  If every rank has the same plan, forward may make the gradients chunk by chunk (`exchange`).
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from onchip.frontend import torch_prepared as stated
from onchip.frontend.torch_parallel import Shards
from onchip.frontend.torch_register import Wanted
from onchip.vocab.torch import parallel
from onchip.vocab.torch.softmax import Asked, TokenStats
from onchip.vocab.torch.tiles import Ids
from onchip.vocab.triton import setup
from onchip.vocab.triton.memory import TritonPlan
from onchip.vocab.triton.setup import TritonSaved

if TYPE_CHECKING:  # Triton is imported where something is launched
    from onchip.vocab.triton.exchange import ShardExchange


def of_shard(call: Any, header: Tensor | None = None) -> Any:
    """The call on this rank's shard, with ids as it numbers them; `header`: that of an exchange, to be filled in."""
    from onchip.vocab.triton.token_launches import number_ids

    flat = stated.converted(call.ids, lambda ids: ids.reshape(-1).contiguous())
    here = number_ids(flat, call.shards, call.options.ignore_index, header).view(call.ids.shape)
    return replace(parallel.local(call), ids=here, options=replace(call.options, ignore_index=parallel.IGNORED))


def run_of(
    call: Any, saved: TritonSaved, class_weight: Tensor | None, weight: Tensor, out: Tensor | None = None
) -> Any:
    """The run for a call, or for the shard's own; arguments from `weight` on as in `setup.make_run`."""
    shards: Shards = call.shards
    if not shards.there:
        return setup.make_run(call, call.options, saved.vectors, out, class_weight, weight=weight)
    part = parallel.class_weight_of_shard(class_weight, shards)
    run = setup.make_run(call, call.options, saved.vectors, out, part, weight=weight)
    return replace(run, whole_vocab=shards.vocab, elsewhere=parallel.ELSEWHERE)


def begin(call: Any, token_weight: Tensor | None, *, exchanges: bool) -> "tuple[Any, ShardExchange | None]":
    """The shard's own call, and the exchange with other ranks during forward, if there is one."""
    from onchip.vocab.triton.exchange import ShardExchange

    if not exchanges:
        return of_shard(call), None
    ids = stated.converted(call.ids, lambda ids: ids.reshape(-1).to(torch.int64).contiguous())
    exchange = ShardExchange(call.shards, ids, token_weight)
    return of_shard(call, exchange.header), exchange


def combined(op: str, call: Any, known: TokenStats, tokens: Ids, asked: Asked) -> TokenStats:
    """The statistics of every token over the whole vocabulary, from this rank's shard."""
    asked = asked._replace(class_weight=parallel.class_weight_of_shard(asked.class_weight, call.shards))
    return parallel.combine(op, call.shards, known, tokens, asked, check_values=call.options.check_inputs)


def plan(call: Any) -> TritonPlan:
    """The plan: the same in forward and backward, for a fake call, and for a whole vocabulary."""
    return setup.plan(parallel.local(call, fake=True))


def fake_saved(call: Any) -> TritonSaved:
    """What forward saves, not yet filled; for a whole vocabulary too."""
    mine = parallel.local(call, fake=True)
    config = setup.plan(mine)
    saved = setup.make_saved(mine, config, fake=True)
    if config.in_forward and call.shards.there and call.grads[0]:  # the sum over ranks is there, of this rank's tokens
        saved = saved._replace(hidden_memory=torch.empty_like(call.hidden, memory_format=torch.contiguous_format))
    return saved


def gradients(
    call: Any,
    config: TritonPlan,
    saved: TritonSaved,
    known: Any,  # TokenSoftmax, of the whole vocabulary
    upstream: Callable[[Any], tuple[Any, Tensor | None]],  # given the run: OutputGradients, and that of the losses' sum
    wanted: Wanted,
    scale: Tensor | None,  # of hidden's gradient that forward made
) -> tuple[Tensor | None, ...]:
    """The gradients of this rank's tensors that are in no memory of forward's."""
    from onchip.vocab.triton import walks
    from onchip.vocab.triton.exchange import HiddenSum
    from onchip.vocab.triton.token_launches import scale_rounded

    shards, hidden, hidden_sum = call.shards, None, None
    if config.in_forward:
        if wanted[0]:
            assert scale is not None
            scale_rounded(saved.hidden_memory, scale).run()
        if not wanted[1]:
            return None, None, None
        wanted = False, *wanted[1:]
    else:
        hidden_sum = HiddenSum(shards)
    mine = of_shard(call)
    out = None if call.weight_grad_out is None else call.weight_grad_out[: shards.rows]
    run = run_of(mine, saved, call.class_weight, setup.weight_in_backward(mine, config, saved), out)
    by_output, factor = upstream(run)
    hidden, weight, bias = walks.backward(
        run, mine, config, saved, known, by_output, wanted, add_to=out, factor=factor, hidden_sum=hidden_sum
    )
    if wanted[1] and out is None and weight is None and not in_memory(call, saved):
        weight = saved.weight_memory[: shards.rows]
    rows = len(call.weight)
    return hidden, padded(weight, rows), padded(bias, rows)


def padded(x: Tensor | None, rows: int) -> Tensor | None:
    return x if x is None or len(x) == rows else stated.call(parallel.padded, x, rows)


def in_memory(call: Any, saved: TritonSaved) -> bool:
    """Whether the weight's gradient is in forward's memory, which has no zeros for padding."""
    return saved.weight_memory.numel() > 0 and (not call.shards.there or call.weight.shape[0] == call.shards.rows)
