"""`weights_unchanged`: FP8 copies of a model's weights that are kept for as long as its caller says that they hold."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from onchip.fp8.torch_operands import QuantizedWeight
from onchip.frontend.options import require_bool
from onchip.frontend.torch_inputs import is_dtensor
from onchip.ops.fp8_linear.torch_op import quantize_weight

if TYPE_CHECKING:
    from onchip.ops.fp8_linear.torch_module import Fp8Linear

NAME = "weights_unchanged"


class _Kept(NamedTuple):
    """What is kept for one layer."""

    name: str
    copies: tuple[Tensor | str | None, ...]  # of a QuantizedWeight, all but the weight
    parameter: Tensor | None  # None: the weight is computed in each call
    version: int
    where: tuple[bool, int]
    check_inputs: bool


# The contexts that are open, the innermost last.  Not on the layers: there they would be copied and pickled with them.
_OPEN: list[dict["Fp8Linear", _Kept]] = []


def weight_of(layer: "Fp8Linear") -> tuple[Tensor | QuantizedWeight, bool]:
    """What `layer` gives to fp8_linear as its weight and as check_inputs."""
    weight = layer.weight
    # Compiled code can't see whether it is captured into a CUDA graph, which would outlive the copies.
    if torch.compiler.is_compiling() or not _OPEN:
        return weight, False
    kept = next((context[layer] for context in reversed(_OPEN) if layer in context), None)
    if kept is None or kept.where != _where(weight):
        return weight, False
    if kept.parameter is not None and (weight is not kept.parameter or weight._version != kept.version):
        raise RuntimeError(
            f"{NAME}: the weight of layer {kept.name!r} changed inside; leave the context before weights are changed"
        )
    return QuantizedWeight(weight, *kept.copies), kept.check_inputs  # type: ignore[arg-type]


@contextmanager
def weights_unchanged(model: torch.nn.Module, *, check_inputs: bool = False) -> Iterator[list[str]]:
    """A context in which no weight of `model` changes: each `Fp8Linear` quantises its weight once, on entry.

    For the micro-batches between two steps of an optimizer.  Results and gradients are the same bits as without.

    Layers quantise in each call as ever where copies can't be kept or used: a weight that is a DTensor, on the meta
    device or sharded (FSDP, outside of forward); another stream than the one of entry; a CUDA graph whose capture began
    inside of the context; what torch.compile has compiled.  A weight that is computed, as by torch's `weight_norm`, has
    the value of entry.  Copies are no part of a layer's state: no state_dict, and nothing pickled or copied, has them.

    Args:
        model: the module whose layers are meant; may be an `Fp8Linear` itself.
        check_inputs: compare the copies with the weight in each call on the GPU too, which synchronises.  On the CPU
            they always are.

    Yields:
        The names of the layers whose copies are kept.

    Raises:
        ValueError: model has no `Fp8Linear`.
        RuntimeError: a weight changed inside, in a call that can see it: by the identity and the version of a parameter
            at no cost, by its values where these are checked.  Or the context was entered in the capture of a CUDA
            graph and left after it.

    Memory: 2 bytes per element of the weights and scales until the context is left, half of it without gradients.

    Example:
        >>> import torch
        >>> from onchip.torch import Fp8Linear, weights_unchanged
        >>> model = torch.nn.Sequential(Fp8Linear(256, 512), torch.nn.GELU(), Fp8Linear(512, 64))
        >>> with weights_unchanged(model) as names:
        ...     for micro_batch in torch.randn(4, 16, 256):
        ...         model(micro_batch).square().mean().backward()
        >>> names
        ['0', '2']
    """
    from onchip.ops.fp8_linear.torch_module import Fp8Linear  # which imports this

    require_bool(NAME, "check_inputs", check_inputs)
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, Fp8Linear)}
    if not layers:
        raise ValueError(f"{NAME}: model has no Fp8Linear; make them of its linear layers with convert_linears")
    captured = _capturing()
    context = {layer: kept for name, layer in layers.items() if (kept := _keep(name, layer, check_inputs))}
    _OPEN.append(context)
    try:
        yield [kept.name for kept in context.values()]
    finally:
        _OPEN[:] = [other for other in _OPEN if other is not context]
        context.clear()  # a traceback may hold this frame
    if captured and not _capturing():
        raise RuntimeError(
            f"{NAME}: it was entered in the capture of a CUDA graph and left after it; leave it before the capture ends"
        )


def _keep(name: str, layer: "Fp8Linear", check_inputs: bool) -> _Kept | None:
    """None for a weight that isn't there as a whole."""
    weight = layer.weight
    if is_dtensor(weight) or weight.is_meta or weight.shape != (layer.out_features, layer.in_features):
        return None
    counts = weight is layer._parameters.get("weight") and type(weight) is Parameter and not weight.is_inference()
    made = quantize_weight(weight, scale=layer.options.scale, backend=layer.backend)
    parameter, version = (weight, weight._version) if counts else (None, 0)
    return _Kept(name, made[1:], parameter, version, _where(weight), check_inputs)


def _where(weight: Tensor) -> tuple[bool, int]:
    """Whether a CUDA graph is captured, and the stream: copies are read where they were made alone."""
    return _capturing(), torch.cuda.current_stream(weight.device).cuda_stream if weight.is_cuda else 0


def _capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
