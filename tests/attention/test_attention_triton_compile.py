"""The kernels compile without a GPU, fit shared memory, spill next to nothing, and don't depend on lengths."""

from unittest import mock

import pytest
import torch

from launched import H100
from linear_cross_entropy.ahead_of_time import compile_all, is_serialized, source_of
from onchip.attention.problem import AttentionProblem
from onchip.attention.triton import launches, portable_launches, wide_launches
from onchip.attention.triton.problem import (
    FEW_ROWS,
    LARGEST_HEAD,
    LARGEST_WIDE_HEAD,
    entries_of,
    key_tile,
    padded,
    tiles_of,
)

GLUON = (
    "attend", "query_gradient", "key_gradient", "attend_wide", "wide_query_gradient", "wide_key_gradient",
    "paired_key_gradient",
)  # fmt: skip
VARIANTS = {
    "128": (128, {}),
    "64": (64, {}),
    "128, stop and sinks": (128, {"stop": True, "sinks": True}),
    "64, stop and sinks": (64, {"stop": True, "sinks": True}),
    "128, softcap": (128, {"softcap": 20.0}),
    "64, softcap": (64, {"softcap": 20.0}),
    "128, float16": (128, {"dtype": torch.float16}),
}
WIDE = {
    "192": (192, {}),
    "192, stop and sinks": (192, {"stop": True, "sinks": True}),
    "192, softcap": (192, {"softcap": 20.0}),
    "256": (256, {}),
    "256, stop and sinks": (256, {"stop": True, "sinks": True}),
    "256, softcap": (256, {"softcap": 20.0}),
}


PORTABLE = ("attend_by_tiles", "query_gradient_by_tiles", "key_gradient_by_tiles")
# Of GPUs without kernels of their own, and of a Hopper whose Triton has no Gluon: bytes of shared memory.
OTHERS = {80: 166912, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
# Both sizes of head and every option once; then the least shared memory, and the newest of the most.
FEW_OTHERS = ((80, "64, softcap"), (80, "128, stop and sinks"), (89, "128"), (100, "128"))


def of_call(
    size, *, tokens=300, batch=2, stop=False, sinks=False, softcap=None, dtype=torch.bfloat16, kernels=launches
):
    """All launches of a call, forward and backward.  Values have as many numbers; with wide heads, at most 128."""
    value_size = LARGEST_HEAD if LARGEST_HEAD < size <= LARGEST_WIDE_HEAD else size
    kernels = wide_launches if size > LARGEST_HEAD else kernels
    p = AttentionProblem(batch, tokens, tokens, 4, 2, size, value_size)
    q, grad_q = (torch.empty(batch, tokens, 4, size, dtype=dtype) for _ in range(2))
    d_out, out = (torch.empty(batch, tokens, 4, value_size, dtype=dtype) for _ in range(2))
    k, grad_k = (torch.empty(batch, tokens, 2, size, dtype=dtype) for _ in range(2))
    v, grad_v = (torch.empty(batch, tokens, 2, value_size, dtype=dtype) for _ in range(2))

    def numbers(*shape):
        return torch.zeros(shape, dtype=torch.int32)

    ranges = numbers(1, tokens), numbers(1, tokens), numbers(1, tokens) if stop else None
    mask = launches.Masked(
        *ranges, numbers(1, entries_of(tokens), 8), numbers(1, tiles_of(tokens), 2) if stop else None
    )
    table = numbers(1, tiles_of(tokens, key_tile(p)), 4)
    lse, of_rows = torch.empty(batch, 4, tokens), torch.empty(4 * batch, 2, padded(tokens))
    sink = torch.empty(4) if sinks else None
    of_sinks = torch.empty(4, batch * padded(tokens) // FEW_ROWS) if sinks else None
    how = mask, 0.1, softcap
    with mock.patch.object(launches, "describe", return_value=H100):
        return [
            launches.query_table(p, mask),
            launches.key_table(p, mask, table),
            kernels.forward(p, q, k, v, sink, *how, out, lse),
            launches.gradient_rows(p, out, d_out, lse, lse.transpose(1, 2), sink, of_rows, of_sinks),
            kernels.gradient_of_queries(p, q, d_out, k, v, *how, of_rows, grad_q),
            kernels.gradient_of_keys(p, q, d_out, k, v, *how, of_rows, table, grad_k, grad_v),
        ]


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.slow] * (x == "64" or ", " in x)) for x in (*VARIANTS, *WIDE)]
)
def test_kernels(name):
    size, options = (VARIANTS | WIDE)[name]
    for found in compile_all(of_call(size, **options), 90):
        assert found.shared <= H100.shared
        # Triton 3.6 spills at most 96 bytes without options; later ones up to 136.
        assert found.spilled <= (144 if not options or "dtype" in options else 360), (found.kernel, found.spilled)
        if found.kernel in GLUON:
            assert "wgmma.mma_async" in found.ptx
            assert "cp.async.bulk.tensor" in found.ptx
            assert not is_serialized(found.ptx), found.kernel


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        pytest.param(capability, name, marks=[pytest.mark.slow] * ((capability, name) not in FEW_OTHERS))
        for capability in OTHERS
        for name in VARIANTS
    ],
)
def test_kernels_for_other_gpus(capability, name):
    size, options = VARIANTS[name]
    for found in compile_all(of_call(size, **options, kernels=portable_launches), capability):
        assert found.shared <= OTHERS[capability]
        assert found.spilled <= 128, (found.kernel, found.spilled)
        if found.kernel in PORTABLE and "stop" not in options:
            assert "cp.async.c" in found.ptx, f"{found.kernel} waits for each block"


@pytest.mark.parametrize(
    ("kernels", "size"),
    [
        *((x, size) for x in (launches, portable_launches) for size in (8, 64, 72, 128)),
        *((None, size) for size in (136, 192, 200, 256)),
    ],
)
def test_another_length_is_no_other_kernel(size, kernels):
    """Nor is another batch, and heads of up to 64 numbers have one, larger ones another."""
    of_size = ("gradient_rows", *PORTABLE)

    def kinds(tokens, batch, size):
        sources = [source_of(x) for x in of_call(size, tokens=tokens, batch=batch, kernels=kernels)]
        made = [(x.fn.__name__, str(x.signature), str(x.constants), str(x.attrs)) for x in sources]
        return [x for x in made if x[0] not in of_size] if size % 64 else made

    expected = kinds(2048, 1, next(x for x in (64, 128, 192, 256) if x >= size))
    for tokens, batch in ((1, 1), (16, 3), (333, 16), (4096, 2)):
        found = kinds(tokens, batch, size)
        assert [x for x in expected if x[0] in {y[0] for y in found}] == found


def test_what_a_sinks_gradient_is_made_of_by_row_is_read_in_16_bytes():
    (found,) = compile_all(of_call(128)[3:4], 90)
    assert "ld.global.v4.b32" in found.ptx
