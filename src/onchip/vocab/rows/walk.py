"""Statistics of each token from existing logits, and the logits' gradient, by PyTorch's operations or Triton's kernels.

Calls are `RowsCall`s, on a whole vocabulary or a rank's shard of it.  Kernels take a shard's own columns, with ids as
it numbers them; `vocab.torch.parallel` combines what the ranks know about their shards.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from onchip.frontend import torch_prepared as stated
from onchip.kernels.triton.launch import device_of
from onchip.vocab.rows import torch as torch_rows
from onchip.vocab.rows.call import RowsCall
from onchip.vocab.rows.launches import launch_ids, launch_rows
from onchip.vocab.torch import parallel, walk
from onchip.vocab.torch.softmax import Asked, TokenGradient, TokenStats
from onchip.vocab.torch.tiles import Ids


def statistics(op: str, call: RowsCall, asked: Asked, *, uniform: bool = False) -> tuple[TokenStats, Any]:
    """The statistics of every token over the whole vocabulary, whose class weights `asked` has; and the tokens, or None
    if kernels took all T and wrote what ignored ones have.

    `uniform`: the mean of lse - z is wanted instead of the logits' mean.
    """
    options, shards = call.options, call.shards
    refuse_to_state(call)
    if call.runs_kernels and options.scratch_bytes is not None:
        call.config()
    if call.runs_kernels and not shards.there:
        if options.check_inputs:
            call.tokens(check_values=True)  # for its checks alone
        ids = _given_ids(call)
        return statistics_of_ids(call.logits, ids, call.token_temperature, options, asked, uniform=uniform), None
    tokens = call.tokens(check_values=options.check_inputs)
    if call.runs_kernels:
        return _of_shard(op, call, tokens, asked, uniform=uniform), tokens
    rows = torch_rows.Rows(call.mine)
    return walk.statistics_of(op, rows, options, shards, tokens, call.config(tokens), asked), tokens


def refuse_to_state(call: RowsCall) -> None:
    """Let no call of this kind be prepared, unless kernels run it on a whole vocabulary."""
    if call.shards.there or not call.kernels:
        stated.refuse("neither PyTorch's walk over rows nor what ranks exchange is stated")


def _of_shard(op: str, call: RowsCall, tokens: Ids, asked: Asked, *, uniform: bool) -> TokenStats:
    """The statistics, by kernels on this rank's columns."""
    ids, options = _ids_of_shard(call)
    asked = asked._replace(class_weight=parallel.class_weight_of_shard(asked.class_weight, call.shards))
    given = call.mine, ids, call.token_temperature, options, asked
    of_ids = partial(statistics_of_ids, uniform=uniform, of_shard=True)
    made = (statistics_of_targets if call.of_targets else of_ids)(*given)
    if made.uniform is None and made.mean_logits is not None:
        made = made._replace(uniform=made.lse - made.mean_logits)
    return parallel.combine(op, call.shards, made, tokens, asked, check_values=options.check_inputs)


def _given_ids(call: RowsCall) -> Tensor:
    """Ids of the whole vocabulary as kernels take them: those that are the options' ignore_index are ignored.  If none
    is to be ignored, ids that equal ignore_index become -1, which is out of range.
    """
    return call.ids if call.kind == "ids" else stated.call(_none_ignored, call.ids, call.options.ignore_index)


def _none_ignored(ids: Tensor, ignore_index: int) -> Tensor:
    return torch.where(ids == ignore_index, -1, ids.to(torch.int64))


def _ids_of_shard(call: RowsCall) -> tuple[Tensor, Any]:
    """Ids as this shard's kernels take them, and the options that go with them."""
    ids = parallel.ids_for_kernels(_given_ids(call), call.shards, call.options.ignore_index)
    return ids, replace(call.options, ignore_index=parallel.IGNORED)


