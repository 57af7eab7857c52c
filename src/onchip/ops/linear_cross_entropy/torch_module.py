"""A language model's head that gives logits or their loss, and the loss of heads of other classes."""

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
# Where the hooks are from that styles of `parallelize_module` register.
PLAN = "torch.distributed.tensor._api"
# Where hooks are from that gather or make a weight, and take what forward gives as it is.
OF_WEIGHTS = ("torch.distributed.", "torch.nn.utils.", "deepspeed.", "onchip.integrations.parallelize")
# For a model that isn't understood.
HEAD_ALONE = (
    "pass the head in its place, as model.get_output_embeddings(), with the model's own softcap= and logit_scale=, and "
    "as hidden what the head is called with"
)
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")

Made = TypeVar("Made")
Compute = Callable[[Tensor, Tensor, Tensor | None], Made]
"""What is made of hidden states, a weight and a bias, while that weight is here as a whole."""

# Classes of PEFT's: the module and the name.
LORA = ("peft.tuners.lora.layer", "Linear")
SAVED = ("peft.utils.other", "ModulesToSaveWrapper")


class LMHead(Linear, Generic[Result]):
    """`torch.nn.Linear` that also computes the loss of its logits: `linear_cross_entropy` in its own forward.

    `head(hidden)` gives the logits as `nn.Linear` does.  `head(hidden, labels)` gives their loss, without storing them.

    Call the module rather than `linear_cross_entropy(hidden, head.weight, labels)` wherever something gathers weights
    when a module is called, and frees them afterwards: FSDP, FSDP2 and DeepSpeed's ZeRO-3.  Parameters, their names,
    initial values and the state_dict are nn.Linear's.

    Labels are shifted: they are those that the data has, and position i is compared with label i + 1.  Where yours are
    shifted already, so that position i is to predict label i, pass shift=False, here or with each call.

    Args:
        in_features, out_features, bias, device, dtype: as in `torch.nn.Linear`: H, V, and whether there is a bias.
        options: those of `LinearCrossEntropyLoss`, as defaults of each call, but for shift, which is True here.  They
            don't change the logits that `head(hidden)` gives: softcap and logit_scale affect only the loss.

    Raises:
        TypeError, ValueError: an option that there isn't, or a wrong one.

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
        *,
        return_stats: Literal[False] = False,
        **options: Unpack[HeadModuleKeywords],
    ) -> None: ...
    @overload
    def __init__(
        self: "LMHead[WithStats]",
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        return_stats: Literal[True],
        **options: Unpack[HeadModuleKeywords],
    ) -> None: ...
    @overload
    def __init__(
        self: "LMHead[Tensor | WithStats]",
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        return_stats: bool,
        **options: Unpack[HeadModuleKeywords],
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
        LinearCrossEntropyLoss(**options)  # which checks them
        self.options = dict(options)

    @overload
    @classmethod
    def from_linear(
        cls, linear: Module, *, return_stats: Literal[False] = False, **options: Unpack[HeadModuleKeywords]
    ) -> "LMHead[Tensor]": ...
    @overload
    @classmethod
    def from_linear(
        cls, linear: Module, *, return_stats: Literal[True], **options: Unpack[HeadModuleKeywords]
    ) -> "LMHead[WithStats]": ...
    @overload
    @classmethod
    def from_linear(
        cls, linear: Module, *, return_stats: bool, **options: Unpack[HeadModuleKeywords]
    ) -> "LMHead[Tensor | WithStats]": ...
    @classmethod
    def from_linear(cls, linear: Module, **options: Any) -> "LMHead[Any]":
        """A head with the parameters of `linear` themselves, not copies, and its training mode.

        A weight that is tied to an embedding stays tied.  Convert a model's head before FSDP2 or PEFT wraps it.

        Args:
            linear: the layer to stand in for; a plain `torch.nn.Linear`.  Hooks that gather its weight (DeepSpeed's)
                go with it.
            options: as in the class.

        Raises:
            TypeError: `linear` is of another class, or has a forward of its own, which may do more.
            RuntimeError: it has hooks of another kind, which are made for logits and would be given a loss.

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
                shift=False those that each position is to predict.
            compute: instead of labels, what to return: `compute(input, weight, bias)`, called here, where the weight is
                whole.  `lm_log_probs` and `lm_jsd` call a head so.
            options: arguments of `linear_cross_entropy`, which override the module's.  With a weight that is sharded
                over the vocabulary, input is a DTensor or vocab_group is among them.

        Returns:
            [..., S, V] without labels; with them what `linear_cross_entropy` returns: the loss, or with return_stats
            `(loss, LinearCrossEntropyStats)`.

        Raises:
            TypeError: options without labels; a normalizer of 16 bits, as mixed precision's casts of a module's
                arguments make it.
            RuntimeError: the weight isn't here as a whole, a plan has the head as PyTorch's `ColwiseParallel`, or the
                head has hooks, which would be given the loss for logits.
            Otherwise as `linear_cross_entropy`.

        Warns:
            UserWarning: labels look shifted already, and shift is given neither here nor to the module (on the CPU).
        """
        if labels is None and compute is None:
            if options:
                raise TypeError(f"LMHead: {', '.join(options)} can only be given with labels, as options of their loss")
            return super().forward(input)
        if any(getattr(hook, "__module__", "") == PLAN for hook in self._forward_hooks.values()):
            raise RuntimeError(
                "LMHead: PyTorch's ColwiseParallel would take the loss for logits; plan the head as "
                "onchip.integrations.parallelize.HeadParallel, with the same arguments"
            )
        _refuse_hooks_of_logits("LMHead", self)
        if compute is not None:
            if labels is not None or options:
                raise TypeError("LMHead: compute is given input, weight and bias alone; pass no labels or options")
            return compute(input, self.weight, self.bias)
        assert labels is not None
        if not (options.get("vocab_group") is not None or is_dtensor(input)):
            _require_whole("LMHead", self.weight)
        normalizer = options.get("normalizer")
        if isinstance(normalizer, Tensor) and normalizer.is_floating_point() and normalizer.itemsize < 4:
            raise TypeError(
                f"LMHead: normalizer is {dtype_name(normalizer.dtype)}, which holds no large count; FSDP's mixed "
                "precision casts the floats that a module is given: pass an integer tensor or a number"
            )
        options = with_shift("LMHead", labels, self.options | options)
        return linear_cross_entropy(input, self.weight, labels, self.bias, **options)

    if TYPE_CHECKING:  # torch.nn.Module's has no types

        @typed_as(forward)
        def __call__(self, *given: Any, **options: Any) -> Any: ...

    def extra_repr(self) -> str:
        """nn.Linear's, whether labels are shifted, and the options that were given."""
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

    It is `linear_cross_entropy` of what `head(hidden)` would be, exactly, or it raises.

    Args:
        head: one of these.

            - An `LMHead`, also inside of DistributedDataParallel, FSDP or torch.compile: it is called.
            - A `torch.nn.Linear` whose weight lies here as a whole: a plain one; inside the forward of the module that
              FSDP wraps, where the head isn't wrapped itself.
            - PEFT's LoRA layer of one of these two, with any number of active adapters, dropout and lora_bias.
            - PEFT's wrapper for `modules_to_save` of one of these two.
            - A whole model that has one of these as its `get_output_embeddings()`, as transformers' have, also inside
              of PEFT's, DistributedDataParallel, FSDP, DeepSpeed or torch.compile.  What the model does to its logits,
              a scale (Cohere, Granite) or a softcap (Gemma 2), enters the loss: it is found by running the model's own
              forward without its layers, on the CPU, in each call (some milliseconds); torch.compile does it
              once.
        hidden: [..., S, H], what the head would be called with: for a model the `last_hidden_state` of its body, as in
            `model.get_decoder()(input_ids).last_hidden_state`.
        labels: [..., S] of any integer dtype, as the data has them: position i is compared with label i + 1.  With
            shift=False those that each position is to predict.
        options: arguments of `linear_cross_entropy`; they override those that an `LMHead` has, also inside of PEFT's
            layer.  shift is True unless the head says otherwise.  softcap and logit_scale of a head that is given alone
            must be passed where its model has them; a model's own can't be changed.

    Returns:
        What `linear_cross_entropy` returns: the loss, or with return_stats `(loss, LinearCrossEntropyStats)`.

    Raises:
        TypeError: a head of another class, or an adapter of another kind; a model whose logits are anything but its
            head's, scaled or capped, or whose forward can't be followed: pass its head.
        ValueError: a softcap or logit_scale that isn't the model's.
        RuntimeError: the head's weight isn't here as a whole, or the head has hooks, which must run: make it an
            `LMHead`.  PEFT's adapters are merged and disabled.
        Otherwise as `linear_cross_entropy`.

    Memory: `linear_cross_entropy`'s.  Under LoRA, with adapters of rank r in all, also a weight [V, H + r] and its
    gradient, even if the head's own weight is frozen.

    Example:
        >>> import torch
        >>> from onchip.torch import lm_loss
        >>> head = torch.nn.Linear(16, 100, bias=False)
        >>> hidden, labels = torch.randn(2, 8, 16), torch.randint(100, (2, 8))
        >>> loss = lm_loss(head, hidden, labels)
        >>> logits = head(hidden)[:, :-1].flatten(0, 1)
        >>> torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten()))
    """
    for name, x in (("hidden", hidden), ("labels", labels)):
        require_tensor("lm_loss", name, x)
    head, own = found_head("lm_loss", head, options)
    if isinstance(called(head), LMHead):
        return head(hidden, labels=labels, **own | options)  # by name, so that no pre-hook drops them
    operands = linear_operands("lm_loss", head, hidden)
    options = with_shift("lm_loss", labels, stored_options(head) | own | options)
    return linear_cross_entropy(operands.hidden, operands.weight, labels, operands.bias, **options)


def found_head(op: str, given: Any, options: Mapping[str, Any], remedy: str = HEAD_ALONE) -> tuple[Any, dict[str, Any]]:
    """The head that is given, alone or in a model, and what the model itself does to its logits: options of a loss.

    Raises ValueError where the caller's `options`, or those that an LMHead has, say something else, and TypeError, with
    the remedy, where what the model does isn't known.
    """
    model = inner_model(given)
    if model is None:
        return given, {}
    head = model.get_output_embeddings()
    if head is None:
        raise TypeError(f"{op}: {type(model).__name__} has no output embeddings; pass its head, the last linear layer")
    softcap, logit_scale = own_logits(op, model, head, remedy)
    own: dict[str, Any] = {"softcap": softcap, "logit_scale": logit_scale}
    for whose, said in (("an LMHead with", stored_options(head)), ("got", options)):
        for name, x in own.items():
            other = said.get(name, x)
            numbers = isinstance(x, float) and isinstance(other, int | float)
            if other != x and not (numbers and math.isclose(x, other, rel_tol=1e-5)):
                raise ValueError(
                    f"{op}: {whose} {name}={other}, but logits of {type(model).__name__} have {name}={x}; leave it "
                    "out, or pass the head alone, as model.get_output_embeddings()"
                )
    return head, own


def computed(op: str, head: Any, hidden: Tensor, compute: Compute[Made], *, sharded: bool = False) -> Made:
    """`compute(hidden, weight, bias)` of a head, in its forward where it is an LMHead.

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
    """The options, and that labels are shifted where nobody says whether.  Warn of some that seem to be already."""
    if "shift" not in options and _seem_shifted(labels, options.get("ignore_index", -100)):
        warnings.warn(
            f"{op}: the last label of each sequence, and no other, is ignored, as where labels are shifted already; "
            f"{op} shifts them by one, so that position i predicts label i + 1: pass shift=False if each label is what "
            "its position predicts, or shift=True to say that they are as the data has them",
            stacklevel=3,
        )
    default: dict[str, Any] = {"shift": True}
    return default | options


