"""Megatron-LM's main branch (core 0.20): GPTModel's loss by `linear_cross_entropy`.

Pass `output_processor` to the model's forward.  It is a plain function: nothing of Megatron is imported.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from onchip.torch import linear_cross_entropy

NAME = "onchip.integrations.megatron"


def output_processor(
    *,
    hidden_states: Tensor,
    output_layer: Any,
    output_weight: Tensor | None,
    labels: Tensor | None,
    loss_mask: Any,
    input_ids: Any,
    position_ids: Any,
    attention_mask: Any,
    decoder_input: Any,
    inference_context: Any,
    packed_seq_params: Any,
    runtime_gather_output: Any,
    context: Mapping[str, Any] | None,
    compute_language_model_loss: Any,
    scale_logits: Any,
    config: Any,
) -> Tensor:
    """The losses of GPTModel's tokens, without storing the logits.

    `model(..., labels=labels, output_processor=output_processor)` returns the same as without output_processor, except
    for rounding: the tokens' losses, which your loss function masks and averages.  A label of -100 has loss 0 here.

    Args:
        hidden_states: [S, B, H], after the model's last norm.
        output_layer: the model's ColumnParallelLinear.
        output_weight: [V, H] of the embedding, where it is shared; None: the output layer's own.
        labels: [B, S].
        config: the model's TransformerConfig.
        context: `output_processor_context` of the model's forward: options of `linear_cross_entropy`, such as
            label_smoothing, softcap, scratch_bytes, backend and precision, or None.
        loss_mask: unused, like all other arguments, which GPTModel passes too.

    Returns:
        [B, S] float32.

    Raises:
        RuntimeError: the model uses tensor or sequence parallelism, inference, an output layer of another class or with
            bias, `defer_embedding_wgrad_compute`, or `gradient_accumulation_fusion` with multi-token prediction.
        ValueError: there are no labels.
        TypeError: there is no such option, or GPTModel passes other arguments than these, as another version does.

    Memory: that of `linear_cross_entropy`.

    Example::

        from onchip.integrations.megatron import output_processor

        losses = model(tokens, position_ids, attention_mask, labels=labels, output_processor=output_processor)

    Source: Megatron-LM, `megatron/core/models/gpt/gpt_model.py`, of 2026-08-22.
    """
    if "ColumnParallelLinear" not in [cls.__name__ for cls in type(output_layer).__mro__]:
        _refuse(f"the output layer is a {type(output_layer).__name__}", "leave adapters off it")
    if config.tensor_model_parallel_size > 1:
        _refuse("tensor parallelism shards the vocabulary", "set tensor_model_parallel_size to 1")
    if config.sequence_parallel:
        _refuse("sequence parallelism shards the tokens", "set sequence_parallel to False")
    if inference_context is not None:
        _refuse("this is inference", "pass output_processor only in training")
    if config.defer_embedding_wgrad_compute:
        _refuse("the head's gradient is deferred", "set defer_embedding_wgrad_compute to False")
    if config.mtp_num_layers and config.gradient_accumulation_fusion:
        # Megatron's fused gradient of the head, in multi-token prediction, makes it drop the one that autograd adds.
        _refuse("multi-token prediction adds to the head's main_grad", "set gradient_accumulation_fusion to False")
    if getattr(output_layer, "bias", None) is not None:
        _refuse("the output layer has a bias", "build it without")
    if labels is None:
        raise ValueError(f"{NAME}: there are no labels; pass output_processor where labels are passed")
    scale = config.mup_output_mult if config.use_mup else 1.0
    weight = output_layer.weight if output_weight is None else output_weight
    target = labels.transpose(0, 1)
    losses: Tensor = linear_cross_entropy(
        hidden_states, weight, target, reduction="none", logit_scale=scale, **(context or {})
    )
    return losses.transpose(0, 1).contiguous()


def _refuse(what: str, remedy: str) -> None:
    raise RuntimeError(f"{NAME}: {what}, which this output_processor doesn't support; {remedy}")
