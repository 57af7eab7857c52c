"""Which heads `onchip.integrations.transformers` can fuse, and the operands of their products."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from onchip.frontend.torch_inputs import dtype_name
from onchip.integrations.deferred_logits import DTYPES
from onchip.integrations.patched_classes import own_class
from onchip.ops.linear_cross_entropy.torch_module import PLAN, active_module, lora_operands
from onchip.torch import LMHead

# PEFT's classes that may stand in a head's place.
OF_PEFT = (
    "peft.tuners.lora.layer.Linear",
    "peft.utils.other.ModulesToSaveWrapper",
    "peft.utils.other.TrainableTokensWrapper",
)
# The modules whose hooks gather a weight for a call of its layer; the loss is then computed in such a call.
GATHERING = ("torch.distributed.fsdp.", "torch.distributed._composable.", "deepspeed.")
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def linear_of(head: Any) -> Any:
    """The layer that holds the head's weight, inside FSDP's and PEFT's modules."""
    for name in ("_fsdp_wrapped_module", "original_module", "base_layer"):
        head = getattr(head, name, head)
    return head


def called(head: Any) -> Any:
    """The module whose forward FSDP calls once the weight is there."""
    while hasattr(head, "_fsdp_wrapped_module"):
        head = head._fsdp_wrapped_module
    return head


def head_refusal(head: Any) -> str | None:
    """Why losses of this head can't be fused, or None."""
    linear, head = linear_of(head), called(head)
    for module in head.modules():
        if (reason := _more_than_its_class(module)) is not None:
            return f"{'' if module is head else 'has a layer inside that '}{reason}"
    if not isinstance(linear, nn.Linear) or type(linear).forward not in (nn.Linear.forward, LMHead.forward):
        return (
            f"is a {_full_name(linear)}, not a plain nn.Linear; if its logits are another function of hidden states, "
            "call an op of onchip.torch in a loss of your own"
        )
    kind = _full_name(head)
    if head is not linear and kind not in OF_PEFT:
        return f"is PEFT's {kind}, not plain LoRA; leave the head out of target_modules, or use LoRA for it"
    if variants := getattr(head, "lora_variant", None):
        names = ", ".join(type(x).__name__ for x in variants.values())
        return f"has an adapter that is not plain LoRA: {names}; use plain LoRA for the head"
    if linear.weight.dtype not in DTYPES:
        return f"has a weight of {linear.weight.dtype}; the loss takes {', '.join(dtype_name(x) for x in DTYPES)}"
    if _grouped(head):
        return (
            "is in a fully_shard group with other modules, which frees its weight after its forward; shard it alone, "
            "or with the model, or pass reshard_after_forward=False for the group"
        )
    return None


def _full_name(module: nn.Module) -> str:
    kind = own_class(module)
    return f"{kind.__module__}.{kind.__name__}"


def _more_than_its_class(module: Any) -> str | None:
    """What a call of the module would run besides the forward of its class, or None."""
    if "forward" in module.__dict__:
        return (
            f"has a forward of its own, set by {origins(module.forward)[0]}, as by accelerate for device_map and "
            "cpu_offload; load the model onto one device, or put the forward into the layer's class"
        )
    for name in HOOKS:
        for hook in getattr(module, name).values():
            if getattr(hook, "__module__", "") == PLAN:
                return "is under a plan of tensor parallelism, such as ColwiseParallel; leave the head out of the plan"
            if not origins(hook)[-1].startswith(GATHERING):
                named = getattr(hook, "__qualname__", type(hook).__name__)
                return (
                    f"has a hook, {named} of {origins(hook)[0]}, which may read or change its logits; remove the hook, "
                    "or put it on another module"
                )
    return None


def origins(function: Any) -> list[str]:
    """The modules that a function is from: that of its code, and the one that it names, as wrappers take it over."""
    code = getattr(function, "func", function)
    code = getattr(code, "__func__", code)
    named = getattr(function, "__module__", None) or type(function).__module__
    return [str(getattr(code, "__globals__", {}).get("__name__", named)), str(named)]


def _grouped(head: Any) -> bool:
    """Whether FSDP2 gathers it together with other modules, and shards them again once each was called."""
    return any(group.post_forward_mesh_info is not None for group in _groups(head))


def _groups(head: Any) -> Sequence[Any]:
    """FSDP2's groups of parameters, if the head shares them with other modules."""
    state = head._get_fsdp_state() if hasattr(head, "_get_fsdp_state") else None
    if len(getattr(state, "_modules", ())) < 2:
        return ()
    several: Sequence[Any] | None = getattr(state, "_fsdp_param_groups", None)  # torch < 2.12 has at most one
    return [x for x in (getattr(state, "_fsdp_param_group", None),) if x] if several is None else several


def product(head: Any, hidden: Tensor) -> tuple[Tensor, Callable[..., Any], bool]:
    """(rows, of, plain): the logits are of(F.linear, rows), and of(f, rows) is f(rows, weight, bias).

    plain: the weight was read here.  Else something gathers it when the head is called, and `of` calls it.
    """
    inner = called(head)
    gathered = head is not inner or hasattr(linear_of(head).weight, "ds_id")
    gathered = gathered or any(getattr(inner, name) for name in HOOKS)
    # Where FSDP2 keeps a group's weights after forward, as accelerate has it, they are there.
    kept = gathered and _groups(inner) and not _grouped(inner) and isinstance(linear_of(head).weight, nn.Parameter)
    if gathered and not kept:
        return hidden, lambda f, rows: _in_forward(head, inner, f, rows), False
    rows, weight, bias = _operands(inner, hidden)
    return rows, lambda f, rows: f(rows, weight, bias), not gathered


def _in_forward(head: Any, inner: Any, f: Callable[..., Any], rows: Tensor) -> Any:
    """f of the operands, in a call of the head."""
    call, inner._onchip_call = inner._onchip_call, None
    inner.__dict__["forward"] = lambda hidden: f(*_operands(inner, hidden))
    try:
        return head(rows)
    finally:
        del inner.__dict__["forward"]
        inner._onchip_call = call


def _operands(head: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """The operands whose product the logits are, for a linear layer or PEFT's layer around one."""
    if isinstance(head, nn.Linear):
        return hidden, head.weight, head.bias
    if type(head).__name__.endswith("TrainableTokensWrapper"):
        # its weight has the trained rows in place of the original ones
        return hidden, head.weight, head.original_module.bias
    if type(head).__name__.endswith("ModulesToSaveWrapper"):
        return _operands(active_module(head), hidden)
    if head.disable_adapters and head.merged:
        head.unmerge()  # as its forward does
    return lora_operands("patch", head, hidden)
