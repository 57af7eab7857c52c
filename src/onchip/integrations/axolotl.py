"""axolotl 0.19: a plugin that patches the model with `onchip.integrations.transformers.patch`.

In a YAML config::

    plugins:
      - onchip.integrations.axolotl.OnchipPlugin
"""

# ruff: noqa: E402
from dataclasses import fields
from typing import Any

from onchip.integrations.head_options import HeadOptions
from onchip.integrations.transformers import patch
from onchip.integrations.versions import require

require("axolotl", "axolotl", "0.19")

from axolotl.integrations.base import BasePlugin
from pydantic import create_model, model_validator

NAME = "onchip.integrations.axolotl"

# Options of axolotl that patch the computation of a model's loss too.
OTHERS = ("cut_cross_entropy", "liger_cross_entropy", "liger_fused_linear_cross_entropy", "chunked_cross_entropy")


_OPTIONS: dict[str, Any] = {f"onchip_{x.name}": (x.type, x.default) for x in fields(HeadOptions)}


class OnchipArgs(create_model("Options", **_OPTIONS)):  # type: ignore[misc]
    """The keys that the plugin adds to axolotl's config: options of `patch`, with onchip_ before their names."""

    onchip: bool = True
    """False: leave the model as it is."""

    @model_validator(mode="before")
    @classmethod
    def check_no_other_loss(cls, data: Any) -> Any:
        """Raise for another library's patch of the loss."""
        others = [name for name in OTHERS if data.get(name)] if data.get("onchip", True) else []
        if others:
            raise ValueError(
                f"{NAME}: {', '.join(others)} replaces the model's loss too; remove it from the config, or set onchip "
                "to false"
            )
        return data


class OnchipPlugin(BasePlugin):  # type: ignore[misc]
    """Compute the model's losses by `linear_cross_entropy`, without storing the logits.

    Raises:
        RuntimeError: the model can't be patched; it is raised when the model is built, and names the reason.
        ValueError, TypeError: an option is out of range.

    Source: axolotl 0.19.0, `axolotl/integrations/base.py`.
    """

    def get_input_args(self) -> str:
        """Where `OnchipArgs` is."""
        return f"{NAME}.OnchipArgs"

    def post_model_build(self, cfg: Any, model: Any) -> None:
        """Patch the model, before adapters are put on it."""
        if cfg.onchip is False:
            return
        given = {name: getattr(cfg, name) for name in _OPTIONS}
        report = patch(model, **{name.removeprefix("onchip_"): x for name, x in given.items() if x is not None})
        if not report.fused:
            raise RuntimeError(f"{NAME}: the model can't be patched: {report.reason}; or set onchip to false")
