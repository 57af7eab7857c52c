"""A language model's head that gives logits or their loss, and the loss for heads of other classes."""

import inspect
import math
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar, Unpack, overload

import torch
from torch import Tensor
from torch.nn import Linear, Module, Parameter
from torch.types import Device

from onchip.frontend.options import No, Yes
from onchip.frontend.torch_inputs import dtype_name, is_dtensor, refuse_transforms, require_tensor
from onchip.frontend.torch_model import WRAPPERS, inner_model, own_logits
from onchip.frontend.torch_module import described, stand_in, typed_as
from onchip.frontend.torch_types import Result, WithStats
from onchip.ops.linear_cross_entropy.torch_op import (
    HeadKeywords,
    HeadModuleKeywords,
    LinearCrossEntropyLoss,
    linear_cross_entropy,
)

OPTIONS = tuple(inspect.signature(LinearCrossEntropyLoss).parameters)
# The module of the hooks that the styles of `parallelize_module` register.
PLAN = "torch.distributed.tensor._api"
# Modules whose hooks gather or compute a weight, and leave the result of forward alone.
OF_WEIGHTS = ("torch.distributed.", "torch.nn.utils.", "deepspeed.", "onchip.integrations.parallelize")
# The remedy for a model whose logits can't be followed.
HEAD_ALONE = (
    "pass its head instead, as model.get_output_embeddings(), with the model's own softcap= and logit_scale=, and as "
    "hidden what the head is called with"
)
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")

Made = TypeVar("Made")
Compute = Callable[[Tensor, Tensor, Tensor | None], Made]
"""A function of hidden states, a weight and a bias, which is called while the whole weight is in memory."""

# Three of PEFT's classes: module and name.
LORA = ("peft.tuners.lora.layer", "Linear")
SAVED = ("peft.utils.other", "ModulesToSaveWrapper")
TOKENS = ("peft.utils.other", "TrainableTokensWrapper")
# What to call for a head in the last one, whose `weight` has the trained rows.
WITH_TOKENS = {
    "lm_loss": "linear_cross_entropy(hidden, head.weight, labels, head.original_module.bias, shift=True)",
    "lm_log_probs": "linear_log_probs(hidden, head.weight, ids, head.original_module.bias, shift=True)",
    "lm_jsd": "linear_jsd with head.weight and head.original_module.bias, whose target is shifted by the caller",
}


