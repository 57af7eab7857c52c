"""LLaMA-Factory 0.9.5 (its v1 trainers): the kernel plugin "onchip", which patches the model.

Importing this module registers it.  In a YAML config::

    kernel_config:
      name: onchip
      include_kernels: auto
"""

# ruff: noqa: E402
from typing import Any

from onchip.integrations.transformers import patch
from onchip.integrations.versions import require

require("llamafactory", "llamafactory", "0.9.5")

from llamafactory.v1.plugins.model_plugins.kernels.interface import KernelPlugin

NAME = "onchip.integrations.llamafactory"


@KernelPlugin("onchip").register()
def apply_onchip(model: Any, include_kernels: Any = None) -> Any:
    """The model, patched by `onchip.integrations.transformers.patch`: its losses don't store the logits.

    Args:
        model: of transformers, or PEFT's around one.
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
            f"{NAME}: include_kernels is {include_kernels!r}, and there is one kernel; set it to auto, or leave out "
            "kernel_config"
        )
    report = patch(model)
    if not report.fused:
        raise RuntimeError(f"{NAME}: the model can't be patched: {report.reason}; leave out kernel_config")
    return model
