"""linear_log_probs for PyTorch on Triton kernels.

As in linear_cross_entropy's triton_op.py, forward leaves what gradients need in the memory that they will take, and
backward turns it into them, in place.  What is launched is in
`vocab.triton.walks`.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.frontend.torch_register import Made, Wanted, register
from onchip.ops.linear_log_probs import triton_spec
from onchip.ops.linear_log_probs.spec import OP, Problem
from onchip.ops.linear_log_probs.torch_call import Call, empty_gradients, empty_outputs
from onchip.vocab.torch.tiles import Head
from onchip.vocab.triton import memory as head_spec
from onchip.vocab.triton import setup
from onchip.vocab.triton.memory import TritonConfig
from onchip.vocab.triton.setup import Saved


def plan(problem: Problem, budget: int | None, *, compiled: bool = False) -> TritonConfig:
    """The plan of a call, the same wherever an operator asks; see `vocab.triton.plan`."""
    if compiled and budget is None:
        return head_spec.plan_for_symbols(triton_spec.head_problem(problem), "auto")
    problem = replace(problem, tokens=int(problem.tokens), ids=int(problem.ids), copied=int(problem.copied))
    return triton_spec.plan(problem, None if budget is None else int(budget))


class TritonCall(NamedTuple):
    """What the operator is told."""

    call: Call
    compiled: bool
    """Whether torch.compile made the call: then its sizes may have been symbols."""

    @property
    def stats(self) -> bool:
        """Whether the entropy and top1 are followed."""
        return self.call.options.entropy or self.call.options.top1

    @property
    def config(self) -> TritonConfig:
        problem = replace(self.call.problem(compacted=False), top1=self.call.options.top1)
        return plan(problem, self.call.budget, compiled=self.compiled)

    @property
    def ids(self) -> Tensor:
        """[T, K] int64."""
        call = self.call
        k = call.ids.shape[-1] if call.ids.ndim == call.hidden.ndim else 1
        return call.ids.reshape(call.number, k).to(torch.int64).contiguous()

    @property
    def head(self) -> Head:
        call, options = self.call, self.call.options
        # The bias in the products' dtype first, as F.linear does under autocast.
        bias = None if call.bias is None else call.bias.to(call.dtype).float()
        softcap = None if options.softcap is None else float(options.softcap)
        weight = setup.product_weight(call.weight, call.dtype)
        return Head(weight, bias, 0.0, 0.0, softcap, float(options.logit_scale))

    def saved(self, config: TritonConfig, *, fake: bool = False) -> Saved:
        call = self.call
        return setup.make_saved(
            call.hidden,
            call.weight,
            call.dtype,
            config,
            call.number,
            grad_hidden=call.grads[0],
            any_grad=any(call.grads),
            fake=fake,
        )


class TritonOutputs(NamedTuple):
    """`Outputs` and `Saved`."""

    log_prob: Tensor
    entropy: Tensor | None
    lse: Tensor
    top1: Tensor | None
    hidden_memory: Tensor
    weight_memory: Tensor
    overflow: Tensor
    vectors: Tensor


class Kept(NamedTuple):
    """What backward is given."""

    call: TritonCall
    log_prob: Tensor
    entropy: Tensor | None
    lse: Tensor
    hidden_memory: Tensor
    weight_memory: Tensor
    overflow: Tensor
    vectors: Tensor


def _forward(told: TritonCall) -> TritonOutputs:
    from onchip.vocab.triton import walks

    call, config, options = told.call, told.config, told.call.options
    shape, tokens = call.hidden.shape[:-1], call.number
    if options.check_inputs:
        call.tokens(check_values=True)
    run = setup.make_run(told.head, tokens)
    hidden = call.hidden.reshape(tokens, run.hidden)
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
        stats=told.stats,
    )
    return TritonOutputs(
        out.log_prob.view(call.ids.shape),
        None if out.entropy is None else out.entropy.view(shape),
        out.lse.view(shape),
        None if out.top1 is None else out.top1.view(shape),
        *(saved._replace(vectors=vectors.packed) if any_grad else saved),
    )


def _fake(told: TritonCall) -> TritonOutputs:
    return TritonOutputs(*empty_outputs(told.call, told.stats), *told.saved(told.config, fake=True))


def _save(told: TritonCall, made: TritonOutputs) -> Kept:
    return Kept(told, made.log_prob, made.entropy, made.lse, *made[4:])


def _gradients(kept: Kept, upstream: Made, wanted: Wanted) -> Made:
    """Turn hidden's and weight's memory into their gradients, and use up the overflow; weight's is made here where
    nothing was kept in its own.
    """
    from onchip.vocab.triton import launches, walks

    told, call, config = kept.call, kept.call.call, kept.call.config
    tokens, ids = call.number, told.ids
    run = setup.make_run(told.head, tokens)
    grad_bias = call.weight.new_zeros(run.vocab, dtype=torch.float32) if wanted[2] else None
    grad_weight, made = None, None
    if wanted[1]:
        grad_weight = kept.weight_memory[: run.vocab]
        if kept.weight_memory.numel() == 0:
            grad_weight = made = torch.empty(call.weight.shape, dtype=call.weight.dtype, device=call.weight.device)
        if tokens == 0:
            grad_weight.zero_()
    if tokens > 0:
        recomputed = head_spec.up(tokens, head_spec.TOKEN_TILE) - config.stashed - config.overflow
        log_probs = setup.flat(upstream[0])
        walks.backward(
            run,
            launches.Vectors.unpack(kept.vectors, tokens),
            ids,
            int(call.options.ignore_index),
            launches.TokenSoftmax(kept.lse.reshape(-1), kept.log_prob.reshape(ids.shape), setup.flat(kept.entropy)),
            walks.OutputGradients(
                None if log_probs is None else log_probs.view(ids.shape),
                setup.flat(upstream[2]),
                setup.flat(upstream[1]) if told.stats else None,
            ),
            setup.logit_buffer(Saved(*kept[4:]), call.weight, call.dtype, config, recomputed=recomputed),
            rows=setup.rows_in(kept.hidden_memory, tokens, run.hidden, call.dtype),
            hidden=call.hidden.reshape(tokens, run.hidden),
            chunk_tiles=(config.vocab_chunk // head_spec.VOCAB_TILE, config.weight_chunk // head_spec.VOCAB_TILE),
            halves=config.halves,
            grad_hidden=kept.hidden_memory.view(tokens, run.hidden) if wanted[0] else None,
            grad_weight=grad_weight,
            grad_bias=grad_bias,
        )
    return None, made, None if grad_bias is None else grad_bias.to(call.dtypes[2])


def _fake_gradients(kept: Kept, upstream: Made, wanted: Wanted) -> Made:
    return empty_gradients(kept.call.call, (False, wanted[1] and kept.weight_memory.numel() == 0, wanted[2]))


def _collect(kept: Kept, made: Made, wanted: Wanted) -> Made:
    in_memory = kept.weight_memory.numel() > 0
    grad_weight = kept.weight_memory[: kept.call.call.weight.shape[0]] if in_memory else made[1]
    return kept.hidden_memory, grad_weight, made[2]


LOG_PROBS = register(
    "linear_log_probs_triton_values",
    op=OP,
    forward=_forward,
    fake=_fake,
    save=_save,
    gradients=_gradients,
    fake_gradients=_fake_gradients,
    differentiable=("hidden", "weight", "bias"),
    differentiable_outputs=3,
    consumed=("hidden_memory", "weight_memory", "overflow"),
    collect=_collect,
    clone=lambda x: setup.aligned(x, x.shape, x.dtype).copy_(x),
)
