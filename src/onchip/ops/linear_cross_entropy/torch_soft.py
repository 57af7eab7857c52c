"""linear_cross_entropy for PyTorch with soft labels: checks, and the choice of an operator."""

from typing import Any

import torch
from torch import Tensor

from onchip.fp8.torch_operands import QuantizedWeight
from onchip.frontend import topk
from onchip.frontend.options import check_head, check_shift, scratch_in_bytes, shapes_of
from onchip.frontend.topk import TopK
from onchip.frontend.torch_inputs import (
    check_class_weight,
    check_normalizer,
    check_weight_grad_out,
    choose_torch_backend,
    copied_rows,
    copied_weight,
    product_dtype,
    sizes_are_symbols,
    temperature_tensor,
)
from onchip.frontend.torch_labels import check_label_tensors, parts_of
from onchip.frontend.torch_parallel import WHOLE, Sharding, Shards, localized
from onchip.frontend.torch_register import needed
from onchip.frontend.torch_types import WithStats
from onchip.ops.linear_cross_entropy import fp8_op, plain_soft, soft_shards, triton_dense, triton_soft
from onchip.ops.linear_cross_entropy.soft_call import SoftCall
from onchip.ops.linear_cross_entropy.spec import OP, Options
from onchip.vocab import memory
from onchip.vocab.parallel import sent_bytes
from onchip.vocab.rows.launches import layout_refusal
from onchip.vocab.soft_shards import SENT
from onchip.vocab.torch import soft
from onchip.vocab.torch.loss import checked_class_weight
from onchip.vocab.triton import setup


def run(
    hidden: Tensor,
    weight: Tensor | QuantizedWeight,
    target: Any,
    bias: Tensor | None,
    *,
    normalizer: float | Tensor | None,
    token_weight: Tensor | None,
    class_weight: Tensor | None,
    temperature: float | Tensor,
    scratch_bytes: int | float | str | None,
    backend: str,
    weight_grad_out: Tensor | None,
    sharding: Sharding,
    **more: Any,
) -> Tensor | WithStats:
    """The loss, or with return_stats the loss and its statistics; arguments as of `linear_cross_entropy`, `more` being
    the other fields of its options."""
    precision = more["precision"]
    matrix = weight.weight if isinstance(weight, QuantizedWeight) else weight
    if precision == "full" and more["strategy"] == "stash":
        raise ValueError(f"{OP}: soft labels are computed by strategy 'recompute'; got 'stash'; pass 'auto'")
    given: dict[str, Any] = {"hidden": hidden, "weight": matrix, "bias": bias}
    shards = None
    if sharding.there(given if isinstance(target, TopK) else given | {"target": target}):
        if precision == "fp8":
            raise ValueError(
                f"{OP}: soft labels with precision='fp8' take no sharded vocabulary; pass precision='full', or targets "
                "that are ids"
            )
        shards, given, target, weight_grad_out = _localized(given, target, weight_grad_out, sharding)
        hidden, matrix, bias = (given[name] for name in ("hidden", "weight", "bias"))
    per_token_temperature = temperature_tensor(OP, temperature)
    tensors = check_label_tensors(OP, target, given, token_weight, class_weight, per_token_temperature)
    dense, shapes = "target" in tensors, shapes_of(tensors)
    if shards is not None:
        shapes = shards.whole(shapes, ("weight", "bias"), ("hidden",))
        shapes = shards.whole(shapes, ("target",), dim=-1)
    vocab, leading = check_head(OP, shapes), torch.Size(shapes["hidden"][:-1])
    topk.check_label_shapes(OP, "target", shapes, "hidden", vocab)
    check_class_weight(OP, tensors, "weight")
    options = Options(
        **more,
        temperature=1.0 if isinstance(temperature, Tensor) else temperature,
        scratch_bytes=scratch_in_bytes(OP, scratch_bytes, leading.numel() * matrix.shape[0]),
    )
    topk.refuse_options(OP, options)
    check_shift(OP, options.shift, leading, "hidden of shape [..., S, H]")
    dtype = product_dtype(OP, tensors)
    fp8_op.check_dtypes(weight, precision, dtype)
    normalizer = check_normalizer(OP, normalizer, options.reduction, "hidden", hidden)
    check_weight_grad_out(OP, weight_grad_out, matrix)
    copied, length = 0, leading[-1] if leading else 0
    if options.shift:
        if shards is not None and shards.sequence == len(leading) - 1:
            raise ValueError(
                f"{OP}: shift=True of soft labels leaves out each sequence's last hidden state, which another rank may "
                "have; pass hidden that isn't sharded within sequences, or labels of the next positions with a "
                "token_weight of 0 for the last"
            )
        hidden, target = hidden[..., :-1, :], _after_the_first(target)
        leading = torch.Size((*leading[:-1], max(0, length - 1)))
        token_weight = None if token_weight is None else token_weight[..., 1:]
        if per_token_temperature is not None and per_token_temperature.ndim > 0:
            per_token_temperature = per_token_temperature[..., :-1]
        # Hidden's gradient is made of these positions first.
        copied = hidden.numel() * hidden.element_size() if hidden.requires_grad else 0
    chosen = precision
    if precision == "full":
        chosen = choose_torch_backend(OP, backend, hidden.device, _refusal(hidden, target, dtype, options, shards))
    ids, labels, kind = parts_of(target, leading)
    copied += copied_rows(hidden) + (copied_weight(matrix, dtype) if chosen == "triton" else 0)
    if shards is not None:
        copied += sent_bytes(leading.numel(), SENT if dense else labels.shape[-1], shards, hidden)
    call = SoftCall(
        hidden=hidden,
        weight=matrix,
        bias=bias,
        ids=ids,
        token_temperature=per_token_temperature,
        dtype=dtype,
        options=options,
        grads=needed(hidden, matrix, bias),
        copied=copied,
        compiled=sizes_are_symbols(hidden, matrix),
        shards=shards or WHOLE,
        kernels=shards is not None and chosen == "triton",
        token_weight=token_weight,
        normalizer=normalizer,
        class_weight=None if class_weight is None else checked_class_weight(OP, options, class_weight, dtype),
        weight_grad_out=weight_grad_out,
        labels=labels,
        kind=kind,
        dense=dense,
    )
    out: Any
    if chosen == "fp8":
        out = fp8_op.SOFT(fp8_op.arguments_of(call, weight, backend)).out
    elif shards is not None:
        out = soft_shards.run(call)
    elif chosen == "triton":
        out = triton_dense.LOSS(call) if dense else triton_soft.LOSS(call).out
    else:
        strategy = "stash" if dense else "recompute" if any(call.grads) else "forward"
        memory.PLANNER.require(call.problem(compacted=False), strategy, call.budget)
        out = plain_soft.OPERATORS[dense](call).out
    # The last position of a sequence costs nothing.
    stats = None
    if options.return_stats:
        stats = fp8_op.soft_stats(out, call) if chosen == "fp8" else out.stats.of(out.lse)
    return soft.shaped(out.loss, stats, leading, length if options.shift else None)


