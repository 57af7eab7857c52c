"""What a call launches on an H100, as text: kernels, PyTorch's operators and memory, in their order.

Calls run on tensors without memory, forward and backward, as they would on the GPU.  The text names no address and no
function of this library, so code that is moved but does the same gives the same text.
"""

import gc
import sys
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from importlib import import_module
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from onchip.fp8 import cublas, torch_products
from onchip.frontend import torch_prepared, torch_register
from onchip.kernels.triton import launch as launches
from onchip.kernels.triton.launch import Device, Launch

H100 = Device(90, 132, 232448)
TIMES = 2
_SHORT = {
    "bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64", "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
}  # fmt: skip


class Recorder(TorchDispatchMode):
    """Notes what runs while it lasts, and the memory that is taken."""

    def __init__(self, **given):
        super().__init__()
        self.lines, self.peak = [], 0
        self._storages, self._names = {}, {}
        self._taken = []  # sizes of what was not yet freed when it was last looked at
        self._last, self._said = {}, {}  # by kernel, and by parameter
        for name, x in given.items():
            self.name(name, x)

    def name(self, name, x):
        """What its memory is called."""
        self._names[x.untyped_storage()._cdata] = name
        self._storages[x.untyped_storage()._cdata] = StorageWeakRef(x.untyped_storage())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            self.lines.append(f"{func} {self._all((*_tensors(args),))}")
            return collective(args)
        made = func(*args, **kwargs)
        if _is_view(func):
            return made
        new = [x for x in _tensors((made,)) if x.untyped_storage()._cdata not in self._storages]
        for x in new:
            storage = x.untyped_storage()
            weak = self._storages[storage._cdata] = StorageWeakRef(storage)
            self._taken.append((weak, storage.nbytes()))
        self.peak = max(self.peak, self.live)
        if "empty" in str(func):
            self.lines.append(f"empty {' '.join(_kind(x) for x in new)}")
        else:
            into = f" -> {' '.join(_kind(x) for x in new)}" if new else ""
            words = [*args, *(f"{k}={self._one(x)}" for k, x in kwargs.items() if k not in ("device", "layout"))]
            self.lines.append(f"{func} {self._all(words)}{into}")
        return made

    @property
    def live(self):
        """Bytes that are taken now, beyond what was given."""
        self._taken = [x for x in self._taken if not x[0].expired()]
        return sum(size for _, size in self._taken)

    def launch(self, launch):
        """A kernel: constants after a colon, and other arguments that aren't None.

        What it has in common with its last launch in this call isn't said again; `^` is what another kernel's argument
        of that name was.
        """
        kernel = launch.kernel.__name__
        constants = {p.name for p in launch.kernel.params if p.is_constexpr}
        said = {name: self._one(x) for name, x in _by_name(launch.arguments).items()}
        before = self._last.get(kernel)
        words = [f"{'x'.join(map(str, launch.grid))}, warps {launch.warps}, stages {launch.stages}"]
        words[0] += "" if launch.registers is None else f", registers {launch.registers}"
        for name, x in said.items():
            if x != ("None" if before is None else before[name]):
                short = "^" if len(x) > 30 and self._said.get(name) == x else x
                words.append(f"{name}{':' if name in constants else '='}{short}")
        self._last[kernel] = said
        self._said |= said
        self.lines.append(f"{kernel} {'again ' if before else ''}{' '.join(words)}")

    def note(self, what, *tensors):
        self.lines.append(f"{what} {self._all(tensors)}")

    def _all(self, values):
        return " ".join(self._one(x) for x in values)

    def _one(self, x):
        if isinstance(x, Tensor):
            return self._tensor(x)
        if hasattr(x, "block_shape"):
            layout = getattr(x, "layout", None)
            swizzle = "" if layout is None else f" swizzle {layout.swizzle_byte_width}"
            at = f"{_list(x.shape)}:{_list(x.strides)} by {_list(x.block_shape)}{swizzle}"
            return f"tma({self._tensor(x.base)} {at})"
        if isinstance(x, tuple | list):
            return f"({' '.join('-' if y is None else self._one(y) for y in x)})"
        if callable(getattr(x, "fn", None)):  # a function that kernels call
            return x.fn.__name__
        said = x if isinstance(x, str) else str(x)
        assert " at 0x" not in said, said
        return _SHORT.get(said.removeprefix("torch."), said)

    def _tensor(self, x):
        storage = x.untyped_storage()
        known = self._names.get(storage._cdata)
        if known is None:
            self._storages.setdefault(storage._cdata, StorageWeakRef(storage))
            known = self._names[storage._cdata] = f"m{sum(y.startswith('m') for y in self._names.values()) + 1}"
        offset = x.storage_offset() * x.element_size()
        return f"{_kind(x)}@{known}{f'+{offset}' if offset else ''}"


def _by_name(arguments):
    """Those that are named tuples of numbers alone by the numbers' names."""
    made = {}
    for name, x in arguments.items():
        numbers = hasattr(x, "_fields") and all(type(y) is float for y in x)
        made |= x._asdict() if numbers else {name: x}
    return made


def _list(numbers):
    return ",".join(map(str, numbers))


