"""The Triton kernels on one shard of a vocabulary, of logits that exist: what `vocab.parallel` does in PyTorch."""

from dataclasses import replace
from typing import Any

import torch

from onchip.vocab import parallel
from onchip.vocab.rows.launches import launch_rows
from onchip.vocab.torch.softmax import Asked, TokenStats
from onchip.vocab.torch.tiles import Tokens


def statistics(op: str, call: Any, tokens: Tokens, asked: Asked) -> TokenStats:
    """The statistics of every token over the whole vocabulary; `asked` has the class weights of all of it.

    `call` has this rank's `mine`, [..., rows] of logits, and targets of all ranks'.
    """
    shards, options = call.shards, replace(call.options, ignore_index=parallel.IGNORED)
    target = parallel.ids_for_kernels(call.target, shards, call.options.ignore_index)
    asked = asked._replace(class_weight=parallel.class_weight_of_shard(asked.class_weight, shards))

    def empty(wanted: bool = True, dtype: torch.dtype = torch.float32) -> Any:
        return torch.empty(target.numel(), dtype=dtype, device=target.device) if wanted else None

    lse, log_prob, entropy, argmax = empty(), empty(), empty(asked.entropy), empty(asked.entropy, torch.int64)
    top, uniform = empty(asked.top), empty(asked.mean_logits)
    if target.numel() > 0:
        launch_rows(
            "losses", call.mine, None, target, None, call.token_temperature, options,
            class_weight=asked.class_weight, divisor=None, loss=empty(), lse=lse, log_prob=log_prob, entropy=entropy,
            correct=empty(asked.entropy, torch.bool), argmax=argmax, top_out=top, uniform=uniform,
        )  # fmt: skip
    log_prob = log_prob.masked_fill(target.reshape(-1) < 0, 0)[:, None]
    known = TokenStats(lse, log_prob, argmax, entropy, None, None, uniform, None, top)
    return parallel.combine(op, shards, known, tokens, asked, check_values=options.check_inputs)
