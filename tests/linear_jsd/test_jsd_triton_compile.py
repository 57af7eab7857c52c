"""The kernels compile for each kind of GPU, fit its shared memory, and spill next to nothing, without a GPU."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from jsd_ahead import KERNELS, jsd_launches, launches

from linear_cross_entropy.ahead_of_time import compile_all, turned, weights_read
from onchip.ops.linear_jsd.triton_memory import JsdPlan

# Compute capability, and bytes of shared memory that a block may use: H100, A100.
HOPPER, AMPERE = (90, 232448), (80, 166912)
# The gradients of the first tokens are kept, those of the others made in backward.
MIXED = JsdPlan(128, 128, 512, 256)
OF_TOPK = ("topk_log_probs", "topk_numbers", "topk_gradients")
OWN = ("logit_tiles", "divergence_rows", "row_scales", *OF_TOPK)
OPTIONS = {
    "plain": {},
    "all": {"bias": True, "hard_weight": 0.3, "temperature": 2.0, "teacher_grad": True, "plan": MIXED},
    "float16": {"dtype": torch.float16, "beta": 0.0, "teacher_hidden": 512},
}


def compiled(device, **options):
    found = compile_all([x for x in launches(device, **options) if x.kernel.__name__ in OWN], device[0])
    for k in found:
        assert k.shared <= device[1], (k.kernel, k.constants, k.shared)
        # Without descriptors a product's addresses take registers of their own.
        assert k.stack <= 16 or not k.constants.get("TMA", True), (k.kernel, k.constants, k.stack)
    return found


def test_weights_whose_columns_lie_in_rows_are_read_as_they_lie():
    weights = turned(1000, 512), turned(1000, 1024)
    found = launches(HOPPER, weights=weights, **OPTIONS["all"])
    assert weights_read(found) == {w.data_ptr() for w in weights}
    for k in compile_all([x for x in found if x.kernel.__name__ == "logit_tiles"], HOPPER[0]):
        assert k.constants["TURNED"]
        assert k.shared <= HOPPER[1]
        assert "wgmma.mma_async" in k.ptx
        assert "cp.async.bulk.tensor" in k.ptx


@pytest.mark.parametrize("options", OPTIONS)
def test_hopper(options):
    found = compiled(HOPPER, **OPTIONS[options])
    assert {k.kernel for k in found} == {*OWN} - {*OF_TOPK}
    for k in found:
        if k.kernel == "logit_tiles":
            assert "wgmma.mma_async" in k.ptx
            assert "cp.async.bulk.tensor" in k.ptx
        if k.kernel == "divergence_rows":
            assert "ld.global.v4" in k.ptx  # eight numbers at a time


def test_pointers():
    for k in compiled(AMPERE, teacher_hidden=512, beta=1.0):
        if k.kernel == "logit_tiles":
            assert not k.constants["TMA"]
            assert "mma.sync" in k.ptx


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str)
def test_logits(dtype):
    """A row of a multiple of 16 bytes is read 16 bytes at a time."""
    made = compiled(HOPPER, logits=True, dtype=dtype, vocab=1024, hard_weight=0.1, teacher_grad=True)
    found = [k for k in made if k.kernel == "divergence_rows"]
    assert len(found) == 2
    assert all("ld.global.v4" in k.ptx for k in found)
    # Of a vocabulary like 1000, whose rows are read number by number, the addresses take 24 bytes of stack.
    assert compiled(HOPPER, teacher_logits=True, vocab=1024)


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        pytest.param(device, dtype, marks=[pytest.mark.slow] * (dtype not in few), id=f"{name}-{dtype}")
        for name, device, few in (
            ("hopper", HOPPER, (torch.bfloat16, torch.float32)), ("ampere", AMPERE, (torch.float16,)),
        )
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
    ],
)  # fmt: skip
def test_a_topk(device, dtype):
    """Of a head, by a plan that keeps some tokens, and of logits."""
    given = {"logits": True, "vocab": 1024} if dtype == torch.float32 else {"plan": MIXED}
    found = compiled(device, topk="tail", dtype=dtype, hard_weight=0.1, temperature=2.0, **given)
    assert {k.kernel for k in found} == {*OWN} - ({"logit_tiles"} if "logits" in given else set())
    assert all("ld.global.v4" in k.ptx for k in found if k.kernel in ("topk_log_probs", "topk_gradients"))


@pytest.mark.parametrize(
    ("beta", "given"),
    [
        pytest.param(0.0, {"logits": True}, id="0.0-logits"),
        pytest.param(0.3, {"bias": True}, id="0.3-heads"),
        pytest.param(0.0, {"bias": True}, id="0.0-heads", marks=pytest.mark.slow),
        pytest.param(0.3, {"logits": True}, id="0.3-logits", marks=pytest.mark.slow),
    ],
)
def test_a_shard(beta, given):
    """Of one rank, whose launches are those of several: softmaxes, between the ends their terms, gradients."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        given = given | {"hard_weight": 0.1, "teacher_grad": True, "vocab_group": dist.group.WORLD}
        found = compiled(HOPPER, vocab=1024, beta=beta, **given)
    finally:
        dist.destroy_process_group()
    rows = [(k.constants["TERMS"], k.constants["KNOWN"]) for k in found if k.kernel == "divergence_rows"]
    softmaxes, gradients = [(beta == 0, False)], [(True, False)] * (1 if "logits" in given else 2)
    assert sorted(rows) == sorted(softmaxes + gradients + [(True, True)] * (beta != 0))


def test_every_kernel_of_the_file_is_launched():
    in_file = {
        name
        for module in KERNELS
        for name, f in vars(module).items()
        if hasattr(f, "params") and f.__module__ == module.__name__ and not name.startswith("_")
    }
    assert in_file == set(OWN)


@pytest.mark.parametrize("beta", [0.0, 1e-6, 0.1, 0.5, 0.9, 1.0])
def test_the_series_where_probabilities_are_nearly_equal(beta):
    """It holds a term's digits to where the differences take over; float64's own are enough for these down to 0.01."""
    x = np.concatenate([side * np.geomspace(0.01, jsd_launches.kernels.NEAR.value, 100) for side in (-1, 1)])
    d = x * np.log(2)
    log_p = -np.log1p(beta * np.expm1(d))
    exact = np.expm1(d) - d if beta in (0, 1) else (1 - beta) * log_p + beta * np.exp(d) * (log_p + d)
    made = np.log(2) * x**2 * np.polyval(jsd_launches.nearly_equal(beta)[::-1], x)
    np.testing.assert_allclose(made, exact, rtol=1e-6)
