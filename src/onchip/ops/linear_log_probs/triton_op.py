"""linear_log_probs for PyTorch on Triton kernels: two registered operators and autograd between them.

As in linear_cross_entropy's triton_op.py, forward leaves what gradients need in the memory that they will take, and
backward turns it into them, in place.  What is launched is in vocab/triton/walks.py.
"""

from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.frontend.torch_autograd import differentiable_once, graph_is_kept
from onchip.kernels.triton.launch import constant_to_compiler, device_of
from onchip.ops.linear_log_probs import torch_walks, triton_spec
from onchip.ops.linear_log_probs.spec import OP, Problem
from onchip.vocab.torch.tiles import Head
from onchip.vocab.triton import memory as head_spec
from onchip.vocab.triton import plan as planning
from onchip.vocab.triton import setup
from onchip.vocab.triton.memory import TritonConfig
from onchip.vocab.triton.setup import Saved


def refusal(device: str, index: int | None, dtype: torch.dtype) -> str | None:
    """Why the kernels can't serve a call on this device with products in `dtype`, or None."""
    reason: str | None = planning.refusal(device, index, dtype)
    return reason


def plan(problem: Problem, budget: int | None) -> tuple[Any, ...]:
    """The plan as the operators take it.

    Inside torch.compile sizes may be symbols: a budget makes numbers of them, and a graph for each.
    """
    if torch.compiler.is_compiling() and budget is None:
        return planning.numbers(head_spec.plan_for_symbols(triton_spec.head_problem(problem), "auto"))
    problem = replace(problem, tokens=int(problem.tokens), ids=int(problem.ids), copied=int(problem.copied))
    found: tuple[Any, ...] = _plan(budget, *[getattr(problem, name) for name in _FIELDS])
    return found


_FIELDS = tuple(field.name for field in fields(Problem))


@constant_to_compiler  # or the search for a plan would be traced
def _plan(budget: int | None, *of_problem: Any) -> tuple[Any, ...]:
    return planning.numbers(triton_spec.plan(Problem(*of_problem), budget))


# ------------------------------------------------------------------------------------------------ registered operators


class Arguments(NamedTuple):
    """What the operators are told."""

    hidden: Tensor  # [..., H]
    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    ids: Tensor  # [...] or [..., K]
    token_temperature: Tensor | None  # [...] or []
    dtype: torch.dtype
    ignore_index: int
    softcap: float | None
    logit_scale: float
    temperature: float
    check_inputs: bool
    token_chunk: int
    vocab_chunk: int
    weight_chunk: int
    stashed: int
    overflow: int
    halves: bool
    stats: bool
    grad_hidden: bool
    grad_weight: bool
    grad_bias: bool

    @property
    def config(self) -> TritonConfig:
        return TritonConfig(
            self.token_chunk,
            self.vocab_chunk,
            self.weight_chunk,
            self.stashed,
            self.overflow,
            self.halves,
        )

    @property
    def any_grad(self) -> bool:
        return self.grad_hidden or self.grad_weight or self.grad_bias

    @property
    def tokens(self) -> int:
        """T."""
        return self.hidden.numel() // self.hidden.shape[-1]

    @property
    def flat_ids(self) -> Tensor:
        """[T, K] int64."""
        k = self.ids.shape[-1] if self.ids.ndim == self.hidden.ndim else 1
        return self.ids.reshape(self.tokens, k).to(torch.int64).contiguous()

    @property
    def head(self) -> Head:
        # The bias in the products' dtype first, as F.linear does under autocast.
        bias = None if self.bias is None else self.bias.to(self.dtype).float()
        return Head(setup.product_weight(self.weight, self.dtype), bias, 0.0, 0.0, self.softcap, self.logit_scale)

    def saved(self, *, fake: bool = False) -> Saved:
        return setup.make_saved(
            self.hidden,
            self.weight,
            self.dtype,
            self.config,
            self.tokens,
            grad_hidden=self.grad_hidden,
            any_grad=self.any_grad,
            fake=fake,
        )


# torch.compile's cache on disk knows an operator by its name alone: a release that changes a schema must rename it.
# What isn't a tensor goes in lists, as in linear_cross_entropy.
_OPTIONS = "ScalarType dtype, int ignore_index, float[] numbers, SymInt[] sizes, bool[] flags"
_TENSORS = "Tensor weight, Tensor? bias, Tensor ids, Tensor? token_temperature"


