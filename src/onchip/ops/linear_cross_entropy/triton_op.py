"""linear_cross_entropy for PyTorch on the Triton kernels: two registered operators and autograd between them.

`_forward_op` computes the loss, and leaves what gradients need in the memory that they will take: the exponentials of
the logits in the weight's, the tokens' hidden states in hidden's.  `_backward_op` turns these into the gradients, in
place; autograd clones them first where the graph is retained.  What is launched is in `onchip.vocab.triton.walks`.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.frontend.torch_autograd import asked_for
from onchip.kernels.triton.launch import device_of
from onchip.ops.linear_cross_entropy import torch_tiles
from onchip.ops.linear_cross_entropy.torch_tiles import differentiable_once
from onchip.vocab.triton import memory as triton_spec
from onchip.vocab.triton import setup
from onchip.vocab.triton.memory import TritonConfig
from onchip.vocab.triton.setup import Saved

# ------------------------------------------------------------------------------------------------ registered operators


class Arguments(NamedTuple):
    """What the operators are told."""

    hidden: Tensor  # [..., H]
    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    target: Tensor  # [...]
    token_weight: Tensor | None  # [...]
    token_temperature: Tensor | None  # [...] or []
    normalizer: Tensor | None  # []
    weight_grad_out: Tensor | None  # [V, H] float32; used in backward
    dtype: torch.dtype
    ignore_index: int
    reduction: str
    label_smoothing: float
    z_loss: float
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
    grad_hidden: bool
    grad_weight: bool
    grad_bias: bool
    stats: bool

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


# torch.compile's cache on disk knows an operator by its name alone: a release that changes a schema must rename it.
# What isn't a tensor goes in lists, since what torch.library does in Python grows with the square of the arguments:
# with one for each number it took 0.24 ms per call.
_OPTIONS = "ScalarType dtype, int ignore_index, str reduction, float[] numbers, SymInt[] sizes, bool[] flags"
_TENSORS = (
    "Tensor weight, Tensor? bias, Tensor target, Tensor? token_weight, Tensor? token_temperature, Tensor? normalizer"
)


def pack(a: Arguments) -> tuple[Any, ...]:
    """The arguments as `_forward_op` takes them."""
    numbers = [a.label_smoothing, a.z_loss, a.softcap or 0.0, a.logit_scale, a.temperature]
    sizes = [a.token_chunk, a.vocab_chunk, a.weight_chunk, a.stashed, a.overflow]
    flags = [a.check_inputs, a.halves, a.grad_hidden, a.grad_weight, a.grad_bias, a.stats]
    return (*a[:11], numbers, sizes, flags)


def _unpack(packed: tuple[Any, ...]) -> Arguments:
    *first, numbers, sizes, flags = packed
    label_smoothing, z_loss, softcap, logit_scale, temperature = numbers
    check_inputs, halves, *wanted = flags
    numbers = (label_smoothing, z_loss, softcap or None, logit_scale, temperature)
    return Arguments._make((*first, *numbers, check_inputs, *sizes, halves, *wanted))


@torch.library.custom_op(
    "onchip::linear_cross_entropy_triton",
    mutates_args=(),
    schema=f"(Tensor hidden, {_TENSORS}, Tensor? weight_grad_out, {_OPTIONS}) -> ({', '.join(['Tensor'] * 10)})",
)
def _forward_op(*args: Any) -> tuple[Tensor, ...]:
    """Return loss, lse, log_prob, entropy, correct, `Saved` and the link; what isn't asked for is empty."""
    from onchip.vocab.triton import walks

    a = _unpack(args)
    shape, tokens = a.target.shape, a.target.numel()
    with device_of(a.hidden), torch.autocast(a.hidden.device.type, enabled=False):
        target = a.target.reshape(-1).to(torch.int64).contiguous()
        if a.check_inputs:
            _check_values(a)
        run = setup.make_run(_head(a), tokens, a.weight_grad_out)
        hidden = a.hidden.reshape(-1, run.hidden)
        per_token = None if a.token_temperature is None else setup.flat(a.token_temperature.expand(shape))
        temperature = a.temperature if per_token is None else per_token
        saved = _saved(a)
        kept = None
        if a.any_grad and a.config.held > 0:
            kept = setup.kept_exponentials(saved, a.weight, a.dtype, a.config)
        out, vectors = walks.forward(
            run,
            hidden,
            target,
            setup.flat(a.token_weight),
            temperature,
            a.ignore_index,
            setup.rows_in(saved.hidden_memory, tokens, run.hidden, a.dtype)
            if a.any_grad
            else hidden.new_empty((min(a.token_chunk, tokens), run.hidden), dtype=a.dtype),
            kept,
            stats=a.stats,
        )
        assert out.loss is not None
        loss = out.loss.view(shape)
        if a.reduction != "none":
            loss = out.loss.sum() / torch_tiles.divisor(a.reduction, a.normalizer, vectors.number)
        if a.any_grad:
            saved = saved._replace(vectors=vectors.packed)
        blank = hidden.new_empty(0, dtype=torch.float32)
        return (
            loss,
            out.lse.view(shape),
            out.log_prob.view(shape),
            blank if out.entropy is None else out.entropy.view(shape),
            blank.to(torch.bool) if out.correct is None else out.correct.view(shape),
            *saved,
            loss.new_empty(0),
        )


