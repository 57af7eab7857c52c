"""transformers: one patch for every model whose head is a linear layer.

While a patched model computes a loss, its head returns `DeferredLogits` (deferred_logits.py): a tensor without memory
that knows the hidden states and what the model does to the logits next (a scale, a softcap, a slice of the vocabulary,
other shapes).
`torch.nn.functional.cross_entropy`, which is what the model's own loss function, Trainer and most training loops end
in, hands it to `linear_cross_entropy`.  Whatever else is asked of it is answered with the logits themselves: they are
computed once, and a warning names what asked.

No model is named here, and no forward is rewritten; so a model's own terms (a router's loss, a shift of the labels,
`num_items_in_batch`) stay as they are.
"""

import inspect
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from types import MethodType
from typing import Any

from onchip.core.machine import naming_extra

with naming_extra("onchip.integrations.transformers", "torch,integrations"):
    import torch

from torch import Tensor, nn

from onchip.frontend.options import ScratchBytes
from onchip.frontend.torch_types import Backend
from onchip.integrations.deferred_logits import DTYPES, Deferred, warn
from onchip.integrations.deferred_logits import DeferredLogits as DeferredLogits
from onchip.integrations.transformers_experts import register_experts as register_experts
from onchip.ops.linear_cross_entropy.spec import Precision
from onchip.ops.linear_cross_entropy.torch_module import active_module, lora_operands
from onchip.torch import LMHead, linear_cross_entropy

# What PEFT may have put in the place of a head.
OF_PEFT = (
    "peft.tuners.lora.layer.Linear",
    "peft.utils.other.ModulesToSaveWrapper",
    "peft.utils.other.TrainableTokensWrapper",
)


@dataclass
class Report:
    """What `patch` found, and what has happened since."""

    fused: bool
    """Whether losses of the model's logits will be fused."""
    reason: str
    """Why not, or what is fused."""
    losses: int = 0
    """Losses that were fused so far."""
    materialized: dict[str, int] = field(default_factory=dict)
    """What asked for the logits themselves, and how often."""

    def __str__(self) -> str:
        asked = "".join(f"\n  logits materialized {n} x for {what}" for what, n in self.materialized.items())
        return f"{'fused' if self.fused else 'not fused'}: {self.reason}; {self.losses} losses so far{asked}"


@dataclass
class _Patch:
    """What a patched model and its head share."""

    options: dict[str, Any]
    report: Report
    forward: Any  # the model's before
    own: bool  # which was the instance's own
    labels_at: int | None  # among forward's positional arguments
    watch: Any  # the handle of the hook that looks for a patch over this one
    armed: bool = False


def patch(
    model: nn.Module,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    scratch_bytes: ScratchBytes = None,
    backend: Backend = "auto",
    precision: Precision = "full",
) -> Report:
    """Compute the losses of a transformers model's logits by `linear_cross_entropy`, without storing the logits.

    Afterwards the model is called as before: with labels, by Trainer, under DDP, FSDP, accelerate or torch.compile.
    `outputs.loss` is the same but for rounding (16-bit logits are not rounded on the way), and `outputs.logits` are
    computed if something reads them.  Without labels a model in training mode, with gradients enabled, defers its
    logits too, for a loop that computes `F.cross_entropy` itself; otherwise, as in `generate`, nothing changes.
    A batch without a single label has loss 0, where transformers has NaN.

    Args:
        model: a model of transformers with a linear head (`get_output_embeddings`), or PEFT's around one.  It may be
            patched before or after it is wrapped.  Patching it again changes the options.
        label_smoothing, z_loss: added while the model is in training mode; see `linear_cross_entropy`.  Trainer's own
            `label_smoothing_factor` asks for the logits: leave it at 0 and pass label_smoothing here.
        scratch_bytes, backend, precision: as of `linear_cross_entropy`.

    Returns:
        `Report`: whether the model will be fused, or why not; it counts the fused losses, and what asked for logits.

    Raises:
        TypeError: not a module with `get_output_embeddings`, or an option of the wrong type.
        ValueError: an option out of range.

    Memory: that of `linear_cross_entropy`; a head that FSDP2 wraps alone is gathered twice in forward.

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
        fused: lm_head [64, 16] of LlamaForCausalLM; 1 losses so far
    """
    options = {
        "label_smoothing": label_smoothing,
        "z_loss": z_loss,
        "scratch_bytes": scratch_bytes,
        "backend": backend,
        "precision": precision,
    }
    base = _base_model(model)
    _try_options(options)
    unpatch(model)
    report = Report(*_found(base))
    if not report.fused:
        warnings.warn(f"onchip.integrations.transformers: not patched: {report.reason}", stacklevel=2)
        return report
    names = list(inspect.signature(type(base).forward).parameters)
    labels_at = names.index("labels") - 1 if "labels" in names else None
    watch, own = base.register_forward_pre_hook(_look_for_liger), "forward" in base.__dict__
    base.__dict__["_onchip"] = _Patch(options, report, base.forward, own, labels_at, watch)
    _patch_head(base)
    base.__dict__["forward"] = MethodType(wraps(type(base).forward)(_model_forward), base)
    return report