def pack(a: Arguments) -> tuple[Any, ...]:
    """The arguments as `_forward_op` takes them."""
    numbers = [a.softcap or 0.0, a.logit_scale, a.temperature]
    sizes = [a.token_chunk, a.vocab_chunk, a.weight_chunk, a.stashed, a.overflow]
    flags = [a.check_inputs, a.halves, a.stats, a.grad_hidden, a.grad_weight, a.grad_bias]
    return (*a[:7], numbers, sizes, flags)


def _unpack(packed: tuple[Any, ...]) -> Arguments:
    *first, (softcap, logit_scale, temperature), sizes, (check_inputs, *flags) = packed
    return Arguments._make((*first, softcap or None, logit_scale, temperature, check_inputs, *sizes, *flags))


@torch.library.custom_op(
    "onchip::linear_log_probs_triton",
    mutates_args=(),
    schema=f"(Tensor hidden, {_TENSORS}, {_OPTIONS}) -> ({', '.join(['Tensor'] * 8)})",
)
def _forward_op(*args: Any) -> tuple[Tensor, ...]:
    """Return log_prob, entropy, lse, top1 and `Saved`; what isn't asked for is empty."""
    from onchip.vocab.triton import walks

    a = _unpack(args)
    shape, tokens = a.hidden.shape[:-1], a.tokens
    with device_of(a.hidden), torch.autocast(a.hidden.device.type, enabled=False):
        if a.check_inputs:
            _check_values(a)
        run = setup.make_run(a.head, tokens)
        hidden = a.hidden.reshape(tokens, run.hidden)
        per_token = None if a.token_temperature is None else setup.flat(a.token_temperature.expand(shape))
        saved = a.saved()
        kept = None
        if a.any_grad and a.config.held > 0:
            kept = setup.logit_buffer(saved, a.weight, a.dtype, a.config)
        out, vectors = walks.forward(
            run,
            hidden,
            a.flat_ids,
            a.temperature if per_token is None else per_token,
            a.ignore_index,
            setup.rows_in(saved.hidden_memory, tokens, run.hidden, a.dtype)
            if a.any_grad
            else hidden.new_empty((min(a.token_chunk, tokens), run.hidden), dtype=a.dtype),
            kept,
            stats=a.stats,
        )
        if a.any_grad:
            saved = saved._replace(vectors=vectors.packed)
        blank = hidden.new_empty(0, dtype=torch.float32)
        return (
            out.log_prob.view(a.ids.shape),
            blank if out.entropy is None else out.entropy.view(shape),
            out.lse.view(shape),
            blank.to(torch.int64) if out.top1 is None else out.top1.view(shape),
            *saved,
        )


@_forward_op.register_fake
def _(*args: Any) -> tuple[Tensor, ...]:
    a = _unpack(args)
    shape = a.hidden.shape[:-1]

    def make(shape: Any, dtype: torch.dtype = torch.float32) -> Tensor:
        return a.hidden.new_empty(shape, dtype=dtype)

    asked = shape if a.stats else 0
    return make(a.ids.shape), make(asked), make(shape), make(asked, torch.int64), *a.saved(fake=True)


def _check_values(a: Arguments) -> None:
    torch_walks.select(
        a.ids,
        a.tokens,
        a.weight.shape[0],
        a.token_temperature,
        ignore_index=a.ignore_index,
        temperature=a.temperature,
        check_values=True,
    )


