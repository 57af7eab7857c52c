"""jsd's Triton kernel on a shard of the vocabulary: what torch_shards.py exchanges, and the gradients made of it.

A launch makes the shard's softmaxes, with its own divergence at the ends of beta; between them a second one, given the
whole vocabulary's log-sum-exps, the shard's part of the divergence.  Backward's is that of a whole vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from onchip.frontend.torch_register import Wanted
from onchip.kernels.triton.launch import device_of
from onchip.ops.linear_jsd import triton_kernels as kernels
from onchip.ops.linear_jsd import triton_memory
from onchip.ops.linear_jsd.torch_call import PARAMETERS, Call
from onchip.ops.linear_jsd.torch_shards import weighed_by_share
from onchip.ops.linear_jsd.triton_memory import JsdPlan
from onchip.ops.linear_jsd.triton_walk import Pair, divergence
from onchip.vocab.parallel import IGNORED
from onchip.vocab.torch.tiles import Tokens
from onchip.vocab.triton.memory import vector_elements

LN2 = math.log(2)
MODELS = (kernels.STUDENT.value, kernels.TEACHER.value)
MAXIMUM, LOG_SUM, MEAN = kernels.MAXIMUM.value, kernels.LOG_SUM.value, kernels.MEAN.value
INVERSE_SCALE = kernels.INVERSE_SCALE.value
HARD_LOG_SUM, LABEL_LOG_PROB = kernels.HARD_LOG_SUM.value, kernels.LABEL_LOG_PROB.value


def _pair(call: Call, here: Tokens, *, elsewhere: int) -> Pair:
    """This shard's logits, with its labels; `elsewhere` in place of those that other shards have.

    A launch over them is for the tokens that count, by position.
    """
    label = here.label.masked_fill(here.label < 0, elsewhere)
    if here.kept is not None:
        label = label.masked_fill(~here.kept, IGNORED)
    options = replace(call.options, ignore_index=IGNORED)
    call = call._replace(target=label.view(call.shape), options=options)
    device = call.first.device
    vectors = torch.zeros(vector_elements(call.number), dtype=torch.int32, device=device)
    stats = torch.zeros((triton_memory.STATS, call.number), dtype=torch.float32, device=device)
    pair = Pair.of(call, JsdPlan(call.number), vectors, stats)
    pair.number_tokens()
    return pair


def _by_token(pair: Pair, x: Tensor) -> Tensor:
    """[T] of what is by position; 0 of ignored tokens."""
    position = pair.vectors.position.long()
    return x[position.clamp(min=0)].masked_fill(position < 0, 0)


def _by_position(pair: Pair, x: Tensor) -> Tensor:
    return x[pair.vectors.order.long()]


def _launch(pair: Pair, loss: Tensor, **more: Any) -> None:
    """What a forward launch makes of the divergence alone: in `loss`, by token, and in the pair's stats."""
    divergence(
        pair, {}, 0, pair.call.number, 0, pair.tiles, {}, loss=loss, soft_weight=1.0, hard_weight=0.0,
        STUDENT_SCALED=False, TEACHER_SCALED=False, **more,
    ).run()  # fmt: skip


def softmaxes(call: Call, here: Tokens) -> list[Tensor]:
    """As `_softmaxes` of torch_shards.py."""
    options, hard = call.options, call.options.hard_weight > 0
    own, ends = torch.zeros_like(here.weight), options.beta in (0, 1)
    if not call.number:
        return [own.clone() for _ in range(2 + ends + 2 * hard)]
    pair = _pair(call, here, elsewhere=0)
    _launch(pair, own, TERMS=ends, STUDENT_MEAN=False, TEACHER_MEAN=False)

    def of_model(model: int) -> Tensor:
        """Its log-sum-exp."""
        return pair.stats[model + MAXIMUM] / options.temperature + pair.stats[model + LOG_SUM] * LN2

    sent = [*(_by_token(pair, of_model(model)) for model in MODELS), *([own] if ends else [])]
    if hard:
        lse = pair.stats[MODELS[0] + MAXIMUM] + pair.stats[HARD_LOG_SUM]
        log_prob = _by_token(pair, pair.stats[LABEL_LOG_PROB])
        sent += [_by_token(pair, lse), log_prob.masked_fill(here.label < 0, 0)]
    return sent


def _put_softmaxes(pair: Pair, student: Tensor, teacher: Tensor) -> None:
    """Where the kernel reads the whole vocabulary's, given log-sum-exps by token.

    What is taken for a row's maximum is a number of few bits, from which logits differ without rounding.
    """
    tau = pair.call.options.temperature
    for model, by_token in zip(MODELS, (student, teacher), strict=True):
        lse = _by_position(pair, by_token)
        maximum = (lse * tau).round()
        pair.stats[model + MAXIMUM] = maximum
        pair.stats[model + LOG_SUM] = torch.where(maximum.isfinite(), (lse - maximum / tau) / LN2, 0)
        pair.stats[model + INVERSE_SCALE] = 1


def sums_of_terms(
    call: Call, here: Tokens, log_shares: Sequence[Tensor], student: Tensor, teacher: Tensor
) -> list[Tensor]:
    """As `_sums_of_terms` of torch_shards.py."""
    value = torch.zeros_like(here.weight)
    if not call.number:
        return [value, value.clone(), value.clone()]
    pair, beta = _pair(call, here, elsewhere=0), call.options.beta
    _put_softmaxes(pair, student, teacher)
    _launch(pair, value, KNOWN=True, HARD=False, STUDENT_MEAN=True, TEACHER_MEAN=True)
    means = (_by_token(pair, pair.stats[model + MEAN]) * LN2 for model in MODELS)
    weights = (1 - beta, beta)
    return [value, *(weighed_by_share(w * x, of) for w, x, of in zip(weights, means, log_shares, strict=True))]


def gradients(call: Call, here: Tokens, known: Any, row: Tensor, wanted: Wanted) -> list[Tensor | None]:
    """Those of this shard's logits, given a `Known` of the whole vocabulary and each token's factor."""
    made: list[Tensor | None] = [None] * len(PARAMETERS)
    into: dict[int, Tensor] = {}
    for who, model in enumerate(call.models):
        if model.logits is not None and wanted[4 * who + 3]:
            shape, device = model.logits.shape, model.logits.device
            made[4 * who + 3] = g = torch.zeros(shape, dtype=model.logits.dtype, device=device)
            into[who] = g.view(call.number, g.shape[-1])
    if not (call.number and into):
        return made
    with device_of(call.first):
        pair, beta = _pair(call, here, elsewhere=-1), call.options.beta
        _put_softmaxes(pair, known.student_lse, known.teacher_lse)
        ends = beta in (0, 1)
        of_means = (known.by_student, 1 - beta), (known.by_teacher, beta)
        for model, (mean, weight) in zip(MODELS, of_means, strict=True):
            pair.stats[model + MEAN] = _by_position(pair, mean / (LN2 * (1 if ends else weight)))
        if known.hard_lse is not None:
            pair.stats[HARD_LOG_SUM] = _by_position(pair, known.hard_lse) - pair.stats[MODELS[0] + MAXIMUM]
            pair.stats[LABEL_LOG_PROB] = _by_position(pair, known.hard_log_prob)
        scale = _by_position(pair, row)
        divergence(pair, {}, 0, call.number, 0, pair.tiles, into, row_scale=scale).run()
    return made
