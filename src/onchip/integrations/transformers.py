"""transformers: one patch for every model whose head is a linear layer.

While a patched model that has labels runs, its head returns `DeferredLogits` (deferred_logits.py): a tensor without
memory that knows the hidden states and what the model does to the logits next (a scale, a softcap, a slice of the
vocabulary, other shapes).  `torch.nn.functional.cross_entropy`, which is what the model's own loss function ends in,
passes it to `linear_cross_entropy`.  Any other operation gets the logits themselves: they are computed once, and a
warning names the operation.  The forward returns a loss like any other, and real logits or `SkippedLogits`, which is no
tensor.  Without labels nothing is deferred.

No model is named here and no forward is rewritten, so a model's own terms (a router's loss, a shift of the labels,
`num_items_in_batch`) stay as they are.
"""

import inspect
import threading
import warnings
from dataclasses import dataclass
from functools import cache
from typing import Any

from onchip.core.machine import naming_extra

with naming_extra("onchip.integrations.transformers", "torch,integrations"):
    import torch

import torch.nn.functional as F
from torch import Tensor, nn

from onchip.frontend.options import ScratchBytes
from onchip.frontend.torch_inputs import require_tensor
from onchip.frontend.torch_model import inner_model
from onchip.frontend.torch_types import Backend
from onchip.integrations.deferred_logits import (
    DTYPES,
    NAME,
    Deferred,
    DeferredCall,
    DeferredLogits,
    require_no_options,
    warn,
)
from onchip.integrations.deferred_logits import Report as Report
from onchip.integrations.deferred_logits import SkippedLogits as SkippedLogits
from onchip.integrations.head_options import TERMS
from onchip.integrations.patched_classes import derived, is_derived, own_class, restore_class
from onchip.integrations.transformers_attention import register_attention as register_attention
from onchip.integrations.transformers_experts import register_experts as register_experts
from onchip.integrations.transformers_heads import called, head_refusal, linear_of, origins, product
from onchip.ops.linear_cross_entropy import Precision
from onchip.torch import LinearCrossEntropyLoss

# Libraries whose forwards compute a loss of their own, and the remedy for each.
OTHERS = {
    "liger_kernel": "Liger's forward computes the loss itself; load the model without Liger's patch "
    "(use_liger_kernel=False), or do without onchip's",
    "trl": "a trainer of TRL computes the loss itself, from hidden states; call onchip.integrations.trl.install() "
    "instead of patch",
}


@dataclass
class _Patch:
    """What a patched model knows."""

    options: dict[str, Any]
    skip_logits: bool | None
    report: Report
    what: str  # is fused
    taken_over: str | None = None  # by another forward


