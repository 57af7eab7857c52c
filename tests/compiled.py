"""Compiles kernels for a GPU that isn't there, as calls would launch them on it."""

import io
import re
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from unittest import mock

import triton
from triton import knobs
from triton.backends.nvidia.compiler import get_ptxas

import launched
from onchip.kernels.triton import launch as launches
from onchip.kernels.triton.compiling import resources

IS_LATER = tuple(int(x) for x in re.findall(r"\d+", triton.__version__)[:2]) > (3, 6)
# By kernel, bytes of a thread's stack that Triton 3.7, 3.8 or 3.9 takes beyond what 3.6 does.
LATER = {
    "losses": 96, "log_probs": 72, "weight_added": 72, "weight_gradient": 8, "softmax_in_turns": 8,
    "softmax_gradient": 8, "gradients": 8, "quantize_words": 32, "fused_gradient": 120, "paired_fused_gradient": 16,
}  # fmt: skip


@dataclass(frozen=True)
class Compiled:
    kernel: str
    constants: Mapping[str, object]
    """By parameter, or field of one; of what is no constant, whether there is any."""
    ptx: str
    shared: int
    """Bytes of shared memory of a block."""
    registers: int
    stack: int
    """Bytes of a thread's stack: what registers don't hold is spilled there."""
    said: str
    """What ptxas said; nothing of a kernel that was compiled before."""

    @property
    def spilled(self) -> int:
        """The stack, without what a later compiler than the one that the kernels were written with may take of it."""
        return max(0, self.stack - (LATER.get(self.kernel, 0) if IS_LATER else 0))


def kinds(runs, device=launched.H100):
    """By what the compiler is asked for, the first launch that asks, of recorded calls as on this device."""
    found = {}

    class Launches(launched.Recorder):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return launched.collective(args) if func.namespace == "c10d" else func(*args, **(kwargs or {}))

        def launch(self, launch):
            source = launch.job(device.capability).source
            attributes = {path: x for path, x in source.attrs.items() if x}
            kind = source.signature, source.constants, attributes, launch.options
            # Without the names of classes.
            key = launch.kernel.__name__, *(re.sub(r"JITFunction\([\w.]+:|\b[A-Z]\w+\(", "(", str(x)) for x in kind)
            found.setdefault(key, launch)

    with (
        mock.patch.object(launched, "Recorder", Launches),
        mock.patch.object(launched, "TIMES", 1),
        mock.patch.dict(launched.ANSWERS, {launches.describe: lambda _: device}),
        launched.bound_by_one_function(),
    ):
        for run in runs:
            run()
    return found


def compiled(launch, capability):
    """The launch's kernel, for GPUs of a compute capability."""
    job = launch.job(capability)
    with redirect_stdout(io.StringIO()) as said, knobs.nvidia.scope():
        knobs.nvidia.dump_ptxas_log = True
        kernel = triton.compile(job.source, target=job.target, options=job.options)
    unused = unused_barriers(kernel.asm["ttgir"])
    assert not unused, f"{launch.kernel.__name__} makes barriers that it doesn't use: {unused}"
    registers, stack = resources(kernel)
    given = {p: launch.arguments[p.name] for p in launch.kernel.params}
    constants = {p.name: x if p.is_constexpr else x is not None for p, x in given.items()}
    for x in given.values():
        constants |= {name: part is not None for name, part in getattr(x, "_asdict", dict)().items()}
    shared = kernel.metadata.shared
    return Compiled(launch.kernel.__name__, constants, kernel.asm["ptx"], shared, registers, stack, said.getvalue())


def unused_barriers(ttgir):
    """The barriers that a kernel in Gluon makes and doesn't use: the compiler gives their memory to something else,
    where a GPU writes when it switches between processes.
    """
    # The code of further groups of warps has names of its own; what it uses is given to it by this.
    code = ttgir.split("partition0(")[0]
    found = []
    for name in re.findall(r"(%\w+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<(?:\d+x)*1xi64,", code):
        each = "|".join([name, *re.findall(rf"(%\w+) = ttg\.memdesc_index {name}\[", code)])
        uses = re.findall(rf"^(.*)(?:{each})\b(?! =)", code, re.MULTILINE)
        if all("init_barrier" in use or "memdesc_index" in use for use in uses):
            found.append(name)
    return found


def is_serialized(k):
    """Whether ptxas waits for each step of a product before the next, because it can't tell what uses the result."""
    return "serialized" in (k.said or _said_of(k.ptx))


def _said_of(ptx):
    tool = get_ptxas(90).path
    with tempfile.NamedTemporaryFile(suffix=".ptx", mode="w") as file:
        file.write(ptx)
        file.flush()
        made = [tool, "-arch=sm_90a", file.name, "-o", "/dev/null"]
        said = subprocess.run(made, capture_output=True, text=True, check=True)
    return said.stdout + said.stderr