def _seem_shifted(labels: Any, ignore_index: Any) -> bool:
    """Whether these plain labels, on the CPU, are like `F.pad(ids[:, 1:], (0, 1), value=ignore_index)`."""
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
    """What a loss of a linear layer takes for `head`, in place of `head(hidden)`; raises what `lm_loss` does.

    K is H, and under LoRA H and the ranks of the active adapters: hidden beside s A d(hidden), weight beside B, for a
    scale s and a dropout d.  That is exact, with dropout and for small adapters too, whose sum with a weight of 16 bits
    would be rounded away.
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
            "something else; make the nn.Linear that it stands for an LMHead, and call that with labels"
        )
    _refuse_hooks(op, head)
    _require_whole(op, head.weight)
    return head.weight, head.bias


def _require_whole(op: str, weight: Tensor) -> None:
    """Raise for a weight that is sharded, or was freed."""
    refuse_transforms(op)  # whose tensors have no memory to look for
    plain = type(weight) in (Tensor, Parameter)
    whole = plain or not is_dtensor(weight)
    if plain and not torch.compiler.is_compiling() and not weight.is_meta:
        whole = weight.ndim == 2 and weight.untyped_storage().nbytes() > 0
    if not whole:
        raise RuntimeError(
            f"{op}: the head's weight isn't here as a whole; it is sharded, as FSDP's are outside of forward.  Call "
            "this inside the forward of the module that FSDP wraps; or make the head an LMHead.from_linear(head) "
            "before, and wrap it by itself.  Under tensor parallelism call an LMHead with vocab_group"
        )


def _refuse_hooks(op: str, module: Any) -> None:
    """Raise for a module whose parameters are read while its call would run something else too."""
    _refuse_hooks_of_logits(op, module)
    if any(getattr(module, name) for name in HOOKS):
        raise RuntimeError(
            f"{op}: {described(module)} has hooks, as FSDP2 and DeepSpeed register them to gather its weight, that "
            "run only when it is called: make the head an LMHead.from_linear(head) before, or, under PEFT, leave "
            "it to the fully_shard of the module around it"
        )


def _refuse_hooks_of_logits(op: str, module: Any) -> None:
    """Raise for a module with hooks that may look at logits, or change them, where there are none."""
    for name in HOOKS:
        for hook in getattr(module, name).values():
            hook = getattr(hook, "func", hook)  # of a partial
            if not (getattr(hook, "__module__", None) or "").startswith(OF_WEIGHTS):
                raise RuntimeError(
                    f"{op}: {described(module)} has a {name[1:-1].replace('_', ' ')}, "
                    f"{getattr(hook, '__qualname__', type(hook).__name__)}, which is made for logits, and there are "
                    "none; remove it, or compute the loss of the logits, as "
                    "onchip.torch.cross_entropy(head(hidden), labels, shift=True), or log_probs or jsd of them"
                )


# --------------------------------------------------------------------------------------------------- inside of wrappers


def called(head: Any) -> Any:
    """The module that a call of `head` hands all its arguments on to."""
    if (inside := WRAPPERS.get(type(head).__name__)) is not None:
        return called(getattr(head, inside))
    return called(active_module(head)) if _is_of_peft(head, *SAVED) else head


def _is_of_peft(head: Any, module: str, name: str) -> bool:
    """Whether it is of this class of PEFT's, with no forward of its own; PEFT need not be there."""
    kind = getattr(sys.modules.get(module), name, None)
    if kind is None or not isinstance(head, kind):
        return False
    return type(head).forward is kind.forward and "forward" not in vars(head)


def active_module(wrapper: Any) -> Any:
    """The one of the modules in a `ModulesToSaveWrapper` that it calls."""
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
    """As `linear_operands`, of PEFT's layer, which may be what is being called."""
    weight, bias = _parameters(op, head.base_layer)
    if head.disable_adapters and head.merged:
        raise RuntimeError(f"{op}: the adapters of head are merged into its weight, and disabled; call head.unmerge()")
    rows, columns = [hidden], [weight]
    for name in head.active_adapters if not (head.disable_adapters or head.merged) else ():
        if name not in head.lora_A:
            continue
        if name in head.lora_variant:
            raise TypeError(
                f"{op}: adapter {name!r} of head is a {type(head.lora_variant[name]).__name__}, whose logits are no "
                "sum of two products; take plain LoRA for the head, or merge the adapter"
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
