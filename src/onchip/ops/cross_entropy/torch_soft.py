"""cross_entropy for PyTorch with soft labels: checks, and the choice of an operator."""

from typing import Any

from torch import Tensor

from onchip.frontend import topk
from onchip.frontend.options import check_logits, scratch_in_bytes, shapes_of
from onchip.frontend.topk import TopK
from onchip.frontend.torch_inputs import (
    check_class_weight,
    check_normalizer,
    choose_torch_backend,
    temperature_tensor,
)
from onchip.frontend.torch_labels import check_label_tensors
from onchip.frontend.torch_parallel import WHOLE, Sharding, Shards, localized
from onchip.frontend.torch_register import needed
from onchip.frontend.torch_types import WithStats
from onchip.ops.cross_entropy import plain_soft, soft_shards, triton_dense, triton_soft
from onchip.ops.cross_entropy.soft_call import SoftCall
from onchip.ops.cross_entropy.spec import OP, Options
from onchip.vocab.rows import launches
from onchip.vocab.torch.labels import parts_of
from onchip.vocab.torch.loss import checked_class_weight, returned


def run(
    logits: Tensor,
    target: Any,
    *,
    normalizer: float | Tensor | None,
    token_weight: Tensor | None,
    class_weight: Tensor | None,
    temperature: float | Tensor,
    scratch_bytes: int | float | str | None,
    backend: str,
    sharding: Sharding,
    **more: Any,
) -> Tensor | WithStats:
    """The loss, or with return_stats the loss and its statistics; arguments as of `cross_entropy`, `more` being the
    other fields of its options."""
    shards = None
    given = {"logits": logits} if isinstance(target, TopK) else {"logits": logits, "target": target}
    if sharding.there(given):
        parts, shards = localized(OP, sharding, given, {}, last=("logits", "target"))
        logits, target = parts["logits"], parts.get("target", target)
    per_token_temperature = temperature_tensor(OP, temperature)
    tensors = check_label_tensors(OP, target, {"logits": logits}, token_weight, class_weight, per_token_temperature)
    shapes = shapes_of(tensors)
    if shards is not None:
        shapes = shards.whole(shapes, ("logits", "target"), dim=-1)
    check_logits(OP, shapes)
    topk.check_label_shapes(OP, "target", shapes, "logits", shapes["logits"][-1])
    check_class_weight(OP, tensors, "logits")
    options = Options(
        **more,
        temperature=1.0 if isinstance(temperature, Tensor) else temperature,
        scratch_bytes=scratch_in_bytes(OP, scratch_bytes, logits.numel()),
    )
    topk.refuse_options(OP, options)
    topk.refuse_shift(OP, options.shift, "target")
    if options.inplace_backward:
        raise ValueError(f"{OP}: inplace_backward=True takes targets that are ids; pass inplace_backward=False")
    normalizer = check_normalizer(OP, normalizer, options.reduction, "logits", logits)
    chosen = choose_torch_backend(OP, backend, logits.device, _refusal(logits, target, shards))
    ids, labels, kind = parts_of(target, logits.shape[:-1])
    assert labels is not None
    call = SoftCall(
        logits=logits,
        ids=ids,
        labels=labels,
        token_weight=token_weight,
        class_weight=None if class_weight is None else checked_class_weight(OP, options, class_weight, logits.dtype),
        token_temperature=per_token_temperature,
        normalizer=normalizer,
        options=options,
        kind=kind,
        grads=needed(logits),
        shards=shards or WHOLE,
    )
    if shards is not None:
        out: Any = soft_shards.LOSS(soft_shards.ShardedCall(call, shards)).out
    elif chosen == "triton":
        out = (triton_dense if call.dense else triton_soft).LOSS(call).out
    else:
        out = plain_soft.LOSS(call).out
    return returned(out, options, kind)


def _refusal(logits: Tensor, target: Any, shards: Shards | None) -> str | None:
    """Why the Triton kernels can't serve a call."""
    if shards is not None:
        return "its soft labels take no sharded vocabulary; pass backend='torch'"
    reason = launches.refusal(logits)
    return reason if isinstance(target, TopK) else reason or launches.layout_refusal("target", target)