def unpatch(model: nn.Module) -> None:
    """Undo `patch`; a model that isn't patched is left as it is."""
    base = _base_model(model)
    made = base.__dict__.pop("_onchip", None)
    if made is None:
        return
    made.watch.remove()
    if not _of_liger(base.forward):  # which was put over ours, and stays
        del base.__dict__["forward"]
        if made.own:
            base.__dict__["forward"] = made.forward
    for module in base.modules():
        _restore(module)


def _base_model(model: Any) -> Any:
    """That of transformers, inside PEFT's."""
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()
    if not isinstance(model, nn.Module) or not hasattr(model, "get_output_embeddings"):
        raise TypeError(
            "patch: model must be a model of transformers, with get_output_embeddings; got "
            f"{type(model).__name__}.  For another module, use onchip.torch.LMHead or lm_loss"
        )
    return model


def _try_options(options: Mapping[str, Any]) -> None:
    """Raise for one that `linear_cross_entropy` would refuse, on any device."""
    if options["backend"] == "triton":
        options = {**options, "backend": "auto"}
    linear_cross_entropy(torch.zeros(1, 128), torch.zeros(128, 128), torch.zeros(1, dtype=torch.long), **options)


def _found(model: Any) -> tuple[bool, str]:
    """Whether the model can be fused, and what, or why not."""
    name, head = type(model).__name__, model.get_output_embeddings()
    if _of_liger(model.forward) or _of_liger(type(model).forward):
        return False, _patched_by_liger(name)
    if head is None:
        return False, f"{name} has no output embeddings"
    if (refusal := _head_refusal(head)) is not None:
        return False, f"the head of {name} {refusal}"
    where = next((n for n, x in model.named_modules() if x is head), "head")
    return True, f"{where} {list(_linear(head).weight.shape)} of {name}"


def _of_liger(forward: Any) -> bool:
    return "liger_kernel" in str(getattr(forward, "__module__", ""))


def _patched_by_liger(name: str) -> str:
    return (
        f"Liger has patched the forward of {name}, which then computes the loss itself; load the model without Liger's "
        "patch (use_liger_kernel=False), or do without onchip's"
    )


def _linear(head: nn.Module) -> Any:
    """The layer that holds the head's weight, inside FSDP's and PEFT's modules."""
    for name in ("_fsdp_wrapped_module", "original_module", "base_layer"):
        head = getattr(head, name, head)
    return head


def _head_refusal(head: Any) -> str | None:
    """Why losses of this head can't be fused, or None."""
    linear, head = _linear(head), _called(head)
    if not isinstance(linear, nn.Linear) or type(linear).forward not in (nn.Linear.forward, LMHead.forward):
        return f"is a {type(linear).__module__}.{type(linear).__name__}, not a plain nn.Linear"
    kind = f"{type(head).__module__}.{type(head).__name__}"
    if head is not linear and kind not in OF_PEFT:
        return f"is PEFT's {kind}, not plain LoRA"
    if variants := getattr(head, "lora_variant", None):
        return f"has an adapter that is not plain LoRA: {', '.join(type(x).__name__ for x in variants.values())}"
    if linear.weight.dtype not in DTYPES:
        return f"has a weight of {linear.weight.dtype}"
    if _grouped(head):
        return (
            "is in one group of fully_shard's with other modules, and its weight is gone after its forward; shard it "
            "alone, or with the model, or pass reshard_after_forward=False for the group"
        )
    return None


def _grouped(head: Any) -> bool:
    """Whether FSDP2 gathers it together with other modules, and shards them again once each was called."""
    return any(group.post_forward_mesh_info is not None for group in _groups(head))


def _groups(head: Any) -> Sequence[Any]:
    """FSDP2's groups of parameters of the head together with other modules, which may be called once in a forward."""
    state = head._get_fsdp_state() if hasattr(head, "_get_fsdp_state") else None
    if len(getattr(state, "_modules", ())) < 2:
        return ()
    several: Sequence[Any] | None = getattr(state, "_fsdp_param_groups", None)  # torch < 2.12 has at most one
    return [x for x in (getattr(state, "_fsdp_param_group", None),) if x] if several is None else several


def _sharded(model: Any) -> bool:
    """Whether FSDP or ZeRO-3 gathers the weights for the model's forward alone, whose results it must see."""
    weight = _linear(model.get_output_embeddings()).weight
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    marks = ("_fsdp_flattened", "ds_id")
    return isinstance(model, fsdp) or not isinstance(weight, nn.Parameter) or any(hasattr(weight, x) for x in marks)


# -------------------------------------------------------------------------------------------------- patched forwards


def _model_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The model's forward; its head defers the logits for as long as it lasts."""
    made: _Patch = self.__dict__["_onchip"]
    labels = kwargs.get("labels")
    if labels is None and made.labels_at is not None and made.labels_at < len(args):
        labels = args[made.labels_at]
    labelled = labels is not None or kwargs.get("shift_labels") is not None
    if not labelled and not (self.training and torch.is_grad_enabled() and not _sharded(self)):
        return made.forward(*args, **kwargs)
    _patch_head(self)
    made.armed = True
    try:
        return made.forward(*args, **kwargs)
    finally:
        made.armed = False


