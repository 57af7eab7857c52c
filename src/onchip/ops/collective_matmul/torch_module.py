"""The two layers of sequence-parallel tensor parallelism, with weights of their own."""

import copy
from typing import TYPE_CHECKING, Any, Self, TypedDict, Unpack, get_args

import torch
from torch import Tensor
from torch.nn import Linear, Module, Parameter
from torch.types import Device

from onchip.collectives.torch_ring import ring_of
from onchip.core.backends import choose_backend
from onchip.frontend.options import require_bool, require_one_of, require_positive_int
from onchip.frontend.torch_module import main_grad_of, require_linear
from onchip.ops.collective_matmul.torch_op import (
    BACKENDS,
    Backend,
    Precision,
    all_gather_matmul,
    matmul_reduce_scatter,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class ParallelOptions(TypedDict, total=False):
    """The keywords of both layers."""

    main_grad: bool
    backend: Backend
    precision: Precision
    reduce_dtype: torch.dtype | None


class _ParallelLinear(Module):
    """This rank's part of an nn.Linear, whose weight is split along dimension `_split`."""

    _split: int
    _sharded: str

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: "ProcessGroup | None",
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        main_grad: bool = False,
        backend: Backend = "auto",
        precision: Precision = "full",
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        name = type(self).__name__
        sizes = {"in_features": in_features, "out_features": out_features}
        for of, size in sizes.items():
            if size is None:
                raise TypeError(f"{name}: {of} must be an int; got NoneType")
            require_positive_int(name, of, size)
        for of, flag in {"bias": bias, "main_grad": main_grad}.items():
            require_bool(name, of, flag)
        choose_backend(name, backend, dict.fromkeys(BACKENDS))
        require_one_of(name, "precision", precision, get_args(Precision))
        if not isinstance(reduce_dtype, torch.dtype | None):
            raise TypeError(f"{name}: reduce_dtype must be a torch.dtype, or None; got {type(reduce_dtype).__name__}")
        super().__init__()
        self.in_features, self.out_features, self.group = in_features, out_features, group
        self.main_grad, self.backend, self.precision = main_grad, backend, precision
        self.reduce_dtype = reduce_dtype
        self.rank, self.ranks = ring_of(name, group)[1:3]
        if sizes[self._sharded] % self.ranks != 0:
            raise ValueError(
                f"{name}: {self._sharded}={sizes[self._sharded]} can't be shared evenly by the {self.ranks} ranks of "
                f"group; pass a multiple of {self.ranks}"
            )
        shape = [out_features, in_features]
        shape[self._split] //= self.ranks
        self.weight = Parameter(torch.empty(shape, device=device, dtype=dtype))
        of_bias = out_features if self._split == 1 else shape[0]
        self.bias = Parameter(torch.empty(of_bias, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw a whole nn.Linear, and take this rank's part: with the same seed on every rank they fit together."""
        where = {"device": self.weight.device, "dtype": self.weight.dtype}
        whole = Linear(self.in_features, self.out_features, self.bias is not None, **where)
        with torch.no_grad():
            self.weight.copy_(self._part(whole.weight))
            if self.bias is not None:
                self.bias.copy_(self._part(whole.bias))

    @classmethod
    def _of(cls, linear: Module, group: "ProcessGroup | None", **options: Any) -> Self:
        """A layer with copies of its part of the parameters of a plain nn.Linear, and its training mode."""
        require_linear(f"{cls.__name__}.from_linear", linear)
        assert isinstance(linear, Linear)
        bias: Tensor | None = linear.bias
        sizes = linear.in_features, linear.out_features
        made = cls(*sizes, group, bias is not None, "meta", linear.weight.dtype, **options)
        for name, whole in linear.named_parameters():
            setattr(made, name, Parameter(made._part(whole.detach()).clone(), whole.requires_grad))
        return made.train(linear.training)

    def _part(self, whole: Tensor) -> Tensor:
        """This rank's part of a weight or bias.  A bias has no dimension 1: then all ranks have all of it."""
        return whole.chunk(self.ranks, self._split)[self.rank] if whole.ndim > self._split else whole

    def _keywords(self) -> dict[str, Any]:
        """The function's arguments besides x, the weight and the group."""
        out = main_grad_of(type(self).__name__, self.weight) if self.main_grad else None
        names = ("bias", "backend", "precision", "reduce_dtype")
        return {"weight_grad_out": out} | {name: getattr(self, name) for name in names}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy with the same group, which can't itself be copied."""
        memo[id(self.group)] = self.group
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made

    def extra_repr(self) -> str:
        """The whole layer's sizes, how many ranks share it, and the options that differ from their defaults."""
        own = f"{self.in_features}, {self.out_features}, ranks={self.ranks}"
        given: dict[str, tuple[object, object]] = {"bias": (self.bias is not None, True)}
        given |= {"main_grad": (self.main_grad, False), "backend": (self.backend, "auto")}
        given |= {"precision": (self.precision, "full"), "reduce_dtype": (self.reduce_dtype, None)}
        return ", ".join([own, *(f"{k}={x!r}" for k, (x, default) in given.items() if x != default)])


class ColumnParallelLinear(_ParallelLinear):
    """This rank's columns of an nn.Linear, after a sequence-parallel layer: `all_gather_matmul` with its own weight.

    Args:
        in_features, out_features, bias, device, dtype: as for the whole `torch.nn.Linear`.
        group: the ranks, which share out_features evenly; None for all processes.
        keep_gathered, backend, precision, reduce_dtype: as in `all_gather_matmul`.
        main_grad: backward adds the weight's gradient to `weight.main_grad`, a float32 tensor of its shape that you
            attach, and leaves `weight.grad` alone.

    The parameters and the state_dict are this rank's, under nn.Linear's names: weight [out_features / n, in_features]
    and bias [out_features / n], the rows from r * out_features / n on.  Concatenated along dimension 0, all ranks'
    parameters are nn.Linear's.

    `forward(x_shard)` takes [T/n, ..., in_features], this rank's tokens, and returns [T, ..., out_features / n].

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from onchip.torch import ColumnParallelLinear, RowParallelLinear
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # or by torchrun
        >>> up, down = ColumnParallelLinear(16, 64, None), RowParallelLinear(64, 16, None)
        >>> down(up(torch.randn(6, 16)).relu()).shape
        torch.Size([6, 16])
        >>> dist.destroy_process_group()

    Source: Megatron-LM's sequence parallelism (arXiv:2205.05198).
    """

    _split, _sharded = 0, "out_features"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: "ProcessGroup | None",
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        keep_gathered: bool = False,
        **options: Unpack[ParallelOptions],
    ) -> None:
        require_bool("ColumnParallelLinear", "keep_gathered", keep_gathered)
        super().__init__(in_features, out_features, group, bias, device, dtype, **options)
        self.keep_gathered = keep_gathered

    @classmethod
    def from_linear(
        cls,
        linear: Module,
        group: "ProcessGroup | None",
        *,
        keep_gathered: bool = False,
        **options: Unpack[ParallelOptions],
    ) -> Self:
        """A layer with copies of this rank's part of the parameters of `linear`, and its training mode.

        Args:
            linear: a plain `torch.nn.Linear`, with the same parameters on every rank.
            group, keep_gathered, main_grad, backend, precision, reduce_dtype: as in the class.

        Raises:
            TypeError: `linear` has another class, or a forward of its own, which may do more.
            ValueError: the ranks can't share the features evenly.
        """
        return cls._of(linear, group, keep_gathered=keep_gathered, **options)

    def forward(self, x_shard: Tensor) -> Tensor:
        """[T, ..., out_features / n], from [T/n, ..., in_features]."""
        options = self._keywords() | {"keep_gathered": self.keep_gathered}
        return all_gather_matmul(x_shard, self.weight, self.group, **options)

    if TYPE_CHECKING:  # torch.nn.Module.__call__ has no types

        def __call__(self, x_shard: Tensor) -> Tensor: ...


class RowParallelLinear(_ParallelLinear):
    """This rank's rows of an nn.Linear, before a sequence-parallel layer: `matmul_reduce_scatter` with its own weight.

    Args:
        in_features, out_features, bias, device, dtype: as for the whole `torch.nn.Linear`.
        group: the ranks, which share in_features evenly; None for all processes.
        main_grad, backend, precision, reduce_dtype: as in `ColumnParallelLinear`.

    The parameters and the state_dict, under nn.Linear's names, are this rank's weight [out_features, in_features / n],
    the columns from r * in_features / n on, and the whole bias [out_features], the same on every rank.  Concatenated
    along dimension 1, all ranks' weights are nn.Linear's.  The bias gets its whole gradient on every rank, with the
    same bits, so it needs no all-reduce over the group.

    `forward(x)` takes [T, ..., in_features / n], all tokens, and returns this rank's [T/n, ..., out_features].

    Example: see `ColumnParallelLinear`.

    Source: Megatron-LM's sequence parallelism (arXiv:2205.05198).
    """

    _split, _sharded = 1, "in_features"

    @classmethod
    def from_linear(cls, linear: Module, group: "ProcessGroup | None", **options: Unpack[ParallelOptions]) -> Self:
        """As `ColumnParallelLinear.from_linear`."""
        return cls._of(linear, group, **options)

    def forward(self, x: Tensor) -> Tensor:
        """[T/n, ..., out_features], from [T, ..., in_features / n]."""
        return matmul_reduce_scatter(x, self.weight, self.group, **self._keywords())

    if TYPE_CHECKING:  # torch.nn.Module.__call__ has no types

        def __call__(self, x: Tensor) -> Tensor: ...
