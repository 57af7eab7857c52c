"""The Triton kernels on one shard of a vocabulary, of logits that exist: what `vocab.parallel` does in PyTorch."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from onchip.vocab import parallel
from onchip.vocab.rows.launches import launch_ids, launch_rows
from onchip.vocab.torch.softmax import Asked, TokenGradient, TokenStats
from onchip.vocab.torch.tiles import Ids, Tokens


def statistics(op: str, call: Any, tokens: Tokens, asked: Asked) -> TokenStats:
    """The statistics of every token over the whole vocabulary; `asked` has the class weights of all of it.

    `call` has this rank's `mine`, [..., rows] of logits, and targets of all ranks'.
    """
    shards, options = call.shards, replace(call.options, ignore_index=parallel.IGNORED)
    target = parallel.ids_for_kernels(call.target, shards, call.options.ignore_index)
    asked = asked._replace(class_weight=parallel.class_weight_of_shard(asked.class_weight, shards))
    known = statistics_of_shard(call.mine, target, call.token_temperature, options, asked)
    return parallel.combine(op, shards, known, tokens, asked, check_values=options.check_inputs)


def statistics_of_shard(
    logits: Tensor,  # [..., rows]
    target: Tensor,  # [...] as `parallel.ids_for_kernels` makes it
    token_temperature: Tensor | None,  # [...] or []
    options: Any,  # whose ignore_index is `parallel.IGNORED`
    asked: Asked,  # with the shard's class weights
    target_logit: Tensor | None = None,  # [T] float32: what is taken for the targets' logits
) -> TokenStats:
    """The statistics of every token over this shard alone."""

    def empty(wanted: bool = True, dtype: torch.dtype = torch.float32) -> Any:
        return torch.empty(target.numel(), dtype=dtype, device=target.device) if wanted else None

    lse, log_prob, entropy, argmax = empty(), empty(), empty(asked.entropy), empty(asked.entropy, torch.int64)
    low = empty()
    top, uniform = empty(asked.top), empty(asked.mean_logits)
    if target.numel() > 0:
        launch_rows(
            "losses", logits, None, target, None, token_temperature, options,
            class_weight=asked.class_weight, divisor=None, loss=empty(), lse=lse, log_prob=log_prob, entropy=entropy,
            correct=empty(asked.entropy, torch.bool), argmax=argmax, top_out=top, low_out=low, uniform=uniform,
            target_logit=target_logit,
        )  # fmt: skip
    log_prob = log_prob.masked_fill(target.reshape(-1) < 0, 0)[:, None]
    return TokenStats(lse, log_prob, argmax, entropy, None, None, uniform, None, top, low)


def statistics_of_ids(
    op: str, call: Any, ids: Tensor, token_temperature: Tensor | None, tokens: Ids, asked: Asked
) -> TokenStats:
    """The same for several ids of each token."""
    shards, logits = call.shards, call.mine
    here = parallel.ids_for_kernels(ids, shards, call.options.ignore_index)
    log_prob = torch.empty(tokens.ids.shape, dtype=torch.float32, device=logits.device)

    def empty(wanted: bool = True, dtype: torch.dtype = torch.float32) -> Any:
        return torch.empty(tokens.number, dtype=dtype, device=logits.device) if wanted else None

    made = {
        "lse": empty(),
        "entropy": empty(asked.entropy),
        "mean": empty(asked.entropy),
        "top1": empty(asked.top, torch.int64),
        "top_out": empty(asked.top),
        "low_out": empty(),
        "mean_logits": empty(asked.mean_logits),
        "log_sum_sq_probs": empty(asked.sum_sq),
    }
    if tokens.number > 0:
        options = replace(call.options, ignore_index=parallel.IGNORED)
        launch_ids("log_probs", logits, None, here, token_temperature, options, log_prob=log_prob, **made)
    log_prob = log_prob.masked_fill(here.reshape(log_prob.shape) < 0, 0)
    lse, plain = made["lse"], made["mean_logits"]
    uniform = None if plain is None else lse - plain
    squares = made["log_sum_sq_probs"]
    known = TokenStats(
        lse, log_prob, made["top1"], made["entropy"], None, plain, uniform, squares, made["top_out"], made["low_out"]
    )
    return parallel.combine(op, shards, known, tokens, asked, check_values=call.options.check_inputs)


def write_gradient(
    call: Any, ids: Tensor, token_temperature: Tensor | None, gradient: TokenGradient, out: Tensor
) -> None:
    """Write the gradient of this rank's logits to `out`, [..., rows], contiguous; `gradient` is of all T tokens."""
    here = parallel.ids_for_kernels(ids, call.shards, call.options.ignore_index)
    options = replace(call.options, ignore_index=parallel.IGNORED)
    more = {name: None if x is None else x.contiguous() for name, x in vars(gradient).items()}
    for kernel in ("log_prob_gradients", "write_ids"):
        launch_ids(kernel, call.mine, out, here, token_temperature, options, **more)
