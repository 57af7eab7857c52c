"""The walks of linear_jsd and jsd on their Triton kernels, over chunks: what runs when, on what memory.

`forward` takes chunks of tokens: two products leave both models' logits (below each tile's largest), and one kernel
reads each token's row of both twice, first for the loss and the gradients' means, then for the logits' gradients.
These stay in a `LogitBuffer`, from which `backward` makes hidden's and weight's gradients with vocab/triton's products.
A token's factor (its weight times the upstream gradient) is applied to rows of hidden for the weight's gradient, and to
rows of the result for hidden's.  Logits that the caller gives are read in place of tiles.

With a sharded vocabulary forward computes what ranks exchange (torch_halves.py), in one walk at the ends of beta and in
two between them.  It leaves numbers for the whole vocabulary, from which backward makes the logits' gradients.

Nothing here waits for the device, except for other ranks.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from onchip.frontend import torch_prepared as stated
from onchip.frontend.torch_register import Wanted
from onchip.kernels.triton.launch import Launch
from onchip.ops.linear_jsd import torch_halves
from onchip.ops.linear_jsd import triton_kernels as kernels
from onchip.ops.linear_jsd import triton_rows as known_rows
from onchip.ops.linear_jsd.torch_call import PARAMETERS, JsdCall
from onchip.ops.linear_jsd.triton_launches import (
    ELSEWHERE,
    Pair,
    divergence,
    empty_tiles,
    logits,
    topk_gradients,
    topk_log_probs,
    topk_numbers,
)
from onchip.ops.linear_jsd.triton_memory import JsdPlan
from onchip.vocab.rows.launches import reduce_losses
from onchip.vocab.torch.parallel import start_sum
from onchip.vocab.triton import setup
from onchip.vocab.triton.products import Products, chunks, float16_scale
from onchip.vocab.triton.records import Vectors
from onchip.vocab.triton.setup import Gradients, TritonSaved
from onchip.vocab.triton.tiling import VOCAB_TILE

LN2 = math.log(2)
MODELS = (known_rows.STUDENT.value, known_rows.TEACHER.value)
MAXIMUM, LOG_SUM, MEAN = known_rows.MAXIMUM.value, known_rows.LOG_SUM.value, known_rows.MEAN.value
INVERSE_SCALE = known_rows.INVERSE_SCALE.value
HARD_LOG_SUM, LABEL_LOG_PROB = known_rows.HARD_LOG_SUM.value, known_rows.LABEL_LOG_PROB.value
# What `divergence` is given to make softmaxes alone, or terms as they are.
UNSCALED = {"soft_weight": 1.0, "hard_weight": 0.0, "STUDENT_SCALED": False, "TEACHER_SCALED": False}
NO_TERMS = {"TERMS": False, "STUDENT_MEAN": False, "TEACHER_MEAN": False}
Take = Callable[..., None]
"""`take(made, first, size, into)` is given the models' logits, for `size` positions from `first` on, and where the
logits' gradients go, if they are to be made."""


def forward(
    call: JsdCall,
    plan: JsdPlan,
    stats: Tensor,
    vectors: Tensor,
    saved: Sequence[TritonSaved],
) -> Tensor:
    """The loss; fills each model's memory, `saved`."""
    pair = Pair.of(call, plan, stated.zero(vectors), stats)
    if call.shards.there:
        stated.refuse("ranks exchange what they know")
        return (_forward_of_shard if pair.topk is None else _topk_of_shard)(pair, plan, saved)
    if pair.topk is not None:
        return _forward_of_topk(pair, plan, saved)
    loss = stated.zeros(call.number, torch.float32, call.first.device)
    if call.number:
        pair.number_tokens()
        _divergences(pair, plan, saved, loss, token_weight=setup.flat(call.token_weight))
    return _reduced(call, loss, pair.vectors.number)


def _reduced(call: JsdCall, losses: Tensor, number: Tensor) -> Tensor:
    """The loss, from that of each token, of which `number` aren't ignored."""
    return reduce_losses(losses.view(call.shape), number, _divisor(call, number), call.options.reduction)


