"""linear_log_probs for PyTorch on Triton kernels.

As in linear_cross_entropy's triton_op.py, forward leaves what backward needs in the gradients' memory, and backward
turns it into the gradients, in place.  The launches are in `vocab.triton.walks`; for a sharded vocabulary the exchange
between ranks is in `vocab.triton.shards`.
"""

from typing import NamedTuple

from torch import Tensor

from onchip.frontend.torch_register import Made, Operator, Wanted
from onchip.ops.linear_log_probs import OP
from onchip.ops.linear_log_probs.torch_call import LogProbsCall, LogProbsOutputs, LogProbsPlainOutputs, asked_by
from onchip.vocab.torch.softmax import Asked
from onchip.vocab.triton import setup, shards
from onchip.vocab.triton.memory import TritonPlan
from onchip.vocab.triton.setup import TritonSaved


class LogProbsTritonOutputs(NamedTuple):
    """The operator's outputs."""

    out: LogProbsOutputs
    saved: TritonSaved


class LogProbsTritonKept(NamedTuple):
    """What forward keeps for backward."""

    call: LogProbsCall
    config: TritonPlan
    log_prob: Tensor
    entropy: Tensor | None
    lse: Tensor
    saved: TritonSaved


def _stats(call: LogProbsCall) -> bool:
    """Whether kernels compute the entropy and top1."""
    return call.options.entropy or call.options.top1


def _plan(call: LogProbsCall) -> TritonPlan:
    return shards.plan(call, stats=_stats(call))


def _forward(call: LogProbsCall) -> LogProbsTritonOutputs:
    from onchip.vocab.triton import walks

    options = call.options
    if call.shards.there:
        call.check_ranks()
        tokens = call.tokens(check_values=options.check_inputs)
        stats, saved = shards.statistics(OP, call, tokens, asked_by(options), stats=_stats(call))
        return LogProbsTritonOutputs(LogProbsPlainOutputs.of(options, stats, tokens, call.leading, call.ids).out, saved)
    config, shape = _plan(call), call.leading
    if options.check_inputs and not call.hidden.is_meta:
        call.tokens(check_values=True)
    saved = setup.make_saved(call, config)
    run = setup.make_run(call, options, saved.vectors, weight=saved.weight)
    asked = Asked(_stats(call), options.mean_logits, options.log_sum_sq_probs)
    out = walks.forward(run, call, config, saved, asked=asked)
    entropy, top1 = out.entropy if options.entropy else None, out.top1 if options.top1 else None
    made = (None if x is None else x.view(shape) for x in (entropy, out.lse, top1, out.mean_logits, out.log_sum_sq))
    return LogProbsTritonOutputs(LogProbsOutputs(out.log_prob.view(call.ids.shape), *made), saved)  # type: ignore[arg-type]


def _fake(call: LogProbsCall) -> LogProbsTritonOutputs:
    out = LogProbsOutputs.empty(call.options, call.hidden, call.leading, call.ids)
    return LogProbsTritonOutputs(out, shards.fake_saved(call, stats=_stats(call)))


def _save(call: LogProbsCall, made: LogProbsTritonOutputs) -> LogProbsTritonKept:
    return LogProbsTritonKept(call, _plan(call), *made.out[:3], made.saved)


def _gradients(kept: LogProbsTritonKept, upstream: Made, wanted: Wanted) -> Made:
    """Turn the kept memory into hidden's and weight's gradients, overwriting the scratch memory."""
    from onchip.vocab.triton import records, walks

    call, config, saved, shape = kept.call, kept.config, kept.saved, (kept.call.number, kept.call.several)
    log_prob, entropy, lse = (setup.flat(x) for x in upstream)
    followed = setup.flat(kept.entropy)
    if not call.options.entropy:
        entropy = followed = None
    by_output = walks.OutputGradients(None if log_prob is None else log_prob.view(shape), lse, entropy)
    known = records.TokenSoftmax(kept.lse.reshape(-1), kept.log_prob.reshape(shape), followed)
    if call.shards.there:
        return shards.gradients(call, config, saved, known, lambda _: (by_output, None), wanted)
    run = setup.make_run(call, call.options, saved.vectors, weight=setup.weight_in_backward(call, config, saved))
    return walks.backward(run, call, config, saved, known, by_output, wanted)


LOG_PROBS = Operator(
    "linear_log_probs_by_triton",
    op=OP,
    forward=_forward,
    fake=_fake,
    save=_save,
    gradients=_gradients,
    differentiable_outputs=3,
    **(shards.IN_PLACE | {"consumed": ("hidden_memory", "weight_memory", "scratch_memory")}),
)
