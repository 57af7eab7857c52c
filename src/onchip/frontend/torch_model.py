"""What a whole model does to the logits of its head, found by running the code that does it."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._python_dispatch import _disable_current_modes

from onchip.frontend.torch_module import described

# Wrappers whose forward passes all its arguments to the module inside, and their name for that module.
WRAPPERS = {
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "module",
    "OptimizedModule": "_orig_mod",
}
# Other wrappers that may be around a whole model.
MODEL_WRAPPERS = {"DataParallel": "module", "DeepSpeedEngine": "module"}

# Logits that reveal a scale and a softcap: small ones show the slope, huge ones the cap.
PROBES = (0.0, 2.0**-20, 2.0**100, 1.0, -3.0, 7.0, -40.0, 1000.0)


def inner_model(given: Any) -> Any:
    """The model with a head that is given, inside of what wraps it; None where something else is given."""
    if not isinstance(given, Module):
        return None
    while True:
        kind = type(given)
        if kind.__name__ in WRAPPERS or kind.__name__ in MODEL_WRAPPERS:
            given = getattr(given, (WRAPPERS | MODEL_WRAPPERS)[kind.__name__])
        elif hasattr(kind, "get_base_model"):  # PEFT's
            inside: Any = given
            given = inside.get_base_model()
        else:
            return given if hasattr(kind, "get_output_embeddings") else None


def own_logits(op: str, model: Any, head: Any, remedy: str) -> tuple[float | None, float]:
    """The softcap and the logit_scale that `model` has after `head`, which is its own.

    Its logits are softcap * tanh(a / softcap) of a = head(hidden) * logit_scale, or without softcap a.  To see that,
    the model's forward runs on the CPU, with stand-ins for its modules: the head's gives known logits, all others the
    hidden states.  Raises TypeError where that can't be run, or does something else.
    """
    try:
        with _disable_current_modes(), torch.no_grad(), torch.device("cpu"):
            return _found(_logits(model, head))
    except Exception as error:
        raise TypeError(
            f"{op}: can't tell what {type(model).__name__} does between hidden states and logits ({error}); {remedy}"
        ) from error


# What torch.compiler.assume_constant_result does, but for importing the compiler: it isn't traced, but run.
own_logits._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _logits(model: Any, head: Any) -> Tensor:
    """[..., V] float64: what the model makes of `PROBES`, entry by entry and again."""
    names = [name for name, module in model._modules.items() if module is head]
    if len(names) != 1:
        raise ValueError("its head lies inside another module")
    tokens = 1 if head.out_features >= len(PROBES) else len(PROBES)
    hidden = torch.arange(tokens * head.in_features, dtype=torch.int64, device="cpu") % 11 + 1  # exact in any dtype
    hidden = hidden.view(1, tokens, -1).to(torch.float32)
    of_head = _Head(head, hidden)
    made: Any = object.__new__(type(model))
    made.__dict__.update(model.__dict__)
    made.__dict__["_modules"] = {
        name: of_head if name in names else None if module is None else _Body(module, hidden)
        for name, module in model._modules.items()
    }
    out = _forward(model)(made, input_ids=torch.zeros(1, tokens, dtype=torch.int64, device="cpu"))
    if of_head.calls != 1:
        raise ValueError(f"its forward calls the head {of_head.calls} times")
    logits: Tensor = out.logits if hasattr(out, "logits") else out[0]
    if logits.shape != (1, tokens, head.out_features):
        raise ValueError(f"it turns logits {[1, tokens, head.out_features]} into {list(logits.shape)}")
    return logits.double()


def _forward(model: Any) -> Any:
    """That of the model's class, where nothing but accelerate was put over it, which leaves logits as they are."""
    if "forward" in vars(model) and not {"_hf_hook", "_original_forward"} & set(vars(model)):
        raise ValueError(f"it is a {described(model)}")
    return type(model).forward


def _found(logits: Tensor) -> tuple[float | None, float]:
    """The softcap and the scale that make these logits of `PROBES`."""
    probes = torch.tensor(PROBES, dtype=torch.float64, device="cpu")
    values = logits.flatten()[: len(PROBES)]
    if not torch.equal(logits, _again(values, logits.shape)):
        raise ValueError("it changes single entries of its logits")
    scale, most = (values[1] / probes[1]).item(), values[2].item()
    scale = 1.0 if abs(scale - 1) < 1e-6 else scale
    if not scale > 0:
        raise ValueError(f"its logits are scaled by {scale}")
    softcap = None if abs(most / (scale * PROBES[2]) - 1) < 1e-5 else most
    own = probes * scale
    own = own if softcap is None else softcap * (own / softcap).tanh()
    if softcap == 0 or not torch.allclose(values, own, rtol=1e-5, atol=1e-12):
        raise ValueError("it does more to its logits than scale them or cap them by a tanh")
    return softcap, scale


class _Hidden:
    """What a model's body returns: hidden states, and nothing else."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, place: Any) -> Any:
        return (self.last_hidden_state,)[place]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _Body:
    """In the place of a module that is not the head."""

    def __init__(self, module: Module, hidden: Tensor) -> None:
        self._module, self._made = module, hidden

    def __call__(self, *given: Any, **named: Any) -> _Hidden:
        if any(isinstance(x, Tensor) and x.is_floating_point() for x in (*given, *named.values())):
            raise ValueError(f"a {type(self._module).__name__} comes between hidden states and logits")
        return _Hidden(self._made)

    def __getattr__(self, name: str) -> Any:
        x = getattr(self._module, name)
        return _Body(x, self._made) if isinstance(x, Module) else x


class _Head(_Body):
    """In the place of the head."""

    calls = 0

    def __call__(self, *given: Any, **named: Any) -> Any:
        self.calls += 1
        (x,) = (*given, *named.values())
        if not (isinstance(x, Tensor) and x.shape == self._made.shape and torch.equal(x.float(), self._made)):
            raise ValueError("its head is called with something other than the last hidden states")
        probes = torch.tensor(PROBES, dtype=torch.float64, device="cpu")
        return _again(probes, torch.Size((*x.shape[:-1], self.out_features)))


def _again(values: Tensor, shape: torch.Size) -> Tensor:
    """The values one after the other, and again, in a tensor of this shape."""
    return values.repeat(-(-shape.numel() // len(values)))[: shape.numel()].view(shape)
