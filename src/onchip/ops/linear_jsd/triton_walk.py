"""The walks of linear_jsd and jsd on their Triton kernels, over chunks: what runs when, on what memory.

`forward` takes chunks of tokens: two products leave both models' logits (below each tile's largest), and one kernel
reads each token's row of both twice, first for the loss and the gradients' means, then for the logits' gradients.
These stay in a `LogitBuffer`, from which `backward` makes hidden's and weight's gradients with vocab/triton's products.
A token's factor (its weight times the upstream gradient) is applied to rows of hidden for the weight's gradient, and to
rows of the result for hidden's.  Logits that the caller gives are read in place of tiles.

With a sharded vocabulary ranks exchange numbers while a chunk's logits are there: first their softmaxes and, for a
top-k teacher, the log-probabilities of its ids, then the sums of a divergence.  With the whole vocabulary's numbers the
kernels go on as if it weren't sharded.

Nothing here waits for the device, except for other ranks.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from onchip.frontend import torch_prepared as stated
from onchip.frontend.torch_register import Wanted
from onchip.kernels.triton.launch import Launch
from onchip.ops.linear_jsd import triton_kernels as kernels
from onchip.ops.linear_jsd import triton_rows as known_rows
from onchip.ops.linear_jsd.torch_call import PARAMETERS, JsdCall, Left
from onchip.ops.linear_jsd.triton_launches import (
    ELSEWHERE,
    Pair,
    divergence,
    empty_tiles,
    logits,
    more_logits,
    topk_gradients,
    topk_log_probs,
    topk_numbers,
)
from onchip.ops.linear_jsd.triton_memory import JsdPlan
from onchip.vocab.rows.launches import reduce_losses
from onchip.vocab.torch import parallel
from onchip.vocab.torch.parallel import start_sum
from onchip.vocab.triton import setup
from onchip.vocab.triton.products import Products, chunks, float16_scale
from onchip.vocab.triton.records import Vectors
from onchip.vocab.triton.setup import Gradients
from onchip.vocab.triton.tiling import VOCAB_TILE

LN2 = math.log(2)
MODELS = (known_rows.STUDENT.value, known_rows.TEACHER.value)
MAXIMUM, LOG_SUM, MEAN = known_rows.MAXIMUM.value, known_rows.LOG_SUM.value, known_rows.MEAN.value
INVERSE_SCALE = known_rows.INVERSE_SCALE.value
HARD_LOG_SUM, LABEL_LOG_PROB = known_rows.HARD_LOG_SUM.value, known_rows.LABEL_LOG_PROB.value
# What `divergence` is given to make softmaxes alone, or terms as they are.
UNSCALED: dict[str, Any] = {"soft_weight": 1.0, "hard_weight": 0.0, "STUDENT_SCALED": False, "TEACHER_SCALED": False}
NO_TERMS: dict[str, Any] = {"TERMS": False, "STUDENT_MEAN": False, "TEACHER_MEAN": False}
# If this rank's entries have less of the probability, all of theirs are 0 in float32, and they have no mean.
TINY = 1e-30
Take = Callable[..., None]
"""`take(made, first, size, into)` is given the models' logits, for `size` positions from `first` on, and where the
logits' gradients go, if they are to be made."""


def forward(call: JsdCall, plan: JsdPlan, left: Left) -> Tensor:
    """The loss; fills what is `left` for backward."""
    stated.zero(left.vectors)
    pair = Pair.of(call, plan, left)
    loss, number = stated.zeros(call.number, torch.float32, call.first.device), pair.vectors.number
    if call.number:
        take = (_taking_topk if pair.topk is not None else _taking_shard if call.shards.there else _taking)(pair, loss)
        pair.number_tokens()
        _chunks_of_tokens(pair, take)
        if call.shards.there:
            pair.put_labels(ELSEWHERE)
    return reduce_losses(loss.view(call.shape), number, _divisor(call, number), call.options.reduction)


def _taking(pair: Pair, loss: Tensor) -> Take:
    """What is done with each chunk's logits; it fills in `loss`, by token, and the tokens' statistics."""
    token_weight, launched = setup.flat(pair.call.token_weight), dict[bool, Launch]()

    def take(made: Any, first: int, size: int, into: Any) -> None:
        known = launched.get(bool(into))  # chunks differ in where they begin, and in whether gradients are made
        if known is None:
            of_chunk = divergence(pair, made, first, size, 0, pair.tiles, into, loss=loss, token_weight=token_weight)
            known = launched[bool(into)] = of_chunk.fixed()
        known.again((pair.padded(size),), first=first).run()

    return take


def _divisor(call: JsdCall, number: Tensor) -> Tensor | None:
    """What the loss is divided by, unless it is the number of tokens that are not ignored."""
    return None if call.normalizer is None else call.divisor(number)


