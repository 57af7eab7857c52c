"""linear_cross_entropy for PyTorch where the vocabulary is sharded over ranks (`vocab.parallel`).

As 'recompute' does, forward keeps two numbers per token, those of the whole vocabulary, and backward computes the
logits of this rank's shard again.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from onchip.frontend.torch_parallel import Shards
from onchip.frontend.torch_register import Made, Operator, Wanted
from onchip.ops.linear_cross_entropy.spec import OP
from onchip.ops.linear_cross_entropy.torch_call import Call
from onchip.vocab import parallel
from onchip.vocab.torch.loss import Outputs, asked_by, loss_gradient, scaled_rows


@dataclass(frozen=True)
class ShardedCall(Call):
    """The arguments of an operator, this rank's; class_weight is of the whole vocabulary."""

    shards: Shards

    @property
    def vocab(self) -> int:
        return self.shards.vocab


class Kept(NamedTuple):
    """What backward is given."""

    call: ShardedCall
    lse: Tensor
    log_prob: Tensor


class TorchOutputs(NamedTuple):
    """What the operator returns."""

    out: Outputs


def require_agreement(call: ShardedCall) -> None:
    """With check_inputs: raise where ranks have different arguments."""
    if call.options.check_inputs:
        values = (call.target, call.token_weight, call.normalizer, call.class_weight, call.token_temperature)
        parallel.require_agreement(OP, call, *values)


def _forward(call: ShardedCall) -> TorchOutputs:
    require_agreement(call)
    options, tokens = call.options, call.tokens(check_values=call.options.check_inputs)
    asked = asked_by(options, call.class_weight)
    stats = parallel.statistics(OP, call, tokens, asked, argmax=options.return_stats)
    return TorchOutputs(Outputs.of(options, stats, tokens, call.target.shape))


def _fake(call: ShardedCall) -> TorchOutputs:
    return TorchOutputs(call.empty_outputs())


def _save(call: ShardedCall, made: TorchOutputs) -> Kept:
    return Kept(call, made.out.lse, made.out.log_prob)


def _gradients(kept: Kept, upstream: Made, wanted: Wanted) -> Made:
    call, (grad_loss,) = replace(kept.call, grads=tuple(wanted)), upstream
    assert grad_loss is not None
    tokens = call.tokens(check_values=False)
    each = tokens.upstream(grad_loss) if call.options.reduction == "none" else grad_loss
    row, grad_scale = scaled_rows(tokens, call.options, each * tokens.inverse_count, call.operand)
    lse, log_prob = (tokens.take(x.reshape(-1)) for x in (kept.lse, kept.log_prob))
    gradient = loss_gradient(call.options, row, lse, log_prob[:, None], call.vocab, tokens.kept, tokens.classes)
    return parallel.gradients(call, tokens, gradient, grad_scale, call.weight_grad_out)


LOSS = Operator(
    "linear_cross_entropy_of_shards",
    op=OP,
    forward=_forward,
    fake=_fake,
    save=_save,
    gradients=_gradients,
    fake_gradients=lambda kept, upstream, wanted: kept.call.empty_gradients(wanted),
    differentiable=("hidden", "weight", "bias"),
    adds_to={"weight": "weight_grad_out"},
)


def operator(call: ShardedCall, backend: str) -> Operator[Any, Any]:
    """That of a backend; raises where its scratch is too small."""
    return LOSS
