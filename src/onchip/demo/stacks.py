"""What the demo's page shows of training stacks: the lines that put onchip into each, as its guide has them."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Stack(NamedTuple):
    """A stack, and the lines to write there."""

    name: str
    lines: Sequence[str]
    guide: str
    """Its page, in docs/guides."""


STACKS: Mapping[str, Sequence[Stack]] = {
    "torch": (
        Stack(
            "transformers, with or without Trainer or PEFT",
            ("from onchip.integrations.transformers import patch", "report = patch(model)"),
            "transformers.md",
        ),
        Stack("TRL", ("from onchip.integrations import trl", "print(trl.install())"), "trl.md"),
        Stack(
            "torchtitan",
            (
                "from onchip.integrations.torchtitan import Fp8LinearConverter, LinearCrossEntropyLoss",
                "config.loss = LinearCrossEntropyLoss.Config()",
                'config.model_spec = model_registry("debugmodel", converters=[Fp8LinearConverter.Config()])',
            ),
            "torchtitan.md",
        ),
        Stack(
            "a loop of your own, DDP, FSDP2",
            (
                "from onchip.torch import LMHead",
                "head = LMHead(64, 5000, bias=False)",
                "loss = head(hidden, labels=ids)  # position i predicts label i + 1",
            ),
            "training_loop.md",
        ),
        Stack(
            "linear layers in FP8",
            ("from onchip.torch import convert_linears", "print(convert_linears(model))"),
            "fp8.md",
        ),
        Stack("verl, NeMo, Megatron, axolotl, LLaMA-Factory", (), "stacks.md"),
    ),
    "jax": (
        Stack(
            "flax and optax",
            (
                "from onchip.integrations.flax import LinearHead",
                "self.head = LinearHead(size, vocab, use_bias=False, rngs=rngs)  # was nnx.Linear",
                "return self.head(hidden, labels, shift=True)  # the mean loss",
            ),
            "flax_optax.md",
        ),
        Stack(
            "levanter",
            ("from onchip.integrations import levanter", "levanter.register(default=True)"),
            "levanter.md",
        ),
        Stack("MaxText", ("from onchip.integrations import maxtext", "print(maxtext.install())"), "stacks.md"),
    ),
}
"""By framework."""
