"""Launches Triton's kernels, and says which devices can run them.  Imports no Triton itself."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from importlib.util import find_spec
from operator import itemgetter
from types import NoneType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from onchip.frontend import torch_ahead, torch_prepared
from onchip.kernels.triton.compile_process import Job
from onchip.kernels.triton.compiling import Ask, compile_coming
from onchip.kernels.triton.keys import settle
from onchip.kernels.triton.packed import Packed
from onchip.kernels.triton.recalled import noted_any, recall
from onchip.kernels.triton.versions import Settings, direct_refusal, gluon_refusal, hashing, interpreted, settings

# Bytes of a thread's stack beyond which a smaller tile is taken.  Triton 3.6 stays below it everywhere.
SPILLED = 512

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Shared:
    """Arguments that several launches share, by the parameters' names; their traits are found once."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self.arguments = arguments
        self.traits = _Traits(arguments)


class _Traits(dict[str, Any]):
    """The traits by the names of these arguments, found when they are asked for."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self.of = arguments

    def __missing__(self, name: str) -> Any:
        made = self[name] = trait(self.of[name])
        return made


class Launch(NamedTuple):
    """One kernel launch, to be run or to be compiled ahead of time."""

    kernel: Any
    grid: tuple[int, ...]
    given: Mapping[str, Any]
    """Arguments by the parameters' names; those that the kernel doesn't take are left out."""
    warps: int = 4
    stages: int = 1
    registers: int | None = None
    """The most registers that a thread may have; None leaves it to the compiler."""
    shared: Shared = Shared({})
    """The other arguments."""

    @property
    def arguments(self) -> dict[str, Any]:
        """Everything that the kernel takes, in the order of its parameters."""
        others = self.shared.arguments
        return {name: self.given[name] if name in self.given else others[name] for name in self.kernel.arg_names}

    @property
    def options(self) -> dict[str, Any]:
        """The options that it is compiled with."""
        return {
            "num_warps": self.warps,
            "num_stages": self.stages,
            "maxnreg": self.registers,
            "enable_fp_fusion": True,  # the default differs between versions of Triton
        }

    def run(self) -> None:
        """Launch on the current device.

        A kernel that was compiled for such arguments before is called directly: with dozens of arguments, Triton takes
        several times as long to find it as to launch it.
        """
        coming = torch_ahead.gathered()
        if coming is not None:
            coming.append(self)
            return
        if torch_prepared.listed_device() is not None:
            torch_prepared.builder().launch(self)  # type: ignore[union-attr]
            return
        triton = _unwatched()
        if triton is None or self.kernel.pre_run_hooks:
            if (told := torch_prepared.builder()) is not None:
                told.refuse("Triton watches its launches")
            self.kernel[self.grid](**self.arguments, **self.options)
            return
        compiled, active = _Compiled.of(self.kernel), triton.driver.active
        device, values = active.get_current_device(), self._values(compiled)
        key = self._key(compiled, device, values)
        found = compiled.by_key.get(key)
        told = torch_prepared.builder()
        if found is not None:
            x, y, z = (*self.grid, 1, 1)[:3]
            stream = active.get_current_stream(device)
            found.run(x, y, z, stream, found.function, found.packed_metadata, None, None, None, *values)
        else:
            compile_coming(self.ask, lambda: asks(torch_ahead.rehearsed(), device))
            found = self.kernel[self.grid](**self.arguments, **self.options)
            if not hasattr(found, "packed_metadata"):  # it is still being compiled
                if told is not None:
                    told.refuse("a kernel is being compiled")
                return
            compiled.by_key[key] = found
        if told is not None:
            told.require(_is_unwatched, partial(active.get_current_stream, device))
            if not told.refused and 0 not in self.grid:
                packed = Packed.of(found, self.grid, values, device)
                if packed is None:
                    told.refuse("it isn't known how CUDA's driver takes a kernel's arguments")
                else:
                    told.launch(packed)

    def ask(self) -> Any:
        """The kernel, compiled but not launched."""
        recall(self.kernel)
        return self.kernel.warmup(grid=self.grid, **self.arguments, **self.options)

    def job(self, capability: int) -> Job:
        """The job of compiling the kernel for a GPU that need not be there, whose compute capability is 8.0 if this is
        80.  Of tensors without memory Triton sees what it would see of others.
        """
        from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]
        from triton.compiler import ASTSource, make_backend  # type: ignore[import-untyped]
        from triton.experimental.gluon._runtime import GluonASTSource  # type: ignore[import-untyped]
        from triton.runtime.jit import create_function_from_signature  # type: ignore[import-untyped]

        kernel, target, given = self.kernel, GPUTarget("cuda", capability, 32), self.arguments | self.options
        kind, backend = GluonASTSource if kernel.is_gluon() else ASTSource, make_backend(target)
        bound, seen, _ = create_function_from_signature(kernel.signature, kernel.params, backend)(**given)
        options, *source = kernel._pack_args(backend, given, bound, seen, None)
        settle(kernel)
        return Job(kind(kernel, *source), target, vars(options), None)

    def _values(self, compiled: "_Compiled") -> Sequence[Any]:
        """The values of all arguments, in the order of the parameters."""
        return compiled.arguments({**self.shared.arguments, **self.given})

    def _key(self, compiled: "_Compiled", device: int, values: Sequence[Any]) -> Any:
        """Everything that decides what is compiled."""
        given, others = self.given, self.shared.traits
        key = [device, self.warps, self.stages, self.registers, compiled.constants(values)]
        for name in compiled.variables:
            if name in given:
                x = given[name]
                key.append(_TRAITS.get(type(x), _other_trait)(x))
            else:
                key.append(others[name])
        key += [_size_trait(x) for x in compiled.numbers(values)]
        return tuple(key)

    def spills(self, most: int = SPILLED) -> bool:
        """Whether a thread's stack has more than `most` bytes, as compiled for the current device: registers don't
        suffice then.
        """
        if torch_prepared.listed_device() is not None:
            return torch_prepared.builder().stack(self) > most  # type: ignore[no-any-return, union-attr]
        if interpreted():
            return False
        compiled, device = _Compiled.of(self.kernel), settings().driver.active.get_current_device()
        key = self._key(compiled, device, self._values(compiled))
        spilled = compiled.spilled.get(key)
        if spilled is None:
            if (coming := torch_ahead.gathered()) is not None:
                coming.append(self)
                return False
            compile_coming(self.ask, lambda: asks(torch_ahead.rehearsed(), device))
            found = self.ask()
            assert found.run is not None  # it is loaded, which counts them
            spilled = compiled.spilled[key] = 4 * found.n_spills
        return spilled > most

    def fixed(self) -> "Launch":
        """The same launch; all its arguments are shared with those that `again` makes from it."""
        return self._replace(given={}, shared=Shared(self.arguments))

    def again(self, grid: tuple[int, ...] | None = None, **changes: Any) -> "Launch":
        """The same launch with other values for some arguments, and with another grid if one is given."""
        return Launch(self.kernel, grid or self.grid, changes, self.warps, self.stages, self.registers, self.shared)


def asks(launches: Sequence[Launch], device: int) -> list[Ask]:
    """The functions that ask Triton for the kernels of these launches, one for each kernel that this process lacks."""
    missing: dict[Any, Ask] = {}
    for launch in launches:
        compiled = _Compiled.of(launch.kernel)
        key = launch._key(compiled, device, launch._values(compiled))
        if key not in compiled.by_key:
            missing.setdefault((id(launch.kernel), key), launch.ask)
    return list(missing.values())


class _Compiled(NamedTuple):
    """A kernel's compiled variants, and functions that pick the values of some parameters from those of all."""

    kernel: Any  # kept, so that no other kernel gets its id
    arguments: Callable[[Mapping[str, Any]], tuple[Any, ...]]  # of all parameters, by their names
    variables: tuple[str, ...]  # names of the parameters whose values the compiler sees something of
    constants: Callable[[Sequence[Any]], tuple[Any, ...]]
    numbers: Callable[[Sequence[Any]], tuple[Any, ...]]  # of whose values it sees nothing
    by_key: dict[Any, Any]  # by device, options, constants, the variables' traits and the numbers' sizes
    spilled: dict[Any, int]  # bytes, by the same

    @staticmethod
    def of(kernel: Any) -> "_Compiled":
        known = _COMPILED.get(id(kernel))
        if known is None:
            variables = [x.name for x in kernel.params if not (x.is_constexpr or x.do_not_specialize)]
            constants = _picker([i for i, x in enumerate(kernel.params) if x.is_constexpr])
            numbers = _picker([i for i, x in enumerate(kernel.params) if x.do_not_specialize and not x.is_constexpr])
            known = _Compiled(kernel, _picker(kernel.arg_names), tuple(variables), constants, numbers, {}, {})
            _COMPILED[id(kernel)] = known
        return known


