"""Launches that a prepared call sends, compared with Triton's own for the same arguments, on a GPU that isn't there."""

import sys
from contextlib import nullcontext
from unittest import mock

import torch

import fake_cuda
from onchip.frontend.torch_builder import Prepared
from onchip.kernels.triton.packed import Packed
from onchip.masks import Causal, Documents

T, H, V = 300, 128, 1000


def calls(op):
    """Calls of an op, and the tensors that get gradients."""
    from onchip import torch as ops

    dtype = torch.float16 if op == "grouped_matmul" else torch.bfloat16
    hidden, weight = (torch.zeros(n, H, dtype=dtype).requires_grad_() for n in (T, V))
    labels, leaves = torch.zeros(T, dtype=torch.int64), (hidden, weight)
    if op == "linear_cross_entropy":
        yield lambda: ops.linear_cross_entropy(hidden, weight, labels, backend="triton"), leaves
        options = {"softcap": 30.0, "label_smoothing": 0.1, "reduction": "none", "backend": "triton"}
        yield lambda: ops.linear_cross_entropy(hidden, weight, labels, **options), leaves
    elif op == "linear_jsd":
        yield lambda: ops.linear_jsd(hidden, weight, hidden.detach(), weight.detach(), backend="triton"), leaves
    elif op == "cross_entropy":
        logits = torch.zeros(T, V, dtype=dtype).requires_grad_()
        yield lambda: ops.cross_entropy(logits, labels, backend="triton"), (logits,)
    elif op == "fp8_linear":
        x, w = (torch.zeros(n, 256, dtype=dtype).requires_grad_() for n in (T, 384))
        yield lambda: ops.fp8_linear(x, w, backend="triton"), (x, w)
    elif op == "grouped_matmul":
        experts, sizes = torch.zeros(3, 256, H, dtype=dtype).requires_grad_(), torch.tensor([100, 0, 200])
        yield lambda: ops.grouped_matmul(hidden, experts, sizes, backend="triton"), (hidden, experts)

    elif op == "attention":
        q, k, v = (torch.zeros(1, T, heads, 64, dtype=dtype).requires_grad_() for heads in (4, 2, 2))
        yield lambda: ops.attention(q, k, v, Documents(labels[None]) & Causal(), backend="triton"), (q, k, v)
        q, k, v = packed = torch.zeros(3, 1, T, 2, 64, dtype=dtype).requires_grad_().unbind()
        yield lambda: ops.attention(q, k, v, Causal().lower(1, T, T, q), softcap=3.0, backend="triton"), packed


OPS = ("linear_cross_entropy", "linear_jsd", "cross_entropy", "fp8_linear", "grouped_matmul", "attention")
WHOLE = ("cross_entropy", "fp8_linear")  # kernels with bodies, which take shared memory
SLOW = ("fp8_linear", "linear_jsd")
OTHER = 0x7F12_3456_7890  # an address


def addresses_are_written_as_by_the_driver(packed):
    """Into descriptors too."""
    for _, of in packed.given.descriptors:
        before, word = of.address, of.word
        of.put(OTHER)
        by_driver = bytes(packed.words)
        of.put(before)
        packed.words[word] = OTHER
        assert bytes(packed.words) == by_driver
        packed.words[word] = before


def main(ops):
    of, compared = Packed.of, 0

    def checked(*args):
        nonlocal compared
        made = of(*args)
        assert made is not None
        *_, by_triton = [x for x in gpu.library.take() if x.kind == "launch"]
        made.words[made.stream] = gpu.stream
        made.send()
        (by_us,) = [x for x in gpu.library.take() if x.kind == "launch"]
        assert by_us == by_triton, (made.name, by_us, by_triton)
        addresses_are_written_as_by_the_driver(made)
        compared += 1
        return made

    with fake_cuda.gpu() as gpu, mock.patch.object(Packed, "of", checked):
        for op in ops:
            before = compared
            with nullcontext() if op in WHOLE else fake_cuda.without_bodies():
                for call, leaves in calls(op):
                    with mock.patch.object(
                        Prepared, "tensors", autospec=True, side_effect=Prepared.tensors
                    ) as repeated:
                        for _ in range(5):
                            out = call()
                            torch.autograd.grad(out, leaves, torch.zeros_like(out))
                    assert repeated.call_count == 6, op  # both passes of the last three
            print(op, compared - before)


if __name__ == "__main__":
    main(sys.argv[1:])