def statistics_of_ids(
    logits: Tensor,  # [..., V]
    ids: Tensor,  # [...] or [..., K]; of a shard as `parallel.ids_for_kernels` makes them
    token_temperature: Tensor | None,  # [...] or []
    options: Any,
    asked: Asked,
    *,
    uniform: bool = False,
    of_shard: bool = False,
    into: Mapping[str, Tensor | None] | None = None,
) -> TokenStats:
    """The statistics of all T tokens over these logits, in one launch; `of_shard`: also what ranks exchange.

    `into` has memory for those of lse, log_prob, entropy and top1 that are asked for.
    """
    tokens = logits.shape[:-1].numel()

    def empty(wanted: bool = True, dtype: torch.dtype = torch.float32) -> Any:
        return stated.empty(tokens, dtype, logits.device) if wanted else None

    made: dict[str, Any] = (
        {**into}
        if into
        else {
            "log_prob": stated.empty(ids.shape, torch.float32, logits.device),
            "entropy": empty(asked.entropy),
            "lse": empty(),
            "top1": empty(asked.top, torch.int64),
        }
    )
    made |= {
        "mean_logits": empty(asked.mean_logits and not uniform),
        "log_sum_sq_probs": empty(asked.sum_sq),
        "uniform": empty(asked.mean_logits and uniform),
        "mean": empty(asked.entropy),
        "top_out": empty(asked.top and of_shard),
        "low_out": empty(of_shard),
    }
    if tokens > 0:
        launch_ids("log_probs", logits, None, ids, token_temperature, options, asked.class_weight, **made)
    return TokenStats(
        made["lse"],
        made["log_prob"].view(tokens, -1 if tokens else 1),
        made["top1"],
        made["entropy"],
        made["mean"],
        made["mean_logits"],
        made["uniform"],
        made["log_sum_sq_probs"],
        made["top_out"],
        made["low_out"],
    )


def statistics_of_targets(
    logits: Tensor,  # [..., rows]
    target: Tensor,  # [...] as `parallel.ids_for_kernels` makes it
    token_temperature: Tensor | None,  # [...] or []
    options: Any,  # whose ignore_index is `parallel.IGNORED`
    asked: Asked,  # with the shard's class weights
    target_logit: Tensor | None = None,  # [T] float32: what is taken for the targets' logits
) -> TokenStats:
    """The same for one id each on a shard, by cross_entropy's kernel."""

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


def write_gradient(call: RowsCall, tokens: Ids | None, gradient: TokenGradient, out: Tensor) -> None:
    """Write the gradient of the logits to `out`, which may be the logits themselves, except for columns that are
    padding.  `gradient` is for the whole vocabulary and the computed tokens, or for all T if kernels run.
    """
    out = without_padding(call, out)
    if out.numel() == 0:
        return
    refuse_to_state(call)
    gradient = parallel.gradient_of_shard(gradient, call.shards)
    if not call.kernels:
        assert tokens is not None
        here = parallel.of_shard(tokens, call.shards)
        torch_rows.write_gradient(call.mine, call.options, here, call.config(tokens).token_chunk, gradient, out)
        return
    ids, options = _ids_of_shard(call) if call.shards.there else (_given_ids(call), call.options)
    given = {name: x for name, x in vars(gradient).items() if name != "labels"}  # which kernels for ids don't have
    more = {name: None if x is None else stated.converted(x, Tensor.contiguous) for name, x in given.items()}
    into = out if out.is_contiguous() else stated.empty_like(out)
    with device_of(out):
        for kernel in ("log_prob_gradients", "write_ids"):
            launch_ids(kernel, call.mine, into, ids, call.token_temperature, options, **more)
    if into is not out:
        stated.call(Tensor.copy_, out, into)


def without_padding(call: RowsCall, x: Tensor) -> Tensor:
    """[..., rows] of [..., V]: this rank's columns without padding."""
    return x[..., : call.shards.rows] if call.shards.there else x


def clear_padding(call: RowsCall, out: Tensor) -> None:
    """Write zeros to the columns that are padding."""
    if call.shards.there:
        stated.zero(out[..., call.shards.rows :])