def _kind(x):
    dtype = str(x.dtype).removeprefix("torch.")
    strides = "" if x.is_contiguous() else f":{_list(x.stride())}"
    return f"{_SHORT.get(dtype, dtype)}[{_list(x.shape)}]{strides}"


def _tensors(values):
    for x in values:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, tuple | list):
            yield from _tensors(x)


def _is_view(func):
    returns = func._schema.returns
    return bool(returns) and all(x.alias_info is not None and not x.alias_info.is_write for x in returns)


def collective(args):
    """As if done: what was to be written, and work that is waited for."""
    from torch._C._distributed_c10d import FakeWork, Work

    return args[0], Work.boxed(FakeWork())


# -------------------------------------------------------------------------------------------------------- the device


# A module that asks for the first time meanwhile would keep the answers.
for _asking in (
    "attention.triton.launches", "attention.triton.op", "collectives.torch_buffers", "collectives.torch_symmetric",
    "collectives.triton_launches", "fp8.torch_operands", "fp8.triton_launches", "groups.triton.launches",
    "groups.triton.op", "ops.cross_entropy.torch_loss", "ops.linear_cross_entropy.fp8_op", "vocab.fp8.launches",
    "vocab.rows.launches", "vocab.rows.walk", "vocab.triton.setup",
):  # fmt: skip
    import_module(f"onchip.{_asking}")
# What this library asks about a device, and what it learns.
ANSWERS = {
    launches.describe: lambda device: H100,
    launches.device_refusal: lambda *_: None,
    launches.device_of: lambda x: nullcontext(),
    torch_products.scaled_mm_refusal: lambda *_: None,
    torch_register.are_plain: lambda *_: True,
}


@cache
def _asking(number):
    """Of so many modules, those that ask one of these questions."""
    modules = [x for name, x in [*sys.modules.items()] if name.startswith("onchip.")]
    return [(x, question) for question in ANSWERS for x in modules if vars(x).get(question.__name__) is question]


@contextmanager
def on_h100(recorder, *, spills=False):
    """Tensors without memory are the GPU's, and what is launched goes to the recorder: in a process of its own."""
    autocast = torch.is_autocast_enabled
    asking = _asking(len(sys.modules))
    patches = [mock.patch.object(module, question.__name__, ANSWERS[question]) for module, question in asking]
    patches += [
        mock.patch.object(Launch, "run", lambda launch: recorder.launch(launch)),
        mock.patch.object(Launch, "spills", return_value=spills),
        mock.patch.object(cublas, "multiplied", partial(_multiplied, recorder)),
        mock.patch.object(dist, "batch_isend_irecv", partial(_sent, recorder)),
        mock.patch.object(torch, "is_autocast_enabled", lambda *x: x != ("meta",) and autocast(*x)),
    ]
    torch_prepared.forget()
    for x in patches:
        x.start()
    Tensor.is_cuda = property(lambda x: x.device.type == "meta")
    try:
        with recorder:
            yield
    finally:
        del Tensor.is_cuda
        for x in reversed(patches):
            x.stop()
        torch_prepared.forget()


@contextmanager
def bound_by_one_function():
    """A kernel's arguments, for one kind of GPU: Triton compiles a function for each launch whose job is asked for,
    which took a third of the time.
    """
    from triton.runtime import jit

    bind, known = jit.create_function_from_signature, {}

    def once(signature, params, backend):
        if id(params) not in known:
            known[id(params)] = params, bind(signature, params, backend)
        return known[id(params)][1]

    with mock.patch.object(jit, "create_function_from_signature", once):
        yield


def _multiplied(recorder, a, b, by_block, out, *, bias=None, add=False):
    how = f"cuBLASLt by {'block' if by_block else 'row'}{', added' if add else ''}"
    recorder.note(how, a.data, a.scales, b.data, b.scales, bias, out)
    return True


def _sent(recorder, both):
    recorder.note("sent and received", *(x.tensor for x in both))
    return []


def recorded(op, given, options, *, spills=False):
    """The lines of a call with these tensors, forward and backward: of the last, for a first one imports modules, which
    keeps memory for longer.
    """
    return [_recorded(op, given, options, spills) for _ in range(TIMES)][-1]


def _recorded(op, given, options, spills):
    recorder = Recorder(**given)
    leaves = [x for x in given.values() if x.requires_grad and x.is_leaf]
    gc.disable()  # what is freed, and when, is left to counts of references
    try:
        with on_h100(recorder, spills=spills):
            made = op(**options)
        recorder.lines.append(f"forward: at most {recorder.peak} bytes, {recorder.live} at its end")
        outputs = [x for x in _tensors((made,)) if x.requires_grad]
        if leaves and outputs:
            upstream = [torch.empty_like(x) for x in outputs]
            for i, x in enumerate(upstream):
                recorder.name(f"upstream{i}", x)
            recorder.peak = 0
            with on_h100(recorder, spills=spills):
                grads = torch.autograd.grad(outputs, leaves, upstream, allow_unused=True)
            recorder.lines.append(f"backward: at most {recorder.peak} bytes, {recorder.live} at its end")
            recorder.note("gradients", *grads)
    finally:
        gc.enable()
    return recorder.lines
