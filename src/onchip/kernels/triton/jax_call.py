"""Triton's kernels in JAX: a launch is a call in XLA, the same by which jax-triton launches kernels.

jax-triton's own function takes whole arrays, and compiles a kernel anew in each process.  Here a kernel is compiled as
for PyTorch, or comes from Triton's cache, and an argument may begin anywhere in an array: the kernel's machine code
adds the offset to the address that it reads.
"""

import re
import subprocess
import zlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple

import jax

from onchip.kernels.triton.compile_process import Job
from onchip.kernels.triton.keys import settle

TARGET = "triton_kernel_call"  # XLA's name of the call
_TYPES = {
    "bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64", "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5", "int8": "i8", "int16": "i16", "uint8": "u8", "int32": "i32", "int64": "i64", "bool": "i1",
}  # fmt: skip


class Pointer(NamedTuple):
    """An argument that is memory."""

    dtype: str
    array: int  # its number among the call's arrays
    offset: int  # bytes from its beginning


def library() -> Any:
    """The module that makes XLA's calls of Triton's kernels; a JAX without a GPU has none."""
    from jaxlib import gpu_triton

    return gpu_triton


def refusal() -> str | None:
    """Why there is no such module, or None."""
    try:
        found = library()
    except ImportError as error:
        return str(error)
    return None if hasattr(found, "TritonKernelCall") else "JAX is not installed for CUDA: pip install 'jax[cuda13]'"


class Compiled(NamedTuple):
    """A kernel, compiled for one kind of arguments."""

    name: str
    ptx: str
    ttir: str
    shared: int
    """Bytes of shared memory that a block takes."""


def job(kernel: Any, arguments: dict[str, Any], options: dict[str, Any], capability: int) -> Job:
    """The job of compiling the kernel for these arguments, for a GPU that need not be there; 80 stands for compute
    capability 8.0.
    """
    from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]
    from triton.compiler import ASTSource  # type: ignore[import-untyped]

    signature: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for i, p in enumerate(kernel.params):
        constant, fixed = p.is_constexpr, p.do_not_specialize
        signature[p.name] = _type((i,), arguments[p.name], constants, attributes, constant=constant, fixed=fixed)
    settle(kernel)
    return Job(ASTSource(kernel, signature, constants, attributes), GPUTarget("cuda", capability, 32), options, None)


def _compiled(made: Job) -> Any:
    import triton  # type: ignore[import-untyped]

    return triton.compile(made.source, target=made.target, options=made.options)


def compiled(kernel: Any, arguments: dict[str, Any], options: dict[str, Any], capability: int) -> Compiled:
    """The kernel, compiled by Triton or taken from its cache."""
    made = _compiled(job(kernel, arguments, options, capability))
    return Compiled(made.metadata.name, made.asm["ptx"], str(made.asm["ttir"]), made.metadata.shared)


