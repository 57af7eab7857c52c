"""TRL's trainers through onchip's ops.

`install()` replaces the two functions by which TRL 1.16 computes losses from hidden states: its chunked
log-probabilities (SFT, DPO, KTO, GRPO, RLOO and trainers built on these) and its chunked divergence (distillation).
`uninstall()` restores TRL's own.  Trainers need no change, and existing ones use onchip's functions too.

A call that onchip can't compute goes to TRL's own function, with one warning for each reason.
"""

import importlib
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

from onchip.core.machine import naming_extra

with naming_extra("onchip.integrations.trl", "torch,integrations"):
    import torch

from torch import Tensor

from onchip.frontend.torch_inputs import DTYPES, dtype_name, is_dtensor
from onchip.integrations.replacing import Installed, Ours, Replacing
from onchip.torch import LogProbs, linear_jsd, linear_log_probs

REMEDY = "pip install 'trl==1.16.*'"
"""The TRL whose functions these are; another version that has the same functions works too."""

LOG_PROBS = "_ChunkedLogProbFunction"
DIVERGENCE = "_chunked_divergence_loss"
TRAINERS = {
    LOG_PROBS: (
        "trl.SFTTrainer",
        "trl.DPOTrainer",
        "trl.KTOTrainer",
        "trl.GRPOTrainer",
        "trl.RLOOTrainer",
        "trl.experimental.async_grpo.AsyncGRPOTrainer",
        "trl.experimental.bema_for_ref_model.DPOTrainer",
        "trl.experimental.gmpo.GMPOTrainer",
    ),
    DIVERGENCE: ("trl.DistillationTrainer",),
}
"""Who calls them."""


# --------------------------------------------------------------------------------------------------- what TRL asks for


class LogProbCall(NamedTuple):
    """The arguments of TRL's `_ChunkedLogProbFunction.apply`, in its order."""

    hidden: Tensor  # [N, H]
    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    targets: Tensor  # [N]
    temperature: float
    chunk_size: int  # of TRL's own tiles
    final_logit_softcapping: float | None = None
    logit_scale: float = 1.0
    outputs: Sequence[str] = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


class DivergenceCall(NamedTuple):
    """The arguments of TRL's `_chunked_divergence_loss`, in its order."""

    student_hidden_states: Tensor  # [B, K, Hs]
    teacher_hidden_states: Tensor  # [B, K, Ht]
    student_lm_head_weight: Tensor  # [V, Hs]
    teacher_lm_head_weight: Tensor  # [V, Ht]
    completion_mask: Tensor  # [B, K]; 0 takes a token out
    beta: float
    num_items_in_batch: Tensor | int | None = None  # what the sum is divided by; None: the number of tokens
    student_lm_head_bias: Tensor | None = None  # [V]
    teacher_lm_head_bias: Tensor | None = None  # [V]
    student_logit_scale: float = 1.0
    teacher_logit_scale: float = 1.0
    student_final_logit_softcapping: float | None = None
    teacher_final_logit_softcapping: float | None = None
    temperature: float = 1.0


class ChunkedLogProbs:
    """The replacement of TRL's class, of which TRL calls only `apply`."""

    @staticmethod
    def apply(*given: Any) -> tuple[Tensor | None, ...]:
        """(log-probability, entropy, log(sum(p^2)), mean logit, whether the target is the top one), each [N] or None.

        The first two have gradients.
        """
        call = LogProbCall(*given)
        reason = _unfit_log_probs(call)
        if reason:
            return _REPLACING.original(LOG_PROBS, reason, "TRL").apply(*call)  # type: ignore[no-any-return]
        return _log_probs(call)


