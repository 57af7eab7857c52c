"""linear_cross_entropy for PyTorch on the Triton kernels.

`_forward` computes the loss, and leaves what gradients need in the memory that they will take: the exponentials of the
logits in the weight's, the tokens' hidden states in hidden's.  `_gradients` turns these into the gradients, in place.
What is launched is in `vocab.triton.walks`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from onchip.frontend.torch_register import Made, Wanted, register
from onchip.ops.linear_cross_entropy.spec import OP
from onchip.ops.linear_cross_entropy.torch_call import Call, empty_gradients, empty_outputs
from onchip.vocab.torch.tiles import Head
from onchip.vocab.triton import memory as triton_spec
from onchip.vocab.triton import plan as planning
from onchip.vocab.triton import setup
from onchip.vocab.triton.memory import TritonConfig
from onchip.vocab.triton.setup import Saved


class TritonCall(NamedTuple):
    """What the operator is told."""

    call: Call
    compiled: bool
    """Whether torch.compile made the call: then its sizes may have been symbols."""

    @property
    def config(self) -> TritonConfig:
        call = self.call
        return planning.plan(call.problem("cuda"), call.options.strategy, call.budget, compiled=self.compiled)

    @property
    def ids(self) -> Tensor:
        """[T, 1] int64."""
        return self.call.target.reshape(-1, 1).to(torch.int64).contiguous()

    @property
    def head(self) -> Head:
        call, options = self.call, self.call.options
        return Head(
            setup.product_weight(call.weight, call.dtype),
            # In the products' dtype first, as F.linear does under autocast.
            None if call.bias is None else call.bias.to(call.dtype).float(),
            float(options.label_smoothing),
            float(options.z_loss),
            None if options.softcap is None else float(options.softcap),
            float(options.logit_scale),
        )

    def saved(self, config: TritonConfig, *, fake: bool = False) -> Saved:
        call = self.call
        return setup.make_saved(
            call.hidden,
            call.weight,
            call.dtype,
            config,
            call.target.numel(),
            grad_hidden=call.grads[0],
            any_grad=any(call.grads),
            fake=fake,
        )


class TritonOutputs(NamedTuple):
    """`Outputs` and `Saved`."""

    loss: Tensor
    lse: Tensor
    log_prob: Tensor
    entropy: Tensor | None
    correct: Tensor | None
    hidden_memory: Tensor
    weight_memory: Tensor
    overflow: Tensor
    vectors: Tensor


class Kept(NamedTuple):
    """What backward is given."""

    call: TritonCall
    lse: Tensor
    log_prob: Tensor
    hidden_memory: Tensor
    weight_memory: Tensor
    overflow: Tensor
    vectors: Tensor


def _forward(told: TritonCall) -> TritonOutputs:
    from onchip.vocab.triton import walks

    call, config, options = told.call, told.config, told.call.options
    shape, tokens = call.target.shape, call.target.numel()
    if options.check_inputs:
        call.tokens(check_values=True)
    run = setup.make_run(told.head, tokens, call.weight_grad_out)
    hidden = call.hidden.reshape(-1, run.hidden)
    per_token = None if call.token_temperature is None else setup.flat(call.token_temperature.expand(shape))
    saved = told.saved(config)
    any_grad = any(call.grads)
    out, vectors = walks.forward(
        run,
        hidden,
        told.ids,
        float(options.temperature) if per_token is None else per_token,
        int(options.ignore_index),
        setup.rows_in(saved.hidden_memory, tokens, run.hidden, call.dtype)
        if any_grad
        else hidden.new_empty((min(config.token_chunk, tokens), run.hidden), dtype=call.dtype),
        setup.logit_buffer(saved, call.weight, call.dtype, config) if any_grad and config.held > 0 else None,
        stats=options.return_stats,
    )
    losses, correct = walks.losses(run, vectors, out, setup.flat(call.token_weight))
    loss = losses.view(shape)
    if options.reduction != "none":
        loss = losses.sum() / call.divisor(vectors.number)
    return TritonOutputs(
        loss,
        out.lse.view(shape),
        out.log_prob.view(shape),
        None if out.entropy is None else out.entropy.view(shape),
        None if correct is None else correct.view(shape),
        *(saved._replace(vectors=vectors.packed) if any_grad else saved),
    )


def _fake(told: TritonCall) -> TritonOutputs:
    return TritonOutputs(*empty_outputs(told.call), *told.saved(told.config, fake=True))


def _save(told: TritonCall, made: TritonOutputs) -> Kept:
    return Kept(told, made.lse, made.log_prob, *made[5:])


def _gradients(kept: Kept, upstream: Made, wanted: Wanted) -> Made:
    """Turn hidden's and weight's memory into their gradients; weight's is added to the caller's memory if there is any,
    and made here where nothing was kept in its own.
    """
    from onchip.vocab.triton import launches, walks

    call, config, grad_loss = kept.call.call, kept.call.config, upstream[0]
    assert grad_loss is not None
    tokens, add = call.target.numel(), call.weight_grad_out is not None
    run = setup.make_run(kept.call.head, tokens, call.weight_grad_out)
    vectors = launches.Vectors.unpack(kept.vectors, tokens)
    grad = grad_loss.reshape(-1).float()
    if call.options.reduction != "none":
        grad = (grad / call.divisor(vectors.number)).expand(tokens)
    weights = setup.flat(call.token_weight)
    if weights is not None:
        grad = grad * weights
    softmax = launches.TokenSoftmax(kept.lse.reshape(-1), kept.log_prob.reshape(-1, 1))
    grad_bias = call.weight.new_zeros(run.vocab, dtype=torch.float32) if wanted[2] else None
    grad_weight, made = call.weight_grad_out if wanted[1] else None, None
    if wanted[1] and grad_weight is None:
        grad_weight = kept.weight_memory[: run.vocab]
        if kept.weight_memory.numel() == 0:
            grad_weight = made = torch.empty(call.weight.shape, dtype=call.weight.dtype, device=call.weight.device)
        if tokens == 0:
            grad_weight.zero_()
    if tokens > 0:
        recomputed = triton_spec.up(tokens, triton_spec.TOKEN_TILE) - config.stashed - config.overflow
        walks.backward(
            run,
            vectors,
            kept.call.ids,
            int(call.options.ignore_index),
            softmax,
            walks.loss_gradients(run, softmax, grad),
            setup.logit_buffer(Saved(*kept[3:]), call.weight, call.dtype, config, recomputed=recomputed),
            rows=setup.rows_in(kept.hidden_memory, tokens, run.hidden, call.dtype),
            hidden=call.hidden.reshape(-1, run.hidden),
            chunk_tiles=(config.vocab_chunk // triton_spec.VOCAB_TILE, config.weight_chunk // triton_spec.VOCAB_TILE),
            halves=config.halves,
            grad_hidden=kept.hidden_memory.view(tokens, run.hidden) if wanted[0] else None,
            grad_weight=grad_weight,
            grad_bias=grad_bias,
            add=add,
        )
    return None, made, None if grad_bias is None else grad_bias.to(call.dtypes[2])


def _fake_gradients(kept: Kept, upstream: Made, wanted: Wanted) -> Made:
    return empty_gradients(kept.call.call, (False, wanted[1] and kept.weight_memory.numel() == 0, wanted[2]))


def _collect(kept: Kept, made: Made, wanted: Wanted) -> Made:
    in_memory = kept.weight_memory.numel() > 0
    grad_weight = kept.weight_memory[: kept.call.call.weight.shape[0]] if in_memory else made[1]
    return kept.hidden_memory, grad_weight, made[2]


LOSS = register(
    "linear_cross_entropy_triton_loss",
    op=OP,
    forward=_forward,
    fake=_fake,
    save=_save,
    gradients=_gradients,
    fake_gradients=_fake_gradients,
    differentiable=("hidden", "weight", "bias"),
    adds_to={"weight": "weight_grad_out"},
    consumed=("hidden_memory", "weight_memory"),
    collect=_collect,
    clone=lambda x: setup.aligned(x, x.shape, x.dtype).copy_(x),
)
