"""verl's fused log-probabilities through `linear_log_probs`.

`install()` replaces the function and the class by which verl 0.9 computes log-probabilities from hidden states if
`use_fused_kernels` is set: `linear_cross_entropy` (the 'triton' backend, and Megatron's) and `FusedLinearForPPO` (the
'torch' and 'liger' backends).  `uninstall()` restores verl's own.  Call `install()` in each worker: it changes the
process in which it runs.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from onchip.integrations.replacing import Installed, Ours, Replacing
from onchip.integrations.versions import require
from onchip.torch import linear_log_probs

VERSION = "0.9"
"""The version of verl whose functions these are."""

FUNCTION = "linear_cross_entropy"
MODULE = "FusedLinearForPPO"


class VerlCall(NamedTuple):
    """The arguments of verl's `linear_cross_entropy`, in its order."""

    hidden: Tensor  # [..., H]
    weight: Tensor  # [V, H], or this rank's rows of it
    labels: Tensor  # [...]
    temperature: float = 1.0
    reduction: str = "none"
    dist_process_group: Any = None  # whose ranks share the vocabulary; None: this one has all


def linear_cross_entropy(*given: Any) -> tuple[Tensor, Tensor]:
    """The replacement of verl's function: (log-probability, entropy), both [T] float32, with gradients.

    Under tensor parallelism, and with another reduction than 'none', verl's own runs, with one warning for each reason.
    """
    call = VerlCall(*given)
    reason = _unfit(call)
    if reason:
        return _REPLACING.original(FUNCTION, reason, "verl")(*call)  # type: ignore[no-any-return]
    ids = call.labels.reshape(call.hidden.shape[:-1])
    log_prob, entropy = _log_probs(call.hidden, call.weight, ids, call.temperature)
    return log_prob.flatten(), entropy.flatten()


class FusedLinearForPPO(nn.Module):
    """The replacement of verl's module, with the same arguments; chunk_size and impl_backend have no effect."""

    def __init__(self, chunk_size: int = 512, impl_backend: str = "torch") -> None:
        super().__init__()
        if impl_backend not in ("torch", "liger"):
            raise ValueError(f"Unsupported FusedLinearForPPO backend: {impl_backend}. Choose 'torch' or 'liger'.")
        self.chunk_size = chunk_size
        self.impl_backend = impl_backend

    def forward(
        self, hidden_states: Tensor, vocab_weights: Tensor, input_ids: Tensor, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """(log-probability, entropy) of each of input_ids [...], float32, with gradients."""
        return _log_probs(hidden_states, vocab_weights, input_ids, temperature)


_REPLACING = Replacing(
    "verl",
    "reinstall verl",
    {
        # `apply` of a torch.autograd.Function.
        FUNCTION: Ours(
            "verl.utils.kernel.linear_cross_entropy",
            linear_cross_entropy,
            VerlCall._fields,
            lambda found: getattr(found, "__self__", found).forward,
        ),
        MODULE: Ours(
            "verl.utils.experimental.torch_functional",
            FusedLinearForPPO,
            ("hidden_states", "vocab_weights", "input_ids", "temperature"),
            lambda found: found.forward,
        ),
    },
)


def install() -> Installed:
    """Let verl compute its fused log-probabilities and entropies by `linear_log_probs`.

    In each loaded module of verl that holds one of the two names, onchip's replaces it; modules that are loaded later
    find onchip's.  A further call does that for modules that were loaded in between.

    In float32, results and gradients are verl's up to rounding.  In 16 bits verl's 'torch' rounds the logits, their
    gradient and the entropy to 16 bits, and onchip doesn't: its entropy is float32.  A token whose id is -100 has
    log-probability and entropy 0 and no gradient.

    Returns:
        What was replaced.

    Raises:
        ModuleNotFoundError: verl isn't installed.
        RuntimeError: verl's version isn't 0.9, or one of the two isn't the one that onchip knows, or something else has
            replaced it.  Then nothing is replaced.

    Memory: that of `linear_log_probs`.

    Example, in a module that `VERL_USE_EXTERNAL_MODULES` names, which verl imports in each worker::

        from onchip.integrations import verl

        verl.install()

    Source: verl 0.9.1, `verl/utils/kernel/linear_cross_entropy.py` and `verl/utils/experimental/torch_functional.py`.
    """
    version = require("verl", "verl", VERSION)
    return Installed(version, _REPLACING.install(f"verl {version}"), what=f"verl {version}")


def uninstall() -> None:
    """Restore verl's own in each module that holds onchip's.  Without an earlier `install` it does nothing.

    Example:
        >>> from onchip.integrations.verl import uninstall
        >>> uninstall()
    """
    _REPLACING.uninstall()


def _unfit(call: VerlCall) -> str | None:
    """Why verl must compute this call itself, or None."""
    group = call.dist_process_group
    if group is not None and torch.distributed.get_world_size(group) > 1:
        return "tensor parallelism shards the vocabulary"
    return None if call.reduction.lower() == "none" else f"the reduction is {call.reduction!r}"


def _log_probs(hidden: Tensor, weight: Tensor, ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    out = linear_log_probs(hidden, weight, ids, temperature=temperature, entropy=True)
    return out.log_prob, out.entropy
