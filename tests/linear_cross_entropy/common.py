"""What the tests of linear_cross_entropy share."""

import itertools
from contextlib import contextmanager
from unittest import mock

import torch

from onchip.ops.linear_cross_entropy.checks import check_case
from onchip.vocab.triton import memory as triton_spec
from onchip.vocab.triton import setup as triton_setup
from shared import assert_same as assert_same
from shared import assert_within_bounds
from shared import gradients as gradients


def small_problem(tokens=24, hidden=16, vocab=70, dtype=torch.float32, device="cpu", bias=False, seed=0):
    """(hidden [2, T/2, H], weight [V, H], target [2, T/2], bias or None), leaves that need gradients."""
    g = torch.Generator().manual_seed(seed)

    def leaf(*shape):
        return torch.randn(*shape, generator=g).to(device=device, dtype=dtype).requires_grad_()

    h, w = leaf(2, tokens // 2, hidden), leaf(vocab, hidden)
    y = torch.randint(vocab, (2, tokens // 2), generator=g).to(device)
    return h, w, y, leaf(vocab) if bias else None


def assert_right(case, dtype=torch.float32, device="cpu", **how):
    """The op on `case` is within its bounds of the oracle, for every quantity."""
    assert_within_bounds(check_case(case, dtype, device, **how))


def capture(step):
    """A CUDA graph of `step`, and what that returns each time the graph is replayed."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()  # compiles what there is to compile
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    return graph, captured


@contextmanager
def memory_off_by_256():
    """Memory for exponentials begins at a multiple of 256 bytes, mostly not of 512, as of another allocator."""
    real, starts = triton_setup._allocate, itertools.cycle((256, 256, 0))

    def off(like, size):
        start = next(starts)
        return real(like, size + start)[start:]

    with mock.patch.object(triton_setup, "_allocate", off):
        yield


def mixed_plan(tokens, *, halves=False):
    """Some tokens' exponentials are kept in the weight's gradient, some in scratch, and some are computed again."""
    config = triton_spec.TritonConfig(tokens, 512, 256, stashed=128, overflow=128, halves=halves)
    return mock.patch.object(triton_spec, "plan", return_value=config)
