"""A GPU that isn't there: Triton compiles kernels for it, and a libcuda of our own records what is launched.

Its tensors are on the CPU, aligned as a GPU's.  Triton links its launchers with the libcuda that it finds, so a process
has either this GPU or a real one: `run` starts one for a script, which then enters `gpu`.
"""

import ast
import ctypes
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
import torch

KINDS = ("launch", "map", "zero", "copy")
_HEADER = struct.Struct("<12Q")


def possible(test):
    """Skips a test where this GPU can't be."""
    test = pytest.mark.skipif(shutil.which("gcc") is None, reason="programs are compiled by gcc")(test)
    reason = "a process with a real libcuda can't have a made-up one"
    return pytest.mark.skipif(torch.cuda.is_available(), reason=reason)(test)


def build(folder: Path) -> Path:
    """The made-up libcuda.so.1."""
    from triton.backends.nvidia.driver import include_dirs

    source, made = Path(__file__).with_suffix(".c"), folder / "libcuda.so.1"
    kind = ["-shared", "-fPIC", "-O1", "-w", "-Wl,-soname,libcuda.so.1"]
    subprocess.run(["gcc", *kind, f"-I{include_dirs[0]}", str(source), "-o", str(made)], check=True)
    return made


def run(script: str, *arguments: str) -> str:
    """What a script prints in a process of this GPU's."""
    with tempfile.TemporaryDirectory() as folder:
        library = str(build(Path(folder)))
        paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TRITON_LIBCUDA_PATH": folder}
        environment = os.environ | paths | {"LD_PRELOAD": library, "FAKE_CUDA": library}
        environment.pop("TRITON_INTERPRET", None)
        command = [sys.executable, script, *arguments]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout


class Entry(NamedTuple):
    """A call of the driver's."""

    kind: str
    function: int
    stream: int
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int
    attributes: bytes
    params: tuple[bytes, ...]


class Library:
    """The made-up libcuda.so.1."""

    def __init__(self, path: str) -> None:
        self.c = ctypes.CDLL(path)
        self.c.fake_take.restype = ctypes.c_size_t
        self.sizes: dict[int, tuple[int, ...]] = {}
        self._buffer = ctypes.create_string_buffer(1 << 24)

    def kernel(self, function: int, sizes: tuple[int, ...]) -> None:
        self.sizes[function] = sizes
        self.c.fake_kernel(ctypes.c_uint64(function), len(sizes), (ctypes.c_int * len(sizes))(*sizes))

    def run_by(self, run) -> None:
        """Have `run(function, grid, params)` called for each launch from now on; fills and copies happen too."""

        def called(header, data):
            _, function, _, *grid, _, _, _, _, attributes, _ = _HEADER.unpack(ctypes.string_at(header, _HEADER.size))
            at, params = data + 72 * attributes, []
            for n in self.sizes[function]:
                params.append(ctypes.string_at(at, n))
                at += n
            run(function, tuple(grid), params)

        self._run = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(called)  # kept, as C has it
        self.c.fake_runner(self._run)

    def take(self) -> list[Entry]:
        """What was asked for since the last time."""
        size, at, made = self.c.fake_take(self._buffer, ctypes.c_size_t(len(self._buffer))), 0, []
        raw = self._buffer.raw[:size]
        while at < size:
            kind, function, stream, *geometry, shared, attributes, count = _HEADER.unpack_from(raw, at)
            at += _HEADER.size
            params, end = [], at + count
            of_attributes = raw[at : at + 72 * attributes]
            at += 72 * attributes if count else 0
            for n in self.sizes.get(function, ()) if kind == 0 else ():
                params.append(raw[at : at + n])
                at += n
            assert at == end
            name = KINDS[kind]
            made.append(
                Entry(name, function, stream, (*geometry[:3],), (*geometry[3:],), shared, of_attributes, (*params,))
            )
        return made


