"""`fp8_linear` as a module, the conversion of a model's linear layers, and quantised weights that are kept."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, TypedDict, Unpack

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.types import Device

from onchip.core.backends import choose_backend
from onchip.fp8.numbers import OP, Fp8Options, GradDtype, Scale
from onchip.fp8.torch_operands import QuantizedActivation, QuantizedWeight
from onchip.frontend.options import require_bool
from onchip.frontend.torch_inputs import is_dtensor
from onchip.frontend.torch_module import main_grad_of, stand_in
from onchip.ops.fp8_linear.torch_op import BACKENDS, Backend, fp8_linear, quantize_weight


class Fp8LayerOptions(TypedDict, total=False):
    """The keywords of a layer."""

    grad_dtype: GradDtype
    scale: Scale
    backend: Backend
    main_grad: bool


class _KeptWeight(NamedTuple):
    """The copies that are kept for one layer."""

    name: str
    copies: tuple[Tensor | str | None, ...]  # of a QuantizedWeight, all but the weight
    parameter: Tensor | None  # None: the weight is computed in each call
    version: int
    where: tuple[bool, int]
    check_inputs: bool


# The open contexts, the innermost last.  They aren't stored on the layers, which would copy and pickle them.
_OPEN: list[dict["Fp8Linear", _KeptWeight]] = []


class Fp8Linear(torch.nn.Linear):
    """`torch.nn.Linear` whose three products multiply FP8 numbers: `fp8_linear` with a weight of its own.

    Parameters, their names, initial values and the state_dict are nn.Linear's.  The weight stays in its dtype, and
    checkpoints of the two classes are interchangeable.

    Args:
        in_features, out_features, bias, device, dtype: as in `torch.nn.Linear`.
        grad_dtype, scale, backend: as in `fp8_linear`.
        main_grad: backward adds the weight's gradient to `weight.main_grad`, a float32 tensor of its shape that you
            attach, and leaves `weight.grad` alone.

    Example:
        >>> import torch
        >>> from onchip.torch import Fp8Linear
        >>> layer = Fp8Linear(256, 384)
        >>> layer(torch.randn(16, 256)).sum().backward()
        >>> layer.weight.grad.shape
        torch.Size([384, 256])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[Fp8LayerOptions],
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self._set_options(**options)

    def _set_options(
        self,
        grad_dtype: GradDtype = "e4m3",
        scale: Scale = "float32",
        backend: Backend = "auto",
        main_grad: bool = False,
    ) -> None:
        self.options = Fp8Options(grad_dtype, scale)
        choose_backend(OP, backend, dict.fromkeys(BACKENDS))
        require_bool(OP, "main_grad", main_grad)
        self.backend = backend
        self.main_grad = main_grad

    @classmethod
    def from_linear(cls, linear: torch.nn.Module, **options: Unpack[Fp8LayerOptions]) -> "Fp8Linear":
        """A layer that shares the parameters of `linear`, without copying them, and has its hooks and training mode.

        Args:
            linear: the layer to replace, a plain `torch.nn.Linear`.
            grad_dtype, scale, backend, main_grad: as in the class.

        Raises:
            TypeError: `linear` has another class, or a forward of its own, which may do more.
        """
        made = stand_in(cls, linear)
        made._set_options(**options)
        return made

    def forward(self, input: Tensor | QuantizedActivation) -> Tensor:
        """[..., out_features], from `input` [..., in_features] or the result of `quantize_activation`."""
        out = main_grad_of("Fp8Linear", self.weight) if self.main_grad else None
        weight, check_inputs = self._weight()
        return fp8_linear(
            input,
            weight,
            self.bias,
            grad_dtype=self.options.grad_dtype,
            scale=self.options.scale,
            backend=self.backend,
            check_inputs=check_inputs,
            weight_grad_out=out,
        )

    if TYPE_CHECKING:  # torch.nn.Module.__call__ has no types

        def __call__(self, input: Tensor | QuantizedActivation) -> Tensor: ...

    def _weight(self) -> tuple[Tensor | QuantizedWeight, bool]:
        """The weight and check_inputs that `fp8_linear` takes."""
        weight = self.weight
        # Compiled code can't see whether it is captured into a CUDA graph, which would outlive the copies.
        if torch.compiler.is_compiling() or not _OPEN:
            return weight, False
        kept = next((context[self] for context in reversed(_OPEN) if self in context), None)
        if kept is None or kept.where != _where(weight):
            return weight, False
        if kept.parameter is not None and (weight is not kept.parameter or weight._version != kept.version):
            raise RuntimeError(
                f"weights_unchanged: the weight of layer {kept.name!r} changed inside the context; leave it before "
                "changing weights"
            )
        return QuantizedWeight(weight, *kept.copies), kept.check_inputs  # type: ignore[arg-type]

    def extra_repr(self) -> str:
        """What nn.Linear shows, and the options that differ from their defaults."""
        mine = vars(self.options) | {"backend": self.backend, "main_grad": self.main_grad}
        defaults = vars(Fp8Options()) | {"backend": "auto", "main_grad": False}
        return ", ".join([super().extra_repr(), *(f"{k}={v!r}" for k, v in mine.items() if v != defaults[k])])