class LMHead(Linear, Generic[Result]):
    """`torch.nn.Linear` that also computes the loss of its logits: `linear_cross_entropy` in its own forward.

    `head(hidden)` gives the logits, as `nn.Linear` does.  `head(hidden, labels)` gives their loss, without storing
    them.

    Under FSDP, FSDP2 and DeepSpeed's ZeRO-3, which gather weights when a module is called and free them afterwards,
    call the module rather than `linear_cross_entropy(hidden, head.weight, labels)`.  Parameters, their names, initial
    values and the state_dict are those of nn.Linear.

    Labels are as the data has them, and the head shifts them: position i is compared with label i + 1.  If yours are
    shifted already, so that position i is to predict label i, pass shift=False, here or with each call.

    Args:
        in_features, out_features, bias, device, dtype: as in `torch.nn.Linear`: H, V, and whether there is a bias.
        options: the options of `LinearCrossEntropyLoss`, as defaults for each call; shift is True here unless given.
            They don't change the logits that `head(hidden)` gives: softcap and logit_scale affect only the loss.

    Raises:
        TypeError, ValueError: there is no such option, or its value is wrong.

    Example:
        >>> import torch
        >>> from onchip.torch import LMHead
        >>> head = LMHead(16, 100, bias=False, softcap=30.0)
        >>> hidden, labels = torch.randn(2, 8, 16), torch.randint(100, (2, 8))
        >>> head(hidden, labels).backward()
        >>> head.weight.grad.shape, head(hidden).shape
        (torch.Size([100, 16]), torch.Size([2, 8, 100]))
    """

    @overload
    def __init__(
        self: "LMHead[Tensor]",
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[HeadModuleKeywords[No]],
    ) -> None: ...
    @overload
    def __init__(
        self: "LMHead[WithStats]",
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[HeadModuleKeywords[Yes]],
    ) -> None: ...
    @overload
    def __init__(
        self: "LMHead[Tensor | WithStats]",
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[HeadModuleKeywords[bool]],
    ) -> None: ...
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self._set_options(options)

    def _set_options(self, options: Mapping[str, Any]) -> None:
        for name in options:
            if name not in OPTIONS:
                raise TypeError(f"LMHead: there is no option {name!r}; options are {', '.join(OPTIONS)}")
        LinearCrossEntropyLoss(**options)  # checks them
        self.options = dict(options)

    @overload
    @classmethod
    def from_linear(cls, linear: Module, **options: Unpack[HeadModuleKeywords[No]]) -> "LMHead[Tensor]": ...
    @overload
    @classmethod
    def from_linear(cls, linear: Module, **options: Unpack[HeadModuleKeywords[Yes]]) -> "LMHead[WithStats]": ...
    @overload
    @classmethod
    def from_linear(
        cls, linear: Module, **options: Unpack[HeadModuleKeywords[bool]]
    ) -> "LMHead[Tensor | WithStats]": ...
    @classmethod
    def from_linear(cls, linear: Module, **options: Any) -> "LMHead[Any]":
        """A head that shares the parameters of `linear`, without copying them, and has its training mode.

        A weight that is tied to an embedding stays tied.  Convert a model's head before FSDP2 or PEFT wraps it.

        Args:
            linear: the layer to replace, a plain `torch.nn.Linear`.  The head takes over hooks that gather its weight
                (DeepSpeed's).
            options: as in the class.

        Raises:
            TypeError: `linear` has another class, or a forward of its own, which may do more.
            RuntimeError: it has other hooks, which expect logits and would be given a loss.

        Example:
            >>> import torch
            >>> from onchip.torch import LMHead
            >>> model = torch.nn.ModuleDict({"lm_head": torch.nn.Linear(16, 100, bias=False)})
            >>> weight = model["lm_head"].weight
            >>> model["lm_head"] = LMHead.from_linear(model["lm_head"])
            >>> model["lm_head"].weight is weight
            True
        """
        made = stand_in(cls, linear)
        _refuse_hooks_of_logits("LMHead.from_linear", linear)
        made._set_options(options)
        return made

    @overload
    def forward(self, input: Tensor, labels: None = None) -> Tensor: ...
    @overload
    def forward(self, input: Tensor, labels: Tensor, **options: Unpack[HeadKeywords]) -> Result: ...
    @overload
    def forward(
        self, input: Tensor, labels: Tensor, *, return_stats: Literal[False], **options: Unpack[HeadKeywords]
    ) -> Tensor: ...
    @overload
    def forward(
        self, input: Tensor, labels: Tensor, *, return_stats: Literal[True], **options: Unpack[HeadKeywords]
    ) -> WithStats: ...
    @overload
    def forward(self, input: Tensor, *, compute: Compute[Made]) -> Made: ...
    def forward(
        self, input: Tensor, labels: Tensor | None = None, *, compute: Compute[Any] | None = None, **options: Any
    ) -> Any:
        """The logits of `input`, or with labels their loss.

        Args:
            input: [..., S, H] hidden states.
            labels: [..., S] of any integer dtype, as the data has them: position i is compared with label i + 1.  With
                shift=False position i is compared with label i.
            compute: instead of labels, a function: the head returns `compute(input, weight, bias)`, called while the
                whole weight is in memory.  `lm_log_probs` and `lm_jsd` call the head in this way.
            options: arguments of `linear_cross_entropy`, which override the module's.  If the weight is sharded over
                the vocabulary, pass vocab_group, or input as a DTensor.

        Returns:
            [..., S, V] without labels; with them what `linear_cross_entropy` returns: the loss, or with return_stats
            `(loss, LinearCrossEntropyStats)`.

        Raises:
            TypeError: there are options but no labels, or normalizer has a 16-bit dtype, as when mixed precision casts
                a module's arguments.
            RuntimeError: the whole weight isn't in memory, the head is planned as PyTorch's `ColwiseParallel`, or it
                has hooks, which expect logits and would be given the loss.
            Otherwise what `linear_cross_entropy` raises.

        Warns:
            UserWarning: labels on the CPU look shifted already, and shift is given neither here nor to the module.
        """
        if labels is None and compute is None:
            if options:
                raise TypeError(f"LMHead: {', '.join(options)} can only be given with labels, as options of their loss")
            return super().forward(input)
        if any(getattr(hook, "__module__", "") == PLAN for hook in self._forward_hooks.values()):
            raise RuntimeError(
                "LMHead: PyTorch's ColwiseParallel would treat the loss as logits; plan the head as "
                "onchip.integrations.parallelize.HeadParallel, with the same arguments"
            )
        _refuse_hooks_of_logits("LMHead", self)
        if compute is not None:
            if labels is not None or options:
                raise TypeError("LMHead: compute takes only input, weight and bias; pass no labels or options")
            return compute(input, self.weight, self.bias)
        assert labels is not None
        if not (options.get("vocab_group") is not None or is_dtensor(input)):
            _require_whole("LMHead", self.weight)
        normalizer = options.get("normalizer")
        if isinstance(normalizer, Tensor) and normalizer.is_floating_point() and normalizer.itemsize < 4:
            raise TypeError(
                f"LMHead: normalizer is {dtype_name(normalizer.dtype)}, which can't hold a large count; FSDP's mixed "
                "precision casts a module's floating-point arguments: pass an integer tensor or a number"
            )
        options = with_shift("LMHead", labels, self.options | options)
        return linear_cross_entropy(input, self.weight, labels, self.bias, **options)

    if TYPE_CHECKING:  # torch.nn.Module.__call__ has no types

        @typed_as(forward)
        def __call__(self, *given: Any, **options: Any) -> Any: ...

    def extra_repr(self) -> str:
        """What nn.Linear shows, whether labels are shifted, and the options that were given."""
        options = {"shift": True} | self.options
        return ", ".join([super().extra_repr(), *(f"{name}={x!r}" for name, x in options.items())])


