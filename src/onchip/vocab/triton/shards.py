"""The Triton kernels on one shard of a vocabulary, with `vocab.parallel` between the two halves.

Exponentials are kept as of a whole vocabulary, relative to a shift of each token that this rank chose, of which its
factor exp(shift - lse) takes account.  Hidden's gradient comes first, in float32, and is added up over the ranks while
the weight's products run.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from onchip.frontend import torch_prepared as stated
from onchip.frontend.torch_parallel import Shards
from onchip.frontend.torch_register import Made, Wanted
from onchip.vocab import parallel
from onchip.vocab.torch.softmax import Asked, TokenStats
from onchip.vocab.torch.tiles import Ids
from onchip.vocab.triton import setup
from onchip.vocab.triton.memory import TritonPlan
from onchip.vocab.triton.setup import TritonSaved


def of_shard(call: Any) -> Any:
    """The call of this rank's shard, with ids as it numbers them."""
    here = parallel.ids_for_kernels(call.ids, call.shards, call.options.ignore_index)
    return replace(parallel.local(call), ids=here, options=replace(call.options, ignore_index=parallel.IGNORED))


def _run(mine: Any, saved: TritonSaved, class_weight: Tensor | None, out: Tensor | None = None) -> Any:
    """Of the shard's own call."""
    shards: Shards = mine.shards
    part = parallel.class_weight_of_shard(class_weight, shards)
    run = setup.make_run(mine, mine.options, saved.vectors, out, part, weight=saved.weight)
    return replace(run, whole_vocab=shards.vocab, elsewhere=parallel.ELSEWHERE)


def statistics(op: str, call: Any, tokens: Ids, asked: Asked, **more: Any) -> tuple[TokenStats, TritonSaved]:
    """The statistics of every token over the whole vocabulary, and what backward needs; arguments as of
    `walk.statistics`, `more` are fields of the problem."""
    from onchip.vocab.triton import walks

    shards, mine = call.shards, of_shard(call)
    config = setup.plan(mine, **more)
    saved = setup.make_saved(mine, config)
    run = _run(mine, saved, asked.class_weight)
    # The argmax is followed with the entropy.
    followed = asked._replace(entropy=asked.entropy or asked.top, class_weight=None)
    made = walks.forward(run, mine, config, saved, asked=followed)
    uniform = made.uniform_loss
    if uniform is None and made.mean_logits is not None:
        uniform = made.lse - made.mean_logits
    ids = mine.ids.reshape(made.log_prob.shape)
    known = TokenStats(
        made.lse,
        made.log_prob,
        torch.empty_like(ids[:, 0]) if made.top1 is None else made.top1,
        made.entropy,
        None,
        made.mean_logits,
        uniform,
        made.log_sum_sq,
        made.top,
    )
    asked = asked._replace(class_weight=parallel.class_weight_of_shard(asked.class_weight, shards))
    return parallel.combine(op, shards, known, tokens, asked, check_values=call.options.check_inputs), saved


def plan(call: Any, **more: Any) -> TritonPlan:
    """That of `statistics`, also of a fake call."""
    return setup.plan(parallel.local(call, fake=True), **more)


def fake_saved(call: Any, **more: Any) -> TritonSaved:
    """Not yet filled."""
    mine = parallel.local(call, fake=True)
    return setup.make_saved(mine, setup.plan(mine, **more), fake=True)


def gradients(
    call: Any,
    config: TritonPlan,
    saved: TritonSaved,
    known: Any,  # TokenSoftmax, of the whole vocabulary
    upstream: Any,  # OutputGradients
    wanted: Wanted,
    class_weight: Tensor | None = None,
    weight_grad_out: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """Those of this rank's tensors that are in no memory of forward's: see `collect`."""
    from onchip.vocab.triton import walks

    stated.refuse("ranks exchange")
    mine, shards = of_shard(call), call.shards
    out = None if weight_grad_out is None else weight_grad_out[: shards.rows]
    run = _run(mine, saved, class_weight, out)
    hidden, weight, bias = walks.backward(
        run, mine, config, saved, known, upstream, wanted, add_to=out, start_sum=partial(parallel.start_sum, shards)
    )
    if wanted[1] and weight_grad_out is None and weight is None and not _in_memory(call, saved):
        weight = saved.weight_memory[: shards.rows]
    rows = len(call.weight)
    hidden = None if hidden is None else hidden.to(call.hidden.dtype)
    return hidden, parallel.padded(weight, rows), parallel.padded(bias, rows)


def _in_memory(call: Any, saved: TritonSaved) -> bool:
    """Whether the weight's gradient is in the memory of forward's, which has no zeros for padding."""
    return saved.weight_memory.numel() > 0 and len(call.weight) == call.shards.rows


def collect(kept: Any, made: Made, wanted: Wanted) -> Sequence[Tensor | None]:
    """The gradients of what `gradients` made, or `walks.backward` of a whole vocabulary."""
    if not kept.call.shards.there:
        return setup.collect(kept, made, wanted)
    hidden, weight, bias = made
    if _in_memory(kept.call, kept.saved):
        weight = kept.saved.weight_memory[: len(kept.call.weight)]
    return hidden, weight, bias


def fake_gradients(kept: Any, upstream: Made, wanted: Wanted) -> Made:
    """Not yet filled."""
    if not kept.call.shards.there:
        return setup.fake_gradients(kept, upstream, wanted)
    new_weight = wanted[1] and not _in_memory(kept.call, kept.saved)
    made: Made = kept.call.empty_gradients((wanted[0], new_weight, wanted[2]))
    return made


# How an op whose kept fields are `call`, `saved` and others registers that gradients are made in place, the weight's of
# a sharded vocabulary too.
IN_PLACE: dict[str, Any] = setup.IN_PLACE | {
    "fake_gradients": fake_gradients,
    "collect": collect,
    "exchanges": lambda call: call.shards.there,
}