def stack(kernel: Any, arguments: dict[str, Any], options: dict[str, Any], capability: int) -> int:
    """Bytes of each thread's stack, which it needs because registers don't suffice."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(_compiled(job(kernel, arguments, options, capability)).asm["cubin"])
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"STACK:(\d+)", said.stdout + said.stderr)
    return 0 if found is None else int(found[1])


def _type(
    path: tuple[int, ...], value: Any, constants: Any, attributes: Any, *, constant: bool = False, fixed: bool = False
) -> Any:
    """The type of a value in Triton's signatures; notes what the compiler may know about the value."""
    if isinstance(value, Pointer):
        if value.offset % 16 == 0:
            attributes[path] = [["tt.divisibility", 16]]
        return f"*{_TYPES[value.dtype]}"
    if isinstance(value, tuple) and not constant:
        parts = [_type((*path, i), x, constants, attributes) for i, x in enumerate(value)]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if constant or value is None or (type(value) is int and value == 1 and not fixed):
        constants[path] = value
        return "constexpr"
    if type(value) is int and value % 16 == 0 and not fixed:
        attributes[path] = [["tt.divisibility", 16]]
    return _kind(value)


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "u1"
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def call(
    kernel: Any,
    grid: Sequence[int],
    arguments: dict[str, Any],
    options: dict[str, Any],
    capability: int,
    arrays: Sequence[jax.Array | jax.ShapeDtypeStruct],
    written: Sequence[bool],
) -> list[jax.Array]:
    """Launch the kernel; returns those of the `arrays` that are `written`, in their memory.

    An array that is only a ShapeDtypeStruct is new memory.
    """
    code = compiled(kernel, arguments, options, capability)
    given = [(i, x) for i, x in enumerate(arrays) if not isinstance(x, jax.ShapeDtypeStruct)]
    made = [i for i, x in enumerate(written) if x]
    # The kernel gets the operands first, then the results.
    place = {i: n for n, (i, _) in enumerate(given)} | {i: len(given) + n for n, i in enumerate(made)}
    aliases = {n: made.index(i) for n, (i, _) in enumerate(given) if written[i]}
    flat = tuple(_flat(kernel, arguments))
    places = tuple([place[x.array] if isinstance(x, Pointer) else -1 for x in flat])
    x, y, z = (*grid, 1, 1)[:3]
    config = _config(code, flat, places, (x, y, z), options["num_warps"], capability, len(given) + len(made))
    results = [jax.ShapeDtypeStruct(arrays[i].shape, arrays[i].dtype) for i in made]
    ask: Any = jax.ffi.ffi_call(  # type: ignore[call-overload]
        TARGET, results, input_output_aliases=aliases, custom_call_api_version=2, legacy_backend_config=config
    )
    return list(ask(*[x for _, x in given]))


def _flat(kernel: Any, arguments: dict[str, Any]) -> Iterator[Any]:
    """The parameters of the machine code."""
    for p in kernel.params:
        if not p.is_constexpr:
            yield from _parts(arguments[p.name], p.do_not_specialize)


def _parts(value: Any, fixed: bool = False) -> Iterator[Any]:
    if isinstance(value, tuple) and not isinstance(value, Pointer):
        for x in value:
            yield from _parts(x)
    elif not (value is None or (type(value) is int and value == 1 and not fixed)):
        yield value


@lru_cache(maxsize=1024)
def _config(
    code: Compiled,
    flat: tuple[Any, ...],
    places: tuple[int, ...],
    grid: tuple[int, int, int],
    warps: int,
    capability: int,
    arrays: int,
) -> bytes:
    """What XLA's call is told about a launch."""
    used = library()
    ptx = of_arrays(
        code, [(k, x.offset) if isinstance(x, Pointer) else None for k, x in zip(places, flat, strict=True)], arrays
    )
    kernel = used.TritonKernel(code.name, warps, 1, code.shared, ptx, code.ttir, capability)
    made = [used.create_array_parameter(0, 0)] * arrays
    made += [used.create_scalar_parameter(x, _kind(x)) for x in flat if not isinstance(x, Pointer)]
    return zlib.compress(used.TritonKernelCall(kernel, *grid, made).to_proto(code.name, b""))


def of_arrays(code: Compiled, where: Sequence[tuple[int, int] | None], arrays: int) -> str:
    """The machine code of a kernel that takes `arrays`, in the order in which XLA passes them, and then its numbers.

    where: for each parameter that is memory, the array and the byte in it where it begins; for a number, None.
    """
    head, body = re.search(rf"\.visible \.entry {re.escape(code.name)}\(([^)]*)\)", code.ptx), code.ptx
    assert head is not None
    parameters = [x.strip() for x in head[1].split(",")]
    assert len(parameters) == len(where) + 2, "Triton's kernels have two more parameters, for scratch memory"
    for i, found in enumerate(where):
        if found is not None:
            name, (array, offset) = rf"\[{re.escape(code.name)}_param_{i}\]", found
            to = rf"\1\2, [{code.name}_array_{array}];" + (rf"\n\tadd.s64 \t\2, \2, {offset};" if offset else "")
            body = re.sub(rf"(ld\.param\.[bu]64\s+)(%\w+), {name};", to, body)
            assert not re.search(name, body), f"{code.name} reads the address of parameter {i} in an unknown way"
    numbers = [x for x, found in zip(parameters, [*where, None, None], strict=True) if found is None]
    given = [f".param .u64 {code.name}_array_{i}" for i in range(arrays)] + numbers
    return body.replace(head[1], "\n\t" + ",\n\t".join(given) + "\n", 1)