@overload
def lm_loss(  # type: ignore[overload-overlap]  # an LMHead is a Module
    head: LMHead[Result], hidden: Tensor, labels: Tensor, **options: Unpack[HeadKeywords]
) -> Result: ...
@overload
def lm_loss(
    head: Module,
    hidden: Tensor,
    labels: Tensor,
    *,
    return_stats: Literal[False] = False,
    **options: Unpack[HeadKeywords],
) -> Tensor: ...
@overload
def lm_loss(
    head: Module, hidden: Tensor, labels: Tensor, *, return_stats: Literal[True], **options: Unpack[HeadKeywords]
) -> WithStats: ...
def lm_loss(head: Module, hidden: Tensor, labels: Tensor, **options: Any) -> Any:
    """The loss of a language model's head, whatever its class, without storing the logits.

    The result is exactly that of `linear_cross_entropy` for the logits that `head(hidden)` would give; where that can't
    be, the call raises.

    Args:
        head: one of these.

            - An `LMHead`, alone or inside DistributedDataParallel, FSDP or torch.compile.  It is called.
            - A plain `torch.nn.Linear` whose whole weight is in memory.  Under FSDP that is so inside the forward of
              the module that FSDP wraps, if the head isn't wrapped by itself.
            - PEFT's LoRA layer around one of these two, with any number of active adapters, dropout and lora_bias.
            - PEFT's wrapper for `modules_to_save` around one of these two.
            - A whole model whose `get_output_embeddings()` is one of these, as in transformers, alone or inside PEFT,
              DistributedDataParallel, FSDP, DeepSpeed or torch.compile.  If the model scales its logits (Cohere,
              Granite) or caps them (Gemma 2), so does the loss.  To find that out, each call runs the model's own
              forward without its layers on the CPU, which takes some milliseconds; torch.compile does it once.
        hidden: [..., S, H], what the head would be called with: for a model the `last_hidden_state` of its body, as in
            `model.get_decoder()(input_ids).last_hidden_state`.
        labels: [..., S] of any integer dtype, as the data has them: position i is compared with label i + 1.  With
            shift=False position i is compared with label i.
        options: arguments of `linear_cross_entropy`; they override the options of an `LMHead`, also of one inside
            PEFT's layer.  shift is True unless the head says otherwise.  If you pass a head alone, pass its model's
            softcap and logit_scale too; for a whole model they are found, and can't be changed.

    Returns:
        What `linear_cross_entropy` returns: the loss, or with return_stats `(loss, LinearCrossEntropyStats)`.

    Raises:
        TypeError: the head has another class, an adapter of another kind, or trainable tokens of PEFT's (the message
            says what to call); or the model does more to its logits than scale and cap them, or its forward can't be
            followed: then pass its head.
        ValueError: softcap or logit_scale isn't the model's.
        RuntimeError: the head's whole weight isn't in memory, or the head has hooks, which must run: make it an
            `LMHead`.  Or PEFT's adapters are merged and disabled.
        Otherwise what `linear_cross_entropy` raises.

    Memory: that of `linear_cross_entropy`.  LoRA, with adapters whose ranks add up to r, adds a weight [V, H + r] and
    its gradient, even if the head's own weight is frozen.

    Example:
        >>> import torch
        >>> from onchip.torch import lm_loss
        >>> head = torch.nn.Linear(16, 100, bias=False)
        >>> hidden, labels = torch.randn(2, 8, 16), torch.randint(100, (2, 8))
        >>> loss = lm_loss(head, hidden, labels)
        >>> logits = head(hidden)[:, :-1].flatten(0, 1)
        >>> torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten()))

    Sources: as `linear_cross_entropy`; LoRA (arXiv:2106.09685), for the adapters.
    """
    for name, x in (("hidden", hidden), ("labels", labels)):
        require_tensor("lm_loss", name, x)
    head, own = found_head("lm_loss", head, options)
    if isinstance(called(head), LMHead):
        return head(hidden, labels=labels, **own | options)  # by name, so that no pre-hook drops the labels
    operands = linear_operands("lm_loss", head, hidden)
    options = with_shift("lm_loss", labels, stored_options(head) | own | options)
    return linear_cross_entropy(operands.hidden, operands.weight, labels, operands.bias, **options)


