"""Calls with a number of tokens that is new launch what they launch where nothing is known, on a fake GPU."""

import struct
from unittest import mock

import pytest
import torch

import fake_cuda
from onchip.frontend import torch_prepared
from onchip.masks import Causal, Documents
from onchip.ops.attention import torch_op as of_attention
from onchip.ops.grouped_matmul import torch_op as of_groups
from onchip.ops.linear_cross_entropy import torch_op as of_loss
from onchip.ops.linear_log_probs import torch_op as of_log_probs
from onchip.torch import attention, grouped_matmul, linear_cross_entropy, linear_log_probs

H = 128


def normal(*shape):
    return torch.zeros(*shape, dtype=torch.bfloat16).requires_grad_()


def head(op, **options):
    def call(n, vocab=1000):
        hidden, weight = normal(n, H), normal(vocab, H)
        return op(hidden, weight, torch.zeros(n, dtype=torch.int64), backend="triton", **options), (hidden, weight)

    return call


def attend(mask, layout="bthd"):
    def call(n):
        q, k, v = (normal(*((1, n, heads, 64) if layout == "bthd" else (1, heads, n, 64))) for heads in (4, 2, 2))
        return attention(q, k, v, mask(n), layout=layout, backend="triton"), (q, k, v)

    return call


def experts(**more):
    def call(n, groups=3):
        x, weight, sizes = normal(n, H), normal(groups, 256, H), torch.zeros(groups, dtype=torch.int64)
        options = {name: make(n) for name, make in more.items()}
        return grouped_matmul(x, weight, sizes, backend="triton", **options), (x, weight)

    return call


# With what checks arguments, and whether it runs once for all lengths.
CALLS = {
    "loss": (head(linear_cross_entropy), of_loss, "check_label_tensors", True),
    "losses": (head(linear_cross_entropy, reduction="none", softcap=30.0), of_loss, "check_label_tensors", True),
    "shifted": (head(linear_cross_entropy, shift=True), of_loss, "check_label_tensors", False),
    "part of the logits": (head(linear_cross_entropy, scratch_bytes=0.9), of_loss, "check_label_tensors", False),
    "log-probs": (head(linear_log_probs), of_log_probs, "check_tensors", True),
    "causal": (attend(lambda n: Causal()), of_attention, "check_kinds", True),
    "by head": (attend(lambda n: Causal(), "bhtd"), of_attention, "check_kinds", True),
    "documents": (attend(lambda n: Documents(torch.zeros(1, n).int()) & Causal()), of_attention, "check_kinds", True),
    "grouped": (experts(), of_groups, "check_kinds", True),
    "scaled": (experts(row_scale=lambda n: torch.ones(n)), of_groups, "check_kinds", True),
}


def numbers(parameter):
    """A launch's parameter, without addresses."""
    if len(parameter) == 8 and abs(struct.unpack("q", parameter)[0]) > 1 << 32:
        return None
    return len(parameter) if len(parameter) > 8 else parameter


def launched(gpu, call, *sizes):
    gpu.library.take()
    out, leaves = call(*sizes)
    torch.autograd.grad(out, leaves, torch.zeros_like(out))
    return [(x.kind, x.function, x.grid, x.shared, [*map(numbers, x.params)]) for x in gpu.library.take()]


def in_full(gpu, call, *sizes):
    torch_prepared.forget()
    return launched(gpu, call, *sizes)


def buffers(entries):
    """The same without the rows of exponentials, which depend on addresses."""
    return [(kind, function, grid, shared, len(params)) for kind, function, grid, shared, params in entries]


def main():
    with fake_cuda.gpu() as gpu, fake_cuda.without_bodies():
        for name, (call, module, checks, once) in CALLS.items():
            lengths = 300, 700, 301, 513
            expected = [in_full(gpu, call, n) for n in lengths]
            torch_prepared.forget()
            with mock.patch.object(module, checks, side_effect=getattr(module, checks)) as checked:
                for n, launches in zip(lengths, expected, strict=True):
                    found = launched(gpu, call, n)
                    assert buffers(found) == buffers(launches), (name, n)
                    if module is not of_loss and module is not of_log_probs:
                        assert found == launches, (name, n)
            assert checked.call_count == (1 if once else len(lengths)), (name, checked.call_count)
            print(name)
        # Sizes that happen to be those of the tokens.
        for call in (head(linear_cross_entropy), head(linear_log_probs), experts()):
            expected = [buffers(in_full(gpu, call, n, n)) for n in (300, 600)]
            torch_prepared.forget()
            assert [buffers(launched(gpu, call, n, n)) for n in (300, 600)] == expected
        # What is wrong is refused at any length.
        for n in (300, 600):
            launched(gpu, head(linear_cross_entropy), n)
            with pytest.raises(ValueError, match="target"):
                linear_cross_entropy(normal(n + 1, H), normal(1000, H), torch.zeros(n, dtype=torch.int64))
        print("sizes")


if __name__ == "__main__":
    main()