def _picker(keys: Sequence[Any]) -> Callable[[Any], tuple[Any, ...]]:
    return itemgetter(*keys) if len(keys) > 1 else lambda values: tuple([values[i] for i in keys])


_COMPILED: dict[int, _Compiled] = {}  # by the kernel's id: its hash is that of its source


def descriptor(x: Tensor, stride: int, rows: int, columns: int) -> Any:
    """A descriptor for a matrix in blocks of [rows, columns], for TMA."""
    return block_descriptor(x, x.shape, (stride, 1), (rows, columns))


def block_descriptor(x: Tensor, shape: Sequence[int], strides: Sequence[int], block: Sequence[int]) -> Any:
    """A descriptor for TMA, in blocks, for memory that begins where `x` does.  Triton's own constructor checks
    everything, which takes three times as long; the caller knows that the values are right.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor  # type: ignore[import-untyped]

    made = object.__new__(TensorDescriptor)
    shape, strides, block = [*shape], [*strides], [*block]
    made.__dict__ = {"base": x, "padding": "zero", "shape": shape, "strides": strides, "block_shape": block}
    return made


def shared_descriptor(
    x: Tensor, shape: Sequence[int], strides: Sequence[int], block: Sequence[int], swizzle: int = 128
) -> Any:
    """As `block_descriptor`, for kernels in Gluon, which state how a block lies in shared memory: in patterns of
    `swizzle` bytes per row, or of a whole row if that is less; 0: row by row.
    """
    size = x.element_size()
    width, bits = min(swizzle, block[-1] * size), 8 * size
    kind, layout = _shared_layout(width, bits, len(block))
    made: Any = object.__new__(kind)
    shape, strides, block = [*shape], [*strides], [*block]
    made.__dict__ = {
        "base": x, "padding": "zero", "shape": shape, "strides": strides, "block_shape": block, "layout": layout,
    }  # fmt: skip
    return made


@lru_cache(maxsize=256)
def _shared_layout(width: int, bits: int, rank: int) -> tuple[type, Any]:
    """Gluon's class of descriptors, and a layout, which takes longer to make than the descriptor."""
    from triton.experimental.gluon.language import NVMMASharedLayout  # type: ignore[import-untyped]
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # type: ignore[import-untyped]

    return TensorDescriptor, NVMMASharedLayout(swizzle_byte_width=width, element_bitwidth=bits, rank=rank)


