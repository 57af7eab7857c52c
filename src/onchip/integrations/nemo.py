"""NeMo Automodel 0.7: its loss from hidden states, by `linear_cross_entropy`.

In a recipe's YAML::

    loss_fn:
      _target_: onchip.integrations.nemo.OnchipCrossEntropy
"""

# ruff: noqa: E402
from typing import Any

import torch
from torch import Tensor

from onchip.integrations.head_options import HeadOptions
from onchip.integrations.versions import require
from onchip.torch import LinearCrossEntropyLoss, linear_cross_entropy

require("nemo", "nemo-automodel", "0.7")

from nemo_automodel.components.loss.chunked_ce import ChunkedCrossEntropy

NAME = "onchip.integrations.nemo"

# Settings by which a model scales its logits.  Automodel passes them to none of its losses.
SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")


class OnchipCrossEntropy(ChunkedCrossEntropy):  # type: ignore[misc]
    """Cross-entropy of the head's logits from hidden states, by `linear_cross_entropy`, which stores no logits.

    It is a subclass of Automodel's ChunkedCrossEntropy, so that recipes check the head, and gather and cast FSDP2's
    weight, as they do for that class; but it has no chunks.  A softcap in the model's config is applied.

    Args:
        ignore_index, reduction: as in `linear_cross_entropy`; reduction must be "sum" if a recipe passes the number of
            tokens, as all do.
        options: arguments of `linear_cross_entropy`: terms of the loss, such as label_smoothing, and scratch_bytes,
            backend and precision.

    Raises:
        TypeError, ValueError: an option has the wrong type or is out of range; in the recipe's setup also if the head
            isn't a plain linear layer without bias, or the model scales its logits.

    Memory: that of `linear_cross_entropy`, and the gathered weight, as with Automodel's own loss.

    Source: NeMo Automodel 0.7.0, `nemo_automodel/components/loss/chunked_ce.py` and `linear_ce_base.py`.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        reduction: str = "sum",
        **options: Any,
    ) -> None:
        super().__init__(compile=False, ignore_index=ignore_index, reduction=reduction)
        self.options: dict[str, Any] = {"ignore_index": ignore_index, **vars(HeadOptions(**options))}
        LinearCrossEntropyLoss(**self.options)  # checks them

    def validate_lm_head(self, lm_head: Any, *, model_config: Any = None) -> Any:
        """The head itself.  The model's softcap is kept for `forward`, which gets only the weight.

        Raises:
            ValueError: there is no config, the head isn't a plain linear layer, or the model scales its logits.
        """
        if model_config is None:
            raise ValueError(f"{NAME}: the model has no config that says how it scales or caps its logits")
        config = model_config.get_text_config()
        for name in SCALES:
            if getattr(config, name, None) not in (None, 1.0):
                raise ValueError(
                    f"{NAME}: the model scales its logits ({name} is {getattr(config, name)}), but Automodel doesn't "
                    "pass that to its losses; use MaskedCrossEntropy"
                )
        head = ChunkedCrossEntropy.validate_lm_head(lm_head)
        self.options["softcap"] = getattr(config, "final_logit_softcapping", None)
        return head

    def forward(
        self,
        hidden_states: Tensor,
        labels: Tensor,
        lm_weight: Tensor,
        num_label_tokens: int | None = None,
        grad_reduce_group: Any = None,
        loss_weights: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        logits_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """The float32 loss; the arguments are those of Automodel's ChunkedCrossEntropy.

        Args:
            hidden_states: [..., H] of this rank.
            labels: [...], or [T] for hidden_states of [1, T, H].
            lm_weight: [V, H], as `prepare_lm_weight` returns it.
            num_label_tokens: the divisor of the sum; with 0 the loss is 0.
            grad_reduce_group: the ranks that share the weight, if it is sharded.
            loss_weights: [...] factor of each token's loss.
            mask: [...]; 0 takes a token out.
            logits_dtype: unused, as logits aren't rounded.

        Raises:
            RuntimeError: `validate_lm_head` hasn't been called, by which a recipe says whose head it is.
            ValueError: shapes are wrong, or there are num_label_tokens or loss_weights and reduction isn't "sum".
        """
        if "softcap" not in self.options:
            raise RuntimeError(
                f"{NAME}: the model's head isn't known yet; call validate_lm_head(model.lm_head, "
                "model_config=model.config), as recipes do"
            )
        if self.reduction != "sum" and not (num_label_tokens is None and loss_weights is None):
            raise ValueError(
                f"{NAME}: num_label_tokens and loss_weights need reduction='sum'; it is {self.reduction!r}"
            )
        if hidden_states.ndim == 3 and hidden_states.shape[0] == 1 and labels.ndim == 1:
            hidden_states = hidden_states.squeeze(0)
        labels = labels.to(hidden_states.device)
        if mask is not None:
            if mask.shape != labels.shape:
                raise ValueError(f"{NAME}: mask is {list(mask.shape)} and labels are {list(labels.shape)}")
            labels = labels.masked_fill(mask.to(labels.device) == 0, self.ignore_index)
        weight = self.materialize_lm_weight(lm_weight, grad_reduce_group=grad_reduce_group)
        if loss_weights is not None:
            loss_weights = loss_weights.to(device=hidden_states.device, dtype=torch.float32)
        loss: Tensor = linear_cross_entropy(
            hidden_states.to(weight.dtype),
            weight,
            labels,
            reduction=self.reduction,
            token_weight=loss_weights,
            **self.options,
        )
        if num_label_tokens is None:
            return loss
        return loss * 0.0 if num_label_tokens == 0 else loss / num_label_tokens
