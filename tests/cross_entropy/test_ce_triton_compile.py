"""The kernels compile for each kind of GPU, read 16 bytes at a time, and spill next to nothing.  No GPU is needed."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from linear_cross_entropy.ahead_of_time import compile_all
from onchip.kernels.triton import launch as triton_calls
from onchip.oracle.torch import computed
from onchip.torch import TopK, cross_entropy, log_probs
from onchip.vocab.rows import launches as row_launches
from onchip.vocab.rows import memory as row_memory
from onchip.vocab.rows import triton as triton_rows

HOPPER, AMPERE = 90, 80
TOKENS = 160
EVERYTHING = {
    "token_weight": torch.ones(TOKENS), "temperature": torch.ones(TOKENS), "label_smoothing": 0.1, "z_loss": 1e-3,
    "softcap": 5.0, "return_stats": True, "class_weight": torch.ones(128256),
}  # fmt: skip


def launches(vocab, dtype=torch.bfloat16, *, tiles=None, inplace=False, **options):
    """What the op launches over logits, forward and backward."""
    found = []
    with (
        mock.patch.object(row_launches, "device_refusal", return_value=None),
        mock.patch.object(row_launches, "heuristic_tiles", tiles or row_launches.heuristic_tiles),
        mock.patch.object(triton_calls.Launch, "run", lambda launch: found.append(launch)),
    ):
        logits = torch.empty(TOKENS, vocab, dtype=dtype, requires_grad=True)  # never touched, so it costs nothing
        given = computed(logits) if inplace else logits
        target = torch.zeros(TOKENS, dtype=torch.int64)
        loss = cross_entropy(given, target, backend="triton", inplace_backward=inplace, **options)
        (loss[0] if isinstance(loss, tuple) else loss).sum().backward()
    return [x for x in found if x.kernel in (triton_rows.losses, triton_rows.gradients)]


def by_kernel(found):
    return {k.kernel: k for k in found}


@pytest.mark.parametrize(
    ("capability", "vocab", "dtype", "options"),
    [
        (HOPPER, 128256, torch.bfloat16, {}),  # read again from the caches
        (AMPERE, 128256, torch.float32, {"reduction": "none"}),
        (HOPPER, 1000, torch.float16, {}),  # in registers; rows of a multiple of 16 bytes but not of 32
    ],
    ids=str,
)
def test_kernels(capability, vocab, dtype, options):
    found = by_kernel(compile_all(launches(vocab, dtype, **options), capability))
    assert set(found) == {"losses", "gradients"}
    for k in found.values():
        assert k.shared <= 4096
        assert k.spilled <= 32, (k.kernel, k.constants, k.stack)
        assert k.registers <= 64
        assert "ld.global.L1::evict_first.L2::cache_hint.v4.b32" in k.ptx
    gradient = "losses" if "reduction" not in options else "gradients"
    assert "st.global.L1::evict_first.L2::cache_hint.v4.b32" in found[gradient].ptx


def test_every_option_at_once():
    for k in compile_all(launches(128256, **EVERYTHING), HOPPER):
        assert k.spilled <= 256, (k.kernel, k.constants, k.stack)


@pytest.mark.parametrize(
    ("capability", "vocab", "dtype", "ids", "options"),
    [
        (HOPPER, 128256, torch.bfloat16, (4,), {"entropy": True, "top1": True, "softcap": 5.0}),
        (AMPERE, 1000, torch.float32, (), {"temperature": torch.ones(TOKENS)}),
    ],
    ids=str,
)
def test_log_probs(capability, vocab, dtype, ids, options):
    found = []
    with (
        mock.patch.object(row_launches, "device_refusal", return_value=None),
        mock.patch.object(triton_calls.Launch, "run", lambda launch: found.append(launch)),
    ):
        logits = torch.empty(TOKENS, vocab, dtype=dtype, requires_grad=True)
        made = log_probs(logits, torch.zeros(TOKENS, *ids, dtype=torch.int64), lse=True, backend="triton", **options)
        sum(x.sum() for x in made if x is not None and x.requires_grad).backward()
    compiled = by_kernel(compile_all(found, capability))
    of_ids = {"share_ids"} if ids else set()
    assert set(compiled) == {"log_probs", "log_prob_gradients", "write_ids"} | of_ids
    for k in compiled.values():
        assert k.shared <= 8192
        assert k.spilled <= 64, (k.kernel, k.constants, k.stack)


@pytest.mark.parametrize(
    ("capability", "vocab", "dtype", "labels", "options"),
    [
        pytest.param(HOPPER, 128256, torch.bfloat16, torch.bfloat16,
                     {"softcap": 5.0, "class_weight": torch.ones(128256)}, marks=pytest.mark.slow),
        (AMPERE, 1000, torch.float16, torch.float32, {"label_smoothing": 0.1}),
        (HOPPER, 128256, torch.bfloat16, torch.bfloat16, {"class_weight": torch.ones(128256), "return_stats": True}),
        pytest.param(HOPPER, 128256, torch.bfloat16, "ids", {"label_smoothing": 0.1}, marks=pytest.mark.slow),
        (AMPERE, 1000, torch.float32, "ids", {"label_smoothing": 0.1, "class_weight": torch.ones(1000), "softcap": 5.0,
                                              "return_stats": True}),
    ],
    ids=str,
)  # fmt: skip
def test_soft_labels(capability, vocab, dtype, labels, options):
    found, kernels = [], {"soft_losses", "soft_gradients"}
    if labels == "ids":
        target = TopK(torch.zeros(TOKENS, 4, dtype=torch.int64), torch.ones(TOKENS, 4), "probs", "truncated")
        kernels = {"log_probs", "share_ids", "log_prob_gradients", "write_ids"}
    else:
        target = torch.empty(TOKENS, vocab, dtype=labels)
    with (
        mock.patch.object(row_launches, "device_refusal", return_value=None),
        mock.patch.object(triton_calls.Launch, "run", lambda launch: found.append(launch)),
    ):
        logits = torch.empty(TOKENS, vocab, dtype=dtype, requires_grad=True)
        made = cross_entropy(logits, target, backend="triton", **options)
        (made[0] if isinstance(made, tuple) else made).backward()
    compiled = by_kernel(compile_all(found, capability))
    assert set(compiled) == kernels
    for k in compiled.values():
        assert k.shared <= 8192
        assert k.spilled <= (256 if "return_stats" in options else 64), (k.kernel, k.constants, k.stack)
        assert k.kernel in ("share_ids", "write_ids") or "ld.global.L1::evict_first.L2::cache_hint.v4.b32" in k.ptx


def test_rows_that_are_not_aligned():
    """One element at a time, side by side."""
    found = by_kernel(compile_all(launches(50257), HOPPER))
    for k in found.values():
        assert k.constants["UNIT"] == 1
        assert k.spilled <= 128, (k.kernel, k.constants, k.stack)
        assert "ld.global.L1::evict_first.L2::cache_hint.b16" in k.ptx


def test_tiles_under_way():
    """With stages, tiles are fetched into shared memory while others are worked on."""
    tiles = row_memory.RowTiles(tile=16384, warps=16, programs=1, stages=3)
    k = by_kernel(compile_all(launches(128256, tiles=lambda *_, **__: tiles)[:1], HOPPER))["losses"]
    assert 2 * 2 * 16384 <= k.shared <= 232448
    assert "cp.async.cg.shared.global" in k.ptx


def test_the_options_reach_both_ways_of_every_switch():
    made = [
        (x.kernel, x.arguments)
        for vocab, options in (
            (1000, {}), (50257, {"reduction": "none"}), (128256, EVERYTHING), (1000, {"inplace": True}),
        )
        for x in launches(vocab, **options)
    ]  # fmt: skip
    for kernel in (triton_rows.losses, triton_rows.gradients):
        others = ("UNIT", "TILE", "LANES", "STAGES")
        switches = [p.name for p in kernel.params if p.is_constexpr and p.name not in others]
        for name in switches:
            assert {bool(a[name]) for k, a in made if k is kernel} == {True, False}, name
        missing = [{name for name, x in a.items() if x is None} for k, a in made if k is kernel]
        optional = {"token_weight", "class_weight", "class_total", "temperature", "inner_scale"}
        if kernel is triton_rows.losses:
            optional |= {"entropy", "correct", "argmax", "out", "target_logit", "terms_out", "top_out", "uniform"}
            optional |= {"low_out"}
        else:
            optional |= {"start", "whole"}
        assert set.union(*missing) == optional
        # For a caller of `launch_rows` that has the targets' logits from elsewhere, and for a sharded vocabulary.
        assert set.intersection(*missing) <= {
            "target_logit",
            "terms_out",
            "top_out",
            "low_out",
            "uniform",
            "start",
            "whole",
        }


@pytest.mark.parametrize(
    "options", [pytest.param({}, marks=pytest.mark.slow), {"label_smoothing": 0.1, "return_stats": True}], ids=str
)
def test_a_shard_of_the_vocabulary(options):
    """Of one rank, whose kernels are those of several."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        found = launches(64128, vocab_group=dist.group.WORLD, **options)
    finally:
        dist.destroy_process_group()
    compiled = by_kernel(compile_all(found, HOPPER))
    assert set(compiled) == {"losses", "gradients"}
    for k in compiled.values():
        assert k.spilled <= 128, (k.kernel, k.constants, k.stack)
        assert k.registers <= 64