def _chunks_of_tokens(pair: Pair, take: Take) -> None:
    """Show all tokens' logits to `take`, a chunk at a time."""
    tokens, plan = pair.call.number, pair.plan
    chunk, kept = min(plan.token_chunk, tokens), min(plan.kept, tokens)
    rows, made, buffers = {}, {}, {}
    gathers, heads = dict[int, Launch](), dict[int, Launch]()
    for who, side in pair.sides.items() if pair.tiles else ():  # a shard may be empty
        rows[who], buffer = setup.rows_and_buffer(side.layer, side.config, side.saved)
        if buffer is not None:
            buffers[who] = buffer
        hard = pair.call.options.hard_weight > 0 and who == 0
        made[who] = empty_tiles(side.run, pair.tiles, chunk, sums=True, hard=hard)
    for first, size in (*chunks(0, kept, chunk), *chunks(kept, tokens, chunk)):
        for who, of_all in rows.items():
            whole = len(of_all) == tokens  # rows of all chunks, for backward
            part = of_all[first : first + size] if whole else of_all[:size]
            if first == 0 or not whole:
                gathers[who] = pair.gather(who, of_all if whole else part, first, gathers.get(who))
            if who not in heads:
                heads[who] = logits(pair, pair.sides[who].run, part, made[who], first, 0, pair.tiles).fixed()
            more_logits(heads[who], pair, pair.sides[who].run, part, first).run()
        take(made, first, size, buffers if first < kept else {})


def _taking_topk(pair: Pair, loss: Tensor) -> Take:
    assert pair.topk is not None
    call, device = pair.call, loss.device
    # What the student gives the K entries and all others, by position.
    found = stated.zeros((call.number, pair.topk.shape[1] + 1), torch.float32, device)
    unused = stated.empty(call.number, torch.float32, device)

    def take(made: Any, first: int, size: int, into: Any) -> None:
        if pair.tiles:
            divergence(pair, made, first, size, 0, pair.tiles, {}, loss=unused, **UNSCALED | NO_TERMS).run()
            topk_log_probs(pair, made, first, size, found).run()
        if call.shards.there:
            at = slice(first, first + size)
            if label := _exchange_softmaxes(pair, at, found)[1]:
                _put_label(pair.stats[:, at], label)
        topk_numbers(pair, first, size, found, loss).run()
        if into:
            topk_gradients(pair, made, first, size, 0, pair.tiles, into).run()

    return take


# ------------------------------------------------------------------------------------------------ a sharded vocabulary


def _taking_shard(pair: Pair, loss: Tensor) -> Take:
    call, options = pair.call, pair.call.options
    own, token_weight = torch.zeros_like(loss), setup.flat(call.token_weight)

    def take(made: Any, first: int, size: int, into: Any) -> None:
        at, launched = slice(first, first + size), partial(divergence, pair, made, first, size, 0, pair.tiles)
        stats, order = pair.stats[:, at], pair.vectors.order[at].long()
        if pair.tiles:
            launched({}, loss=own, **UNSCALED | NO_TERMS).run()
        shares, label = _exchange_softmaxes(pair, at)
        if pair.tiles:
            launched({}, loss=own, **UNSCALED, KNOWN=True, HARD=False, STUDENT_MEAN=True, TEACHER_MEAN=True).run()
        # Under their own probabilities, as they are: where both models are certain, all of a gradient cancels.
        means = torch.where(shares < TINY, 0, shares * _of_models(stats, MEAN))
        summed = _gathered(pair, [own[order], *means])[1].sum(0)
        _of_models(stats, MEAN)[:] = means = summed[1:]
        if torch.float16 in call.dtypes:
            # No term is below minus its probability, so a gradient is at most 1 plus twice the sum.
            bound = (1 + 2 * LN2 * means) * (options.soft_factor / options.temperature) + options.hard_weight
            _of_models(stats, INVERSE_SCALE)[:] = torch.exp2(bound.clamp(min=1e-30).log2().floor() - 13)
        value = summed[0] * options.soft_factor
        if label:
            _put_label(stats, label)
            value = value - options.hard_weight * stats[LABEL_LOG_PROB]
        value = value if token_weight is None else value * token_weight[order]
        there = torch.arange(first, first + size, dtype=torch.int64, device=order.device) < pair.vectors.number
        value = torch.where(there, value, 0)  # of a position that isn't there it is 0
        stated.call(Tensor.index_add_, loss, 0, order, value)
        if into:
            launched(into).run()

    return take


def _of_models(stats: Tensor, row: int, models: int = 2) -> Tensor:
    """[models, n]: a number of each model."""
    each = MODELS[1]
    return stats[row : row + models * each : each]


