"""log_probs for PyTorch, for logits that exist already: its call and its operator."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from onchip.frontend import torch_prepared as stated
from onchip.frontend.torch_register import Made, Operator, Wanted, stated_on
from onchip.ops.linear_log_probs import LOGITS_OP, LogitsOptions
from onchip.ops.linear_log_probs.torch_call import LogProbsPlainOutputs, asked_by, gradient_by_outputs
from onchip.vocab.rows import walk
from onchip.vocab.rows.call import RowsCall
from onchip.vocab.rows.launches import shares_of_ids
from onchip.vocab.torch import tiles
from onchip.vocab.torch.agreement import require_agreement
from onchip.vocab.torch.softmax import TokenGradient
from onchip.vocab.torch.tiles import Ids


@dataclass(frozen=True)
class LogProbsRowsCall(RowsCall):
    """The arguments of the operator."""

    options: LogitsOptions

    @property
    def of_op(self) -> dict[str, Any]:
        more = self.options.mean_logits + self.options.log_sum_sq_probs
        return {"op": LOGITS_OP, "ids": self.several, "stats": self.options.entropy, "more_stats": more}

    def tokens(self, *, check_values: bool) -> Ids:
        options = self.options
        return tiles.select(
            LOGITS_OP, "ids", self.ids, self.number, self.vocab, self.token_temperature,
            ignore_index=options.ignore_index, temperature=options.temperature, dtype=self.logits.dtype,
            check_values=check_values, compact=not self.kernels,
        )  # fmt: skip


class LogProbsRowsKept(NamedTuple):
    """What forward keeps for backward."""

    call: LogProbsRowsCall
    log_prob: Tensor
    entropy: Tensor | None
    lse: Tensor
    mean: Tensor | None


def _forward(call: LogProbsRowsCall) -> LogProbsPlainOutputs:
    logits = call.logits
    if call.shards.there:
        sizes = logits.shape[:-1], logits.dtype
        require_agreement(
            LOGITS_OP, call, sizes, call.ids, call.token_temperature, split={"logits": logits},
            check=call.require_memory,
        )  # fmt: skip
    stats, tokens = walk.statistics(LOGITS_OP, call, asked_by(call.options))
    return LogProbsPlainOutputs.of(call.options, stats, tokens, logits.shape[:-1], call.ids)


def _fake(call: LogProbsRowsCall) -> LogProbsPlainOutputs:
    return LogProbsPlainOutputs.empty(call.options, call.logits, call.logits.shape[:-1], call.ids)


def _save(call: LogProbsRowsCall, made: LogProbsPlainOutputs) -> LogProbsRowsKept:
    return LogProbsRowsKept(call, made.out.log_prob, made.out.entropy, made.out.lse, made.mean)


def _gradients(kept: LogProbsRowsKept, upstream: Made, wanted: Wanted) -> Made:
    call, tokens = kept.call, None
    out = stated.empty_like(call.logits)
    if call.kernels:
        gradient = TokenGradient(*stated_on(call, _of_all_tokens, *kept[1:], *upstream))
    else:
        tokens = call.tokens(check_values=False)
        gradient, _ = gradient_by_outputs(kept, upstream, tokens)
    walk.write_gradient(call, tokens, gradient, out)
    walk.clear_padding(call, out)
    return [out]


def _of_all_tokens(call: LogProbsRowsCall, *tensors: Any) -> list[Any]:
    """The fields of a `TokenGradient` for all T tokens, from what is kept and the upstream gradients."""
    tokens = call.tokens(check_values=False)
    gradient, _ = gradient_by_outputs(LogProbsRowsKept(call, *tensors[:4]), tensors[4:], tokens, shares_of_ids)
    return [*vars(gradient).values()]


def _fake_gradients(kept: LogProbsRowsKept, upstream: Made, wanted: Wanted) -> list[Tensor]:
    """Contiguous, whatever the logits' strides."""
    return [stated.empty_like(kept.call.logits)]


LOG_PROBS = Operator(
    "log_probs_of_logits",
    op=LOGITS_OP,
    forward=_forward,
    fake=_fake,
    save=_save,
    gradients=_gradients,
    fake_gradients=_fake_gradients,
    differentiable=("logits",),
    differentiable_outputs=3,
    states=True,
)