def trait(x: Any) -> Any:
    """An argument's traits: at least what Triton's compiler knows of it, so that equal traits run the same code."""
    return _TRAITS.get(type(x), _other_trait)(x)


@lru_cache(maxsize=4096)
def _int_trait(x: int) -> Any:
    """Whether it is 1; for other numbers, whether 16 divides it and how many bits it needs."""
    return x == 1 or (x % 16 == 0, _size_trait(x))


def _size_trait(x: Any) -> Any:
    """How many bits a number needs that Triton doesn't compile for."""
    return None if x is None else 32 if -(2**31) <= x < 2**31 else 63 if -(2**63) <= x < 2**63 else 64


def _tensor_trait(x: Tensor) -> Any:
    """Its dtype, and whether it isn't aligned."""
    return (x.dtype, "unaligned") if x.data_ptr() % 16 else x.dtype


def _other_trait(x: Any) -> Any:
    """The trait of a named tuple, a subclass of Tensor, or a TensorDescriptor; a constant is its own trait."""
    if isinstance(x, tuple):
        get, other = _TRAITS.get, _other_trait
        return type(x), *[None if y is None else get(type(y), other)(y) for y in x]
    if isinstance(x, Tensor):
        return _tensor_trait(x)
    return (x.base.dtype, *x.block_shape) if hasattr(x, "block_shape") else x