def _localized(
    layer: dict[str, Any], target: Any, weight_grad_out: Tensor | None, sharding: Sharding
) -> tuple[Shards, dict[str, Any], Any, Tensor | None]:
    """Which part of the vocabulary this rank has, and its layer, labels and main gradient."""
    rows = {"weight": layer["weight"], "bias": layer["bias"], "weight_grad_out": weight_grad_out}
    if isinstance(target, TopK):
        of_tokens = target.indices
    else:
        of_tokens, rows = target, rows | {"target": target}
    parts, shards = localized(OP, sharding, rows, {"hidden": layer["hidden"]}, tokens=of_tokens, last=("target",))
    assert shards is not None
    mine = {name: parts[name] for name in layer}
    return shards, mine, parts.get("target", target), parts["weight_grad_out"]


def _after_the_first(target: Any) -> Any:
    """Soft labels without those of each sequence's first position, which nothing predicts; a view."""
    if isinstance(target, TopK):
        return target._replace(indices=target.indices[..., 1:, :], values=target.values[..., 1:, :])
    return target[..., 1:, :]


def _refusal(hidden: Tensor, target: Any, dtype: torch.dtype, options: Options, shards: Shards | None) -> str | None:
    """Why the Triton kernels can't serve a call."""
    reason = layout_refusal("target", target) if isinstance(target, Tensor) else None
    if shards is not None and isinstance(target, Tensor):
        reason = "its labels of every entry take no sharded vocabulary; pass backend='torch', or K ids"
    elif shards is not None and options.label_smoothing > 0:
        reason = (
            "its labels of K ids take no label_smoothing with a sharded vocabulary; pass backend='torch', or smooth "
            "the labels"
        )
    return reason or setup.refusal(hidden.device.type, hidden.device.index, dtype)
