"""Launches kernels in Triton and Gluon on the CPU: they are compiled for Hopper, and tests/ptx runs their PTX.

Memory that nobody has written is NaN.
"""

import sys
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch
import triton

from onchip.groups.triton import op as groups
from onchip.kernels.triton.launch import Launch
from onchip.vocab.triton import setup
from ptx import machine, translate

SWIZZLES = (0, 32, 64, 128)


class Done(NamedTuple):
    """A launch that was run, with the memory that it was given, before and after."""

    launch: object
    scratch: list[torch.Tensor]
    before: list[np.ndarray]
    after: list[np.ndarray]

    @property
    def name(self):
        return self.launch.kernel.__name__

    def again(self, change=lambda ptx: ptx, seed=1):
        """What it leaves the second time, by PTX that was changed."""
        kernel = _compile(self.launch)
        memory, params, maps = _arguments(self.launch, kernel, self.scratch)
        now = _copy(memory)
        _fill(memory, self.before)
        try:
            _run(kernel, change(kernel.asm["ptx"]), self.launch, memory, params, maps, seed)
            return _copy(memory)
        finally:
            _fill(memory, now)


@contextmanager
def emulating(keep=(), seed=0):
    """What is launched in the context runs, on a GPU of 4 multiprocessors; of the kernels to `keep` this gives a list
    of what was done.
    """
    done, scratch, allocate = [], [], setup._allocate

    def noted(like, shape, dtype):
        """Exponentials are in two pieces of memory, of which a descriptor has one and reaches to the other."""
        made = allocate(like, shape, dtype)
        scratch.append(made.view(-1).view(torch.uint8).fill_(255))
        return made

    def run(launch):
        kernel = _compile(launch)
        memory, params, maps = _arguments(launch, kernel, scratch)
        kept = launch.kernel.__name__ in keep
        before = _copy(memory) if kept else []
        _run(kernel, kernel.asm["ptx"], launch, memory, params, maps, seed)
        if kept:
            done.append(Done(launch, list(scratch), before, _copy(memory)))

    fills = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # which fills what torch.empty returns with NaN
    try:
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(Launch, "run", run))
            stack.enter_context(mock.patch.object(Launch, "spills", return_value=False))
            stack.enter_context(mock.patch.object(setup, "_allocate", noted))
            stack.enter_context(mock.patch.object(groups, "check"))  # which would raise, as on the CPU
            for module in [x for x in sys.modules.values() if "device_refusal" in vars(x)]:
                stack.enter_context(mock.patch.object(module, "device_refusal", _served))
            yield done
    finally:
        torch.use_deterministic_algorithms(fills)


def _served(*_):  # a function, which torch.compile can trace
    return None


def _compile(launch):
    job = launch.job(90)
    return triton.compile(job.source, target=job.target, options=job.options)


_translate = cache(translate.translate)


def _run(kernel, ptx, launch, memory, params, maps, seed):
    program = _translate(ptx)
    params = params + [0] * (len(program.params) - len(params))  # memory of Triton's own, which none of them uses
    machine.run(program, (*launch.grid, 1, 1)[:3], params, maps, memory, kernel.metadata.shared, seed)


def _copy(memory):
    return [data.copy() for _, _, data in memory.regions]


def _fill(memory, contents):
    for (_, _, data), content in zip(memory.regions, contents, strict=True):
        data[:] = content


def _arguments(launch, kernel, more):
    """Memory, and parameters as PTX numbers them, beside the descriptors that some of them are."""
    memory, params, maps = machine.Memory(), [], {}
    described = iter(kernel.metadata.tensordesc_meta or ())

    def add(x):
        storage = x.untyped_storage()
        memory.add(storage.data_ptr(), storage.nbytes())

    def give(x, varies):
        if isinstance(x, tuple):
            for part in x:
                give(part, varies)
        elif isinstance(x, torch.Tensor):
            add(x)
            params.append(x.data_ptr())
        elif hasattr(x, "block_shape"):
            said, base = next(described), x.base
            add(base)
            maps[len(params)] = machine.TensorMap(
                base.data_ptr(), base.element_size(), tuple(x.shape), tuple(x.strides), tuple(said["block_size"]),
                SWIZZLES[said["swizzle"]],
            )  # fmt: skip
            params.extend([0, *x.shape, *x.strides])
        elif x is not None and (varies or x != 1 or isinstance(x, float)):
            params.append(x)

    for x in more:
        add(x)
    for p in launch.kernel.params:
        if not p.is_constexpr:
            give(launch.arguments[p.name], p.do_not_specialize)
    return memory, params, maps