def _divisor(call: JsdCall, number: Tensor) -> Tensor | None:
    """What the loss is divided by, unless it is the number of tokens that are not ignored."""
    return None if call.normalizer is None else call.divisor(number)


def _divergences(pair: Pair, plan: JsdPlan, saved: Sequence[TritonSaved], loss: Tensor, **more: Any) -> None:
    """Fill in `loss`, by token, and the tokens' statistics; `more` are arguments of `divergence`."""

    def take(made: Any, first: int, size: int, into: Any) -> None:
        divergence(pair, made, first, size, 0, pair.tiles, into, loss=loss, **more).run()

    _chunks_of_tokens(pair, plan, saved, take)


def _chunks_of_tokens(pair: Pair, plan: JsdPlan, saved: Sequence[TritonSaved], take: Take) -> None:
    """Show all tokens' logits to `take`, a chunk at a time."""
    tokens, chunk, kept = pair.call.number, min(plan.token_chunk, pair.call.number), min(plan.kept, pair.call.number)
    rows, made, buffers = {}, {}, {}
    for who, side in pair.sides.items():
        rows[who], buffer = setup.rows_and_buffer(side.layer, side.config, saved[who])
        if buffer is not None:
            buffers[who] = buffer
        hard = pair.call.options.hard_weight > 0 and who == 0
        made[who] = empty_tiles(side.run, pair.tiles, chunk, sums=True, hard=hard)
    for first, size in (*chunks(0, kept, chunk), *chunks(kept, tokens, chunk)):
        for who, of_all in rows.items():
            whole = len(of_all) == tokens  # rows of all chunks, for backward
            part = of_all[first : first + size] if whole else of_all[:size]
            if first == 0 or not whole:
                pair.gather(who, of_all if whole else part, first)
            logits(pair, pair.sides[who].run, part, made[who], first, 0, pair.tiles).run()
        take(made, first, size, buffers if first < kept else {})


def _forward_of_shard(pair: Pair, plan: JsdPlan, saved: Sequence[TritonSaved]) -> Tensor:
    """The loss of the whole vocabulary; leaves all ranks' numbers in the pair's memory."""
    call, options, stats = pair.call, pair.call.options, pair.stats
    ends, tokens = options.beta in (0, 1), call.tokens(check=False)
    if call.number:
        pair.number_tokens()
    by_token, order = _by_token(pair), pair.vectors.order.long()

    def divergences(**more: Any) -> Tensor:
        """The shard's own divergences, [T], without weights."""
        loss = torch.zeros(call.number, dtype=torch.float32, device=stats.device)
        if call.number:
            _divergences(pair, plan, saved, loss, **UNSCALED, **more)
        return loss

    def softmaxes() -> list[Tensor]:
        own = divergences(**NO_TERMS | {"TERMS": ends})
        lses = [stats[of + MAXIMUM] / options.temperature + stats[of + LOG_SUM] * LN2 for of in MODELS]
        return [*map(by_token, lses), *([own] if ends else []), *_of_label(pair, by_token)]

    def put(student: Tensor, teacher: Tensor) -> None:
        """Put the whole vocabulary's log-sum-exps where the kernel reads them.  A row's maximum is replaced by a number
        of few bits, whose differences from logits are exact.
        """
        for of, lse in zip(MODELS, (student[order], teacher[order]), strict=True):
            stats[of + MAXIMUM] = maximum = (lse * options.temperature).round()
            rest = (lse - maximum / options.temperature) / LN2
            stats[of + LOG_SUM] = torch.where(maximum.isfinite(), rest, 0)

    def terms(student: Tensor, teacher: Tensor) -> list[Tensor]:
        put(student, teacher)
        value = divergences(KNOWN=True, HARD=False, STUDENT_MEAN=True, TEACHER_MEAN=True)
        weights = zip(MODELS, (1 - options.beta, options.beta), strict=True)
        return [value, *(by_token(stats[of + MEAN]) * (LN2 * weight) for of, weight in weights)]

    losses, numbers = torch_halves.of_two_models(call, tokens, softmaxes, terms)
    student, teacher, *sums = numbers[:, :4].unbind(1)
    put(student, teacher)
    for of, total, weight in zip(MODELS, sums, (1.0, 1.0) if ends else (1 - options.beta, options.beta), strict=True):
        stats[of + MEAN] = total[order] / (LN2 * weight)
        # No term is below minus its probability, so a gradient is at most 1 plus twice the sum.
        stats[of + INVERSE_SCALE] = _inverse_scale(call, 1 + 2 * total[order])
    _put_label(pair, numbers, order)
    return call.reduced(tokens, losses)


