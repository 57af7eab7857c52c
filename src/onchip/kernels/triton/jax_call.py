"""Triton's kernels in JAX: a launch is a call in XLA, the same by which jax-triton launches kernels.

jax-triton's own function takes whole arrays, and compiles a kernel anew in each process.  Here a kernel is compiled as
for PyTorch, or comes from Triton's cache, and an argument may begin anywhere in an array: the kernel's machine code
adds the offset to the address that it reads.
"""

import re
import subprocess
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from onchip.kernels.triton.compile_process import Job
from onchip.kernels.triton.keys import settle

if TYPE_CHECKING:  # it imports PyTorch
    from onchip.kernels.triton.launch import Launch

TARGET = "triton_kernel_call"  # XLA's name of the call


class Pointer(NamedTuple):
    """An argument that is memory."""

    array: int  # its number among the call's arrays
    offset: int  # bytes from its beginning


def library() -> Any:
    """The module that makes XLA's calls of Triton's kernels; a JAX without a GPU has none."""
    from jaxlib import gpu_triton

    return gpu_triton


def job(launch: "Launch", capability: int) -> Job:
    """The job of compiling the launch's kernel for a GPU that need not be there; 80 stands for compute capability 8.0.
    Triton sees of the arguments what it would see in PyTorch.
    """
    from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]
    from triton.compiler import ASTSource, make_backend  # type: ignore[import-untyped]
    from triton.runtime.jit import create_function_from_signature  # type: ignore[import-untyped]

    kernel, target = launch.kernel, GPUTarget("cuda", capability, 32)
    backend, given = make_backend(target), launch.arguments | launch.options
    bound, seen, _ = create_function_from_signature(kernel.signature, kernel.params, backend)(**given)
    options, *source = kernel._pack_args(backend, given, bound, seen, None)
    settle(kernel)
    return Job(ASTSource(kernel, *source), target, vars(options), None)


def compiled(made: Job) -> Any:
    """The kernel, compiled by Triton or taken from its cache."""
    import triton  # type: ignore[import-untyped]

    return triton.compile(made.source, target=made.target, options=made.options)


def stack(launch: "Launch", capability: int) -> int:
    """Bytes of each thread's stack, which it needs because registers don't suffice."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled(job(launch, capability)).asm["cubin"])
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"STACK:(\d+)", said.stdout + said.stderr)
    return 0 if found is None else int(found[1])


def call(
    launch: "Launch",
    arguments: Mapping[str, Any],  # the launch's, with pointers for tensors
    capability: int,
    arrays: Sequence[jax.Array | jax.ShapeDtypeStruct],
    written: Sequence[bool],
) -> list[jax.Array]:
    """Launch the kernel; returns those of the `arrays` that are `written`, in their memory.

    An array that is only a ShapeDtypeStruct is new memory.
    """
    made, used = job(launch, capability), library()
    given = [i for i, x in enumerate(arrays) if not isinstance(x, jax.ShapeDtypeStruct)]
    results = [i for i, x in enumerate(written) if x]
    order = [*given, *results]  # the kernel gets the operands first, then the results
    place = {i: n for n, i in enumerate(order)}
    flat = [x for name, kind in made.source.signature.items() for x in _parts(arguments[name], kind)]
    where = [(place[x.array], x.offset) if isinstance(x, Pointer) else None for x, _ in flat]
    parameters = [used.create_array_parameter(0, 0)] * len(order)
    parameters += [used.create_scalar_parameter(x, kind) for x, kind in flat if not isinstance(x, Pointer)]
    code = compiled(made)
    name, ptx = code.metadata.name, of_arrays(code.metadata.name, code.asm["ptx"], where, len(order))
    kernel = used.TritonKernel(name, launch.warps, 1, code.metadata.shared, ptx, str(code.asm["ttir"]), capability)
    config = used.TritonKernelCall(kernel, *(*launch.grid, 1, 1)[:3], parameters).to_proto(name, b"")
    ask: Any = jax.ffi.ffi_call(  # type: ignore[call-overload]
        TARGET,
        [jax.ShapeDtypeStruct(arrays[i].shape, arrays[i].dtype) for i in results],
        input_output_aliases={n: results.index(i) for n, i in enumerate(given) if written[i]},
        custom_call_api_version=2,
        legacy_backend_config=zlib.compress(config),
    )
    return list(ask(*[arrays[i] for i in given]))


def _parts(value: Any, kind: Any) -> list[tuple[Any, str]]:
    """The parameters of the machine code that are made from an argument, and their types for Triton."""
    if isinstance(kind, tuple):
        return [part for each in zip(value, kind, strict=True) for part in _parts(*each)]
    return [] if kind == "constexpr" else [(value, kind)]


def of_arrays(kernel: str, ptx: str, where: Sequence[tuple[int, int] | None], arrays: int) -> str:
    """The machine code of a kernel that takes `arrays`, in the order in which XLA passes them, and then its numbers.

    where: for each parameter that is memory, the array and the byte in it where it begins; for a number, None.
    """
    head = re.search(rf"\.visible \.entry {re.escape(kernel)}\(([^)]*)\)", ptx)
    assert head is not None
    parameters = [x.strip() for x in head[1].split(",")]
    assert len(parameters) == len(where) + 2, "Triton's kernels have two more parameters, for scratch memory"
    for i, found in enumerate(where):
        if found is not None:
            name, (array, offset) = rf"\[{re.escape(kernel)}_param_{i}\]", found
            to = rf"\1\2, [{kernel}_array_{array}];" + (rf"\n\tadd.s64 \t\2, \2, {offset};" if offset else "")
            ptx = re.sub(rf"(ld\.param\.[bu]64\s+)(%\w+), {name};", to, ptx)
            assert not re.search(name, ptx), f"{kernel} reads the address of parameter {i} in an unknown way"
    numbers = [x for x, found in zip(parameters, [*where, None, None], strict=True) if found is None]
    given = [f".param .u64 {kernel}_array_{i}" for i in range(arrays)] + numbers
    return ptx.replace(head[1], "\n\t" + ",\n\t".join(given) + "\n", 1)