def _gathered(pair: Pair, numbers: Sequence[Tensor]) -> tuple[parallel.Gathered, Tensor]:
    """What ranks know, and their numbers, [ranks, numbers, n]."""
    options, shards = pair.call.options, pair.call.shards
    found = parallel.gather(options.op, shards, numbers, check_values=options.check_inputs)
    return found, found.sure(torch.stack(found.numbers, 1))


def _exchange_softmaxes(pair: Pair, at: slice, topk: Tensor | None = None) -> tuple[Tensor, Sequence[Tensor]]:
    """Put the whole vocabulary's softmaxes where kernels have left those of this rank's entries, and a top-k teacher's
    ids' log-probabilities.  Returns the shares of these entries, [models, n], and what `_put_label` takes.
    """
    call, tau, models = pair.call, pair.call.options.temperature, 2 if topk is None else 1
    stats, order = pair.stats[:, at], pair.vectors.order[at].long()
    maximum, log_sum = (_of_models(stats, row, models) for row in (MAXIMUM, LOG_SUM))
    if not pair.tiles:
        stats[:] = 0
        log_sum[:], stats[HARD_LOG_SUM] = -math.inf, -math.inf
    sent, label = [*(maximum / tau + log_sum * LN2)], list[Tensor]()
    if call.options.hard_weight > 0:
        own = pair.ids[order, 0]
        here = (own >= 0) & (own < call.size)
        sent += [stats[MAXIMUM] + stats[HARD_LOG_SUM], stats[LABEL_LOG_PROB].masked_fill(~here, 0)]
    known = [] if topk is None else topk[at].unbind(1)[: None if call.topk_rest == "tail" else -1]
    found, parts = _gathered(pair, [*sent, *known])
    lse, log_share = parallel.log_sum(parts[:, :models])
    # A row's maximum is replaced by a number of few bits, whose differences from logits are exact.
    maximum[:] = (lse * tau).round()
    log_sum[:] = torch.where(maximum.isfinite(), (lse - maximum / tau) / LN2, 0)
    if call.options.hard_weight > 0:
        target, of_label = call.targets()[0].reshape(-1, 1)[order].long(), parts[:, models]
        total, share = parallel.log_sum(of_label)
        label = [total, parallel.log_prob_of(target, found, [parts[:, models + 1]], of_label, share)[:, 0]]
    if topk is not None and call.indices is not None:
        own, share, ids = parts[:, 0], log_share[:, 0], call.indices.reshape(-1, call.indices.shape[-1])[order]
        if call.topk_rest == "tail":
            topk[at, -1] = parallel.log_sum((parts[:, -1] + share).masked_fill(own == -math.inf, -math.inf))[0]
        of_ids = parts[:, len(sent) : len(sent) + ids.shape[1]].unbind(1)
        topk[at, :-1] = parallel.log_prob_of(ids, found, of_ids, own, share)
    return log_share[parallel.group_of(call.shards).rank()].exp(), label


def _put_label(stats: Tensor, label: Sequence[Tensor]) -> None:
    """Leave the whole vocabulary's numbers for the label: the log-sum-exp, and its log-probability."""
    lse, stats[LABEL_LOG_PROB] = label
    stats[HARD_LOG_SUM] = lse - stats[MAXIMUM]


# ----------------------------------------------------------------------------------------------------------- gradients


def _logit_gradients(pair: Pair, *args: Any, **more: Any) -> Launch:
    return (divergence if pair.topk is None else topk_gradients)(pair, *args, **more)


def backward(call: JsdCall, plan: JsdPlan, left: Left, grad_loss: Tensor, wanted: Wanted) -> list[Tensor | None]:
    """The gradients that are wanted, except those with memory in what is `left`, which are filled in there."""
    pair = Pair.of(call, plan, left)
    tokens = call.number
    row_scale = _row_scale(call, pair.vectors, grad_loss)
    made: list[Tensor | None] = [None] * len(PARAMETERS)
    if not pair.sides:
        into = {}
        for who, model in enumerate(call.models):
            if model.logits is not None and wanted[4 * who + 3]:
                made[4 * who + 3] = g = stated.zero(stated.empty_like(model.logits))
                into[who] = g.view(tokens, g.shape[-1])
        if tokens and pair.tiles:
            _logit_gradients(pair, {}, 0, tokens, 0, pair.tiles, into, row_scale=row_scale).run()
        return made
    parts = [wanted[4 * who : 4 * who + 3] for who in (0, 1)]  # of hidden, weight and bias
    grads = {
        who: setup.Gradients.of(side.layer, side.saved, parts[who])
        for who, side in pair.sides.items()
        if any(parts[who])
    }
    if call.shards.there:
        stated.refuse("ranks add up the gradients of hidden states")
        for who, to in grads.items():
            if to.hidden is not None:
                # Not in the memory of hidden's rows, and in float32, since ranks add them up.
                grads[who] = to._replace(hidden=torch.zeros_like(to.hidden, dtype=torch.float32))
    waits = _chunks_of_vocabulary(pair, row_scale, grads) if tokens and pair.tiles else {}
    for who, to in grads.items():
        layer = pair.sides[who].layer
        if to.weight is not None and len(to.weight) > call.size:
            stated.zero(to.weight[call.size :])  # padding
        hidden, weight, bias = to.made(layer.dtypes[2])
        if call.shards.there and to.hidden is not None:
            wait = waits.get(who) or start_sum(call.shards, to.hidden.view(layer.hidden.shape))
            hidden = wait().to(layer.hidden.dtype)
        made[4 * who : 4 * who + 3] = hidden, weight, bias
    return made