def found_head(op: str, given: Any, options: Mapping[str, Any], remedy: str = HEAD_ALONE) -> tuple[Any, dict[str, Any]]:
    """The head, given alone or in a model, and the options with which a loss repeats what the model does to its logits.

    Raises ValueError if the caller's `options`, or an LMHead's, contradict these, and TypeError, with the remedy, if
    it isn't known what the model does.
    """
    model = inner_model(given)
    if model is None:
        _refuse_trained_tokens(op, given)
        return given, {}
    head = model.get_output_embeddings()
    if head is None:
        raise TypeError(f"{op}: {type(model).__name__} has no output embeddings; pass its head, the last linear layer")
    _refuse_trained_tokens(op, head, model)
    softcap, logit_scale = own_logits(op, model, head, remedy)
    own: dict[str, Any] = {"softcap": softcap, "logit_scale": logit_scale}
    for whose, said in (("an LMHead with", stored_options(head)), ("got", options)):
        for name, x in own.items():
            other = said.get(name, x)
            numbers = isinstance(x, float) and isinstance(other, int | float)
            if other != x and not (numbers and math.isclose(x, other, rel_tol=1e-5)):
                raise ValueError(
                    f"{op}: {whose} {name}={other}, but the logits of {type(model).__name__} have {name}={x}; leave it "
                    "out, or pass the head alone, as model.get_output_embeddings()"
                )
    return head, own


def _refuse_trained_tokens(op: str, head: Any, model: Any = None) -> None:
    """Raise for a head whose weight PEFT computes, with the rows of its trainable tokens."""
    if _is_of_peft(head, *TOKENS):
        found = "" if model is None else ", where head is model.get_output_embeddings()"
        scaled = "" if op == "lm_jsd" else ", with the model's own softcap= and logit_scale="
        raise TypeError(
            f"{op}: PEFT trains some rows of this head (trainable_token_indices); call {WITH_TOKENS[op]}{found}{scaled}"
        )