@_forward_op.register_fake
def _(*args: Any) -> tuple[Tensor, ...]:
    a = _unpack(args)
    per_token = [a.target.new_empty(a.target.shape, dtype=torch.float32) for _ in range(4)]
    return (
        per_token[0] if a.reduction == "none" else a.hidden.new_empty((), dtype=torch.float32),
        per_token[1],
        per_token[2],
        per_token[3] if a.stats else a.hidden.new_empty(0, dtype=torch.float32),
        a.target.new_empty(a.target.shape if a.stats else 0, dtype=torch.bool),
        *_saved(a, fake=True),
        a.hidden.new_empty(0, dtype=torch.float32),
    )


def _saved(a: Arguments, *, fake: bool = False) -> Saved:
    return setup.make_saved(
        a.hidden,
        a.weight,
        a.dtype,
        a.config,
        a.target.numel(),
        grad_hidden=a.grad_hidden,
        any_grad=a.any_grad,
        fake=fake,
    )


def _head(a: Arguments) -> torch_tiles.Head:
    # The bias in the products' dtype first, as F.linear does under autocast.
    bias = None if a.bias is None else a.bias.to(a.dtype).float()
    weight = setup.product_weight(a.weight, a.dtype)
    return torch_tiles.Head(weight, bias, a.label_smoothing, a.z_loss, a.softcap, a.logit_scale)


def _backward_arguments(hidden_memory: Tensor, weight_memory: Tensor, args: tuple[Any, ...]) -> tuple[Arguments, bool]:
    *rest, add = args
    return _unpack((hidden_memory, *rest[:6], weight_memory if add else None, *rest[6:])), add