# By type, since asking whether a number is a tensor takes longer than all else.
_TRAITS: dict[type, Callable[[Any], Any]] = {
    int: _int_trait, Tensor: _tensor_trait, Parameter: _tensor_trait, bool: type, float: type, NoneType: type
}  # fmt: skip


def _unwatched() -> Settings | None:
    """Triton, if it does no more around a launch than `Launch.run` does."""
    triton = _triton()
    return None if triton is None or triton.watched() else triton


def _is_unwatched() -> bool:
    return _unwatched() is not None


@lru_cache(maxsize=1)
def _triton() -> Settings | None:
    return settings() if direct_refusal() is None else None


def constant_to_compiler(function: _Function) -> _Function:
    """What torch.compiler.assume_constant_result does, which would import the compiler just to say so."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_to_compiler  # it asks the system
def device_refusal(device: str, index: int | None, dtype: torch.dtype) -> str | None:
    """Why no Triton kernel can serve a call on this device with tensors of `dtype`, or None."""
    if dtype == torch.float64:
        return "it takes no float64; pass backend='plain', or 'auto'"
    if find_spec("triton") is None:
        return "Triton is not installed"
    if torch_prepared.listed_device() is not None:
        return None
    if interpreted():
        return "Triton's interpreter computes bfloat16 wrongly" if dtype == torch.bfloat16 else None
    if device != "cuda":
        return f"it runs on CUDA tensors, not on {device!r}"
    if torch.version.hip is not None:
        return "it is written for NVIDIA GPUs"
    _hash_if_needed()
    major, minor = torch.cuda.get_device_capability(index)
    return None if major >= 8 else f"it needs compute capability 8.0 or later; this is {major}.{minor}"


@lru_cache(maxsize=1)
def _hash_if_needed() -> None:
    """Have Triton's files hashed meanwhile, unless the cache has kernels whose keys need no hash."""
    if not noted_any():
        hashing()


def has_gluon(capability: int) -> bool:
    """Whether kernels in Gluon can run: they are written for Hopper."""
    return capability == 90 and gluon_refusal() is None


# A thread's registers on average, of kernels in Gluon whose warps have different numbers: three groups of four warps
# have all that a multiprocessor has.
ALL_REGISTERS = 168


class Device(NamedTuple):
    """What a launch depends on."""

    capability: int  # 90 is 9.0
    programs: int  # multiprocessors
    shared: int  # bytes of shared memory that a block may use

    @property
    def product_bytes(self) -> int:
        """Of these, what the blocks and the staged result of a product may take as on Hopper: for Blackwell, Triton 3.6
        stages up to 32 KiB more.
        """
        return self.shared - (32 << 10) * (self.capability >= 100)


def describe(device: torch.device) -> Device:
    """Describe a GPU; the CPU, under the interpreter, counts as a small Hopper."""
    if (listed := torch_prepared.listed_device()) is not None:
        return listed  # type: ignore[no-any-return]
    if torch_ahead.gathered() is not None and torch.cuda.is_available():
        return _describe(torch.cuda.current_device())
    return _describe(device.index) if device.type == "cuda" else Device(90, 4, 232448)


@lru_cache(maxsize=64)
def _describe(index: int | None) -> Device:
    p = torch.cuda.get_device_properties(index)
    shared: int = p.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return Device(10 * p.major + p.minor, p.multi_processor_count, shared)


def device_of(x: Tensor) -> Any:
    """A context in which the device of `x` is current: Triton launches on the current device."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()
