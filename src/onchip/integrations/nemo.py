"""NeMo Automodel 0.7: its loss of hidden states by `linear_cross_entropy`.

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

# Settings of a model by which it scales its logits, which no loss of Automodel's is given.
SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")


class OnchipCrossEntropy(ChunkedCrossEntropy):  # type: ignore[misc]
    """Cross-entropy of the head's logits from hidden states, by `linear_cross_entropy`, which stores no logits.

    It is a subclass of Automodel's ChunkedCrossEntropy, so that recipes check the head, and gather FSDP2's weight and
    cast it, as for that; it has no chunks.  A softcap in the model's config is applied.

    Args:
        ignore_index, reduction: as in `linear_cross_entropy`; reduction must be "sum" where a recipe gives the number
            of tokens, as all do.
        options: of `linear_cross_entropy`: the terms that it adds to a loss, such as label_smoothing, scratch_bytes,
            backend and precision.

    Raises:
        TypeError, ValueError: an option of the wrong type or out of range; from the recipe's setup, a head that is no
            plain linear layer without bias, or a model that scales its logits.

    Memory: that of `linear_cross_entropy`, and the gathered weight, as with Automodel's own.

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
        LinearCrossEntropyLoss(**self.options)  # which checks them

    def validate_lm_head(self, lm_head: Any, *, model_config: Any = None) -> Any:
        """The head itself.  Its model's softcap is kept for `forward`, which is given the weight alone.

        Raises:
            ValueError: there is no config, a head that is no plain linear layer, or a model that scales its logits.
        """
        if model_config is None:
            raise ValueError(f"{NAME}: the model has no config, which would say how it scales or caps its logits")
        config = model_config.get_text_config()
        for name in SCALES:
            if getattr(config, name, None) not in (None, 1.0):
                raise ValueError(
                    f"{NAME}: the model scales its logits ({name} is {getattr(config, name)}), and Automodel doesn't "
                    "hand that to its losses; use MaskedCrossEntropy"
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
        """The float32 loss; arguments as of Automodel's ChunkedCrossEntropy.

        Args:
            hidden_states: [..., H] of this rank.
            labels: [...], or [T] for hidden_states of [1, T, H].
            lm_weight: [V, H], what `prepare_lm_weight` returns.
            num_label_tokens: what a sum is divided by; 0 makes it 0.
            grad_reduce_group: the ranks that share the weight, where it is sharded.
            loss_weights: [...] factor of each token's loss.
            mask: [...]; 0 takes a token out.
            logits_dtype: unused: logits aren't rounded.

        Raises:
            RuntimeError: before `validate_lm_head`, by which a recipe says whose head it is.
            ValueError: wrong shapes; num_label_tokens or loss_weights with another reduction than "sum".
        """
        if "softcap" not in self.options:
            raise RuntimeError(
                f"{NAME}: the model's head wasn't seen; call validate_lm_head(model.lm_head, "
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