def _inverse_scale(call: JsdCall, bound: Tensor) -> Tensor:
    """What undoes the scaling of float16 gradients, given a bound on those of the divergence."""
    bound = bound * (call.options.soft_factor / call.options.temperature) + call.options.hard_weight
    return torch.exp2(bound.clamp(min=1e-30).log2().floor() - 13)


def _by_token(pair: Pair) -> Callable[[Tensor], Tensor]:
    """A function that takes what is indexed by position, and returns it indexed by token; 0 for ignored tokens."""
    position = pair.vectors.position.long()

    def by_token(x: Tensor) -> Tensor:
        return x[position.clamp(min=0)].masked_fill((position < 0).view(-1, *[1] * (x.ndim - 1)), 0)

    return by_token


def _of_label(pair: Pair, by_token: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """With hard labels: a shard's log-sum-exp at temperature 1, and what it gives the label, by token."""
    stats, label = pair.stats, pair.ids[:, 0]
    if pair.call.options.hard_weight == 0:
        return []
    there = (label >= 0) & (label < pair.call.size)
    log_prob = by_token(stats[LABEL_LOG_PROB]).masked_fill(~there, 0)
    return [by_token(stats[MODELS[0] + MAXIMUM] + stats[HARD_LOG_SUM]), log_prob]


def _put_label(pair: Pair, numbers: Tensor, order: Tensor) -> None:
    """Leave the whole vocabulary's numbers for the label, the last two, and who has it."""
    if pair.call.options.hard_weight > 0:
        pair.stats[HARD_LOG_SUM] = numbers[order, -2] - pair.stats[MODELS[0] + MAXIMUM]
        pair.stats[LABEL_LOG_PROB] = numbers[order, -1]
    if pair.call.number:
        pair.put_labels(ELSEWHERE)


# ----------------------------------------------------------------------------------------------------- a top-k teacher


def _forward_of_topk(pair: Pair, plan: JsdPlan, saved: Sequence[TritonSaved]) -> Tensor:
    losses = stated.zeros(pair.call.number, torch.float32, pair.stats.device)

    def gradients(found: Tensor, made: Any, first: int, size: int, into: Any) -> None:
        topk_numbers(pair, first, size, found, losses).run()
        if into:
            topk_gradients(pair, made, first, size, 0, pair.tiles, into).run()

    _topk_chunks(pair, plan, saved, gradients)
    return _reduced(pair.call, losses, pair.vectors.number)


def _topk_of_shard(pair: Pair, plan: JsdPlan, saved: Sequence[TritonSaved]) -> Tensor:
    """The loss of the whole vocabulary; leaves what gradients are made from in the pair's memory."""
    call, stats, tokens = pair.call, pair.stats, pair.call.tokens(check=False)
    found = _topk_chunks(pair, plan, saved, lambda *_: None)
    by_token, order = _by_token(pair), pair.vectors.order.long()
    below = stats[MODELS[0] + MAXIMUM] / call.options.temperature
    known = by_token(found).unbind(1)
    known = known if call.topk_rest == "tail" else known[:-1]
    sent = [by_token(below + stats[MODELS[0] + LOG_SUM] * LN2), *known, *_of_label(pair, by_token)]
    losses, numbers = torch_halves.of_topk(call, tokens, sent)
    pair.numbers[:] = numbers[order, : pair.numbers.shape[1]]
    pair.numbers[:, 0] -= below
    stats[MODELS[0] + INVERSE_SCALE] = _inverse_scale(call, pair.numbers[:, 1:].abs().amax(1))
    _put_label(pair, numbers, order)
    return call.reduced(tokens, losses)


def _topk_chunks(pair: Pair, plan: JsdPlan, saved: Sequence[TritonSaved], after: Callable[..., None]) -> Tensor:
    """What the student gives the K entries and all others, [T, K + 1] by position, and its softmax in `stats`.
    `after` is called with it for each chunk, and with the arguments of `Take`.
    """
    call, device, ids = pair.call, pair.stats.device, pair.call.indices
    assert ids is not None
    found = stated.zeros((call.number, ids.shape[-1] + 1), torch.float32, device)
    unused = stated.empty(call.number, torch.float32, device)

    def take(made: Any, first: int, size: int, into: Any) -> None:
        of_student: dict[str, Any] = UNSCALED | NO_TERMS
        divergence(pair, made, first, size, 0, pair.tiles, {}, loss=unused, **of_student).run()
        topk_log_probs(pair, made, first, size, found).run()
        after(found, made, first, size, into)

    if call.number:
        pair.number_tokens()
        _chunks_of_tokens(pair, plan, saved, take)
    return found


# ----------------------------------------------------------------------------------------------------------- gradients


def _logit_gradients(pair: Pair, *args: Any, **more: Any) -> Launch:
    return (divergence if pair.topk is None else topk_gradients)(pair, *args, **more)


def backward(
    call: JsdCall,
    plan: JsdPlan,
    stats: Tensor,
    vectors: Tensor,
    saved: Sequence[TritonSaved],
    grad_loss: Tensor,
    wanted: Wanted,
) -> list[Tensor | None]:
    """The gradients that are wanted, except those with memory in `saved`, which are filled in there."""
    tokens = call.number
    vectors = stated.call(torch.clone, vectors)  # launches write to some of them
    pair = Pair.of(call, plan, vectors, stats)
    row_scale = _row_scale(call, pair.vectors, grad_loss)
    made: list[Tensor | None] = [None] * len(PARAMETERS)
    if not pair.sides:
        into = {}
        for who, model in enumerate(call.models):
            if model.logits is not None and wanted[4 * who + 3]:
                made[4 * who + 3] = g = stated.zero(stated.empty_like(model.logits))
                into[who] = g.view(tokens, g.shape[-1])
        if tokens:
            _logit_gradients(pair, {}, 0, tokens, 0, pair.tiles, into, row_scale=row_scale).run()
        return made
    parts = [wanted[4 * who : 4 * who + 3] for who in (0, 1)]  # of hidden, weight and bias
    grads = {
        who: setup.Gradients.of(side.layer, saved[who], parts[who])
        for who, side in pair.sides.items()
        if any(parts[who])
    }
    if call.shards.there:
        stated.refuse("ranks add up the gradients of hidden states")
        for who, to in grads.items():
            if to.hidden is not None:
                # Not in the memory of hidden's rows, and in float32, since ranks add them up.
                grads[who] = to._replace(hidden=torch.zeros_like(to.hidden, dtype=torch.float32))
    waits = _chunks_of_vocabulary(pair, plan, row_scale, saved, grads) if tokens else {}
    for who, to in grads.items():
        layer = pair.sides[who].layer
        if to.weight is not None:
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
    pair: Pair, plan: JsdPlan, row_scale: Tensor, saved: Sequence[TritonSaved], grads: Mapping[int, Gradients]
) -> dict[int, Callable[[], Tensor]]:
    """Fill in the gradients of hidden states, weights and biases; for a shard, return a function that waits for
    hidden's.
    """
    tokens, kept = pair.call.number, min(plan.kept, pair.call.number)
    left, chunk_tiles = tokens - kept, plan.vocab_chunk // VOCAB_TILE
    row_scales, products = {}, {}
    waits: dict[int, Callable[[], Tensor]] = {}
    for who, to in grads.items():
        side = pair.sides[who]
        row_scales[who], kept_scale, inverse = _scales(pair, who, row_scale, side.layer.dtype)
        products[who] = Products.of(side.run, side.layer, side.config, saved[who], to, kept_scale, inverse)
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