def patch(
    model: nn.Module,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    scratch_bytes: ScratchBytes = None,
    backend: Backend = "auto",
    precision: Precision = "full",
    skip_logits: bool | None = None,
) -> Report:
    """Compute the loss of a transformers model by `linear_cross_entropy`, without storing the logits.

    Afterwards call the model as before: with labels, by Trainer, under DDP, FSDP, accelerate or torch.compile.
    `outputs.loss` is the same except for rounding (16-bit logits are not rounded on the way).  Without labels, as in
    `generate` or in a loop with its own loss, the model does what it did before; for such a loss there is
    `token_losses`.  A batch without a single label has loss 0, whereas transformers gives NaN.

    Args:
        model: a model of transformers with a linear head (`get_output_embeddings`), alone or inside PEFT's, DDP's,
            FSDP's or torch.compile's module.  It may be patched before or after these wrap it, but before accelerate
            prepares it.  Patching it again changes the options.
        label_smoothing, z_loss: added to the model's own loss in calls with labels in training mode; see
            `linear_cross_entropy`.  A loss that is computed outside the model's forward doesn't get them: leave
            Trainer's `label_smoothing_factor` at 0 and pass label_smoothing here.
        scratch_bytes, backend, precision: as in `linear_cross_entropy`.
        skip_logits: whether a call with labels leaves out `outputs.logits`; in their place is then a `SkippedLogits`,
            which raises an error that says so if something reads it.  None: in training mode with gradients enabled, as
            Liger does.  True: in evaluation too, which then stores no logits either.  False: never; the loss stays
            fused.

    Returns:
        `Report`: whether the model will be fused, or why not.  It counts the fused losses, and the operations that
        asked for logits.

    Raises:
        TypeError: model isn't a module with `get_output_embeddings`, or an option has the wrong type.
        ValueError: an option is out of range.
        RuntimeError, when the model is called: label_smoothing or z_loss can't be added to its loss.

    Memory: that of `linear_cross_entropy`, and, unless they are skipped, the logits in the head's dtype.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from onchip.integrations import transformers as onchip_transformers
        >>> config = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        ...                      num_attention_heads=2)
        >>> model = LlamaForCausalLM(config)
        >>> report = onchip_transformers.patch(model)
        >>> ids = torch.randint(64, (2, 8))
        >>> model(input_ids=ids, labels=ids).loss.backward()
        >>> print(report)
        fused: lm_head [64, 16] of LlamaForCausalLM; 1 loss so far
    """
    options: dict[str, Any] = {
        "label_smoothing": label_smoothing,
        "z_loss": z_loss,
        "scratch_bytes": scratch_bytes,
        "backend": backend,
        "precision": precision,
    }
    base = _base_model(model)
    LinearCrossEntropyLoss(**options)  # checks them
    if skip_logits is not None and not isinstance(skip_logits, bool):
        raise TypeError(f"patch: skip_logits must be True, False or None; got {skip_logits!r}")
    unpatch(model)
    report = Report(*_found(base))
    if not report.fused:
        missing = " and ".join(name for name in TERMS if options[name])
        missing = f"; its loss has no {missing}" if missing else ""
        warnings.warn(f"{NAME}: not patched: {report.reason}{missing}", stacklevel=2)
        return report
    base.__dict__["_onchip"] = _Patch(options, skip_logits, report, report.reason)
    if not is_derived(base):
        kind: Any = type(base)
        base.__class__ = patched_model_class(kind)
    if not is_derived(head := called(base.get_output_embeddings())):
        _take_class(head)
    return report


def unpatch(model: nn.Module) -> None:
    """Undo `patch`; a model that isn't patched is left as it is."""
    base = _base_model(model)
    if base.__dict__.pop("_onchip", None) is None:
        return
    for module in base.modules():
        module.__dict__.pop("_onchip_call", None)
        restore_class(module)


def token_losses(model: nn.Module, labels: Tensor, **inputs: Any) -> Tensor:
    """The cross-entropy of each token from a patched model, without storing the logits: for a loss of your own.

    It is computed in the model's forward, so it works under DDP, FSDP and PEFT.  The logits are as the model returns
    them, scaled or capped.

    Args:
        model: a patched causal model; it may be wrapped.
        labels: [B, S], as the data has them: position i is to predict labels[:, i + 1].  Labels of -100 are ignored.
        inputs: the model's own arguments: input_ids [B, S], attention_mask and so on.

    Returns:
        [B, S] in float32: position i has -log p(labels[:, i + 1]), or 0 if it has no label to predict.  It doesn't
        include the `label_smoothing` and `z_loss` of `patch`.

    Raises:
        TypeError: `patch` doesn't take the model, the model has an encoder, or labels aren't a tensor.
        RuntimeError: the model isn't patched, or its forward was replaced since.
        ValueError: the model's logits aren't [B, S, V].

    Memory: that of `linear_cross_entropy`; that of the logits if the model isn't fused any more, of which it warns.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from onchip.integrations.transformers import patch, token_losses
        >>> config = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        ...                      num_attention_heads=2)
        >>> model = LlamaForCausalLM(config)
        >>> report = patch(model)
        >>> ids, weight = torch.randint(64, (2, 8)), torch.rand(2, 8)
        >>> loss = (token_losses(model, ids, input_ids=ids) * weight).sum() / weight.sum()
        >>> loss.backward()
    """
    require_tensor("token_losses", "labels", labels)
    base = _base_model(model)
    made = base.__dict__.get("_onchip")
    if made is None:
        raise RuntimeError("token_losses: model isn't patched, or can't be; call patch(model) and read its report")
    if base.config.is_encoder_decoder:
        raise TypeError(f"token_losses: {type(base).__name__} has an encoder; call it with labels, for the mean loss")
    losses: Tensor | None = model(**inputs, onchip_labels=labels, return_dict=True).get("loss")
    if losses is None:
        raise RuntimeError(f"token_losses: the model's forward doesn't compute them: {made.report.reason}")
    return losses