def computed(op: str, head: Any, hidden: Tensor, compute: Compute[Made], *, sharded: bool = False) -> Made:
    """`compute(hidden, weight, bias)` for a head; for an LMHead it is called in the head's forward.

    The weight is whole, unless the vocabulary is `sharded`.
    """

    def checked(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Made:
        if not (sharded or is_dtensor(hidden)):
            _require_whole(op, weight)
        return compute(hidden, weight, bias)

    if isinstance(called(head), LMHead):
        made: Made = head(hidden, compute=checked)
        return made
    return compute(*linear_operands(op, head, hidden))


def with_shift(op: str, labels: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The options, with shift=True if it isn't among them; then warn of labels that look shifted already."""
    if "shift" not in options and _seem_shifted(labels, options.get("ignore_index", -100)):
        warnings.warn(
            f"{op}: these labels look shifted already: the last one of each sequence is ignored, and no other; {op} "
            "shifts them by one, so that position i predicts label i + 1.  Pass shift=False if position i predicts "
            "label i, or shift=True if the labels are as the data has them",
            stacklevel=3,
        )
    default: dict[str, Any] = {"shift": True}
    return default | options


def _seem_shifted(labels: Any, ignore_index: Any) -> bool:
    """Whether these labels are plain, on the CPU, and like `F.pad(ids[:, 1:], (0, 1), value=ignore_index)`."""
    plain = type(labels) is Tensor and labels.device.type == "cpu" and labels.ndim > 0 and labels.shape[-1] > 1
    if not plain or labels.is_floating_point() or torch.compiler.is_compiling() or type(ignore_index) is not int:
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():
        return False
    last = labels[..., -1] == ignore_index
    return bool(last.all()) and int((labels == ignore_index).sum()) == last.numel()


class HeadOperands(NamedTuple):
    """The logits of a head are hidden @ weight.T + bias."""

    hidden: Tensor  # [..., K]
    weight: Tensor  # [V, K]
    bias: Tensor | None  # [V]


def linear_operands(op: str, head: Module, hidden: Tensor) -> HeadOperands:
    """The operands that a loss of a linear layer takes for `head`; raises what `lm_loss` raises.

    K is H, and under LoRA H plus the ranks of the active adapters: [hidden, s A d(hidden)] and [weight, B], with a
    scale s and a dropout d.  That is exact, also with dropout and for small adapters, which would be rounded away if
    they were added to a 16-bit weight.
    """
    if _is_of_peft(head, *SAVED):
        _refuse_hooks(op, head)
        return linear_operands(op, active_module(head), hidden)
    if _is_of_peft(head, *LORA):
        _refuse_hooks(op, head)
        return lora_operands(op, head, hidden)
    return HeadOperands(hidden, *_parameters(op, head))


def _parameters(op: str, head: Any) -> tuple[Tensor, Tensor | None]:
    """The weight and bias of a linear layer that does no more than multiply and add."""
    own_forward = getattr(type(head), "forward", None) not in (Linear.forward, LMHead.forward)
    if not isinstance(head, Linear) or own_forward or "forward" in vars(head):
        raise TypeError(
            f"{op}: head must be a torch.nn.Linear or an LMHead, or one of these in PEFT's LoRA layer or "
            f"modules_to_save, or a model with get_output_embeddings; got {described(head)}, whose logits may be "
            "something else; use an LMHead in its place, and call that with labels"
        )
    _refuse_hooks(op, head)
    _require_whole(op, head.weight)
    return head.weight, head.bias


def _require_whole(op: str, weight: Tensor) -> None:
    """Raise for a weight that is sharded, or was freed."""
    refuse_transforms(op)  # their tensors have no memory to look for
    plain = type(weight) in (Tensor, Parameter)
    whole = plain or not is_dtensor(weight)
    if plain and not torch.compiler.is_compiling() and not weight.is_meta:
        whole = weight.ndim == 2 and weight.untyped_storage().nbytes() > 0
    if not whole:
        raise RuntimeError(
            f"{op}: the head's weight is sharded, as weights under FSDP are outside forward.  Call this inside the "
            "forward of the module that FSDP wraps; or replace the head by LMHead.from_linear(head) before wrapping, "
            "and wrap it by itself.  Under tensor parallelism call an LMHead with vocab_group"
        )


def _refuse_hooks(op: str, module: Any) -> None:
    """Raise for a module with hooks, which don't run where its parameters are read without calling it."""
    _refuse_hooks_of_logits(op, module)
    if any(getattr(module, name) for name in HOOKS):
        raise RuntimeError(
            f"{op}: {described(module)} has hooks that run only when it is called, like those that gather a weight "
            "under FSDP2 and DeepSpeed; replace the head by LMHead.from_linear(head) before wrapping, or, under PEFT, "
            "leave it to the fully_shard of the module around it"
        )


def _refuse_hooks_of_logits(op: str, module: Any) -> None:
    """Raise for a module with hooks that may read or change logits, since no logits are computed."""
    for name in HOOKS:
        for hook in getattr(module, name).values():
            hook = getattr(hook, "func", hook)  # a partial's function
            if not (getattr(hook, "__module__", None) or "").startswith(OF_WEIGHTS):
                raise RuntimeError(
                    f"{op}: {described(module)} has a {name[1:-1].replace('_', ' ')}, "
                    f"{getattr(hook, '__qualname__', type(hook).__name__)}, which expects logits, but none are "
                    "computed; remove it, or compute the logits and pass them to onchip.torch.cross_entropy, as "
                    "cross_entropy(head(hidden), labels, shift=True), or to log_probs or jsd"
                )


# --------------------------------------------------------------------------------------------------- inside of wrappers


def called(head: Any) -> Any:
    """The module to which a call of `head` passes all its arguments."""
    if (inside := WRAPPERS.get(type(head).__name__)) is not None:
        return called(getattr(head, inside))
    return called(active_module(head)) if _is_of_peft(head, *SAVED) else head


def _is_of_peft(head: Any, module: str, name: str) -> bool:
    """Whether `head` is an instance of this class of PEFT's, with the class's forward; PEFT need not be installed."""
    kind = getattr(sys.modules.get(module), name, None)
    if kind is None or not isinstance(head, kind):
        return False
    return type(head).forward is kind.forward and "forward" not in vars(head)


def active_module(wrapper: Any) -> Any:
    """The module that a `ModulesToSaveWrapper` calls."""
    active = [name for name in wrapper.active_adapters if name in wrapper.modules_to_save]
    return wrapper.original_module if wrapper.disable_adapters or not active else wrapper.modules_to_save[active[0]]


def stored_options(head: Any) -> dict[str, Any]:
    """The options of an LMHead, also where something has wrapped it."""
    while (inside := WRAPPERS.get(type(head).__name__)) is not None:
        head = getattr(head, inside)
    for name in ("original_module", "base_layer"):
        head = getattr(head, name, head)
    return head.options if isinstance(head, LMHead) else {}


def lora_operands(op: str, head: Any, hidden: Tensor) -> HeadOperands:
    """As `linear_operands`, for PEFT's LoRA layer, which may be the module that is being called."""
    weight, bias = _parameters(op, head.base_layer)
    if head.disable_adapters and head.merged:
        raise RuntimeError(f"{op}: head's adapters are merged into its weight, but disabled; call head.unmerge()")
    rows, columns = [hidden], [weight]
    for name in head.active_adapters if not (head.disable_adapters or head.merged) else ():
        if name not in head.lora_A:
            continue
        if name in head.lora_variant:
            raise TypeError(
                f"{op}: head's adapter {name!r} is a {type(head.lora_variant[name]).__name__}, whose logits aren't a "
                "sum of two products; use plain LoRA for the head, or merge the adapter"
            )
        down, scale = head.lora_A[name], head.scaling[name]
        up, up_bias = _parameters(op, head.lora_B[name])
        rows.append((down(head.lora_dropout[name](hidden.to(down.weight.dtype))) * scale).to(hidden.dtype))
        columns.append(up.to(weight.dtype))
        if up_bias is not None:
            bias = (up_bias * scale).to(weight.dtype) + (0 if bias is None else bias)
    if len(rows) == 1:
        return HeadOperands(hidden, weight, bias)
    return HeadOperands(torch.cat(rows, -1), torch.cat(columns, -1), bias)
