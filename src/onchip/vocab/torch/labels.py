"""The labels of a cross-entropy, as fields of an operator's call.

ids: [...] or [..., K].  labels: the probabilities of these ids, [..., K], or of every entry, [..., V]; None: each token
has one id, with probability 1.  kind: what the labels are: "ids" if there are none, "probs" or "log_probs" of K ids, or
"dense", probabilities of every entry, with which the ids [...] mean nothing.  The functions take any call with these
fields and with `token_weight`, `normalizer`, `class_weight`, `token_temperature`, `options`, the `dtype` of logits or
products, T as `number`, and V as `vocab`.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from onchip.frontend.torch_inputs import accumulator
from onchip.frontend.torch_labels import check_log_probs, log_probs_or_nan
from onchip.vocab.torch import tiles
from onchip.vocab.torch.tiles import Tokens


def several(call: Any) -> int:
    """K, the ids per token."""
    return call.ids.shape[-1] if call.kind in ("probs", "log_probs") else 1


def leading(call: Any) -> torch.Size:
    """The dimensions of all tokens."""
    shape: torch.Size = call.ids.shape
    return shape[:-1] if call.kind in ("probs", "log_probs") else shape


def tokens(op: str, call: Any, *, check_values: bool, compact: bool = True) -> Tokens:
    """Which tokens count, and what they weigh; with soft labels all count.

    Values are always checked on the CPU, unless kernels take them, without `compact`.
    """
    options, of_ids = call.options, call.kind == "ids"
    first = () if not options.shift else (1,) if of_ids else (1, 0)
    if call.kind == "log_probs" and (check_values or (compact and call.labels.device.type == "cpu")):
        check_log_probs(op, "target", call.labels, first=first)
    chosen = tiles.select(
        op, "target" if of_ids else "target.indices", call.ids, call.number, call.vocab, call.token_temperature,
        ignore_index=options.ignore_index if of_ids else None, temperature=options.temperature, dtype=call.dtype,
        check_values=check_values, compact=compact, first=first,
    )  # fmt: skip
    made = tiles.weighed(op, chosen, call.token_weight, options.reduction, call.normalizer, check_values=check_values)
    each, q = call.class_weight, None
    if of_ids and each is not None:
        q = each[made.label][:, None]
    elif not of_ids and call.kind != "dense":
        q = probs(call)
    return replace(made, q=q, class_weight=each)


def probs(call: Any, *, weighed: bool = True) -> Tensor:
    """[T, K]: the probabilities of K ids in the dtype of sums; if `weighed`, times the weights of their classes."""
    each, shape = call.class_weight, (call.number, several(call) if call.number else 1)  # as `tiles.select` has it
    values, total = call.labels.reshape(shape), accumulator(call.dtype)
    q: Tensor = log_probs_or_nan(values).to(total).exp() if call.kind == "log_probs" else values.to(total)
    if each is not None and weighed:
        q = q * each[call.ids.reshape(shape).to(torch.int64).clamp(0, len(each) - 1)]
    return q