def _row_scale(call: JsdCall, vectors: Vectors, grad_loss: Tensor) -> Tensor:
    """The factor of each position's gradients."""
    grad_loss, apart = grad_loss.reshape(-1), call.options.reduction == "none"
    arguments = {
        **vectors.known,
        "grad_loss": grad_loss,
        "grad_stride": grad_loss.stride(0) if apart else 0,
        "divisor": _divisor(call, vectors.number),
        "token_weight": setup.flat(call.token_weight),
        "out": (out := stated.empty_like(vectors.factor)),
        "T": call.number,
        "MEAN": call.options.reduction == "mean",
        "BLOCK": 256,
    }
    if call.number:
        Launch(kernels.row_scales, (-(-call.number // 256),), arguments).run()
    return out


def _chunks_of_vocabulary(
    pair: Pair, row_scale: Tensor, grads: Mapping[int, Gradients]
) -> dict[int, Callable[[], Tensor]]:
    """Fill in the gradients of hidden states, weights and biases; for a shard, return a function that waits for
    hidden's.
    """
    kept, chunk_tiles = min(pair.plan.kept, pair.call.number), pair.plan.vocab_chunk // VOCAB_TILE
    left = pair.call.number - kept
    row_scales, products = {}, {}
    waits: dict[int, Callable[[], Tensor]] = {}
    for who, to in grads.items():
        side = pair.sides[who]
        row_scales[who], kept_scale, inverse = _scales(pair, who, row_scale, side.layer.dtype)
        products[who] = Products.of(side.run, side.layer, side.config, side.saved, to, kept_scale, inverse)
        products[who].take_kept()
    heads = {}
    for who, side in pair.sides.items() if left else ():
        if who in products:
            rows = products[who].rows[kept:]
        else:
            rows = stated.empty((left, side.run.hidden), side.run.weight.dtype, side.run.weight.device)
            pair.gather(who, rows, kept)
        heads[who] = rows, empty_tiles(side.run, min(chunk_tiles, pair.tiles), left, sums=False, hard=False)
    for first, count in chunks(0, pair.tiles, chunk_tiles):
        made = {}
        for who, (rows, out) in heads.items():
            largest = out.largest.view(-1)[: len(out.largest) * count].view(-1, count)
            made[who] = out._replace(largest=largest)
            logits(pair, pair.sides[who].run, rows, made[who], kept, first, count).run()
        for who, p in products.items() if left else ():
            given = made, kept, left, first, count, {who: p.buffer}
            _logit_gradients(pair, *given, row_scale=row_scales[who]).run()
        for who, p in products.items():
            p.take_hidden(first, count)
            if pair.call.shards.there and first + count == pair.tiles and p.grads.hidden is not None:
                p.finish()
                waits[who] = start_sum(pair.call.shards, p.grads.hidden.view(pair.sides[who].layer.hidden.shape))
            p.take_chunk(first, count)
    for who, p in products.items():
        if who not in waits:
            p.finish()
    return waits


def _scales(pair: Pair, who: int, row_scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
    """The factors of a side's rows of gradients, for those that are made now and those that were kept, and the inverse.

    float16 can't hold a gradient of 1e-8.  So kept gradients were scaled to below 2^14, and here the largest of their
    factors is made 1, so that all stay below that.
    """
    inverse = pair.stats[MODELS[who] + INVERSE_SCALE]
    kept = stated.call(torch.mul, row_scale, inverse) if dtype == torch.float16 else row_scale
    grad_scale = float16_scale(kept, pair.vectors, dtype, largest=1.0)
    if grad_scale is None:
        return row_scale, kept, None
    row_scale, kept = (stated.call(torch.mul, x, grad_scale) for x in (row_scale, kept))
    return row_scale, kept, stated.call(torch.reciprocal, grad_scale)
