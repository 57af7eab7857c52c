"""The plan of a call on the Triton kernels, and the memory in which its gradients are made.

Forward leaves what gradients need in the memory that they will take (`setup.Saved`), and backward turns it into them.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from onchip.frontend.torch_inputs import DTYPES
from onchip.kernels.triton.launch import device_refusal
from onchip.vocab.memory import Problem
from onchip.vocab.torch.tiles import Head
from onchip.vocab.triton import memory as triton_spec
from onchip.vocab.triton import setup
from onchip.vocab.triton.memory import TritonConfig
from onchip.vocab.triton.setup import Saved


def refusal(device: str, index: int | None, dtype: torch.dtype) -> str | None:
    """Why the kernels can't serve a call on this device with products in `dtype`, or None."""
    reason = device_refusal(device, index, dtype)
    if reason is None and dtype not in (torch.bfloat16, torch.float16):
        reason = f"its products are of bfloat16 or float16, not of {DTYPES[dtype]}"
    return reason


def plan(problem: Problem, strategy: str, budget: int | None, *, compiled: bool) -> TritonConfig:
    """The plan of a call, the same wherever an operator asks: for its fake too, where sizes may be symbols.

    What is `compiled` without a budget has a plan that needs no numbers; a budget makes numbers of the symbols, and a
    graph for each.
    """
    if compiled and budget is None:
        return triton_spec.plan_for_symbols(problem, strategy)
    problem = replace(problem, tokens=int(problem.tokens), ids=int(problem.ids), copied=int(problem.copied))
    return triton_spec.plan(problem, strategy, None if budget is None else int(budget))


def head_of(call: Any, label_smoothing: float = 0.0, z_loss: float = 0.0) -> Head:
    """The linear layer of an op's call and what happens to its logits, as launches take them."""
    # The bias in the products' dtype first, as F.linear does under autocast.
    bias = None if call.bias is None else call.bias.to(call.dtype).float()
    softcap = None if call.options.softcap is None else float(call.options.softcap)
    weight = setup.product_weight(call.weight, call.dtype)
    return Head(weight, bias, float(label_smoothing), float(z_loss), softcap, float(call.options.logit_scale))


def saved_of(call: Any, config: TritonConfig, *, fake: bool = False) -> Saved:
    """Memory for what forward leaves for backward; not yet filled."""
    tokens, wanted = call.hidden.numel() // call.hidden.shape[-1], any(call.grads)
    return setup.make_saved(
        call.hidden, call.weight, call.dtype, config, tokens, grad_hidden=call.grads[0], any_grad=wanted, fake=fake
    )


def rows_and_buffer(call: Any, config: TritonConfig, saved: Saved) -> tuple[Tensor, Any]:
    """What forward fills in: the tokens' hidden states by position, and exponentials, None where none are kept."""
    size = call.hidden.shape[-1]
    tokens = call.hidden.numel() // size
    if not any(call.grads):
        return call.hidden.new_empty((min(config.token_chunk, tokens), size), dtype=call.dtype), None
    buffer = setup.logit_buffer(saved, call.weight, call.dtype, config) if config.held > 0 else None
    return setup.rows_in(saved.hidden_memory, tokens, size, call.dtype), buffer


def backward_memory(call: Any, config: TritonConfig, saved: Saved, wanted: Sequence[bool]) -> dict[str, Any]:
    """The same for backward, as walks take it, with where the gradients go; weight's is new where nothing was kept."""
    vocab, size = call.weight.shape
    tokens = call.hidden.numel() // size
    recomputed = triton_spec.up(tokens, triton_spec.TOKEN_TILE) - config.stashed - config.overflow
    grad_weight = None
    if wanted[1]:
        grad_weight = saved.weight_memory[:vocab]
        if saved.weight_memory.numel() == 0:
            grad_weight = torch.empty(call.weight.shape, dtype=call.weight.dtype, device=call.weight.device)
        if tokens == 0:
            grad_weight.zero_()
    gradients = {
        "grad_hidden": saved.hidden_memory.view(tokens, size) if wanted[0] else None,
        "grad_weight": grad_weight,
        "grad_bias": call.weight.new_zeros(vocab, dtype=torch.float32) if wanted[2] else None,
    }
    if tokens == 0:  # nothing walks
        return gradients
    return gradients | {
        "rows": setup.rows_in(saved.hidden_memory, tokens, size, call.dtype),
        "hidden": call.hidden.reshape(tokens, size),
        "buffer": setup.logit_buffer(saved, call.weight, call.dtype, config, recomputed=recomputed),
        "chunk_tiles": (config.vocab_chunk // triton_spec.VOCAB_TILE, config.weight_chunk // triton_spec.VOCAB_TILE),
        "halves": config.halves,
    }


def new_gradients(call: Any, saved: Saved, memory: dict[str, Any]) -> tuple[Tensor | None, ...]:
    """Those of weight and bias that are in no memory of forward's."""
    grad_bias = memory["grad_bias"]
    return (
        None,
        memory["grad_weight"] if saved.weight_memory.numel() == 0 else None,
        None if grad_bias is None else grad_bias.to(call.dtypes[2]),
    )


def all_gradients(call: Any, saved: Saved, made: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """With those that are."""
    in_memory = saved.weight_memory.numel() > 0
    return saved.hidden_memory, saved.weight_memory[: call.weight.shape[0]] if in_memory else made[1], made[2]


def clone(memory: Tensor) -> Tensor:
    """A copy for a backward that uses it up."""
    return setup.aligned(memory, memory.shape, memory.dtype).copy_(memory)