def _base_model(model: Any) -> Any:
    """That of transformers, inside of wrappers and of PEFT's."""
    inner = inner_model(model)
    if inner is None:
        raise TypeError(
            "patch: model must be a model of transformers, with get_output_embeddings; got "
            f"{type(model).__name__}.  For another module, use onchip.torch.LMHead or lm_loss"
        )
    return inner


def _found(model: Any) -> tuple[bool, str]:
    """Whether the model can be fused, and what, or why not."""
    name, head = type(model).__name__, model.get_output_embeddings()
    if "forward" in model.__dict__:
        other = _other(model.forward) or (
            f"it was set by {origins(model.forward)[0]}, as by accelerate; patch the model before that, or load it "
            "onto one device"
        )
        return False, f"{name} has a forward of its own: {other}"
    if (refusal := _refusal(model)) is not None:
        return False, refusal
    where = next((n for n, x in model.named_modules() if x is head), "head")
    return True, f"{where} {list(linear_of(head).weight.shape)} of {name}"


def _refusal(model: Any) -> str | None:
    """Why a call of the model can't be fused, or None."""
    name, head = type(model).__name__, model.get_output_embeddings()
    if (other := _other(own_class(model).forward)) is not None:
        return f"{name} has another forward: {other}"
    if head is None:
        return f"{name} has no output embeddings"
    if (refusal := head_refusal(head)) is not None:
        return f"the head of {name} {refusal}"
    if not torch.compiler.is_compiling() and torch.nn.modules.module._has_any_global_hook():
        return "global module hooks, such as FlopCounterMode's, are to see the head's logits"
    return None


def _other(forward: Any) -> str | None:
    """Who computes the loss in a forward that isn't transformers', and what to do."""
    for name in origins(forward):
        package = name.partition(".")[0]
        if package in OTHERS:
            return OTHERS[package]
    return None


# -------------------------------------------------------------------------------------------------- patched classes


@cache
def patched_model_class(base: Any) -> type:
    """`base`, whose heads defer the logits while a call with labels lasts."""
    signature = inspect.signature(base.forward)
    labels_at = next((i for i, name in enumerate(signature.parameters) if name == "labels"), 0) - 1

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = self.__dict__.get("_onchip")
        by_token = kwargs.pop("onchip_labels", None)  # of `token_losses`
        labels = kwargs.get("labels")
        if labels is None and 0 <= labels_at < len(args):
            labels = args[labels_at]
        labelled = labels is not None or kwargs.get("shift_labels") is not None or by_token is not None
        head = _head_of_call(self, by_token is None) if labelled and made is not None else None
        if head is None:
            outputs = base.forward(self, *args, **kwargs)
            return outputs if by_token is None else _with_token_losses(outputs, by_token)
        call = DeferredCall(self, made.options, made.skip_logits, made.report)
        if by_token is not None:
            call.options, call.skip_logits = made.options | dict.fromkeys(TERMS, 0.0), True
        if not torch.compiler.is_compiling():
            call.thread = threading.get_ident()
        head._onchip_call = call
        try:
            outputs = base.forward(self, *args, **kwargs)
            return call.settled(outputs if by_token is None else _with_token_losses(outputs, by_token))
        finally:
            head._onchip_call = None
            call.open = False

    def __setattr__(self: Any, name: str, value: Any) -> None:
        made = self.__dict__.get("_onchip")
        if name == "forward" and made is not None and (other := _other(value)) is not None:
            made.taken_over = f"the forward of {type(self).__name__} was replaced: {other}"
            _tell(made.report, made.taken_over)
        base.__setattr__(self, name, value)

    for name in ("__module__", "__name__", "__qualname__", "__doc__"):
        setattr(forward, name, getattr(base.forward, name, None))
    forward.__signature__ = signature  # type: ignore[attr-defined]
    members = {"forward": forward, "__setattr__": __setattr__}
    return derived(base, base.__name__, members, patched_model_class)