def chunked_divergence_loss(*given: Any, **named: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The replacement of TRL's function: (loss [], sum of the student's entropies [], number of tokens []).

    Only the loss has gradients.
    """
    call = DivergenceCall(*given, **named)
    reason = _unfit_divergence(call)
    if reason:
        return _REPLACING.original(DIVERGENCE, reason, "TRL")(*call)  # type: ignore[no-any-return]
    return _divergence(call)


_REPLACING = Replacing(
    "trl",
    REMEDY,
    {
        LOG_PROBS: Ours(
            "trl.trainer.utils", ChunkedLogProbs, LogProbCall._fields, lambda found: getattr(found, "forward", None)
        ),
        DIVERGENCE: Ours("trl.trainer.distillation_trainer", chunked_divergence_loss, DivergenceCall._fields),
    },
)


# ---------------------------------------------------------------------------------------------------------- the switch


def install() -> Installed:
    """Let TRL compute log-probabilities by `linear_log_probs` and divergences by `linear_jsd`.

    In each module of TRL that holds one of its two functions, onchip's replaces it.  A further call does that for
    modules that were loaded in between.

    Losses, metrics and gradients are TRL's up to rounding.  In 16 bits TRL rounds the logits of its log-probabilities
    to 16 bits, and onchip doesn't.  A step of distillation projects the student's hidden states once more, for the
    entropy that TRL logs.

    TRL's own function runs, with one warning for each reason, if

    - DeepSpeed ZeRO-3 partitions the head,
    - a dtype isn't float32, bfloat16 or float16, or tensors are neither on the CPU nor on a CUDA device,
    - a logit scale or softcap isn't above 0,
    - in distillation, a model has a softcap, the two models have different logit scales, or, without autocast, a head's
      dtype isn't that of its hidden states.

    Returns:
        What was replaced, and the trainers that this reaches.

    Raises:
        ModuleNotFoundError: TRL isn't installed.
        RuntimeError: one of TRL's functions isn't there, takes other arguments than in TRL 1.16, or was replaced by
            something else.  Then nothing is replaced.

    Memory: that of `linear_log_probs` and `linear_jsd`; TRL's chunk sizes aren't used.

    Example:
        >>> from onchip.integrations.trl import install, uninstall
        >>> install().trainers[0]
        'trl.SFTTrainer'
        >>> uninstall()

    Source: TRL 1.16, `trl/kernels/chunked_logprob.py` and `trl/trainer/distillation_trainer.py`.
    """
    version = _version()
    replaced = _REPLACING.install(f"TRL {version}")
    return Installed(version, replaced, (*TRAINERS[LOG_PROBS], *TRAINERS[DIVERGENCE]), what=f"TRL {version}")


def uninstall() -> None:
    """Restore TRL's own functions in each module that holds onchip's.  Without an earlier `install` it does nothing.

    Example:
        >>> from onchip.integrations.trl import uninstall
        >>> uninstall()
    """
    _REPLACING.uninstall()


def _version() -> str:
    """TRL's; raise unless it is installed."""
    try:
        return str(importlib.import_module("trl").__version__)
    except ModuleNotFoundError as error:
        if error.name != "trl":
            raise
        raise ModuleNotFoundError(
            "onchip.integrations.trl: TRL isn't installed; pip install 'onchip[integrations]'", name="trl"
        ) from None


# ----------------------------------------------------------------------------------------------------- what onchip can


def _unfit_log_probs(call: LogProbCall) -> str | None:
    """Why TRL must compute these log-probabilities, or None."""
    head = _unfit_head("", call.hidden, call.weight, call.bias)
    return head or _unfit_logits(call.final_logit_softcapping, call.logit_scale)


def _unfit_divergence(call: DivergenceCall) -> str | None:
    """Why TRL must compute this divergence, or None."""
    heads = {
        "the student's ": (call.student_hidden_states, call.student_lm_head_weight, call.student_lm_head_bias),
        "the teacher's ": (call.teacher_hidden_states, call.teacher_lm_head_weight, call.teacher_lm_head_bias),
    }
    for whose, head in heads.items():
        reason = _unfit_head(whose, *head) or _mixed_dtypes(whose, *head)
        if reason:
            return reason
    softcaps = call.student_final_logit_softcapping, call.teacher_final_logit_softcapping
    if softcaps != (None, None):
        return "linear_jsd has no softcap"
    if call.student_logit_scale != call.teacher_logit_scale:
        return (
            f"the student's logits are scaled by {call.student_logit_scale} and the teacher's by "
            f"{call.teacher_logit_scale}, but linear_jsd has one scale"
        )
    return _unfit_logits(None, call.student_logit_scale)