def _look_for_liger(model: Any, args: Any) -> None:
    """Before a call: has Liger put its own forward in the place of ours, as Trainer's use_liger_kernel does?"""
    report = model.__dict__["_onchip"].report
    if report.fused and _of_liger(model.forward):
        report.fused, report.reason = False, _patched_by_liger(type(model).__name__)
        warn(report.reason)


def _patch_head(model: Any) -> None:
    """Of whatever head there is now: PEFT or FSDP may have put another one in its place."""
    head, report = _called(model.get_output_embeddings()), model.__dict__["_onchip"].report
    if "_onchip_head" in head.__dict__ and not _grouped(head):
        return
    if report.fused and (refusal := _head_refusal(head)) is not None:
        report.fused, report.reason = False, f"the head of {type(model).__name__} now {refusal}"
        warn(report.reason)
    if not report.fused:
        for module in (head, _linear(head)):
            _restore(module)
        return
    _restore(_linear(head))
    head.__dict__["_onchip_head"] = Head(model.__dict__["_onchip"], model)
    head.__dict__["forward"] = MethodType(_head_forward, head)


def _restore(module: Any) -> None:
    """Give a patched head its own forward back."""
    if module.__dict__.pop("_onchip_head", None) is not None:
        del module.__dict__["forward"]


def _called(head: Any) -> Any:
    """The module whose forward FSDP calls once the weight is there."""
    while hasattr(head, "_fsdp_wrapped_module"):
        head = head._fsdp_wrapped_module
    return head


@dataclass
class Head:
    """What a patched head knows."""

    patch: _Patch
    model: Any

    def __call__(self, deferred: Deferred, **asked: Any) -> Any:
        """Through the module, so that FSDP gathers the weight."""
        head = self.model.get_output_embeddings()
        if not self.patch.armed:
            self._check_later(deferred, _called(head))
        kind = deferred.hidden.device.type
        # Where FSDP2 keeps a group's weights after forward, as accelerate has it, they are there.
        kept = _groups(_called(head)) and not _grouped(_called(head)) and isinstance(_linear(head).weight, nn.Parameter)
        with torch.autocast(kind, deferred.autocast, enabled=deferred.autocast is not None):
            return (head.forward if kept else head)(deferred.hidden, **asked)

    def _check_later(self, deferred: Deferred, head: Any) -> None:
        """Raise where what was deferred can't be computed after the model's forward."""
        if deferred.with_gradients and _sharded(self.model):
            raise RuntimeError(
                "onchip.integrations.transformers: a model that FSDP or ZeRO-3 shards must compute losses of its "
                "logits in its own forward, where the weights are: pass it the labels, and for the logits call the "
                "model under torch.no_grad"
            )
        if deferred.versions not in (None, _versions(head)):
            raise RuntimeError(
                "onchip.integrations.transformers: the head's weight was changed since these logits were deferred; "
                "read outputs.logits before optimizer.step()"
            )


def _head_forward(self: Any, hidden: Tensor, *args: Any, onchip: str = "", **kwargs: Any) -> Any:
    """The head's forward, which defers; or what is made of the deferred logits later, here, where the weight is."""
    head: Head = self.__dict__["_onchip_head"]
    if onchip == "loss":
        return _loss(self, hidden, **kwargs)
    if onchip == "logits" or not head.patch.armed or hidden.dtype not in DTYPES or args or kwargs:
        return type(self).forward(self, hidden, *args, **kwargs)
    shape = (*hidden.shape[:-1], _linear(self).out_features)
    kind = hidden.device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    versions = None if torch.compiler.is_compiling() else _versions(self)
    made = Deferred(head, hidden, shape[-1], autocast, versions, torch.is_grad_enabled())
    return DeferredLogits.of(made, shape, autocast or hidden.dtype)


def _versions(head: Any) -> list[int]:
    """What tells a parameter that was changed in place, as an optimizer does."""
    return [p._version for p in head.parameters()]


def _loss(head: Any, hidden: Tensor, target: Tensor, vocab: int, **options: Any) -> Tensor:
    """Of rows of hidden states; `vocab`: the logits before it alone."""
    hidden, weight, bias = _operands(head, hidden)
    if vocab < len(weight):
        weight, bias = weight[:vocab], None if bias is None else bias[:vocab]
    loss: Tensor = linear_cross_entropy(hidden, weight, target, bias, **options)
    return loss


def _operands(head: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Whose product the logits are: of a linear layer, or of PEFT's around one."""
    if isinstance(head, nn.Linear):
        return hidden, head.weight, head.bias
    if type(head).__name__ == "TrainableTokensWrapper":
        return hidden, head.weight, head.original_module.bias  # with the trained rows in place of the others
    if type(head).__name__ == "ModulesToSaveWrapper":
        return _operands(active_module(head), hidden)
    return lora_operands("patch", head, hidden)
