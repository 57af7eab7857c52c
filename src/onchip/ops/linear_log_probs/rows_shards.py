"""log_probs for PyTorch of logits whose vocabulary is sharded over ranks (`vocab.parallel`): both backends."""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.frontend.torch_parallel import Shards
from onchip.frontend.torch_register import Made, Operator, Wanted
from onchip.kernels.triton.launch import device_of
from onchip.ops.linear_log_probs.rows_call import RowsCall
from onchip.ops.linear_log_probs.spec import LOGITS_OP, LogitsOptions
from onchip.ops.linear_log_probs.torch_op import TorchOutputs, asked_by, gradient_by_outputs
from onchip.vocab import parallel
from onchip.vocab.agreement import require_agreement
from onchip.vocab.chunks import Config
from onchip.vocab.rows import memory as row_memory
from onchip.vocab.rows import shards as row_shards
from onchip.vocab.rows import torch as torch_rows
from onchip.vocab.torch import walk
from onchip.vocab.torch.tiles import Ids


class ShardedCall(NamedTuple):
    """The arguments of the operator, this rank's."""

    rows: RowsCall
    shards: Shards
    kernels: bool  # whether ranks run kernels, which take ignored tokens too

    @property
    def options(self) -> LogitsOptions:
        return self.rows.options

    @property
    def grads(self) -> tuple[bool, ...]:
        return self.rows.grads

    @property
    def operand(self) -> torch.dtype:
        return self.rows.operand

    @property
    def runs_kernels(self) -> bool:
        """Whether this rank does: an empty shard has nothing for them, and says the same to other ranks without."""
        return self.kernels and self.shards.rows > 0

    @property
    def mine(self) -> Tensor:
        """[..., rows]: this rank's logits without padding."""
        return self.rows.logits[..., : self.shards.rows]

    def tokens(self, *, check_values: bool) -> Ids:
        """Those that count, with ids of the whole vocabulary."""
        return self.rows.tokens(check_values=check_values, compact=not self.kernels, vocab=self.shards.vocab)


class Kept(NamedTuple):
    """What backward is given."""

    call: ShardedCall
    log_prob: Tensor
    entropy: Tensor | None
    lse: Tensor
    mean: Tensor | None


def _chunk(call: ShardedCall, tokens: Ids) -> int:
    """The rows of a chunk, the same in forward and backward: a budget that is too small is refused in forward."""
    if not call.shards.rows:
        return 1
    logits = call.mine
    gathered = torch_rows.flatten(logits) is None or (tokens.index is not None and logits.dtype != tokens.dtype)
    problem = call.rows._replace(logits=logits).problem(gathered=gathered, kernels=call.kernels)
    sent = parallel.sent_bytes(tokens.total, problem.ids, call.shards, logits)
    return row_memory.plan(replace(problem, sent=sent), "", call.options.scratch_bytes)


def _forward(call: ShardedCall) -> TorchOutputs:
    rows, shards, options = call.rows, call.shards, call.options
    sizes = rows.logits.shape[:-1], rows.logits.dtype
    require_agreement(LOGITS_OP, call, sizes, rows.ids, rows.token_temperature, split={"logits": rows.logits})
    tokens, asked = call.tokens(check_values=options.check_inputs), asked_by(options)
    config = Config("forward", _chunk(call, tokens), max(1, shards.rows))
    if call.runs_kernels:
        stats = row_shards.statistics_of_ids(LOGITS_OP, call, rows.ids, rows.token_temperature, tokens, asked)
    else:
        stats = walk.statistics_of(LOGITS_OP, torch_rows.Rows(call.mine), options, shards, tokens, config, asked)
    return TorchOutputs.of(stats, tokens, rows.logits.shape[:-1], rows.ids)


def _fake(call: ShardedCall) -> TorchOutputs:
    return TorchOutputs.empty(call.options, call.rows.logits, call.rows.ids)


def _save(call: ShardedCall, made: TorchOutputs) -> Kept:
    return Kept(call, made.out.log_prob, made.out.entropy, made.out.lse, made.mean)


def _gradients(kept: Kept, upstream: Made, wanted: Wanted) -> Made:
    call, rows = kept.call, kept.call.rows
    tokens = call.tokens(check_values=False)
    gradient, _ = gradient_by_outputs(kept, upstream, tokens)
    mine = call.mine
    out = torch.empty(mine.shape, dtype=mine.dtype, device=mine.device)
    if call.runs_kernels and mine.numel() > 0:
        with device_of(out):
            row_shards.write_gradient(call, rows.ids, rows.token_temperature, gradient, out)
    elif mine.numel() > 0:
        here = parallel.of_shard(tokens, call.shards)
        torch_rows.write_gradient(mine, call.options, here, _chunk(call, tokens), gradient, out)
    padding = rows.logits.shape[-1] - call.shards.rows
    return [torch.nn.functional.pad(out, (0, padding)) if padding else out]


LOG_PROBS: Operator[Any, Any] = Operator(
    "log_probs_of_shards",
    op=LOGITS_OP,
    forward=_forward,
    fake=_fake,
    save=_save,
    gradients=_gradients,
    fake_gradients=lambda kept, upstream, wanted: [
        torch.empty_like(kept.call.rows.logits, memory_format=torch.contiguous_format)
    ],
    differentiable=("logits",),
    differentiable_outputs=3,
)
