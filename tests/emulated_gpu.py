"""The GPU that isn't there (fake_cuda.py), with an emulator of its kernels (tests/ptx), for launches that C sends.

Run as a script, in a process that has this GPU: prepared calls, with other numbers at other addresses, give the same
bits as calls that aren't prepared.
"""

import struct
import sys
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from unittest import mock

import torch

import fake_cuda
from losses import mixed_plan, plan_in_forward
from ptx import machine, translate

_ELEMENT_BYTES = (1, 2, 4, 4, 8, 8, 2, 4, 8, 2)  # of cuda.h's CUtensorMapDataType


class Process(machine.Memory):
    """All memory of this process."""

    def find(self, address, size):
        try:
            return super().find(address, size)
        except machine.Fault:
            self.regions = []
            for line in Path("/proc/self/maps").read_text().splitlines():
                place, rights, *_ = line.split()
                start, end = (int(x, 16) for x in place.split("-"))
                if rights.startswith("rw") and start <= address < end:
                    self.add(start, end - start)
            return super().find(address, size)


def tensor_map(raw):
    """Of what fake_cuda.c wrote into it."""
    base, kind, *rest = struct.unpack("<16Q", raw)
    rank = kind >> 8 & 0xFF
    element = _ELEMENT_BYTES[kind & 0xFF]
    shape, strides, box = rest[:rank], rest[rank : 2 * rank - 1], rest[2 * rank - 1 : 3 * rank - 1]
    strides = [1, *(x // element for x in strides)]
    return machine.TensorMap(
        base, element, tuple(shape[::-1]), tuple(strides[::-1]), tuple(x & 0xFFFFFFFF for x in box[::-1]),
        (0, 32, 64, 128)[kind >> 24 & 0xFF],
    )  # fmt: skip


@contextmanager
def gpu():
    """As `fake_cuda.gpu`, with kernels that run."""
    from triton.compiler.compiler import CompiledKernel

    kernels, memory, prepare, programs = {}, Process(), CompiledKernel._init_handles, cache(translate.translate)

    def noted(self):
        prepare(self)
        kernels[self.function] = self.asm["ptx"], self.metadata.shared

    def run(function, grid, params):
        try:
            ptx, shared = kernels[function]
            maps = {i: tensor_map(x) for i, x in enumerate(params) if len(x) == 128}
            numbers = [0 if len(x) == 128 else int.from_bytes(x, "little") for x in params]
            machine.run(programs(ptx), grid, numbers, maps, memory, shared)
        except BaseException as error:  # which C would swallow
            failures.append(error)

    failures = []
    with fake_cuda.gpu() as made, mock.patch.object(CompiledKernel, "_init_handles", noted):
        made.library.run_by(run)
        yield made
        made.library.c.fake_runner(None)
    if failures:
        raise failures[0]


def calls():
    """What makes the tensors of a call, and the call of them, by name."""
    from onchip.torch import TopK, cross_entropy, fp8_linear, grouped_matmul, linear_cross_entropy, linear_log_probs

    def leaf(*shape, std=1.0):
        return (torch.randn(shape) * std).to(torch.bfloat16).requires_grad_()

    def head(t=140, h=128, v=300):
        return leaf(t, h), leaf(v, h, std=h**-0.5), torch.randint(v, (t,))

    def wide_head():
        hidden, weight, target = head()
        return hidden, weight.detach().float().requires_grad_(), target

    def labelled():
        return *head()[:2], torch.randint(300, (140, 3)), torch.rand(140, 3)

    def of_ids(hidden, weight, ids, values, **more):
        labels = TopK(ids, values, "probs", "truncated")
        return linear_cross_entropy(hidden, weight, labels, label_smoothing=0.1, z_loss=1e-3, **more)

    def taught():
        return *head()[:2], torch.rand(140, 300)

    def logits():
        return leaf(20, 300), torch.randint(300, (20,))

    def experts():
        return leaf(60, 128), leaf(3, 128, 128), torch.tensor([9, 0, 40])

    def read_by_index():
        return leaf(30, 128), leaf(3, 128, 128), torch.tensor([9, 0, 40]), torch.randint(30, (60,))

    def layer():
        return leaf(128, 256), leaf(128, 256, std=0.1)

    def heads(d=64, t=140):
        return leaf(1, t, 4, d), leaf(1, t, 2, d), leaf(1, t, 2, d), torch.randn(4, requires_grad=True)

    def attend(q, k, v, sinks, **more):
        from onchip.masks import Window
        from onchip.torch import attention

        return attention(q, k, v, Window(70), sinks=sinks, **more)

    def projection():
        return leaf(1, 140, 3, 4, 64), torch.randn(4, requires_grad=True)

    return {
        "attention": (heads, attend),
        "one projection": (projection, lambda x, sinks, **more: attend(*x.unbind(2), sinks, **more)),
        **dict.fromkeys(("planned", "mixed", "in forward"), (head, linear_cross_entropy)),
        "top-k": (labelled, of_ids),
        "dense": (taught, linear_cross_entropy),
        "linear_log_probs": (head, linear_log_probs),
        "cross_entropy": (logits, cross_entropy),
        "grouped_matmul": (experts, grouped_matmul),
        "autocast": (wide_head, linear_cross_entropy),
        "rows": (read_by_index, lambda *given, **more: grouped_matmul(*given[:3], rows=given[3], **more)),
        "fp8_linear": (layer, fp8_linear),
    }


# Calls with tensors of their own, then with the last ones' memory and other numbers.
FRESH, SAME = 3, 2


def main(name):
    import onchip.groups.triton.op
    from onchip.frontend import torch_prepared
    from onchip.groups.triton import launches

    autocast = partial(torch.autocast, "cpu", torch.bfloat16)
    copied = partial(mock.patch.object, launches, "copying_rows_pays", lambda n, activation: True)
    plans = {"mixed": mixed_plan, "in forward": plan_in_forward, "rows": copied, "autocast": autocast}
    plan = plans.get(name, nullcontext)
    make, op = calls()[name]

    def step(seed, given):
        torch.manual_seed(seed)
        with torch.no_grad():
            for x, new in zip(given, make(), strict=True):
                x.copy_(new)
        leaves = [x for x in given if x.requires_grad]
        out = op(*given, backend="triton")
        made = [out.detach(), *torch.autograd.grad(out, leaves, torch.full_like(out, 0.5))]
        assert all(x.isfinite().all() for x in made)
        return [hash(x.view(torch.uint8).numpy().tobytes()) for x in map(torch.atleast_1d, made)]

    memory = [make() for _ in range(FRESH)]
    memory += [memory[-1]] * SAME
    with gpu(), plan(), mock.patch.object(onchip.groups.triton.op, "check"):  # which reads numbers on the CPU
        repeated = [step(seed, given) for seed, given in enumerate(memory)]
        with mock.patch.object(torch_prepared, "is_prepared", return_value=False):
            expected = {seed: step(seed, memory[seed]) for seed in (0, FRESH - 1, FRESH + SAME - 1)}
    assert {seed: repeated[seed] for seed in expected} == expected
    print("the same bits")


if __name__ == "__main__":
    main(*sys.argv[1:])
