"""LLaMA-Factory 0.9.5 (its v1 trainers): the kernel plugin "onchip", which patches the model.

Its trainers compute log-probabilities from the model's logits, in `BaseTrainer.compute_log_probs`; for a patched model
these come from `token_losses`.

Importing this module registers it.  In a YAML config::

    kernel_config:
      name: onchip
      include_kernels: auto
"""

# ruff: noqa: E402
import weakref
from typing import Any

from onchip.integrations.transformers import patch, token_losses
from onchip.integrations.versions import require

require("llamafactory", "llamafactory", "0.9.5")

from llamafactory.v1.core.base_trainer import BaseTrainer
from llamafactory.v1.plugins.model_plugins.kernels.interface import KernelPlugin

NAME = "onchip.integrations.llamafactory"


@KernelPlugin("onchip").register()
def apply_onchip(model: Any, include_kernels: Any = None) -> Any:
    """The model, patched by `onchip.integrations.transformers.patch`, so that the trainers don't store its logits.

    Args:
        model: a model of transformers, or PEFT's around one.
        include_kernels: "auto" or True; None or False leaves the model as it is, as LLaMA-Factory's own plugins do.

    Raises:
        ValueError: include_kernels is something else.
        RuntimeError: the model can't be patched; the reason is in the message.

    Source: LLaMA-Factory 0.9.5, `llamafactory/v1/plugins/model_plugins/kernels/interface.py`.
    """
    if include_kernels is None or include_kernels is False:
        return model
    if include_kernels is not True and include_kernels != "auto":
        raise ValueError(
            f"{NAME}: include_kernels is {include_kernels!r}, but there is only one kernel; set it to auto, or leave "
            "out kernel_config"
        )
    report = patch(model)
    if not report.fused:
        raise RuntimeError(f"{NAME}: the model can't be patched: {report.reason}; leave out kernel_config")
    _patched.add(model)
    return model


class _Called(Exception):
    """Raised where LLaMA-Factory's own function calls the model: with what."""


class _Model:
    """The model for LLaMA-Factory's own function, which looks at it, and prepares its inputs."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, **inputs: Any) -> Any:
        raise _Called(inputs)


def _compute_log_probs(self: Any, model: Any, batch: Any) -> Any:
    """Of each next token [B, S - 1], as LLaMA-Factory's own."""
    if not any(module in _patched for module in model.modules()):
        return _theirs(self, model, batch)
    try:
        _theirs(self, _Model(model), batch)
    except _Called as call:
        inputs = dict(call.args[0])
    labels = batch["labels"].to(self.device, non_blocking=True)
    inputs.pop("labels", None)
    return -token_losses(model, labels, **inputs)[:, :-1]


_patched: Any = weakref.WeakSet()  # models
_theirs = BaseTrainer.compute_log_probs
BaseTrainer.compute_log_probs = _compute_log_probs