def _unfit_head(whose: str, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    if hasattr(weight, "ds_id"):
        return f"DeepSpeed ZeRO-3 partitions {whose}lm_head, and onchip's backward would find it empty"
    if hidden.device.type not in ("cpu", "cuda"):
        return f"{whose}hidden states are on {hidden.device.type}"
    named = {"hidden states are": hidden, "lm_head is": weight, "lm_head's bias is": bias}
    for what, x in named.items():
        if x is not None and x.dtype not in DTYPES:
            return f"{whose}{what} {dtype_name(x.dtype)}"
    return None


def _mixed_dtypes(whose: str, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    if torch.is_autocast_enabled(hidden.device.type):
        return None
    for x in (bias, None if is_dtensor(weight) else weight):
        if x is not None and x.dtype != hidden.dtype:
            return f"{whose}lm_head is {dtype_name(x.dtype)} and its hidden states are {dtype_name(hidden.dtype)}"
    return None


def _unfit_logits(softcap: float | None, scale: float) -> str | None:
    if softcap is not None and softcap <= 0:
        return f"the softcap is {softcap}, not above 0"
    return None if scale > 0 else f"the logit scale is {scale}, not above 0"


# -------------------------------------------------------------------------------------------------- what onchip does


def _log_probs(call: LogProbCall) -> tuple[Tensor | None, ...]:
    hidden, weight, bias, outputs = call.hidden, call.weight, call.bias, call.outputs
    device = hidden.device.type
    context: Any = nullcontext()
    mixed = any(x is not None and x.dtype != hidden.dtype for x in (weight, bias))
    if mixed and not torch.is_autocast_enabled(device):
        # TRL's products are of hidden's dtype.  Under autocast, gradients are rounded to the head's dtype alone.
        if hidden.dtype == torch.float32:
            weight, bias = weight.float(), None if bias is None else bias.float()
        else:
            context = torch.autocast(device, dtype=hidden.dtype)
    with context:
        out = linear_log_probs(
            hidden,
            weight,
            call.targets,
            bias,
            softcap=call.final_logit_softcapping,
            logit_scale=call.logit_scale,
            temperature=call.temperature,
            entropy="entropy" in outputs,
            top1="is_top1" in outputs,
            mean_logits="mean_logits" in outputs,
            log_sum_sq_probs="log_sum_sq_probs" in outputs,
        )
    if not isinstance(out, LogProbs):
        return out, None, None, None, None
    is_top1 = None if out.top1 is None else out.top1 == call.targets
    return out.log_prob, out.entropy, out.log_sum_sq_probs, out.mean_logits, is_top1


def _divergence(call: DivergenceCall) -> tuple[Tensor, Tensor, Tensor]:
    valid = call.completion_mask.reshape(-1) != 0
    number = valid.sum()
    student, teacher = (x.flatten(0, -2)[valid] for x in (call.student_hidden_states, call.teacher_hidden_states))
    weight, bias = _whole(call.student_lm_head_weight, call.student_lm_head_bias, student.dtype)
    teacher_weight, teacher_bias = _whole(call.teacher_lm_head_weight, call.teacher_lm_head_bias, teacher.dtype)
    normalizer = call.num_items_in_batch
    if isinstance(normalizer, Tensor):
        normalizer = normalizer.to(student.device)
    loss = linear_jsd(
        student,
        weight,
        teacher,
        teacher_weight,
        beta=call.beta,
        temperature=call.temperature / call.student_logit_scale,
        normalizer=normalizer,
        student_bias=bias,
        teacher_bias=teacher_bias,
    )
    with torch.no_grad():
        ids = torch.zeros(len(student), dtype=torch.int64, device=student.device)
        stats = linear_log_probs(
            student,
            weight,
            ids,
            bias,
            logit_scale=call.student_logit_scale,
            temperature=call.temperature,
            entropy=True,
        )
    return loss, stats.entropy.sum(), number


def _whole(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """FSDP2's shards gathered, as TRL gathers them; other tensors as they are."""
    if not is_dtensor(weight):
        return weight, bias
    gathered: Any = weight
    more: Any = bias
    return gathered.full_tensor().to(dtype), None if bias is None else more.full_tensor()