@cache
def patched_head_class(base: Any) -> type:
    """`base`, which defers its logits during a call of the model; its forward is its own, and so are its hooks."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = self.__dict__.get("_onchip_call")
        fits = call is not None and call.is_here() and len(args) == 1 and not kwargs
        if not fits or not isinstance(args[0], Tensor) or args[0].dtype not in DTYPES:
            return base.__call__(self, *args, **kwargs)
        if (reason := _undeferrable()) is not None:
            call.compute(reason)
            return base.__call__(self, *args, **kwargs)
        return _deferred(call, self, args[0])

    return derived(base, f"Patched{base.__name__}", {"__call__": __call__}, patched_head_class)


def _undeferrable() -> str | None:
    """Who can't be given deferred logits where the head is called now, and what to do; or None."""
    if torch.compiler.is_compiling():
        return None
    if torch._C._are_functorch_transforms_active():
        return "a transform of torch.func, which can't differentiate the fused loss; for that, take torch.autograd"
    return None


def _with_token_losses(outputs: Any, labels: Tensor) -> Any:
    """The outputs, with the loss of each token for a loss."""
    logits = outputs["logits"]
    if logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"token_losses: labels are {list(labels.shape)}, but the model's logits are {list(logits.shape)}; there "
            "must be a label for each position of the logits"
        )
    target = F.pad(labels[..., 1:], (0, 1), value=-100).flatten().long().to(logits.device)
    losses = F.cross_entropy(logits.flatten(0, -2).float(), target, reduction="none")
    outputs["loss"] = losses.view(labels.shape)
    return outputs


def _deferred(call: DeferredCall, inner: Any, hidden: Tensor) -> Tensor:
    """What stands for the logits of hidden states."""
    kind = hidden.device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    rows, of_head, plain = product(call.model.get_output_embeddings(), hidden)
    shape = (*hidden.shape[:-1], linear_of(inner).out_features)
    guarded = plain and not torch.compiler.is_compiling()
    made = Deferred(call, rows, of_head, shape[-1], autocast, torch.is_grad_enabled(), guarded)
    return DeferredLogits.of(made, shape, autocast or hidden.dtype)


def _head_of_call(model: Any, with_options: bool) -> Any:
    """The module that may defer the logits of a call, whose loss is to have patch's options or not; or None.

    It is looked up for each call: PEFT, FSDP, accelerate or the user may have put another one in its place.
    """
    made: _Patch = model.__dict__["_onchip"]
    refusal = made.taken_over or _refusal(model)
    head = None if refusal else called(model.get_output_embeddings())
    if head is not None and not is_derived(head):
        if torch.compiler.is_compiling():
            refusal = "its head was replaced; call patch again, before torch.compile's first call"
        else:
            _take_class(head)
    if refusal:
        _tell(made.report, refusal)
        if with_options:
            require_no_options(model, made.options, refusal)
        return None
    if not made.report.fused:
        made.report.fused, made.report.reason = True, made.what
    return None if head.__dict__.get("_onchip_call") is not None else head  # of a call around this one, or a thread's


def _take_class(head: nn.Module) -> None:
    head.__dict__["_onchip_call"] = None
    kind: Any = type(head)
    head.__class__ = patched_head_class(kind)


def _tell(report: Report, reason: str) -> None:
    """That losses aren't fused, and why; once."""
    if report.fused or report.reason != reason:
        report.fused, report.reason = False, reason
        if not torch.compiler.is_compiling():
            warn(f"not fused any more: {reason}")
