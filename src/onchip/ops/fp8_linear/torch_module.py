"""`fp8_linear` as a module, and turning a model's linear layers into it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from onchip.core.backends import choose_backend
from onchip.fp8.numbers import OP, Options
from onchip.fp8.torch_operands import QuantizedActivation
from onchip.frontend.options import require_bool
from onchip.ops.fp8_linear.torch_op import BACKENDS, fp8_linear
from onchip.ops.fp8_linear.torch_unchanged import weight_of


class Fp8Linear(torch.nn.Linear):
    """`torch.nn.Linear` whose three products are of FP8 numbers: `fp8_linear` with a weight of its own.

    Parameters, their names, initial values and the state_dict are nn.Linear's: the weight is kept in its dtype, and a
    checkpoint of one is one of the other.

    Args:
        in_features, out_features, bias, device, dtype: as of `torch.nn.Linear`.
        grad_dtype, scale, backend: as of `fp8_linear`.
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
        device: Any = None,
        dtype: Any = None,
        *,
        grad_dtype: str = "e4m3",
        scale: str = "float32",
        backend: str = "auto",
        main_grad: bool = False,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self._set_options(Options(grad_dtype, scale), backend, main_grad)

    def _set_options(self, options: Options, backend: str, main_grad: bool) -> None:
        choose_backend(OP, backend, dict.fromkeys(BACKENDS))
        require_bool(OP, "main_grad", main_grad)
        self.options = options
        self.backend = backend
        self.main_grad = main_grad

    @classmethod
    def from_linear(
        cls,
        linear: torch.nn.Linear,
        *,
        grad_dtype: str = "e4m3",
        scale: str = "float32",
        backend: str = "auto",
        main_grad: bool = False,
    ) -> "Fp8Linear":
        """A layer with the parameters of `linear` themselves, not copies, its hooks and its training mode.

        Args:
            linear: the layer to stand in for; a plain `torch.nn.Linear`.
            grad_dtype, scale, backend, main_grad: as of the class.

        Raises:
            TypeError: `linear` is of another class, or has a forward of its own, which may do more.
        """
        if type(linear) is not torch.nn.Linear:
            raise TypeError(f"Fp8Linear.from_linear: it takes a torch.nn.Linear; got {type(linear).__name__}")
        if "forward" in vars(linear):
            raise TypeError(
                "Fp8Linear.from_linear: linear.forward was replaced, and would run in the place of this class's; "
                "convert before it is"
            )
        made = cls.__new__(cls)
        made.__dict__.update(linear.__dict__)  # as copy.copy does
        made._compiled_call_impl = None  # what `linear.compile()` made runs that layer
        made._parameters = linear._parameters.copy()
        made._set_options(Options(grad_dtype, scale), backend, main_grad)
        return made

    def forward(self, input: Tensor | QuantizedActivation) -> Tensor:
        """[..., out_features] of `input` [..., in_features], or of what `quantize_activation` made of one."""
        out = None
        if self.main_grad and torch.is_grad_enabled() and self.weight.requires_grad:
            out = getattr(self.weight, "main_grad", None)
            if out is None:
                raise ValueError("Fp8Linear: main_grad=True needs weight.main_grad, float32 and of weight's shape")
        weight, check_inputs = weight_of(self)
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

    def extra_repr(self) -> str:
        """nn.Linear's, and the options that differ from their defaults."""
        mine = vars(self.options) | {"backend": self.backend, "main_grad": self.main_grad}
        defaults = vars(Options()) | {"backend": "auto", "main_grad": False}
        return ", ".join([super().extra_repr(), *(f"{k}={v!r}" for k, v in mine.items() if v != defaults[k])])


def convert_linears(
    model: torch.nn.Module,
    filter: Callable[[str, torch.nn.Linear], bool] | None = None,
    *,
    grad_dtype: str = "e4m3",
    scale: str = "float32",
    backend: str = "auto",
    main_grad: bool = False,
) -> list[str]:
    """Put an `Fp8Linear` with the same parameters in the place of each `torch.nn.Linear` of `model`.

    The usual recipe leaves the output head, routers and other small layers as they are: pass a filter.  Optimizers and
    names of parameters stay valid.  Subclasses of nn.Linear are left alone, and so are layers whose forward another
    library has replaced.  A layer that is used in several places stays one layer.

    Args:
        model: changed in place; must not be an nn.Linear itself.
        filter: called with each layer's name and the layer; it is replaced where that returns True.  None: all are.
        grad_dtype, scale, backend, main_grad: as of `Fp8Linear`.

    Returns:
        The names of the layers that were replaced.

    Raises:
        ValueError: `model` is an nn.Linear: use `Fp8Linear.from_linear`.

    Example:
        >>> import torch
        >>> from onchip.torch import convert_linears
        >>> model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 10))
        >>> convert_linears(model, lambda name, layer: layer.out_features >= 128)
        ['0']
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
            replaced[module] = Fp8Linear.from_linear(
                module,
                grad_dtype=grad_dtype,
                scale=scale,
                backend=backend,
                main_grad=main_grad,
            )
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, replaced[module])
        names.append(name)
    return names