def parameter_sizes(cubin: bytes) -> tuple[int, ...]:
    """Bytes of each of a kernel's parameters, of EIATTR_KPARAM_INFO in its .nv.info."""
    found, at = {}, -1
    while (at := cubin.find(b"\x04\x17\x0c\x00", at + 1)) >= 0:
        index, ordinal, _, flags = struct.unpack_from("<IHHI", cubin, at + 4)
        if index == 0 and flags & 0x3FF == 0:  # else these bytes are something else's
            found[ordinal] = flags >> 18
    return tuple(found[i] for i in range(len(found)))


class Driver:
    """Of a Hopper, with Triton's own launchers in front of the made-up libcuda."""

    def __init__(self, library: Library) -> None:
        from triton.backends.nvidia.driver import CudaLauncher, CudaUtils

        self.library, self.stream = library, 0x10
        self.launcher_cls = CudaLauncher
        self.utils = self
        self.get_current_stream = lambda device: self.stream  # one object, as Triton's driver has it
        triton = CudaUtils()  # some of what follows is another version's
        for name in ("fill_tma_descriptor", "fill_tma_descriptor_tiled", "launch", "build_signature_metadata"):
            if hasattr(triton, name):
                setattr(self, name, getattr(triton, name))

    def get_current_device(self):
        return 0

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_device_properties(self, device):
        return {"max_shared_mem": 232448}

    def load_binary(self, name, cubin, shared, device):
        function = 0x1000 + len(self.library.sizes)
        self.library.kernel(function, parameter_sizes(cubin))
        return 1, function, 32, 0, 1024


def _is_prepared(x):
    """For all tensors; a Mock would take 7 us, and its calls are timed."""
    return True


@contextmanager
def without_bodies():
    """Kernels are compiled with their parameters alone, which is soon done, and only where they are launched; they have
    a cache of their own.
    """
    from triton import knobs
    from triton.runtime.jit import JITFunction

    from onchip.kernels.triton import launch

    parse = JITFunction.parse

    def alone(first, others):
        """Triton compiles it at the launch."""

    def empty(self):
        tree = parse(self)
        function = tree.body[0]
        function.body = [ast.copy_location(ast.Pass(), function.body[0])]
        return tree

    with (
        mock.patch.object(JITFunction, "parse", empty),
        mock.patch.object(launch, "compile_coming", alone),
        mock.patch.dict(os.environ, TRITON_CACHE_DIR=f"{knobs.cache.dir}-without-bodies"),
    ):
        yield


@contextmanager
def gpu():
    """Calls with tensors of the CPU's run on the GPU that isn't there, and are prepared."""
    from triton.runtime import driver

    import onchip.torch  # noqa: F401 - whose modules are changed here
    from onchip.core.cuda_driver import driver as library
    from onchip.frontend import torch_builder, torch_prepared
    from onchip.vocab.triton import setup

    with ExitStack() as stack:
        made = Driver(Library(os.environ["FAKE_CUDA"]))
        stack.enter_context(mock.patch.object(driver, "_active", made))
        stack.enter_context(mock.patch.object(torch_prepared, "is_prepared", _is_prepared))
        stack.enter_context(mock.patch.object(torch_builder, "_driver_of", return_value=library()))
        stream = stack.enter_context(mock.patch.object(torch._C, "_cuda_getCurrentRawStream", create=True))
        stream.return_value = made.stream
        allocate = partial(torch_prepared.empty, device=torch.device("cpu"))
        stack.enter_context(mock.patch.object(setup, "_allocate", lambda _, shape, dtype: allocate(shape, dtype)))
        for name in ("device_refusal", "triton_refusal"):
            for module in [x for x in sys.modules.values() if x.__name__.startswith("onchip.") and hasattr(x, name)]:
                stack.enter_context(mock.patch.object(module, name, return_value=None))
        yield made


if __name__ == "__main__":
    print(run(*sys.argv[1:]), end="")