@torch.library.custom_op(
    "onchip::linear_log_probs_triton_backward",
    mutates_args=("hidden_memory", "weight_memory", "overflow_memory"),
    schema=(
        "(Tensor(a!) hidden_memory, Tensor(b!) weight_memory, Tensor(c!) overflow_memory, Tensor vectors, "
        "Tensor? grad_log_prob, Tensor? grad_entropy, Tensor? grad_lse, Tensor log_prob, Tensor entropy, Tensor lse, "
        f"Tensor hidden, {_TENSORS}, {_OPTIONS}) -> Tensor"
    ),
)
def _backward_op(
    hidden_memory: Tensor,
    weight_memory: Tensor,
    overflow_memory: Tensor,
    packed: Tensor,
    grad_log_prob: Tensor | None,
    grad_entropy: Tensor | None,
    grad_lse: Tensor | None,
    log_prob: Tensor,
    entropy: Tensor,
    lse: Tensor,
    *args: Any,
) -> Tensor:
    """Turn hidden's and weight's memory into their gradients, and return that of bias; uses up the overflow."""
    from onchip.vocab.triton import launches, walks

    a = _unpack(args)
    tokens = a.tokens
    with device_of(a.weight), torch.autocast(a.weight.device.type, enabled=False):
        run = setup.make_run(a.head, tokens)
        ids = a.flat_ids
        saved = Saved(hidden_memory, weight_memory, overflow_memory, packed)
        grad_bias = a.weight.new_zeros(run.vocab if a.grad_bias else 0, dtype=torch.float32)
        if tokens == 0:
            if a.grad_weight:
                weight_memory.zero_()
        else:
            recomputed = head_spec.up(tokens, head_spec.TOKEN_TILE) - a.stashed - a.overflow
            log_probs = setup.flat(grad_log_prob)
            walks.backward(
                run,
                launches.Vectors.unpack(packed, tokens),
                ids,
                a.ignore_index,
                launches.TokenSoftmax(lse.reshape(-1), log_prob.reshape(ids.shape), entropy.reshape(-1)),
                walks.OutputGradients(
                    None if log_probs is None else log_probs.view(ids.shape),
                    setup.flat(grad_lse),
                    setup.flat(grad_entropy) if a.stats else None,
                ),
                setup.logit_buffer(saved, a.weight, a.dtype, a.config, recomputed=recomputed),
                rows=setup.rows_in(hidden_memory, tokens, run.hidden, a.dtype),
                hidden=a.hidden.reshape(tokens, run.hidden),
                chunk_tiles=(a.vocab_chunk // head_spec.VOCAB_TILE, a.weight_chunk // head_spec.VOCAB_TILE),
                halves=a.halves,
                grad_hidden=hidden_memory.view(tokens, run.hidden) if a.grad_hidden else None,
                grad_weight=weight_memory[: run.vocab] if a.grad_weight else None,
                grad_bias=grad_bias if a.grad_bias else None,
            )
        return grad_bias.to((a.weight if a.bias is None else a.bias).dtype)


@_backward_op.register_fake
def _(*args: Any) -> Tensor:
    a = _unpack(args[10:])
    like = a.weight if a.bias is None else a.bias
    return like.new_empty(a.weight.shape[0] if a.grad_bias else 0)


# ---------------------------------------------------------------------------------------------------------- autograd


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    log_prob, entropy, lse, top1, *saved = output
    ctx.mark_non_differentiable(top1, *saved)
    ctx.set_materialize_grads(False)  # what has no gradient costs nothing
    ctx.save_for_backward(*saved, log_prob, entropy, lse, *inputs[:5])
    ctx.options = inputs[5:]


def _backward(
    ctx: Any, grad_log_prob: Tensor | None, grad_entropy: Tensor | None, grad_lse: Tensor | None, *_: Any
) -> tuple[Any, ...]:
    nothing = (None,) * (2 + len(ctx.options))
    upstream = (grad_log_prob, grad_entropy, grad_lse)
    if all(x is None for x in upstream):
        return (None, None, None, *nothing)
    *memory, log_prob, entropy, lse, hidden, weight, bias, ids, temperature = ctx.saved_tensors
    inputs = (hidden, weight, bias, ids, temperature, *ctx.options)
    a = _unpack(inputs)
    saved = Saved(*memory)
    hidden_memory, weight_memory = setup.memory_for_backward(saved, weight, grad_weight=a.grad_weight)
    overflow = saved.overflow
    if graph_is_kept():
        overflow = setup.aligned(overflow, overflow.shape, overflow.dtype).copy_(overflow)
    grad_bias = _backward_op(
        hidden_memory, weight_memory, overflow, saved.vectors, *upstream, log_prob, entropy, lse, *inputs
    )
    grads = differentiable_once(
        OP,
        (
            hidden_memory if a.grad_hidden else None,
            weight_memory[: weight.shape[0]] if a.grad_weight else None,
            grad_bias if a.grad_bias else None,
        ),
        *upstream,
        log_prob,
    )
    return (*grads, *nothing)


_forward_op.register_autograd(_backward, setup_context=_setup_context)


def forward(*args: Any) -> tuple[Tensor, ...]:
    """log_prob, entropy, lse and top1, for the arguments that `Arguments` lists."""
    return tuple(_forward_op(*pack(Arguments(*args)))[:4])