@torch.library.custom_op(
    "onchip::linear_cross_entropy_triton_backward",
    mutates_args=("hidden_memory", "weight_memory"),
    schema=(
        "(Tensor(a!) hidden_memory, Tensor(b!) weight_memory, Tensor overflow_memory, Tensor vectors, "
        f"Tensor hidden, Tensor grad_loss, Tensor lse, Tensor log_prob, {_TENSORS}, {_OPTIONS}, bool add) -> Tensor"
    ),
)
def _backward_op(
    hidden_memory: Tensor,
    weight_memory: Tensor,
    overflow_memory: Tensor,
    packed: Tensor,
    hidden: Tensor,
    grad_loss: Tensor,
    lse: Tensor,
    log_prob: Tensor,
    *args: Any,
) -> Tensor:
    """Turn hidden's and weight's memory into their gradients, and return that of bias; with `add`, weight's is added to
    what is there.
    """
    from onchip.vocab.triton import launches, walks

    a, add = _backward_arguments(hidden_memory, weight_memory, args)
    tokens = a.target.numel()
    with device_of(a.weight), torch.autocast(a.weight.device.type, enabled=False):
        run = setup.make_run(_head(a), tokens, a.weight_grad_out)
        vectors = launches.Vectors.unpack(packed, tokens)
        saved = Saved(hidden_memory, weight_memory, overflow_memory, packed)
        row = vectors.factor * (run.head.logit_scale / run.outer_scale)
        if a.reduction == "none":
            row = row * grad_loss.reshape(-1).float()[vectors.order]
        else:
            row = row * (grad_loss / torch_tiles.divisor(a.reduction, a.normalizer, vectors.number))
        weights = setup.flat(a.token_weight)
        if weights is not None:
            row = row * weights[vectors.order]
        row = row.masked_fill(vectors.label < 0, float("nan"))
        too_large = walks.scale_for_float16(row, vectors, a.dtype)
        row = row if too_large is None else row * too_large
        grad_bias = a.weight.new_zeros(run.vocab if a.grad_bias else 0, dtype=torch.float32)
        if tokens == 0:
            if a.grad_weight and not add:
                weight_memory.zero_()
        else:
            again = triton_spec.up(tokens, triton_spec.TOKEN_TILE) - a.stashed - a.overflow
            walks.backward(
                run,
                vectors,
                launches.Upstream(
                    lse.reshape(-1),
                    log_prob.reshape(-1),
                    row,
                    row.clone(),
                    torch.empty_like(row),
                    None if too_large is None else 1 / too_large,
                    vectors.label,
                ),
                setup.rows_in(hidden_memory, tokens, run.hidden, a.dtype),
                hidden.reshape(-1, run.hidden),
                setup.kept_exponentials(saved, a.weight, a.dtype, a.config, again_tokens=again),
                (a.vocab_chunk // triton_spec.VOCAB_TILE, a.weight_chunk // triton_spec.VOCAB_TILE),
                a.halves,
                grad_hidden=hidden_memory.view(tokens, run.hidden) if a.grad_hidden else None,
                grad_weight=weight_memory[: run.vocab] if a.grad_weight else None,
                grad_bias=grad_bias if a.grad_bias else None,
                add=add,
            )
        return grad_bias.to((a.weight if a.bias is None else a.bias).dtype)


@_backward_op.register_fake
def _(hidden_memory: Tensor, weight_memory: Tensor, *args: Any) -> Tensor:
    a, _ = _backward_arguments(hidden_memory, weight_memory, args[6:])
    like = a.weight if a.bias is None else a.bias
    return like.new_empty(a.weight.shape[0] if a.grad_bias else 0)


# ------------------------------------------------------------------------------------------------------- their parts


def _check_values(a: Arguments) -> None:
    torch_tiles.select_tokens(
        a.target,
        a.weight.shape[0],
        a.token_weight,
        a.token_temperature,
        a.normalizer,
        ignore_index=a.ignore_index,
        reduction=a.reduction,
        temperature=a.temperature,
        check_values=True,
    )


# ---------------------------------------------------------------------------------------------------------- autograd


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    a = _unpack(inputs)
    ctx.mark_non_differentiable(*output[1:-1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[5:], a.hidden, output[1], output[2], *a[1:7])
    # Not saved as a tensor: other micro-batches may add to it before this one does, and that is no mistake.
    ctx.weight_grad_out = a.weight_grad_out
    ctx.options = inputs[8:]


def _backward(ctx: Any, grad_loss: Tensor | None, *_: Any) -> tuple[Any, ...]:
    nothing = (None,) * (5 + len(ctx.options))
    if grad_loss is None:
        return (None, None, None, *nothing)
    hidden_memory, weight_memory, overflow, vectors, link, hidden, lse, log_prob, *tensors = ctx.saved_tensors
    a = _unpack((hidden_memory, *tensors, ctx.weight_grad_out, *ctx.options))
    if a.weight_grad_out is not None and not asked_for(ctx, (False, a.grad_weight))[1]:
        a = a._replace(weight_grad_out=None, grad_weight=False)
    saved = Saved(hidden_memory, weight_memory, overflow, vectors)
    hidden_memory, weight_memory = setup.memory_for_backward(
        saved, a.weight, grad_weight=a.grad_weight and a.weight_grad_out is None
    )
    if a.weight_grad_out is not None:
        weight_memory = a.weight_grad_out
    grad_bias = _backward_op(
        hidden_memory, weight_memory, overflow, vectors, hidden, grad_loss, lse, log_prob, *tensors, *pack(a)[8:],
        a.weight_grad_out is not None,
    )  # fmt: skip
    grads = differentiable_once(
        (
            hidden_memory if a.grad_hidden else None,
            weight_memory[: a.weight.shape[0]] if a.grad_weight and a.weight_grad_out is None else None,
            grad_bias if a.grad_bias else None,
        ),
        grad_loss,
        link,
    )
    return (*grads, *nothing)


_forward_op.register_autograd(_backward, setup_context=_setup_context)


def forward(*args: Any) -> tuple[Tensor, ...]:
    """Loss, lse, log_prob, entropy and correct, for the arguments that `Arguments` lists."""
    return tuple(_forward_op(*pack(Arguments(*args)))[:5])