def convert_linears(
    model: torch.nn.Module,
    filter: Callable[[str, torch.nn.Linear], bool] | None = None,
    **options: Unpack[Fp8LayerOptions],
) -> list[str]:
    """Replace each `torch.nn.Linear` of `model` by an `Fp8Linear` with the same parameters.

    The usual recipe leaves out the output head, routers and other small layers: pass a filter.  Optimizers and names of
    parameters stay valid.  Subclasses of nn.Linear are left alone, and so are layers whose forward another library has
    replaced.  A layer that is used in several places stays one layer.

    Args:
        model: changed in place; must not be an nn.Linear itself.
        filter: a function of a layer's name and the layer; layers for which it returns True are replaced.  None
            replaces all.
        grad_dtype, scale, backend, main_grad: as in `Fp8Linear`.

    Returns:
        The names of the layers that were replaced.

    Raises:
        ValueError: `model` is an nn.Linear: use `Fp8Linear.from_linear`.

    Memory: none; the parameters are not copied.  Calls of the layers take that of `fp8_linear`.

    Example:
        >>> import torch
        >>> from onchip.torch import convert_linears
        >>> model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 10))
        >>> convert_linears(model, lambda name, layer: layer.out_features >= 128)
        ['0']

    Source: DeepSeek-V3 (arXiv:2412.19437), section 3.3, for the layers and for which ones to leave out.
    """
    if type(model) is torch.nn.Linear:
        raise ValueError("convert_linears: model is a Linear itself; use Fp8Linear.from_linear")
    replaced: dict[torch.nn.Module, Fp8Linear] = {}
    names = []
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if type(module) is not torch.nn.Linear or "forward" in vars(module):
            continue
        if not (filter is None or filter(name, module)):
            continue
        if module not in replaced:
            replaced[module] = Fp8Linear.from_linear(module, **options)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, replaced[module])
        names.append(name)
    return names


@contextmanager
def weights_unchanged(model: torch.nn.Module, *, check_inputs: bool = False) -> Iterator[list[str]]:
    """A context in which no weight of `model` changes, so that each `Fp8Linear` quantises its weight once, on entry.

    Use it for the micro-batches between two steps of an optimizer.  Results and gradients are the same, to the bit.

    A layer still quantises in each call if its copies can't be kept or used: if its weight is a DTensor, on the meta
    device or sharded (under FSDP, outside forward); on another stream than the one of entry; in a CUDA graph whose
    capture began inside the context; and in code that torch.compile has compiled.  A weight that is computed, as by
    torch's `weight_norm`, has its value on entry.  Copies are no part of a layer's state: they aren't in its
    state_dict, nor pickled or copied with it.

    Args:
        model: the module that holds the layers; may be an `Fp8Linear` itself.
        check_inputs: compare the copies with the weight in each call on the GPU too, which waits for the device.  On
            the CPU they are always compared.

    Yields:
        The names of the layers whose copies are kept.

    Raises:
        ValueError: model has no `Fp8Linear`.
        RuntimeError: a call finds that a weight has changed inside the context.  It always compares a parameter's
            identity and version, which costs nothing, and the values where these are checked.  Or the context was
            entered during the capture of a CUDA graph and left after it.

    Memory: 2 bytes per element of the weights, and scales, until the context is left; half of that without gradients.

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
    op = "weights_unchanged"
    require_bool(op, "check_inputs", check_inputs)
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, Fp8Linear)}
    if not layers:
        raise ValueError(f"{op}: model has no Fp8Linear; convert its linear layers with convert_linears")
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
            f"{op}: the context was entered during the capture of a CUDA graph and left after it; leave it before the "
            "capture ends"
        )


def _keep(name: str, layer: Fp8Linear, check_inputs: bool) -> _KeptWeight | None:
    """The copies of a layer's weight; None if the whole weight isn't in memory."""
    weight = layer.weight
    if is_dtensor(weight) or weight.is_meta or weight.shape != (layer.out_features, layer.in_features):
        return None
    counts = weight is layer._parameters.get("weight") and type(weight) is Parameter and not weight.is_inference()
    made = quantize_weight(weight, scale=layer.options.scale, backend=layer.backend)
    parameter, version = (weight, weight._version) if counts else (None, 0)
    return _KeptWeight(name, made[1:], parameter, version, _where(weight), check_inputs)


def _where(weight: Tensor) -> tuple[bool, int]:
    """Whether a CUDA graph is being captured, and the stream: copies are only read where they were made."""
    return _capturing(), torch.cuda.current_stream(weight.device).cuda_stream if weight.is_cuda else 0


def _capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
